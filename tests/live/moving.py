"""What ranks do for the matrix: build an old and a new state, move one into the other, compare with what is sliced by hand."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from tests.live.layouts import LAYOUTS, Job, Parts, whole
from tests.live.states import MOMENTS, STEP, WORLD, Made, Meshes, differing

PADDING = 3.5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """``apart``: the target is on the last of eight ranks, so that there are newcomers, leavers, and idle ones between; else both begin at
    rank 0. ``optimizer`` of the target: stepped or new."""

    source: str
    target: str
    apart: bool = False
    optimizer: str = "stepped"

    @property
    def first(self) -> int:
        """First rank of the target."""
        return WORLD - LAYOUTS[self.target].world if self.apart else 0

    @property
    def size(self) -> int:
        """Of the group of both."""
        return WORLD if self.apart else max(LAYOUTS[self.source].world, LAYOUTS[self.target].world)

    def __str__(self) -> str:
        return f"{self.source} to {self.target}" + (" apart" if self.apart else "") + (", new" if self.optimizer == "new" else "")


@dataclass(frozen=True, kw_only=True)
class Bed:
    """All that torch makes on all ranks together: meshes, and groups of consecutive ranks (first, count)."""

    meshes: Meshes
    groups: dict[tuple[int, int], Any]

    @classmethod
    def of(cls, pairs: Sequence[Pair], move: Move) -> Bed:
        """What some pairs need: a group of both sides of each, and to save and load one of each side too."""
        layouts = {name: LAYOUTS[name] for pair in pairs for name in (pair.source, pair.target)}
        spans = {(0, pair.size) for pair in pairs}
        if move is by_storage:
            spans |= {(0, layouts[pair.source].world) for pair in pairs} | {(pair.first, layouts[pair.target].world) for pair in pairs}
        groups = {(first, n): dist.new_group(list(range(first, first + n))) for first, n in sorted(spans)}
        return cls(meshes=Meshes(layouts), groups=groups)


Move = Callable[[Bed, Pair, Made | None, Made | None], Any]
"""From an old state to a new one; each is None on ranks that do not have it. Gives this rank's report."""


def rank_value(rank: int) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(1000 + rank).get_state(), "position": [rank, "of the source"]}


def pick(values: Sequence[Any], rank: int, world: int) -> Any:
    return values[(rank + world) % len(values)]


def expected(pair: Pair, rank: int, full: Parts) -> Parts:
    """The target's parts. Padding is kept where both sides have the same, and is zero where they differ."""
    source, target = LAYOUTS[pair.source], LAYOUTS[pair.target]
    alike = isinstance(source, Job) and isinstance(target, Job) and source.padded == target.padded
    parts = target.parts(rank, full, PADDING if alike else 0.0)
    return parts | {f"{name}.step": torch.tensor(float(STEP)) for name in parts if not name.endswith(MOMENTS)}


def run_pairs(pairs: Sequence[Pair], move: Move) -> dict[str, tuple[list[str], Any, float]]:
    """Every pair: problems on this rank, its report, and seconds."""
    bed = Bed.of(pairs, move)
    outcome = {}
    for number, pair in enumerate(pairs):
        if dist.get_rank() < pair.size:
            began = time.monotonic()
            try:
                problems, report = run_pair(bed, pair, move, number)
            except Exception as err:  # noqa: BLE001  the test of this pair fails with it; the other pairs go on
                problems, report = [f"{type(err).__name__}: {err}"], None
            outcome[str(pair)] = problems, report, time.monotonic() - began
    return outcome


def run_pair(bed: Bed, pair: Pair, move: Move, seed: int) -> tuple[list[str], Any]:
    rank, full = dist.get_rank(), whole(seed)
    source, target = LAYOUTS[pair.source], LAYOUTS[pair.target]
    old = new = None
    if rank < source.world:
        parts = source.parts(rank, full, PADDING)
        old = bed.meshes.build(pair.source, 0, parts)
        old.state |= {"step": seed, "note": ("a", 1.5, None), "rank": ckpt.PerRank(rank_value(rank), reshard=pick)}
    if 0 <= rank - pair.first < target.world:
        new = bed.meshes.build(pair.target, pair.first, optimizer=pair.optimizer)
        new.state |= {"step": -1, "note": None, "rank": ckpt.PerRank(None, reshard=pick)}
    report = move(bed, pair, old, new)
    problems = []
    if new is not None:
        place = rank - pair.first
        problems += differing(new.tensors(), expected(pair, place, full))
        problems += [f"lr of {n} is {lr}" for n, lr in new.rates().items() if lr != (0.25 if "norm" in n else 0.5)]
        if (new.state["step"], new.state["note"]) != (seed, ("a", 1.5, None)):
            problems.append(f"plain values are {new.state['step']}, {new.state['note']}")
        wanted = rank_value(place if source.world == target.world else (place + target.world) % source.world)
        value = new.state["rank"].value
        if value["position"] != wanted["position"] or not torch.equal(value["generator"], wanted["generator"]):
            problems.append(f"the value per rank is that of {value['position']}, should be that of {wanted['position']}")
    if old is not None:
        steps = {f"{name}.step": torch.tensor(float(STEP)) for name in parts if not name.endswith(MOMENTS)}
        problems += [f"the source has changed: {p}" for p in differing(old.tensors(), parts | steps)]
    return problems, report


# ------------------------------------------------------------------------------------------------------------ ways to move


def by_storage(bed: Bed, pair: Pair, old: Made | None, new: Made | None) -> None:
    """A save and a load, which shows that layouts and oracle agree."""
    union = bed.groups[0, pair.size]
    folder = [tempfile.mkdtemp(prefix="ckpt-", dir="/dev/shm") if dist.get_rank() == 0 else ""]
    if pair.size > 1:
        dist.broadcast_object_list(folder, 0, group=union)
    if old is not None:
        group = bed.groups[0, LAYOUTS[pair.source].world]
        ckpt.save(f"{folder[0]}/c", old.state, layout=old.layout, job=ckpt.Job(process_group=group, timeout=20))
    dist.barrier(union)
    if new is not None:
        group = bed.groups[pair.first, LAYOUTS[pair.target].world]
        ckpt.load(f"{folder[0]}/c", new.state, layout=new.layout, job=ckpt.Job(process_group=group, timeout=20))
    dist.barrier(union)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def by_reshard(bed: Bed, pair: Pair, old: Made | None, new: Made | None) -> Any:
    from ckpt.live import reshard

    return reshard(
        {} if old is None else old.state,
        None if new is None else new.state,
        layout=None if old is None else old.layout,
        new_layout=None if new is None else new.layout,
        job=ckpt.Job(process_group=bed.groups[0, pair.size], timeout=20),
    )
