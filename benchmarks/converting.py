"""The scenario ``convert``: exports, conversions and imports of one model, beside what torch has for it and copies of the same bytes.

The model is bfloat16, of ``--size`` MB, in two checkpoints of one rank: ours, and one of DCP. *copy* reads and writes the bytes of our data
file as they are, 8 MiB at a time; *checked copy* is ``ckpt.maintenance.copy``, which compares digests too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt
from ckpt.converters.virtual.importer import import_checkpoint
from ckpt.maintenance.copy import copy_checkpoint
from ckpt.settings import limits

from .findings import Finding, at_least, at_most, medians
from .footprint import MIB, _resident, reset_peak
from .measure import RankCost, Sample, cost_of
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns

SHAPE = (2048, 1024)
"""Of a tensor of the model: 4 MiB."""
SAME = 1.2
"""Most CPU time that an export may take, in copies that compare nothing."""
ROOM = 200
"""MiB beside the budget that a conversion may take."""
FASTER = 50
"""Least times that an import is faster than a conversion that copies."""
SOON = 2.0
"""Seconds of an import, at most."""
WORTH = 1_000_000_000
"""Bytes from which on the start of an export does not count."""
LARGE = 10_000_000_000
BLOCK = 8 << 20


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All contestants in turns, on one rank."""
    source = place.fresh("convert-source")
    pool.run(prepare, on=1, directory=source, size=settings.size)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for repetition, name in turns(list(CONTESTANTS), min(settings.repeat, 3)):
        place.cool(source)
        target = place.fresh("convert-target")
        os.mkdir(target)
        sample = Sample.of(pool.run(convert, on=1, name=name, source=source, target=target))
        tell(f"convert, {place.label}: {name} {sample.wall:.2f} s, {sample.cpu:.2f} s CPU")
        if repetition > 0:
            samples[name].append({"wall": sample.wall, "cpu": sample.cpu, "peak": float(sample.said[0]["peak"])})
    place.fresh("convert-target")
    place.fresh("convert-source")
    return [_finding(place, settings.size, {name: medians(found) for name, found in samples.items()})]


def _finding(place: Place, size: int, found: dict[str, dict[str, float]]) -> Finding:
    where = f"{size / 1e6:,.0f} MB, {place.label}"
    export, imported = found["export to hf"], found["import of dcp"]
    checks = [
        at_least(f"consolidation in exports, wall: {where}", found["consolidate hf"]["wall"] / export["wall"], 1),
        at_most(f"memory of an export: {where}", export["peak"] / MIB, limits.CONVERT_MEMORY / MIB + ROOM, "MiB"),
        at_most(f"seconds of an import: {where}", imported["wall"], SOON),
    ]
    if size >= WORTH:
        checks.append(at_most(f"CPU of an export, in copies: {where}", export["cpu"] / found["copy"]["cpu"], SAME))
    if size >= LARGE:  # how long an import takes does not depend on the size
        checks.append(
            at_least(f"dcp_to_torch_save in imports, wall: {where}", found["dcp_to_torch_save"]["wall"] / imported["wall"], FASTER)
        )
    return Finding(
        scenario="convert",
        title=f"conversions of a model in bfloat16, {where}",
        columns=("", "wall s", "CPU s", "peak MiB"),
        rows=[(n, f"{m['wall']:.2f}", f"{m['cpu']:.2f}", f"{m['peak'] / MIB:,.0f}") for n, m in found.items()],
        figures={"place": place.label, "bytes": size, "medians": found},
        checks=checks,
    )


def prepare(rank: Rank, *, directory: str, size: int) -> None:
    """The sources: ours, DCP's, and DCP's shards of safetensors."""
    count = max(1, size // (2 * SHAPE[0] * SHAPE[1]))
    model = {f"layers.{i}.weight": torch.randn(SHAPE).to(torch.bfloat16) for i in range(count)}
    ckpt.save(f"{directory}/ckpt", {"model": model}, process_group=rank.groups[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model}, checkpoint_id=f"{directory}/dcp", no_dist=True)
        writer = dcp.HuggingFaceStorageWriter(f"{directory}/shards", save_distributed=True)
        dcp.save(dict(model), storage_writer=writer, no_dist=True)


def convert(rank: Rank, *, name: str, source: str, target: str) -> RankCost:
    """One contestant, and the most memory that it took beside what was there before."""
    del rank
    before = reset_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = cost_of(lambda: CONTESTANTS[name](source, target) or {})
    cost.said["peak"] = max(0, _resident("VmHWM") - before)
    return cost


def _copy(source: str, target: str) -> None:
    buffer = memoryview(bytearray(BLOCK))
    for path in Path(f"{source}/ckpt/data").iterdir():
        with open(path, "rb", buffering=0) as read, open(f"{target}/{path.name}", "wb", buffering=0) as write:
            while count := read.readinto(buffer):
                write.write(buffer[:count])
            os.fsync(write.fileno())


def _consolidate(source: str, target: str) -> None:
    names = [t.name for t in ckpt.open(f"{source}/shards").tensors()]
    consolidate_safetensors_files(f"{source}/shards", target, dict.fromkeys(names, 1))


def _torch_save(source: str, target: str) -> None:
    dcp_to_torch_save(f"{source}/dcp", f"{target}/model.pt")
    with open(f"{target}/model.pt", "rb") as file:
        os.fsync(file.fileno())


def _convert(part: str, to: str, name: str) -> Callable[[str, str], dict[str, Any]]:
    return lambda source, target: asdict(ckpt.convert(f"{source}/{part}", f"{target}/{name}", to=to))


CONTESTANTS: dict[str, Callable[[str, str], dict[str, Any] | None]] = {
    "copy": _copy,
    "checked copy": lambda source, target: asdict(copy_checkpoint(f"{source}/ckpt", f"{target}/copy")),
    "export to hf": _convert("ckpt", "hf", "hf"),
    "consolidate hf": _consolidate,
    "dcp to native": _convert("dcp", "native", "native"),
    "dcp to torch": _convert("dcp", "torch", "model.pt"),
    "dcp_to_torch_save": _torch_save,
    "import of dcp": lambda source, target: asdict(import_checkpoint(f"{source}/dcp", f"{target}/virtual")),
}
"""What is measured: from a directory with the sources to an empty one."""
