"""Scale of loads: what one rank plans of a load of 405 billion parameters, as thousands of ranks wrote them. One process plays the ranks.

Flat over all ranks → bfloat16 weights in 8 parts: every file is looked into, and one of each ``BATCH`` is read.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import dtype
from ckpt.engine.load.chunk_scan import ChunkScan
from ckpt.engine.load.reader import Reader
from ckpt.engine.load.shared_reads import SharedReads, worth_all
from ckpt.engine.load.whole_chunks import TensorLoad
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import CommitRecord
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.state.tensors import LocalShard, LocalTensor

from .findings import Finding, at_most
from .flat_files import FlatFiles
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scale_jobs import DENSE, KEPT, OTHER
from .scenarios import Settings, Tell

BATCH = 128
"""Files that are there at a time."""
SECONDS, MEGABYTES = 10.0, 500.0


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Of ``settings`` only ``large_layers`` and ``large_ranks`` are used."""
    layers, ranks = settings.large_layers, settings.large_ranks
    found: dict[str, Any] = pool.run(gather, on=1, layers=layers, ranks=ranks, directory=place.fresh("files"))[0]
    tell("scale, load: done")
    rows = [
        ("plan with headers, CPU s", f"{found['gather_cpu']:.1f}"),
        ("memory of it, MB", f"{found['gather_mb']:.0f}"),
        ("files, chunks", f"{found['gather_files']:,}, {found['gather_chunks']:,}"),
        ("headers, GB", f"{found['gather_headers'] / 1e9:.2f}"),
        ("calls of the storage that read chunks", f"{found['gather_calls']:,}"),
        ("bytes read for each needed", f"{found['gather_read'] / found['gather_needed']:.2f}"),
        ("reading one file of each batch, CPU s per GB", f"{found['read_cpu_per_gb']:.2f}"),
    ]
    checks = at_most("gather", found["gather_cpu"], SECONDS, "CPU s"), at_most("gather", found["gather_mb"], MEGABYTES, "MB")
    title = f"load of 4 × {layers} layers that {ranks:,} ranks wrote, as one rank plans it"
    return [Finding(scenario="scale", title=title, columns=("", "ckpt"), rows=rows, figures=found, checks=checks)]


# --------------------------------------------------------------------------------------------------------------- the state


def states(layers: int, layout: TensorLayout) -> list[TensorSpec]:
    names = {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in DENSE.items()} | OTHER
    return [TensorSpec(stored.format(name), dtype(kind), shape, layout) for name, shape in names.items() for stored, kind in KEPT]


def flat(ranks: int) -> TensorLayout:
    return TensorLayout(Mesh(("dp",), (ranks,)), (Flat("dp"),))


