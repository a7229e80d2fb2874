"""What the live scenarios push: a model in bfloat16 that four trainers hold as FSDP2 does, and two engines as tensor parallelism does.

An element's value follows from its tensor, its place in it and the step, so what arrives can be checked in any layout. Engines are ranks
that follow the trainers in the pool; what trainers and engines have is plain memory, so that every contestant moves the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

TRAINERS, ENGINES = 4, 2
HIDDEN, HEADS, FEATURES, VOCABULARY = 2048, 512, 5632, 32_000
COLUMNS = ("o", "down")
"""Matrices that tensor parallelism cuts along dimension 1; others along 0."""

Shapes = Mapping[str, tuple[int, ...]]
Block = tuple[slice, ...]


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a Llama-like model that take about ``nbytes`` in bfloat16. A small one has smaller matrices."""
    layer = {"q": (HIDDEN, HIDDEN), "k": (HEADS, HIDDEN), "v": (HEADS, HIDDEN), "o": (HIDDEN, HIDDEN)}
    layer |= {"gate": (FEATURES, HIDDEN), "up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES), "norm": (HIDDEN,)}
    scale = 1
    while 2 * nbytes < sum(2 * math.prod(s) for s in layer.values()) // scale**2:
        scale *= 2
    layer = {name: tuple(n // scale for n in shape) for name, shape in layer.items()}
    embedding = (VOCABULARY // scale, HIDDEN // scale)
    count = max(1, round((nbytes - 2 * math.prod(embedding)) / sum(2 * math.prod(s) for s in layer.values())))
    return {"embedding": embedding} | {f"layers.{n}.{name}": shape for n in range(count) for name, shape in layer.items()}


def cut(name: str) -> int | None:
    """The dimension that tensor parallelism cuts."""
    last = name.rpartition(".")[2]
    return None if last == "norm" else int(last in COLUMNS)


def share(shape: tuple[int, ...], dim: int | None, count: int, index: int) -> Block:
    """Part ``index`` of ``count`` along a dimension, or all."""
    each = 0 if dim is None else -(-shape[dim] // count)
    return tuple(slice(min(index * each, n), min((index + 1) * each, n)) if d == dim else slice(0, n) for d, n in enumerate(shape))


def values(number: int, shape: tuple[int, ...], block: Block, step: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The block of tensor ``number`` at a step: numbers between 1 and 2."""
    row = np.arange(block[-1].start, block[-1].stop, dtype=np.int64) * 31
    place = row if len(block) == 1 else np.arange(block[0].start, block[0].stop, dtype=np.int64)[:, None] * 7 + row
    bits = torch.from_numpy(((place + 13 * number + 5 * step) % 127 + 0x3F80).astype(np.int16)).view(torch.bfloat16)
    return bits.clone() if out is None else out.copy_(bits)


@dataclass(eq=False)
class Side:
    """What one rank has: ``tensors`` by name, which block of the whole each is, and the state that ckpt is given."""

    shapes: Shapes
    tensors: dict[str, torch.Tensor]
    blocks: dict[str, Block]
    state: dict[str, Any]
    layout: ckpt.Layout | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def fill(self, step: int) -> None:
        for number, (name, tensor) in enumerate(self.tensors.items()):
            values(number, self.shapes[name], self.blocks[name], step, tensor)

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def wrong(self, step: int) -> str | None:
        """The first tensor that is not that of the step."""
        rows = enumerate(self.tensors.items())
        return next((n for i, (n, t) in rows if not torch.equal(t, values(i, self.shapes[n], self.blocks[n], step))), None)


def trainer(wanted: Shapes, rank: int, mesh: DeviceMesh) -> Side:
    """DTensors in equal parts of dimension 0."""
    blocks = {name: share(shape, 0, TRAINERS, rank) for name, shape in wanted.items()}
    tensors = {name: torch.zeros([b.stop - b.start for b in block], dtype=torch.bfloat16) for name, block in blocks.items()}
    strides = {name: (shape[1], 1) if len(shape) == 2 else (1,) for name, shape in wanted.items()}
    sharded = {
        name: DTensor.from_local(t, mesh, [Shard(0)], run_check=False, shape=torch.Size(wanted[name]), stride=strides[name])
        for name, t in tensors.items()
    }
    return Side(shapes=wanted, tensors=tensors, blocks=blocks, state={"model": sharded})


def engine(wanted: Shapes, place: int, first: int) -> Side:
    """Plain tensors of tensor parallelism; ``first`` is the first engine's rank."""
    blocks = {name: share(shape, cut(name), ENGINES, place) for name, shape in wanted.items()}
    tensors = {name: torch.zeros([b.stop - b.start for b in block], dtype=torch.bfloat16) for name, block in blocks.items()}
    rules = [("*norm", ckpt.Replicate()), *((f"*.{name}", ckpt.Shard(1, "tp")) for name in COLUMNS), ("*", ckpt.Shard(0, "tp"))]
    layout = ckpt.Layout(ckpt.Mesh(("tp",), (ENGINES,), tuple(range(first, first + ENGINES))), rules)
    return Side(shapes=wanted, tensors=tensors, blocks=blocks, state={"model": dict(tensors)}, layout=layout)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups of trainers, engines, both, and of the first trainer with the engines."""

    trainers: dist.ProcessGroup
    engines: dist.ProcessGroup
    both: dist.ProcessGroup
    senders: dist.ProcessGroup
    mesh: DeviceMesh

    @classmethod
    def of(cls) -> Groups:
        """Collective over all ranks."""
        engines = list(range(TRAINERS, TRAINERS + ENGINES))
        groups = [dist.new_group(ranks) for ranks in (list(range(TRAINERS)), engines, [*range(TRAINERS), *engines], [0, *engines])]
        mesh = DeviceMesh("cpu", torch.arange(TRAINERS), mesh_dim_names=("dp",))
        return cls(trainers=groups[0], engines=groups[1], both=groups[2], senders=groups[3], mesh=mesh)


def pieces(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[memoryview]:
    """The bytes of tensors, each at most so many at once."""
    for tensor in tensors.values():
        data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
        for start in range(0, len(data), limit):
            yield data[start : start + limit]


def engine_share(wanted: Shapes) -> int:
    """Bytes that a trainer sends an engine, on average."""
    needed = sum(2 * math.prod(b.stop - b.start for b in share(shape, cut(name), ENGINES, 0)) for name, shape in wanted.items())
    return needed // TRAINERS
