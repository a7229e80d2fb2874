"""Parts of tensors that are neither plain tensors nor DTensors: this rank's memory, and where the object it comes from says that it lies.

``ShardedTensor`` is the older class of ``torch.distributed`` (FSDP version 1 makes them for ``SHARDED_STATE_DICT`` without a device mesh).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import StateError
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Boxes, Shard
from ckpt.layout.tensor_layout import TensorLayout


@dataclass(eq=False, slots=True)
class Sharded:
    """This rank's part of a tensor of global ``shape``: ``memory`` has the shape that ``layout`` gives it.

    With a layout of listed boxes ``blocks`` are the memory of each, in their order. ``counted`` are other tensors of this memory, whose
    versions count what is done to it through them.
    """

    memory: torch.Tensor
    shape: tuple[int, ...]
    layout: TensorLayout
    blocks: tuple[torch.Tensor, ...] = ()
    counted: tuple[torch.Tensor, ...] = ()


def is_sharded_tensor(value: object) -> bool:
    """Whether it is a ``ShardedTensor``; its module is not imported for that."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def from_sharded_tensor(tensor: Any, state_name: str) -> Sharded:
    """The place that a ``ShardedTensor`` has by its metadata."""
    from torch.distributed import get_process_group_ranks

    meta = tensor.metadata()
    shape, ranks = tuple(meta.size), get_process_group_ranks(tensor._process_group)
    shards = sorted(meta.shards_metadata, key=lambda s: tuple(s.shard_offsets))
    holders = [int(s.placement.rank()) for s in shards]
    if not set(holders) <= set(ranks):
        hint = "make it on the group of all ranks that have shards"
        raise StateError("ranks outside of its process group have shards of this ShardedTensor", where=f"tensor {state_name}", hint=hint)
    mine = {tuple(s.metadata.shard_offsets): s.tensor.detach() for s in tensor.local_shards()}
    # Cut along one dimension, one shard per rank: an ordinary ``Shard``, possibly with unequal sizes. Everything else
    # is stored as listed boxes, which is always right but plans more slowly.
    cut = [d for d in range(len(shape)) if any(s.shard_sizes[d] != shape[d] for s in shards)]
    if len(cut) > 1 or not shape or len(set(holders)) < len(holders):
        boxes = tuple(tuple((tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in shards if s.placement.rank() == rank) for rank in ranks)
        layout = TensorLayout(Mesh(("shard",), (len(ranks),), tuple(ranks)), (Boxes("shard", boxes),))
        blocks = tuple(mine[offset] for offset, _ in boxes[tensor._process_group.rank()])
        return Sharded(blocks[0] if blocks else torch.empty(0, dtype=tensor.dtype), shape, layout, blocks)
    dim = cut[0] if cut else 0
    rest = [rank for rank in ranks if rank not in holders]
    sizes = (*(int(s.shard_sizes[dim]) for s in shards), *(0 for _ in rest))
    layout = TensorLayout(Mesh(("shard",), (len(ranks),), (*holders, *rest)), (Shard(dim, "shard", sizes),))
    nothing = torch.empty([0 if d == dim else n for d, n in enumerate(shape)], dtype=tensor.dtype)
    return Sharded(next(iter(mine.values()), nothing), shape, layout)
