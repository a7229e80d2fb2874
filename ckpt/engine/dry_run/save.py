"""A dry run of a save: its first phases, which write nothing, and in place of the others what they would write."""

from __future__ import annotations

import math

from ckpt import settings
from ckpt.concurrency import gc_paused
from ckpt.engine.save.job import SaveJob
from ckpt.engine.save.leader import Leader
from ckpt.engine.save.options import SaveOptions, SaveReport
from ckpt.engine.save.plan import NO_ID, RankPlan
from ckpt.engine.save.save import RankShare, begin_row, prepare
from ckpt.formats.native.clearing import check_no_link
from ckpt.formats.native.datafile import plan_coded_file
from ckpt.net.channel import Row
from ckpt.net.group import Group

from .forecast import rate_of_saves


def dry_run(url: str, state: object, group: Group, options: SaveOptions) -> SaveReport:
    """What a save of ``state`` would write on this rank; collective over ``group``. Nothing is written."""
    job = SaveJob.begin(group.call("save", url, options.timeout), options)
    call = job.call
    with job.cache.turn, gc_paused(), call.phase("plan"):
        share = prepare(job, state)
        row = begin_row(job, share) | {"bytes": _rank_bytes(share.plan)}

        def decide(rows: dict[int, Row]) -> Row:
            check_no_link(share.backend)
            known = list(job.cache.tables)  # a copy: the next save is still the first one, if it is
            leader = Leader(call=call, backend=share.backend, options=options, known=known)
            tables = leader.join(rows)
            _ = leader.values  # they may contradict each other
            tensors = [*tables.joined.tensors.values(), *(t for table in tables.own.values() for t in table.tensors)]
            rate = rate_of_saves(url)
            longest = max(row["bytes"] for row in rows.values())
            return {
                "tensor_bytes": sum(row.get("own_bytes", 0) for row in rows.values()) + sum(t.nbytes for t in tensors),
                "seconds": None if rate is None else longest / max(rate.bytes_per_second, 1.0),
                "measured": None if rate is None else rate.measured,
            }

        decision: Row = call.agree(row, decide)
    call.drain()
    return SaveReport(
        url=url,
        id="",
        tensor_bytes=decision["tensor_bytes"],
        rank_bytes=row["bytes"],
        sent_bytes=_moved(share.plan)[0],
        seconds=math.nan if decision["seconds"] is None else decision["seconds"],
        requests=share.plan.requests,
        files=len(share.plan.batches),
        memory=_memory(job, share),
        dry_run=True,
        reused_bytes=share.reuse.nbytes if share.reuse is not None else 0,
        estimated_from=decision["measured"],
    )


def _rank_bytes(plan: RankPlan) -> int:
    """Bytes of this rank's files. With a codec: if no chunk shrinks."""
    sizes = [file.size for file in plan.files]
    for number, group in enumerate(plan.groups):
        specs = plan.specs[group]
        stored = plan_coded_file(specs, [None] * len(specs), [s.nbytes for s in specs], id=NO_ID, rank=0, number=number)
        sizes.append(stored.size)
    return sum(sizes)


def _moved(plan: RankPlan) -> tuple[int, int]:
    """Bytes of the fragments of flat shards that this rank sends, and of those that it receives."""
    sizes = {t.name: t.dtype.itemsize for t in plan.key.infos}
    sent, received = (sum((f.stop - f.start) * sizes[f.name] for f in fragments) for fragments in (plan.sends, plan.receives))
    return sent, received


def _memory(job: SaveJob, share: RankShare) -> int:
    """A block for each thread, the fragments, and with a codec the coded chunks of one file."""
    plan, options = share.plan, job.options
    threads = max(options.threads, share.backend.io_hints.concurrency)
    small = any(len(batch.numbers) > 1 for batches in plan.batches for batch in batches)
    coded = max((sum(batch.length for batch in batches) for batches in plan.batches), default=0) if plan.groups else 0
    return (threads * settings.CACHE_BLOCK if small else 0) + sum(_moved(plan)) + coded
