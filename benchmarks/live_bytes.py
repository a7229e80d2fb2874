"""The scenario ``live-bytes``: what ranks send each other when a state of 150 MB goes from one layout into another, by the bytes needed.

The state and the layouts are those of the tests (tests/live/layouts.py), 64 times as large in each dimension. *gather + broadcast* is what
the usual way sends: each whole tensor to every rank of the target, and before that to the first rank of the source what it lacks.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from tests.live.layouts import LAYOUTS, Job, Parts, Sizes, Torch
from tests.live.states import MOMENTS, WORLD, Meshes

from .findings import Finding, at_most
from .measure import RankCost, Sample, cost_of
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

FACTOR = 64
SENT, BALANCE = 1.02, 1.10
"""Most bytes sent in those needed, and most that one holder sends in mean shares where replicas allow a choice."""
PAIRS = [
    ("fsdp4", "tp2", False),
    ("fsdp4", "tp2", True),
    ("fsdp2-tp2", "engine-tp4", True),
    ("fsdp2-tp2", "engine-tp4", False),
    ("pp2-vpp2-tp2-ep2", "engine-tp2-ep2", False),
    ("pp2-vpp2-tp2-ep2", "tp4-ep4", False),
    ("pp2-tp2", "fsdp4", True),
    ("hsdp2x2", "engine-tp4", True),
    ("copies2", "fsdp4", True),
    ("zero3", "tp2", True),
    ("tp3-uneven", "engine-tp4", True),
    ("tp4-ep4", "zero3", True),
    ("fsdp4", "fsdp3", False),
]
"""Source, target, and whether they are on ranks of their own."""
REPLICATED = ("hsdp2x2", "copies2")


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """In processes of its own."""
    rows, figures, checks = [], {}, []
    with Pool(WORLD) as own:
        own.run(prepare, on=WORLD)
        for source, target, apart in PAIRS:
            costs = own.run(move, on=WORLD, source=source, target=target, apart=apart)
            sample = Sample.of(costs)
            traffic = next(c.said["traffic"] for c in costs if c.said["traffic"])
            crossing = sum(needed - copied for needed, _, copied, _ in traffic.values())
            sent = [s for _, s, _, _ in traffic.values() if s]
            needed = sum(n for n, *_ in traffic.values())
            tensors = sum(c.said["whole"] for c in costs[:1])
            gathered = tensors * (LAYOUTS[target].world + 1)
            over, balance = sum(sent) / crossing, max(sent) / mean(sent)
            title = f"{source} → {target}" + (", apart" if apart else "")
            tell(f"{title}: {sum(sent) / 1e6:,.0f} MB sent for {needed / 1e6:,.0f} MB, busiest {balance:.2f}, {sample.cpu:.2f} s CPU")
            amounts = [f"{n / 1e6:,.0f}" for n in (needed, needed - crossing, sum(sent))]
            rows.append(
                (title, *amounts, f"{over:.3f}", f"{balance:.2f}", f"{gathered / needed:.1f}", f"{sample.wall:.2f}", f"{sample.cpu:.2f}")
            )
            figures[title] = {"needed": needed, "crossing": crossing, "sent": sum(sent), "balance": balance, "cpu": sample.cpu}
            checks.append(at_most(f"bytes sent in bytes needed: {title}", over, SENT))
            if source in REPLICATED and apart:
                checks.append(at_most(f"busiest sender in mean shares: {title}", balance, BALANCE))
    return [
        Finding(
            scenario="live-bytes",
            title=f"resharding in memory, {WORLD} ranks at most",
            columns=("", "needed MB", "own MB", "sent MB", "sent / crossing", "busiest / mean", "gather + broadcast", "wall s", "CPU s"),
            rows=rows,
            figures=figures,
            checks=checks,
            notes=(
                "needed: by all ranks of the target, replicas counted; own: of that, from a rank's own memory; crossing: the rest;"
                " gather + broadcast: what these send, in bytes needed",
            ),
        )
    ]


# ------------------------------------------------------------------------------------------------------------ in a rank


def prepare(rank: Rank) -> None:
    sizes = Sizes.times(FACTOR)
    names = {name for source, target, _ in PAIRS for name in (source, target)}
    rank.kept["meshes"] = Meshes({name: _scaled(LAYOUTS[name], sizes) for name in sorted(names)})


def _scaled(layout: Job | Torch, sizes: Sizes) -> Job | Torch:
    if isinstance(layout, Torch):
        return replace(layout, sizes=sizes)
    return replace(layout, sizes=sizes, padded=FACTOR * layout.padded)


def move(rank: Rank, *, source: str, target: str, apart: bool) -> RankCost:
    """One reshard, all ranks taking part; what each has sent."""
    from ckpt.live import reshard

    meshes: Meshes = rank.kept["meshes"]
    old, new = meshes.layouts[source], meshes.layouts[target]
    first = WORLD - new.world if apart else 0
    full = _full(old.sizes)
    mine = meshes.build(source, 0, old.parts(rank.number, full)) if rank.number < old.world else None
    its = meshes.build(target, first) if 0 <= rank.number - first < new.world else None
    gc.collect()
    dist.barrier()

    def act() -> dict[str, Any]:
        report = reshard(
            None if mine is None else mine.state,
            None if its is None else its.state,
            layout=None if mine is None else mine.layout,
            new_layout=None if its is None else its.layout,
            timeout=60,
        )
        return {"traffic": {r: (t.needed, t.sent, t.copied, t.received) for r, t in report.ranks.items()}}

    cost = cost_of(act)
    cost.said["whole"] = sum(t.nbytes for t in full.values())
    dist.barrier()
    return cost


def _full(sizes: Sizes) -> Parts:
    """Full tensors, of zeros: the tests look at values."""
    full: Parts = {}
    for name, (shape, dtype) in sizes.shapes().items():
        full[name] = torch.zeros(shape, dtype=dtype)
        full |= {f"{name}.{key}": torch.zeros(shape) for key in MOMENTS}
    return full
