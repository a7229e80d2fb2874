"""What a reshard of the job of ``live_plan`` moves before the first tensor, experts over 64 ranks of a stage: tables and addresses, by the
functions that a reshard calls for them. No rank runs.

    python -m benchmarks.live_tables 256:128 1024:256 4096:512
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace

import xxhash

from ckpt.engine.save.leader import grouped_parts
from ckpt.net.broadcast_tree import FAN
from ckpt.net.channel import whom_to_ask
from ckpt.plan.machines import ancestors, numbers_of
from ckpt.plan.tables import Table, tables_to_bytes

from .live_plan import STAGES, Job

MACHINE = 8
OTHERS = 1010
"""Bytes that a rank gets from the store for all other words and the address of the rank above it, by ``tests/plan/test_growth.py``."""


def moved(job: Job) -> Mapping[str, float]:
    """Counts and bytes."""
    each, parts, rows = job.source // STAGES, dict[str, bytes](), {}
    for stage, tensors in enumerate(job.source_tensors()):
        for owner in range(min(each, job.expert_ranks)):
            mine = [t for t in tensors if dict(t.layout.at).get("ep", (owner,)) == (owner,)]
            packed = {
                xxhash.xxh3_128_hexdigest(data): data for data in (p.to_bytes() for p in Table(tensors=tuple(mine), aliases={}).parts())
            }
            parts |= packed
            for rank in range(each * stage + owner, each * (stage + 1), job.expert_ranks):
                at = [[f"10.0.{rank // 2048}.{rank // 8 % 256}", 40000 + rank % 8], ["127.0.0.1", 41000 + rank % 8]]
                rows[rank] = {"table": " ".join(packed), "state": "0" * 32, "addresses": at, "network": "0" * 47}
    ranks_of = grouped_parts(dict(sorted(rows.items())))
    tables = tables_to_bytes((ranks, parts[digest]) for digest, ranks in ranks_of.items())
    offers = {rank: row["table"].split() for rank, row in rows.items()}
    question = json.dumps(whom_to_ask({digest: ranks[0] for digest, ranks in ranks_of.items()}, offers))
    ranks = job.source + job.target
    machines = numbers_of([MACHINE, ranks // MACHINE], ranks)
    between = sum(bool(machines[ancestors(rank, machines, FAN)[0]] != machines[rank]) for rank in range(1, ranks))
    told = sum(len(json.dumps({"row": row, "offers": offers[rank]})) for rank, row in rows.items())
    return {
        "different tables": len({row["table"] for row in rows.values()}),
        "bytes of parts": sum(map(len, parts.values())),
        "bytes out of the store": sum(map(len, parts.values())) + told + ranks * (len(question) + OTHERS),
        "questions in the tree": ranks - 1,
        "bytes of tables": len(tables),
        "bytes between machines": between * len(tables),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="+", help="ranks that have the old state, a colon, and ranks that get the new one")
    for text in parser.parse_args().ranks:
        source, target = map(int, text.split(":"))
        print(
            text,
            *(f"{what} {count:,}" for what, count in moved(replace(Job(), source=source, target=target, expert_ranks=64)).items()),
            sep="; ",
        )


if __name__ == "__main__":
    main()
