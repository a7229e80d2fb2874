"""Scale of loads: what one rank plans of a load of 405 billion parameters, as thousands of ranks wrote them. One process plays the ranks.

*gathered*: flat over all ranks → bfloat16 weights in 8 parts: every file is looked into. Headers are made for a sample of the files; the
time of a file is that of the sample. *shared*: who reads what for whom. *verdict*: what every rank reads of machines.
"""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ckpt.adapters.tensors import Held, LocalTensor
from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import dtype
from ckpt.engine.exact import Job
from ckpt.engine.plan import chunks_of, specs_of
from ckpt.engine.reader import Reader
from ckpt.engine.sharing import Sharing, worth_all
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.datafile import plan_data_files
from ckpt.formats.native.header import parse_header
from ckpt.io_backends.memory import MemoryBackend
from ckpt.layout import TensorLayout
from ckpt.mesh import Mesh
from ckpt.plan.machines import spell
from ckpt.plan.ownership import Global, Owned, assign
from ckpt.splits import Flat, Shard, Split

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .planning import ID, KEPT
from .planning_large import LAYER, OTHER
from .pool import Pool, Rank
from .scenarios import Settings, Tell

SAMPLE = 400
"""Files whose headers are made: making one takes far longer than looking into it."""
SECONDS, MEGABYTES = 10.0, 500.0
SHARE_SECONDS = 1.0
VERDICTS = 10.0
"""Megabytes that all ranks together read of verdicts."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """``place`` is not used, and of ``settings`` only ``large_layers`` and ``large_ranks``."""
    del place
    layers, ranks = settings.large_layers, settings.large_ranks
    found: dict[str, Any] = {}
    for name, part in PARTS.items():
        found |= pool.run(part, on=1, layers=layers, ranks=ranks)[0]
        tell(f"scale, load, {name}: done")
    rows = [
        ("gathered from all ranks: plan with headers, CPU s", f"{found['gather_cpu']:.1f}"),
        ("of each file, ms", f"{found['file_ms']:.2f}"),
        ("chunks of it", f"{found['gather_chunks']:,.0f}"),
        ("memory, MB", f"{found['gather_mb']:.0f}"),
        ("shared, flat over an eighth, CPU s", f"{found['share_flat']:.2f}"),
        ("shared, HSDP over as many, CPU s", f"{found['share_hsdp']:.2f}"),
        ("verdicts of all ranks, MB", f"{found['verdict_mb']:.2f}"),
    ]
    return [
        Finding(
            scenario="scale",
            title=f"load of 4 × {layers} layers that {ranks:,} ranks wrote, as one rank plans it",
            columns=("", "ckpt"),
            rows=rows,
            figures=found,
            checks=(
                at_most("gather", found["gather_cpu"], SECONDS, "CPU s"),
                at_most("gather", found["gather_mb"], MEGABYTES, "MB"),
                at_most("shared, flat", found["share_flat"], SHARE_SECONDS, "CPU s"),
                at_most("shared, HSDP", found["share_hsdp"], SHARE_SECONDS, "CPU s"),
                at_most("verdicts", found["verdict_mb"], VERDICTS, "MB"),
            ),
        )
    ]


# --------------------------------------------------------------------------------------------------------------- the state


def states(layers: int, layout: TensorLayout) -> list[Global]:
    names = {f"layers.{i}.{part}": shape for i in range(layers) for part, shape in LAYER.items()} | OTHER
    return [Global(stored.format(name), dtype(kind), shape, layout) for name, shape in names.items() for stored, kind in KEPT]


def flat(ranks: int) -> TensorLayout:
    return TensorLayout(Mesh(("dp",), (ranks,)), (Flat("dp"),))


def hsdp(ranks: int) -> TensorLayout:
    shards = min(256, ranks)
    return TensorLayout(Mesh(("copy", "dp"), (ranks // shards, shards)), (Shard(0, "dp"),))


def entries_of(tensors: list[Global], owned: Mapping[str, Owned]) -> dict[str, TensorEntry]:
    grids: dict[int, Grid] = {}
    found = {}
    for t in tensors:
        mine = owned[t.name]
        grid = grids.setdefault(id(mine), Grid(cuts=mine.cuts, boxes=mine.boxes, files=mine.owners.astype(np.int32)))
        found[t.name] = TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, grid=grid)
    return found


def jobs_of(tensors: list[Global], stored: Mapping[str, TensorEntry], rank: int) -> list[Job]:
    """With memory of one element that stands for all."""
    one = torch.empty(1, dtype=torch.bfloat16)
    jobs = []
    for t in tensors:
        held = [Held(p.box, one.expand(p.box.shape)) for p in t.layout.pieces(t.shape, rank)]
        jobs.append(Job(LocalTensor(t, held, t.name), stored[t.name]))
    return jobs


# --------------------------------------------------------------------------------------------------------------- the parts


class _Made(NativeCatalog):
    """Headers are made as they are asked for; ``making`` counts the CPU seconds of that."""

    def __init__(self, tensors: list[Global], ranks: int) -> None:
        self._owned = assign(tensors, merge=True)
        self._globals = {t.name: t for t in tensors}
        self.making = 0.0
        files = tuple(DataFile(path=f"data/{ID}-{r:05}.safetensors", size=0, header=0, digest="", rank=r) for r in range(ranks))
        contents = Contents(tensors=tuple(entries_of(tensors, self._owned).values()), files=files)
        record = cast(CommitRecord, SimpleNamespace(features=frozenset(), world_size=ranks, id=ID))
        super().__init__(MemoryBackend("memory://scale-load"), opened=(record, contents))

    def _read_header(self, file: DataFile) -> Any:
        before = cpu_seconds()
        (plan,) = plan_data_files(specs_of(chunks_of(self._owned, file.rank), self._globals), id=ID, rank=file.rank)
        header = plan.encode_header(range(len(plan)))
        self.making += cpu_seconds() - before
        return parse_header(header, plan.row(header), "benchmark")


def gather(rank: Rank, *, layers: int, ranks: int) -> dict[str, Any]:
    """Seconds and memory of the plan of one of 8 ranks that hold the weights in rows or columns."""
    del rank
    tensors = states(layers, flat(ranks))
    catalog, mesh = _Made(tensors, ranks), Mesh(("tp",), (8,))

    def wanted(t: Global) -> Global:
        splits: tuple[Split, ...] = () if "norm" in t.name else (Shard(1 if "wo" in t.name or "w2" in t.name else 0, "tp"),)
        return Global(t.name, t.dtype, t.shape, TensorLayout(mesh, splits))

    weights = [wanted(t) for t in tensors if t.dtype.name == "bfloat16"]
    jobs = jobs_of(weights, catalog.tensors, 3)
    reader = Reader(catalog=catalog, verify="full", threads=1, beat=lambda: None)
    gc.collect()
    gc.freeze()
    gc.disable()  # as a load does
    held, before = _peak_mb(), cpu_seconds()
    sweep = reader.plan(jobs).sweep
    assert sweep is not None
    first, catalog.making = cpu_seconds() - before - catalog.making, 0.0
    middle = len(sweep.files) // 2
    sample = sweep.files[middle : middle + SAMPLE]
    before, chunks = cpu_seconds(), 0
    for number in sample:
        file = sweep.look_up(number)
        chunks += len(file)
        for _ in sweep.tasks(file):
            pass
    each = (cpu_seconds() - before - catalog.making) / len(sample)
    gc.enable()
    return {
        "gather_cpu": first + each * len(sweep.files),
        "file_ms": 1000 * each,
        "gather_chunks": chunks / len(sample) * len(sweep.files),
        "gather_mb": _peak_mb() - held,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def shared(rank: Rank, *, layers: int, ranks: int) -> dict[str, Any]:
    """Seconds to divide what ranks read for each other."""
    del rank

    def seconds(before: TensorLayout, after: TensorLayout) -> float:
        saved = states(layers, before)
        stored, tensors = entries_of(saved, assign(saved, merge=True)), states(layers, after)
        middle = len(after.ranks()) // 2 + 1
        sharing = Sharing.of(jobs_of(tensors, stored, middle), middle, parts=False, piece=2 << 20)
        gc.collect()
        gc.disable()
        began = cpu_seconds()
        sharing.divide((), None, worth_all)
        gc.enable()
        return cpu_seconds() - began

    return {"share_flat": seconds(flat(ranks), flat(max(ranks // 8, 1))), "share_hsdp": seconds(hsdp(ranks), hsdp(ranks))}


def verdict(rank: Rank, *, layers: int, ranks: int) -> dict[str, Any]:
    """Bytes that all ranks read about machines of 8 ranks."""
    del rank, layers
    return {"verdict_mb": ranks * len(json.dumps(spell([f"machine {i // 8}" for i in range(ranks)]))) / 1e6}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"gather": gather, "share": shared, "verdict": verdict}
