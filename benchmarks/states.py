"""The states that are saved and loaded. An element's value follows from its tensor and its place in it, so any layout can be checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt.state.tensors import as_bytes

Kind = Literal["sharded", "replicated", "small", "equal"]

LAYERS = 8
MOMENTS = ("exp_avg", "exp_avg_sq")
SMALL_SHAPE = (16,)
"""64 bytes of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to build on ``ranks`` ranks.

    ``sharded``: a model and its Adam state as DTensors over all ranks, along dimension ``dim`` where there is one; ``size`` is bytes of all
    ranks together. With ``tensor_parallel``, so many neighbours cut the last dimension, and the groups of them dimension 0.
    ``replicated``: the same as plain tensors, equal on all ranks; ``size`` is bytes of one rank. ``small``: ``size`` is the number of
    tensors of 64 bytes. ``equal``: ``tensors`` DTensors of one size, cut by rows; ``size`` is bytes of all ranks together.
    """

    kind: Kind
    ranks: int
    size: int
    dim: int = 0
    tensor_parallel: int = 1
    tensors: int = 0

    @property
    def label(self) -> str:
        """The layout, in short."""
        return f"dim {self.dim}" if self.tensor_parallel == 1 else f"FSDP × TP {self.tensor_parallel}"


@dataclass(eq=False)
class State:
    """One rank's state. ``tree`` is given to ckpt and DCP; ``local`` is the memory in it by name.

    ``start`` and ``total`` are for contestants that know bytes alone: where this rank's bytes begin in those of all ranks one after
    another, and how many these are. A replicated state starts at 0 on every rank.
    """

    tree: dict[str, Any]
    local: dict[str, torch.Tensor]
    replicated: bool
    start: int
    total: int
    digests: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.local.values())

    def clear(self) -> None:
        """Set all memory to zero, so that a load has to bring everything."""
        for tensor in self.local.values():
            tensor.zero_()

    def find_difference(self) -> str | None:
        """The first tensor whose bytes are not those that it was built with; None if all are."""
        return next((name for name, digest in digests_of(self.local).items() if digest != self.digests[name]), None)


def digests_of(local: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: xxhash.xxh3_64_hexdigest(as_bytes(t)) for name, t in local.items()}


def build(recipe: Recipe, group: dist.ProcessGroup) -> State:
    """This rank's state, its memory touched. Collective over ``group``."""
    tree, local = _small(recipe.size) if recipe.kind == "small" else (_equal if recipe.kind == "equal" else _adam)(recipe, group)
    replicated = recipe.kind in ("replicated", "small")
    sizes: list[int] = [0] * recipe.ranks
    dist.all_gather_object(sizes, sum(t.nbytes for t in local.values()), group=group)
    starts = [0, *accumulate(sizes)]
    rank = dist.get_rank(group)
    return State(
        tree=tree,
        local=local,
        replicated=replicated,
        start=0 if replicated else starts[rank],
        total=sizes[0] if replicated else starts[-1],
        digests=digests_of(local),
    )


def _small(count: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    local = {f"t{i:06d}": pattern(SMALL_SHAPE, i) for i in range(count)}
    return {"model": dict(local)}, {f"model.{name}": tensor for name, tensor in local.items()}


def _equal(recipe: Recipe, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    mesh, local = _mesh(recipe, group), dict[str, torch.Tensor]()
    shape = (recipe.ranks, recipe.size // recipe.ranks // recipe.tensors // 4)
    model = {f"t{i:04d}": dtensor(local, f"model.t{i:04d}", shape, i, mesh, [Shard(0)]) for i in range(recipe.tensors)}
    return {"model": model}, local


def _adam(recipe: Recipe, group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A model and its Adam state; ``step`` is a plain scalar per parameter, as torch.optim keeps it."""
    mesh = _mesh(recipe, group)
    local: dict[str, torch.Tensor] = {}
    seed = 0

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal seed
        seed += 1
        if recipe.kind == "replicated":
            local[name] = pattern(shape, seed)
            return local[name]
        last = len(shape) - 1
        dims = (min(recipe.dim, last),) if recipe.tensor_parallel == 1 else (0, last)
        return dtensor(local, name, shape, seed, mesh, [Replicate() if i and not last else Shard(dim) for i, dim in enumerate(dims)])

    model, state = {}, {}
    for name, shape in shapes(recipe.size).items():
        model[name] = tensor(f"model.{name}", shape)
        state[name] = {moment: tensor(f"optim.state.{name}.{moment}", shape) for moment in MOMENTS}
        state[name]["step"] = local[f"optim.state.{name}.step"] = torch.tensor(float(len(model)))
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(model)}]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}, local


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a Llama-like model that take, with two moments and in float32, about ``nbytes``."""
    hidden = max(32, round(math.sqrt(nbytes / 12 / (LAYERS * 12 + 8)) / 32) * 32)
    inner = round(hidden * 8 / 3 / 32) * 32
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (4 * hidden, hidden)}
    for i in range(LAYERS):
        found |= {f"layers.{i}.attention.{w}.weight": (hidden, hidden) for w in ("wq", "wk", "wv", "wo")}
        found |= {f"layers.{i}.mlp.{w}.weight": (inner, hidden) for w in ("w1", "w3")}
        found |= {f"layers.{i}.mlp.w2.weight": (hidden, inner)}
        found |= {f"layers.{i}.{norm}.weight": (hidden,) for norm in ("attention_norm", "mlp_norm")}
    return found | {"norm.weight": (hidden,), "output.weight": (4 * hidden, hidden)}


def _mesh(recipe: Recipe, group: dist.ProcessGroup) -> DeviceMesh:
    """Groups are made by all ranks of the job, so only a recipe for all of them can have tensor parallelism."""
    if recipe.tensor_parallel == 1:
        return DeviceMesh.from_group(group, "cpu")
    return init_device_mesh("cpu", (recipe.ranks // recipe.tensor_parallel, recipe.tensor_parallel), mesh_dim_names=("dp", "tp"))


def dtensor(
    local: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], seed: int, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    local[name] = pattern(shape, seed, tuple(offset), tuple(size))
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local[name], mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def pattern(shape: tuple[int, ...], seed: int, offset: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """The block at ``offset`` of shape ``size`` (by default all) of global tensor number ``seed``: float32, finite."""
    offset = offset if offset is not None else (0,) * len(shape)
    size = size if size is not None else shape
    index = torch.zeros((), dtype=torch.int64)
    for start, count, extent in zip(offset, size, shape, strict=True):
        index = index.unsqueeze(-1) * extent + torch.arange(start, start + count)
    bits = (index * 2_654_435_761 + seed * 40_503) & 0x3FFF_FFFF  # exponents below 128: no infinity, no NaN
    return bits.to(torch.int32).view(torch.float32)
