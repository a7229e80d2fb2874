"""An index is small: tensors that are cut alike share a grid."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.formats.native.index import decode_index, encode_index
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
RANKS = 64


def decoder(layers: int, hidden: int, ffn: int, vocab: int, kv: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama-style model."""
    found: list[tuple[str, tuple[int, ...]]] = [("embed", (vocab, hidden)), ("norm", (hidden,)), ("head", (vocab, hidden))]
    block = {
        "wq": (hidden, hidden),
        "wk": (kv, hidden),
        "wv": (kv, hidden),
        "wo": (hidden, hidden),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
    }
    block |= {"down": (hidden, ffn)}
    for i in range(layers):
        found += [(f"layers.{i}.{name}", shape) for name, shape in block.items()]
        found += [(f"layers.{i}.ln_{n}", (hidden,)) for n in (1, 2)]
    return found


def adam(model: Sequence[tuple[str, tuple[int, ...]]], layout: TensorLayout) -> list[TensorSpec]:
    """A bf16 weight and two fp32 moments for each tensor."""
    weights = [TensorSpec(f"model.{name}.weight", BF16, shape, layout) for name, shape in model]
    moments = [TensorSpec(f"optim.{name}.weight.{m}", F32, shape, layout) for m in ("exp_avg", "exp_avg_sq") for name, shape in model]
    return weights + moments


def data_file(rank: int) -> DataFile:
    """A row as a save writes it: nothing about its size or digest can be guessed, so neither can be compressed away."""
    digest = hashlib.md5(str(rank).encode(), usedforsecurity=False)
    size = int.from_bytes(digest.digest()[:4], "little")
    return DataFile(
        path=f"data/{'x7' * 8}-{rank:05}.safetensors", size=size + (1 << 24), header=4096 * 12, digest=digest.hexdigest(), rank=rank
    )


def contents_of(tensors: Sequence[TensorSpec], owned: dict[str, ChunkAssignment], ranks: int) -> Contents:
    """What the leader of a save with one file per rank writes; tensors that are cut and dealt alike share a grid."""
    files = [data_file(r) for r in range(ranks)]
    grids: dict[int, Grid] = {}
    entries = []
    for t in tensors:
        mine = owned[t.name]
        grid = grids.setdefault(id(mine), Grid(cuts=mine.cuts, boxes=mine.boxes, files=mine.owners.astype(np.int32)))
        entries.append(TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, grid=grid))
    return Contents(tensors=tuple(entries), files=tuple(files), state={"step": 1})


def different(values: Sequence[int]) -> list[int]:
    """Sizes near the given ones, none of which 64 divides."""
    return [v + 1 if (v + 1) % RANKS else v + 2 for v in values]


FSDP = TensorLayout(Mesh.of({"dp": RANKS}), (Shard(0, "dp"),))
DDP = TensorLayout(Mesh.of({"dp": RANKS}))
ZERO = TensorLayout(Mesh.of({"dp": RANKS}), (Flat("dp"),))
EVEN = decoder(148, 2048, 8192, 32768, 512)
ODD = decoder(148, *different([2048, 8192, 32768, 512]))


@pytest.mark.parametrize("model", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("layout", [FSDP, DDP, ZERO], ids=["fsdp", "ddp", "zero"])
def test_an_index_of_4000_tensors_on_64_ranks_is_below_1_mb(layout: TensorLayout, model: list[tuple[str, tuple[int, ...]]]) -> None:
    tensors = adam(model, layout)
    assert len(tensors) == 4005
    owned = assign(tensors)
    contents = contents_of(tensors, owned, RANKS)
    index = encode_index(contents)
    sizes = {name: len(data) for name, data in index.items()}
    chunks = sum(len(o.owners) for o in owned.values())
    grids = len({id(o) for o in owned.values()})
    print(f"{len(tensors)} tensors, {chunks} chunks, {grids} grids, {sum(sizes.values())} bytes: {sizes}")
    assert sum(sizes.values()) < 1_000_000
    again = decode_index(index, "x")
    assert len(again.tensors) == len(tensors)
    assert sum(len(t.grid) for t in again.tensors) == chunks


def test_fsdp_has_a_grid_per_shape() -> None:
    tensors = adam(EVEN, FSDP)
    owned = assign(tensors)
    cut_alike = {(t.shape, t.dtype.itemsize) for t in tensors}
    assert len({id(o) for o in owned.values()}) <= len(cut_alike) < 20
