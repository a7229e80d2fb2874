"""Parts of tensors that are neither plain tensors nor DTensors: this rank's memory, and where the object it comes from says that it lies.

``ShardedTensor`` is the older class of ``torch.distributed`` (FSDP version 1 makes them for ``SHARDED_STATE_DICT`` without a device mesh).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.layout import TensorLayout
from ckpt.mesh import Mesh
from ckpt.splits import Shard


@dataclass(eq=False, slots=True)
class Sharded:
    """This rank's part of a tensor of global ``shape``: ``memory`` has the shape that ``layout`` gives it."""

    memory: torch.Tensor
    shape: tuple[int, ...]
    layout: TensorLayout


def is_sharded_tensor(value: object) -> bool:
    """Whether it is a ``ShardedTensor``; its module is not imported for that."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def from_sharded_tensor(tensor: Any, said: str) -> Sharded:
    """The place that a ``ShardedTensor`` has by its metadata.

    Raises:
        StateError: it is cut along several dimensions, a rank has several shards, or its process group leaves out ranks that have shards.
    """
    from torch.distributed import get_process_group_ranks

    meta = tensor.metadata()
    shape = tuple(meta.size)
    shards = sorted(meta.shards_metadata, key=lambda s: tuple(s.shard_offsets))
    cut = [d for d in range(len(shape)) if any(s.shard_sizes[d] != shape[d] for s in shards)]
    ranks = get_process_group_ranks(tensor._process_group)
    holders = [s.placement.rank() for s in shards]
    dim = cut[0] if cut else 0
    ends = [0, *(s.shard_offsets[dim] + s.shard_sizes[dim] for s in shards)] if shape else [0]
    follow = all(s.shard_offsets[dim] == end for s, end in zip(shards, ends, strict=False)) and ends[-1] == (shape[dim] if shape else 0)
    if len(cut) > 1 or not shape or not follow or len(set(holders)) < len(holders) or not set(holders) <= set(ranks):
        raise StateError(
            "a ShardedTensor that is not cut along one dimension, one shard to a rank, cannot be stored",
            where=f"tensor {said}",
            hint="make it a DTensor: give FSDP a device_mesh=, or use fully_shard",
        )
    rest = [rank for rank in ranks if rank not in holders]
    mesh = Mesh(("shard",), (len(ranks),), (*holders, *rest))
    sizes = (*(int(s.shard_sizes[dim]) for s in shards), *(0 for _ in rest))
    mine = tensor.local_shards()
    memory = mine[0].tensor.detach() if mine else _nothing(tensor, shape, dim)
    return Sharded(memory, shape, TensorLayout(mesh, (Shard(dim, "shard", sizes),)))


def _nothing(tensor: Any, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    return torch.empty([0 if d == dim else n for d, n in enumerate(shape)], dtype=tensor.dtype)
