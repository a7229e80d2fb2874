"""The scenario ``export``: the model of a running job as safetensors files, beside torch's own ways and plain writes of the same bytes.

*ckpt* is ``export``: every rank writes its blocks into the same file. *gather* is the usual way: the whole model on the host of rank 0
(``get_model_state_dict`` with ``full_state_dict`` and ``cpu_offload``), and safetensors' ``save_file`` there. *dcp* is DCP's
``HuggingFaceStorageWriter`` with consolidation, which writes shards and then copies them. *raw* is ``pwrite`` of each rank's bytes as they
are, in no order that anybody could read. All make the file durable.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ckpt.adapters.memory import as_bytes
from ckpt.converters.export.export import export
from ckpt.settings import limits

from . import tasks
from .contestants import sync_directory
from .findings import Finding, at_least, at_most, medians
from .footprint import MIB, _resident, reset_peak
from .measure import RankCost, Sample, cost_of
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns
from .states import Recipe, State

FILE = "model.safetensors"
ROOM = 64
"""MiB beside the windows that an export may take on a rank."""
FEWER = 2.0
"""Least times that an export takes less CPU time than gathering."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """A model that FSDP cuts, and one that tensor parallelism cuts too, on all ranks."""
    n = 2 * settings.ranks
    recipes = [Recipe(kind="sharded", ranks=n, size=settings.size * n, tensor_parallel=tp) for tp in (1, 2)]
    return [_finding(recipe, settings, pool, place, tell) for recipe in recipes]


def _finding(recipe: Recipe, settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    pool.run(tasks.prepare, on=recipe.ranks, recipe=recipe)
    layout = "FSDP" if recipe.tensor_parallel == 1 else recipe.label
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    nbytes = 0
    for repetition, name in turns(list(CONTESTANTS), min(settings.repeat, 3)):
        target = place.fresh("export")
        os.mkdir(target)
        costs = pool.run(write, on=recipe.ranks, name=name, target=target)
        sample, said = Sample.of(costs), [c.said for c in costs]
        nbytes = sum(s["bytes"] for s in said)
        tell(f"export of {layout} on {recipe.ranks}, {place.label}: {name} {sample.wall:.2f} s, {sample.cpu:.2f} s CPU")
        if repetition > 0:
            row = {"wall": sample.wall, "cpu": sample.cpu, "written": float(sum(sample.written)), "writes": sum(s["writes"] for s in said)}
            samples[name].append(row | {"peak": float(max(s["peak"] for s in said)), "sent": float(sum(s["sent"] for s in said))})
    place.fresh("export")
    pool.run(tasks.forget, on=recipe.ranks)
    return _table(f"{layout} on {recipe.ranks}, {nbytes / 1e6:,.0f} MB, {place.label}", nbytes, {n: medians(s) for n, s in samples.items()})


def _table(where: str, nbytes: int, found: dict[str, dict[str, float]]) -> Finding:
    ours, gather = found["ckpt"], found["gather"]
    rows = [
        (
            name,
            *(f"{m['wall']:.2f}", f"{m['cpu']:.2f}", f"{m['cpu'] / found['raw']['cpu']:.1f}", f"{m['written'] / nbytes:.2f}"),
            *(f"{m['sent'] / nbytes:.2f}", f"{m['peak'] / MIB:,.0f}"),
        )
        for name, m in found.items()
    ]
    return Finding(
        scenario="export",
        title=f"safetensors files out of a running job, {where}",
        columns=("", "wall s", "CPU s", "CPU / raw", "written", "sent", "peak MiB"),
        rows=rows,
        figures={"where": where, "bytes": nbytes, "medians": found},
        checks=[
            at_most(f"memory of an export on a rank: {where}", ours["peak"] / MIB, limits.EXPORT_MEMORY / MIB + ROOM, "MiB"),
            at_least(f"CPU of gathering in exports: {where}", gather["cpu"] / ours["cpu"], FEWER),
        ],
        notes=("written and sent: times the bytes of the model; peak: beside the state, of the rank that took most",),
    )


def write(rank: Rank, *, name: str, target: str) -> RankCost:
    """One contestant, and the most memory that it took beside what was there before."""
    state: State = rank.kept["state"]
    group = rank.groups[rank.kept["recipe"].ranks]
    model = _module(state.tree["model"])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier(group)
    before = reset_peak()
    cost = cost_of(lambda: CONTESTANTS[name](model, target, group) or {})
    cost.said["peak"] = max(0, _resident("VmHWM") - before)
    cost.said["bytes"] = sum(t.nbytes for n, t in state.local.items() if n.startswith("model."))
    cost.said.setdefault("sent", 0)
    cost.said.setdefault("writes", 0)
    dist.barrier(group)
    return cost


def _module(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters under their names."""
    found = nn.Module()
    for name, tensor in tensors.items():
        owner = found
        *path, last = name.split(".")
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return found


def _export(model: nn.Module, target: str, group: dist.ProcessGroup) -> dict[str, Any]:
    report = export(target, model, process_group=group)
    return {"sent": report.sent_bytes, "writes": report.writes}


def _gather(model: nn.Module, target: str, group: dist.ProcessGroup) -> None:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank(group) == 0:
        save_file(whole, f"{target}/{FILE}", {"format": "pt"})
        _sync(target)
    dist.barrier(group)


def _dcp(model: nn.Module, target: str, group: dist.ProcessGroup) -> None:
    writer = dcp.HuggingFaceStorageWriter(target, save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer, process_group=group)
    if dist.get_rank(group) == 0:
        _sync(target)
    dist.barrier(group)


def _raw(model: nn.Module, target: str, group: dist.ProcessGroup) -> None:
    views = [as_bytes(p.to_local()) for p in model.parameters()]  # type: ignore[operator]
    sizes: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(sizes, sum(len(v) for v in views), group=group)
    at = sum(sizes[: dist.get_rank(group)])
    fd = os.open(f"{target}/{FILE}", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for view in views:
            start = 0
            while start < len(view):
                start += os.pwrite(fd, view[start:], at + start)
            at += len(view)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(target)


def _sync(target: str) -> None:
    """The file at the end; DCP syncs what it writes first, but not what it consolidates."""
    names = [n for n in os.listdir(target) if n.endswith(".safetensors")]
    for name in names:
        with open(f"{target}/{name}", "rb") as file:
            os.fsync(file.fileno())
    sync_directory(target)


CONTESTANTS: dict[str, Callable[[nn.Module, str, dist.ProcessGroup], dict[str, Any] | None]] = {
    "ckpt": _export,
    "gather": _gather,
    "dcp": _dcp,
    "raw": _raw,
}
"""What is measured: from a model on all ranks to files in an empty directory."""