def hsdp(ranks: int) -> TensorLayout:
    shards = min(256, ranks)
    return TensorLayout(Mesh(("copy", "dp"), (ranks // shards, shards)), (Shard(0, "dp"),))


def entries_of(tensors: list[TensorSpec], assignments: Mapping[str, ChunkAssignment]) -> dict[str, TensorEntry]:
    grids: dict[int, Grid] = {}
    found = {}
    for t in tensors:
        mine = assignments[t.name]
        grid = grids.setdefault(id(mine), Grid(cuts=mine.cuts, boxes=mine.boxes, files=mine.owners.astype(np.int32)))
        found[t.name] = TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, grid=grid)
    return found


def jobs_of(tensors: list[TensorSpec], stored: Mapping[str, TensorEntry], rank: int) -> list[TensorLoad]:
    """With memory of one element that stands for all."""
    one = torch.empty(1, dtype=torch.bfloat16)
    jobs = []
    for t in tensors:
        held = [LocalShard(p.box, one.expand(p.box.shape)) for p in t.layout.pieces(t.shape, rank)]
        jobs.append(TensorLoad(LocalTensor(t, held, t.name), stored[t.name]))
    return jobs


# --------------------------------------------------------------------------------------------------------------- the parts


class FlatCheckpoint(NativeCatalog):
    """A checkpoint whose data files are written when they are needed and removed after that: all headers of a large job together take
    10 GB."""

    def __init__(self, files: FlatFiles, directory: str, ranks: int) -> None:
        self._written = files
        self._directory = directory
        lacking = DataFile(path="", size=0, header=0, digest="", rank=0)
        self.rows = [lacking] * ranks
        tensors = tuple(entries_of(list(files.tensors), files.assignments).values())
        contents = Contents(tensors=tensors, files=cast("tuple[DataFile, ...]", self.rows))
        record = cast(CommitRecord, SimpleNamespace(features=frozenset(), world_size=ranks, id=files.id))
        super().__init__(open_backend(directory), opened=(record, contents))

    def write(self, number: int) -> None:
        self.rows[number] = self._written.write(self._directory, number)

    def remove(self, number: int) -> None:
        os.unlink(os.path.join(self._directory, self.rows[number].path))


@dataclass(eq=False)
class _Gathered:
    """What looking into files took, and what it found."""

    cpu: float = 0.0
    mb: float = 0.0
    chunks: int = 0
    calls: int = 0
    read: int = 0
    needed: int = 0
    headers: int = 0

    def add(self, scan: ChunkScan, numbers: Sequence[int]) -> None:
        for number in numbers:
            before = cpu_seconds()
            file = scan.look_up(number)
            runs = scan.runs(file.stored.alike)
            self.cpu += cpu_seconds() - before
            offsets = file.stored.alike.offsets.tolist()
            self.chunks += len(file)
            self.calls += len(runs) + len(file.others)
            self.read += sum(stop - offsets[first] for first, _, stop in runs) + sum(o.extent.length for o in file.others)
            self.needed += file.needed
        self.mb = max(self.mb, _resident_mb())
        self.headers += sum(scan.catalog.files[number].header for number in numbers)


def in_eighths(t: TensorSpec) -> TensorSpec:
    """A weight as 8 ranks have it that divide rows or columns."""
    splits: tuple[Split, ...] = () if "norm" in t.name else (Shard(1 if "wo" in t.name or "w2" in t.name else 0, "tp"),)
    return TensorSpec(t.name, t.dtype, t.shape, TensorLayout(Mesh(("tp",), (8,)), splits))


def gather(rank: Rank, *, layers: int, ranks: int, directory: str) -> dict[str, Any]:
    """Seconds and memory of the plan of one of 8 ranks that hold the weights in rows or columns: every file is there, one after another."""
    del rank
    tensors = states(layers, flat(ranks))
    files = FlatFiles(tensors, assign(tensors, merge_flat_shards=True), "0123456789abcdef")
    for number in range(0, ranks, max(ranks // 8, 1)):
        assert files.header(number)[0] == files.saved(number)
    catalog = FlatCheckpoint(files, directory, ranks)
    jobs = jobs_of([in_eighths(t) for t in tensors if t.dtype.name == "bfloat16"], catalog.tensors, 3)
    reader = Reader(catalog=catalog, verify="full", threads=1)
    gc.collect()
    gc.freeze()
    gc.disable()  # as a load does
    resident, before = _resident_mb(), cpu_seconds()
    scan = reader.plan(jobs).scan
    assert scan is not None
    found, reading = _Gathered(cpu=cpu_seconds() - before), 0.0
    for first in range(0, len(scan.files), BATCH):
        numbers = scan.files[first : first + BATCH]
        for number in numbers:
            catalog.write(number)
        found.add(scan, numbers)
        before = cpu_seconds()
        reader.read_file(scan, numbers[0])
        reading += cpu_seconds() - before
        for number in numbers:
            catalog.remove(number)
    gc.enable()
    return {
        "gather_cpu": found.cpu,
        "gather_files": len(scan.files),
        "gather_chunks": found.chunks,
        "gather_mb": found.mb - resident,
        "gather_headers": found.headers,
        "gather_calls": found.calls,
        "gather_read": found.read,
        "gather_needed": found.needed,
        "read_cpu_per_gb": reading / reader.fetch.read * 1e9,
    }


def _resident_mb() -> float:
    """Memory that this process has now, not at its peak: that would hide what comes after it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def tensor_parallel(ranks: int) -> TensorLayout:
    """Rows in eighths, each of which very many ranks have."""
    return TensorLayout(Mesh(("dp", "tp"), (max(ranks // 8, 1), 8)), (Shard(0, "tp"),))


def rows(ranks: int) -> TensorLayout:
    return TensorLayout(Mesh(("dp",), (ranks,)), (Shard(0, "dp"),))


def two_d(ranks: int) -> TensorLayout:
    """Rows in eighths, each in rows over the ranks that have it."""
    return TensorLayout(Mesh(("dp", "tp"), (max(ranks // 8, 1), 8)), (Shard(0, "tp"), Shard(0, "dp")))


def replicated(ranks: int) -> TensorLayout:
    return TensorLayout(Mesh(("dp",), (ranks,)))


def share_seconds(layers: int, before: TensorLayout, after: TensorLayout) -> float:
    """CPU seconds in which a rank in the middle finds what it shares."""
    saved = states(layers, before)
    stored, tensors = entries_of(saved, assign(saved, merge_flat_shards=True)), states(layers, after)
    middle = len(after.ranks()) // 2 + 1
    sharing = SharedReads.of(jobs_of(tensors, stored, middle), middle, parts=False, piece=2 << 20)
    gc.collect()
    gc.disable()
    began = cpu_seconds()
    sharing.divide((), None, worth_all)
    gc.enable()
    return cpu_seconds() - began
