"""Planning and the index of a large job on ranks that are only simulated: no bytes of tensors are moved.

The state is a mixed-precision model under FSDP over tensor parallelism: for each parameter a bfloat16 weight, a float32 master copy and two
moments. ckpt runs what a save runs. DCP gets the same boxes as its own WriteItems, one plan per rank, and runs its own global planner,
metadata and storage writer; its local planning, which needs DTensors of all ranks, is left out.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.catalog import Contents, DataFile
from ckpt.dtypes import dtype
from ckpt.engine.save.index_rows import Chunking, index_rows
from ckpt.engine.save.plan import chunks_of, specs_of
from ckpt.formats.native.datafile import DataFilePlan, plan_data_files
from ckpt.formats.native.index import decode_index, encode_index
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.tables import Table, join_tables

from .measure import cpu_seconds
from .pool import Rank

T = TypeVar("T")

HIDDEN, INNER, KEYS = 8192, 28672, 1024
COLUMN, ROW = (Shard(0, "tp"), Shard(0, "dp")), (Shard(1, "tp"), Shard(0, "dp"))
LAYER: dict[str, tuple[tuple[int, ...], tuple[Shard, ...]]] = {
    "attention.wq": ((HIDDEN, HIDDEN), COLUMN),
    "attention.wk": ((KEYS, HIDDEN), COLUMN),
    "attention.wv": ((KEYS, HIDDEN), COLUMN),
    "attention.wo": ((HIDDEN, HIDDEN), ROW),
    "mlp.w1": ((INNER, HIDDEN), COLUMN),
    "mlp.w2": ((HIDDEN, INNER), ROW),
    "mlp.w3": ((INNER, HIDDEN), COLUMN),
    "attention_norm": ((HIDDEN,), (Shard(0, "dp"),)),
    "mlp_norm": ((HIDDEN,), (Shard(0, "dp"),)),
}
KEPT = (("model.{}.weight", "bfloat16"), *((f"optim.state.{{}}.weight.{k}", "float32") for k in ("master", "exp_avg", "exp_avg_sq")))
ID = "0123456789abcdef"


def measure(rank: Rank, *, tensors: int, ranks: int, repeat: int, directory: str) -> dict[str, Any]:
    """Bytes, and CPU seconds of each repetition but the first. One process plays all ranks.

    ``rank_cpu`` is one rank's planning, ``leader_cpu`` what only the leader does (DCP's ``finish_cpu``
    too: it writes the metadata), ``read_cpu`` reading the index at a load. ``to_leader`` are the
    bytes that ranks send to the leader: ckpt's ranks send equal tables once.
    """
    ours, theirs = _Ours(tensors, ranks), _Dcp(tensors, ranks, directory)
    for repetition in range(repeat + 1):
        if repetition == 1:
            ours.forget()
            theirs.forget()
        ours.run(repetition)
        theirs.run()
    return {"tensors": tensors, "ranks": ranks, "chunks": theirs.chunks, "ckpt": ours.found, "dcp": theirs.found}


class _Timed:
    """``found`` holds bytes, and lists of CPU seconds by what they were spent on."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def timed(self, what: str, work: Callable[[], T]) -> T:
        before = cpu_seconds()
        result = work()
        self.found.setdefault(what, []).append(cpu_seconds() - before)
        return result

    def forget(self) -> None:
        """Drop the times so far."""
        self.found = {k: v for k, v in self.found.items() if not isinstance(v, list)}


