"""The scenario ``merge``: flat shards, cut in the middle of rows, stored in three ways, and what a later load in rows takes.

*gather*: every rank collects whole tensors with ``all_gather``, and ``ckpt`` stores them as replicated ones (not compared), each rank its
share. *boxes*: ``merge_flat_shards=False``, each shard as the boxes that it is made of. *merge*: the default, whole rows.
"""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import ckpt
from ckpt.formats.registry import open_catalog

from .findings import Finding, at_most, medians
from .measure import RankCost, Sample, cost_of
from .places import Place
from .pool import Pool, Rank
from .report import Check
from .scenarios import Settings, Tell, turns
from .states import digests_of, dtensor, pattern, shapes
from .tasks import WrongBytesError

WAYS = ("gather", "boxes", "merge")
SENT = 0.05
"""Most that merging may send, of what gathering does."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Save on one rank more than ``settings.ranks``, load on ``settings.ranks``."""
    source, target = settings.ranks + 1, settings.ranks
    total = pool.run(prepare, on=source, ranks=source, target=target, size=settings.size)[0]
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repetition, way in turns(WAYS, min(settings.repeat, 3)):
        directory = place.fresh(way)
        saved = Sample.of(pool.run(save, on=source, way=way, directory=directory))
        place.cool(directory)
        loaded = Sample.of(pool.run(load, on=target, way=way, directory=directory))
        found = {
            "save": saved.wall,
            "save_cpu": saved.cpu,
            "sent": float(sum(s["sent"] for s in saved.said)),
            "chunks": float(pool.run(count_chunks, on=1, directory=directory)[0]),
            "load": loaded.wall,
            "load_cpu": loaded.cpu,
        }
        tell(f"merge on {source}, {place.label}: {way} save {saved.wall:.2f} s, load {loaded.wall:.2f} s")
        place.fresh(way)
        if repetition > 0:
            samples[way].append(found)
    pool.run(forget, on=source)
    return [_finding(place, source, target, total, samples)]


def _finding(place: Place, source: int, target: int, total: int, samples: dict[str, list[dict[str, float]]]) -> Finding:
    mine = {way: medians(s) for way, s in samples.items()}
    where = f"ranks {source}→{target}, {place.label}"
    rows = [
        (
            way,
            *(f"{m[k]:.3f}" for k in ("save", "save_cpu")),
            f"{m['sent'] / 1e6:,.2f}",
            f"{m['chunks']:,.0f}",
            *(f"{m[k]:.3f}" for k in ("load", "load_cpu")),
        )
        for way, m in mine.items()
    ]
    checks = [
        Check(
            name=f"merging stores fewer chunks than boxes: {where}",
            ok=mine["merge"]["chunks"] < mine["boxes"]["chunks"],
            detail=f"{mine['merge']['chunks']:,.0f} of {mine['boxes']['chunks']:,.0f}",
        ),
        at_most(f"CPU seconds of merging over gathering: {where}", mine["merge"]["save_cpu"] / mine["gather"]["save_cpu"], 1.0),
    ]
    if mine["gather"]["sent"]:
        checks.append(at_most(f"bytes that merging sends over gathering: {where}", mine["merge"]["sent"] / mine["gather"]["sent"], SENT))
    return Finding(
        scenario="merge",
        title=f"flat shards of {total / 1e6:,.0f} MB, {where}, loaded in rows",
        columns=("", "save s", "CPU s", "sent MB", "chunks", "load s", "CPU s"),
        rows=rows,
        figures={"place": place.label, "ranks": [source, target], "medians": mine, "samples": samples},
        checks=checks,
    )


# -------------------------------------------------------------------------------------------------------------- on the ranks


def prepare(rank: Rank, *, ranks: int, target: int, size: int) -> int:
    """Flat shards of ``size`` bytes on all ranks together, and rows of the same on the first ``target``; the bytes of all."""
    warnings.filterwarnings("ignore")
    rank.kept.clear()
    found = shapes(3 * size)
    flat, rules = {}, []
    for seed, (name, shape) in enumerate(found.items()):
        length = -(-math.prod(shape) // ranks)
        flat[name] = pattern(shape, seed).flatten()[rank.number * length : (rank.number + 1) * length].clone()
        rules.append((name, ckpt.Flat("dp"), ckpt.GlobalShape(shape)))
    rank.kept.update(shapes=found, flat=flat, layout=ckpt.Layout({"dp": ranks}, rules), group=rank.groups[ranks], ranks=ranks)
    if rank.number < target:
        _prepare_rows(rank, target)
    return sum(4 * math.prod(shape) for shape in found.values())


def _prepare_rows(rank: Rank, target: int) -> None:
    mesh = DeviceMesh.from_group(rank.groups[target], "cpu")
    local: dict[str, torch.Tensor] = {}
    rows = {name: dtensor(local, name, shape, seed, mesh, [Shard(0)]) for seed, (name, shape) in enumerate(rank.kept["shapes"].items())}
    rank.kept.update(rows=rows, local=local, digests=digests_of(local), target=rank.groups[target])


def save(rank: Rank, *, way: str, directory: str) -> RankCost:
    """Save the flat shards in one of the ways."""
    gc.collect()
    dist.barrier(rank.kept["group"])
    cost = cost_of(lambda: _gather(rank, directory) if way == "gather" else _flat(rank, directory, merge=way == "merge"))
    dist.barrier(rank.kept["group"])
    return cost


def _gather(rank: Rank, directory: str) -> dict[str, Any]:
    group, ranks = rank.kept["group"], rank.kept["ranks"]
    whole, sent = {}, 0
    for name, shape in rank.kept["shapes"].items():
        count = math.prod(shape)
        mine = rank.kept["flat"][name]
        padded = torch.zeros(-(-count // ranks))
        padded[: mine.numel()] = mine
        gathered = torch.empty(ranks * padded.numel())
        dist.all_gather_into_tensor(gathered, padded, group=group)
        whole[name] = gathered[:count].view(shape)
        sent += (ranks - 1) * mine.nbytes
    ckpt.save(directory, whole, check_replicas=False, process_group=group)
    return {"sent": sent}


def _flat(rank: Rank, directory: str, *, merge: bool) -> dict[str, Any]:
    report = ckpt.save(directory, rank.kept["flat"], layout=rank.kept["layout"], merge_flat_shards=merge, process_group=rank.kept["group"])
    return {"sent": report.sent_bytes}


def load(rank: Rank, *, way: str, directory: str) -> RankCost:
    """Load rows, and compare them.

    Raises:
        WrongBytesError: they are not what was saved.
    """
    local, group = rank.kept["local"], rank.kept["target"]
    for tensor in local.values():
        tensor.zero_()
    gc.collect()
    dist.barrier(group)
    cost = cost_of(lambda: {"needed": asdict(ckpt.load(directory, rank.kept["rows"], process_group=group))["bytes_needed"]})
    dist.barrier(group)
    if digests_of(local) != rank.kept["digests"]:
        raise WrongBytesError(f"what was saved by {way} was not loaded as it was")
    return cost


def count_chunks(rank: Rank, *, directory: str) -> int:
    """Stored chunks of all tensors."""
    return sum(len(t.grid) for t in open_catalog(directory).tensors.values())


def forget(rank: Rank) -> None:
    rank.kept.clear()
    gc.collect()