class _Ours(_Timed):
    def __init__(self, tensors: int, ranks: int) -> None:
        super().__init__()
        self.tensors = tensors
        self.ranks = ranks
        table = model(tensors, mesh(ranks, "files"))
        assignments = assign(table)
        plans = [plan for r in range(ranks) for plan in _plan(table, assignments, r)]
        self.files: list[DataFile] = [plan.row(plan.encode_header([0] * len(plan))) for plan in plans]
        self.found["headers"] = sum(f.header for f in self.files)

    def run(self, repetition: int) -> None:
        # Meshes of other names each time: otherwise the planner finds its results of the last repetition in its caches.
        table = model(self.tensors, mesh(self.ranks, f"rank{repetition}"))
        self.timed("rank_cpu", lambda: (Table(tensors=tuple(table), aliases={}).to_bytes(), _plan(table, assign(table), 0)))
        sent = Table(tensors=tuple(model(self.tensors, mesh(self.ranks, f"leader{repetition}"))), aliases={}).to_bytes()
        index = self.timed("leader_cpu", lambda: self.lead(sent))
        self.timed("read_cpu", lambda: decode_index(index, "benchmark"))
        self.found |= {"index": sum(map(len, index.values())), "to_leader": len(sent)}

    def lead(self, sent: bytes) -> dict[str, bytes]:
        joined = join_tables([(range(self.ranks), Table.from_bytes(sent))])
        entries = index_rows(joined, {}, self.files, (), range(self.ranks), Chunking())
        return encode_index(Contents(tensors=entries, files=tuple(self.files), state=None, ranks={}))


def _plan(tensors: Sequence[TensorSpec], assignments: dict[str, ChunkAssignment], rank: int) -> list[DataFilePlan]:
    return plan_data_files(specs_of(chunks_of(assignments, rank), {t.name: t for t in tensors}), id=ID, rank=rank)


class _Dcp(_Timed):
    def __init__(self, tensors: int, ranks: int, directory: str) -> None:
        super().__init__()
        self.directory = directory
        table = model(tensors, mesh(ranks, "dcp"))
        self.plans = [_local_plan(table, r) for r in range(ranks)]
        self.chunks = 0
        self.found["to_leader"] = sum(len(pickle.dumps(plan)) for plan in self.plans)

    def run(self) -> None:
        final, metadata = self.timed("leader_cpu", lambda: DefaultSavePlanner().create_global_plan(self.plans))
        results = _results(final)
        self.chunks = sum(map(len, results))
        writer = FileSystemWriter(self.directory)
        self.timed("finish_cpu", lambda: writer.finish(metadata, results))
        read: Metadata = self.timed("read_cpu", lambda: FileSystemReader(self.directory).read_metadata())
        assert len(read.storage_data) == self.chunks
        with open(f"{self.directory}/.metadata", "rb") as file:
            self.found["index"] = len(file.read())


def _local_plan(tensors: Sequence[TensorSpec], rank: int) -> SavePlan:
    items = []
    for t in tensors:
        properties = TensorProperties(dtype=getattr(torch, t.dtype.name))
        for piece in t.layout.pieces(t.shape, rank):
            chunk = ChunkStorageMetadata(torch.Size(piece.box.offset), torch.Size(piece.box.shape))
            data = TensorWriteData(chunk, properties, torch.Size(t.shape))
            items.append(WriteItem(MetadataIndex(t.name, piece.box.offset), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={t.name: tuple(t.name.split(".", 1)) for t in tensors})


def _results(plans: Sequence[SavePlan]) -> list[list[WriteResult]]:
    """What the ranks report when they have written: all chunks of a rank in one file."""
    results = []
    for rank, plan in enumerate(plans):
        at, found = 0, []
        for item in plan.items:
            size = item.tensor_storage_size() or 0
            found.append(WriteResult(item.index, size, _StorageInfo(f"__{rank}_0.distcp", at, size)))
            at += size
        results.append(found)
    return results


def mesh(ranks: int, name: str) -> Mesh:
    """The job's mesh, data parallel by tensor parallel; its dimensions are called after ``name``."""
    tp = math.gcd(8, ranks)
    return Mesh((f"dp-{name}", f"tp-{name}"), (ranks // tp, tp))


def model(tensors: int, mesh: Mesh) -> list[TensorSpec]:
    """The first ``tensors`` tensors of the state, layer by layer."""
    names = dict(zip(("dp", "tp"), mesh.names, strict=True))
    layouts = {splits: TensorLayout(mesh, tuple(Shard(s.dim, names[s.over]) for s in splits)) for _, splits in LAYER.values()}
    every = (
        TensorSpec(stored.format(f"layers.{layer}.{part}"), dtype(kind), shape, layouts[splits])
        for layer in count()
        for part, (shape, splits) in LAYER.items()
        for stored, kind in KEPT
    )
    return list(islice(every, tensors))
