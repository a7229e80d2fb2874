"""Parts of tensors that are neither plain tensors nor DTensors: this rank's memory, and where the object it comes from says that it lies.

``ShardedTensor`` is the older class of ``torch.distributed`` (FSDP version 1 makes them for ``SHARDED_STATE_DICT`` without a device mesh).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt.errors import LayoutError, StateError
from ckpt.plan.layout.geometry import Box, flat_to_boxes
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Boxes, Shard, StatedBoxes
from ckpt.plan.layout.tensor_layout import TensorLayout

from . import lazy
from .dtensor import STATED_FIELDS, holder_of, is_dtensor, mesh_of

if TYPE_CHECKING:
    import torch


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
        return Sharded(blocks[0] if blocks else lazy.torch.empty(0, dtype=tensor.dtype), shape, layout, blocks)
    dim = cut[0] if cut else 0
    rest = [rank for rank in ranks if rank not in holders]
    sizes = (*(int(s.shard_sizes[dim]) for s in shards), *(0 for _ in rest))
    layout = TensorLayout(Mesh(("shard",), (len(ranks),), (*holders, *rest)), (Shard(dim, "shard", sizes),))
    nothing = lazy.torch.empty([0 if d == dim else n for d, n in enumerate(shape)], dtype=tensor.dtype)
    return Sharded(next(iter(mine.values()), nothing), shape, layout)


# Tensors that state themselves which boxes of a global tensor they hold. Recognised by what they have, on any version of torch:
#
#     global_shape, global_offsets, local_offsets, local_sizes    of a plain tensor: ``CheckpointableTensor`` of torch 2.15
#     __create_chunk_list__                                       of a plain tensor or a DTensor's local one: the protocol of
#                                                                 torch.distributed.checkpoint that Megatron-FSDP and torchrec use
#
# Such a rank knows its own boxes alone. Its layout lists these; the leader joins those of all ranks (``tensor_layout.joined_layout``).
# Ranks along the dimensions over which a DTensor is replicated are known to have the same.

_OVER, _COPIES = "stated", "copies"
Part: TypeAlias = "tuple[tuple[Any, Any], torch.Tensor]"
"""Offset and sizes of a box, and its memory."""


def from_stated(tensor: torch.Tensor, name: str, rank: int) -> Sharded:
    """The place that a tensor states."""
    local = holder_of(tensor)
    shape, parts = _by_fields(local) if all(hasattr(local, f) for f in STATED_FIELDS) else _by_chunks(tensor, local, name)
    _check_boxes(shape, parts, name)
    parts = [(box, memory) for box, memory in parts if memory.numel() or not shape]
    return Sharded(_example(tensor), shape, _layout(tensor, name, [box for box, _ in parts], rank), tuple(memory for _, memory in parts))


def of_boxes(name: str, shape: tuple[int, ...], parts: Sequence[Part], rank: int, *, tensors: Sequence[torch.Tensor]) -> Sharded:
    """The place of boxes that only this rank knows of, in memory of ``tensors``."""
    _check_boxes(shape, parts, name)
    parts = [(box, memory) for box, memory in parts if memory.numel() or not shape]
    layout = _alone([box for box, _ in parts], rank if parts else 0)  # ranks that have none say the same
    return Sharded(tensors[0].detach(), shape, layout, tuple(memory for _, memory in parts), tuple(tensors[1:]))


def _check_boxes(shape: tuple[int, ...], parts: Sequence[Part], name: str) -> None:
    problem = _problem(shape, parts)
    if problem is not None:
        hint = "every box is a pair of offset and sizes inside of the global shape, and its memory has these sizes"
        raise LayoutError(f"the boxes that it states do not fit: {problem}", where=f"tensor {name}", hint=hint)


def beside_stated(tensor: torch.Tensor, param: torch.Tensor, name: str, rank: int) -> Sharded | None:
    """The place of what an optimizer keeps for a parameter that states its boxes; None for a single number."""
    beside, own = holder_of(param), holder_of(tensor)
    if own.shape != beside.shape and own.numel() == 1:
        return None
    of_param = from_stated(param, name, rank)
    starts = [(memory.storage_offset() - beside.storage_offset(), memory) for memory in of_param.blocks]
    inside = all(memory.untyped_storage().data_ptr() == beside.untyped_storage().data_ptr() for _, memory in starts)
    if own.shape != beside.shape or not inside or own.stride() != beside.stride():
        text = f"it has shape {tuple(own.shape)}, its parameter {tuple(beside.shape)} here: the owners of its elements are unknown"
        raise LayoutError(text, where=f"tensor {name}", hint="have it state its boxes, as the parameter does")
    blocks = tuple(own.detach().as_strided(m.shape, m.stride(), own.storage_offset() + start) for start, m in starts)
    return Sharded(_example(own), of_param.shape, of_param.layout, blocks)


def _example(tensor: torch.Tensor) -> torch.Tensor:
    return lazy.torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _by_fields(local: Any) -> tuple[tuple[int, ...], list[Part]]:
    shape, memory = tuple(local.global_shape), local.detach()
    rows = list(zip(local.global_offsets, local.local_offsets, local.local_sizes, strict=False))
    if not len(local.global_offsets) == len(local.local_offsets) == len(local.local_sizes):
        return shape, [((None, None), memory)]
    parts = []
    for offset, at, sizes in rows:
        fits = len(at) == len(sizes) == memory.ndim and all(
            min(a, n) >= 0 and a + n <= m for a, n, m in zip(at, sizes, memory.shape, strict=True)
        )
        block = memory[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] if fits else memory
        parts.append(((tuple(offset) if fits else None, tuple(sizes)), block))
    return shape, parts


def _by_chunks(tensor: torch.Tensor, local: Any, name: str) -> tuple[tuple[int, ...], list[Part]]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local.__create_chunk_list__()]
    if is_dtensor(tensor):
        shape = tuple(tensor.shape)
    else:
        # The global shape that a plain tensor gives the planner of torch.distributed.checkpoint
        items = local.__create_write_items__(name, local) if hasattr(local, "__create_write_items__") else []
        sizes = {tuple(item.tensor_data.size) for item in items if item.tensor_data is not None}
        shape = sizes.pop() if len(sizes) == 1 else tuple(local.shape)
    if len(boxes) == 1 and type(local) in lazy.PLAIN and tuple(local.shape) == boxes[0][1]:
        return shape, [(boxes[0], local.detach())]
    if boxes and not hasattr(local, "__get_tensor_shard__"):
        return shape, [((None, None), local)] if len(boxes) > 1 else [(boxes[0], local.detach())]
    return shape, [(box, local.__get_tensor_shard__(MetadataIndex(name, box[0])).detach()) for box in boxes]


def _problem(shape: tuple[int, ...], parts: Sequence[Part]) -> str | None:
    for (offset, sizes), memory in parts:
        if offset is None:
            return "its memory has no such parts"
        if not len(shape) == len(offset) == len(sizes) or any(o < 0 or o + n > m for o, n, m in zip(offset, sizes, shape, strict=True)):
            return f"offset {tuple(offset)}, sizes {tuple(sizes)} in a tensor of shape {shape}"
        if tuple(memory.shape) != tuple(sizes):
            return f"memory of shape {tuple(memory.shape)} for sizes {tuple(sizes)}"
    boxes = [Box(tuple(offset), tuple(sizes)) for (offset, sizes), _ in parts]
    twice = next((b for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.intersect(b) is not None), None)
    return None if twice is None else f"{twice} is in two of them"


def _layout(tensor: torch.Tensor, name: str, boxes: Sequence[tuple[Any, Any]], rank: int) -> TensorLayout:
    ranks: tuple[int, ...] = (rank,)
    if is_dtensor(tensor):
        if any(p.is_partial() for p in tensor.placements):
            text = f"{tensor.placements} cannot be stored"
            raise LayoutError(text, where=f"tensor {name}", hint="redistribute it to Shard or Replicate first")
        mesh = mesh_of(tensor.device_mesh)
        where = mesh.coordinate(rank)
        if where is not None:
            same = tuple(slice(None) if p.is_replicate() else at for p, at in zip(tensor.placements, where, strict=True))
            ranks = tuple(mesh.array()[same].reshape(-1).tolist())
    alone = _alone(boxes, rank)
    return alone if len(ranks) == 1 else TensorLayout(Mesh((_OVER, _COPIES), (1, len(ranks)), ranks), alone.splits)


def _alone(boxes: Sequence[tuple[Any, Any]], rank: int) -> TensorLayout:
    listed = (tuple((tuple(map(int, offset)), tuple(map(int, sizes))) for offset, sizes in boxes),)
    return TensorLayout(Mesh((_OVER,), (1,), (rank,)), (StatedBoxes(_OVER, listed),))


# Values of a state that say themselves what they are stored as: a box of a named tensor of the job, or a named object. The state's own
# names for them, which differ between pipeline stages, say nothing.
#
# Megatron-Core makes them (``sharded_state_dict``). They are known by their fields, so that Megatron-Core need not be there:
#
#     key, data, local_shape, global_shape, global_offset     ``ShardedTensor``: ``data`` is that box of the tensor ``key``, behind
#       prepend_axis_num, flattened_range                     ``prepend_axis_num`` axes of size 1, or a flat range of it
#     key, data, global_shape, global_offset                  ``ShardedObject``: plain values and tensors, kept as they are
#     key, data, build_fn, merge_fn                           ``ShardedTensorFactory``: makes the two above of a tensor, and back
#     unwrap                                                  ``LocalNonpersistentObject``: neither saved nor loaded
#
# ``replica_id`` that is not 0 in all its parts: another rank saves the same. A load fills ``data`` of all.

_LOCAL = "LocalNonpersistentObject"


def is_named(value: object) -> bool:
    """Whether a value says itself what it is stored as."""
    kind: Any = type(value)
    return _names_itself(kind)


@lru_cache(maxsize=4096)
def _names_itself(kind: Any) -> bool:
    has = getattr(kind, "__dataclass_fields__", {}).keys()
    if not has:
        return bool(kind.__name__ == _LOCAL and hasattr(kind, "unwrap"))
    return has >= {"key", "data", "replica_id"} and (has >= {"global_shape", "global_offset"} or has >= {"build_fn", "merge_fn"})


@dataclass(eq=False, slots=True)
class NamedValues:
    """Those of one walk over a state: boxes by tensor, objects by stored name, and factories with what they have built."""

    boxes: dict[str, list[Any]] = field(default_factory=dict)
    objects: dict[str, list[Any]] = field(default_factory=dict)
    factories: list[tuple[Any, Any]] = field(default_factory=list)

    def add(self, value: Any) -> None:
        if hasattr(value, "build_fn"):
            built = value.build()
            self.factories.append((value, built))
            for each in _named_in(built):
                self.add(each)
        elif hasattr(value, "local_shape"):
            self.boxes.setdefault(value.key, []).append(value)
        elif type(value).__name__ != _LOCAL:
            self.objects.setdefault(stored_name(value), []).append(value)


def stored_name(value: Any) -> str:
    """The name of an object, as Megatron-Core's own checkpoints have it."""
    offset, shape = (".".join(map(str, numbers)) for numbers in (value.global_offset, value.global_shape))
    return f"{value.key}/shard_{offset}_{shape}"


def is_main(value: Any) -> bool:
    """Whether this rank saves it."""
    replica = value.replica_id
    return not (replica if isinstance(replica, int) else any(replica))


def _named_in(value: Any) -> Iterator[Any]:
    if is_named(value):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _named_in(child)


def place(name: str, values: Sequence[Any], rank: int, *, main: bool = False) -> Sharded:
    """The place of the boxes that this rank has of one tensor; or only of those that it saves."""
    shape, parts = tuple(values[0].global_shape), list[Part]()
    for value in values:
        if not isinstance(value.data, lazy.Tensor) or value.data.is_meta:
            text = f"the {type(value).__name__} has no data"
            raise StateError(text, where=f"tensor {name}", hint="give it a tensor first: value.init_data(device)")
        if (value.data.dtype, tuple(value.global_shape)) != (values[0].data.dtype, shape):
            text = f"this rank gives it dtype {values[0].data.dtype} and shape {shape}, and {value.data.dtype} and {value.global_shape}"
            raise StateError(text, where=f"tensor {name}", hint="each key is the name of one tensor")
        parts += _parts(value) if is_main(value) or not main else ()
    return of_boxes(name, shape, parts, rank, tensors=[value.data for value in values])


def _parts(value: Any) -> Iterator[Part]:
    """Offset, sizes and memory of each box: several for a flat range."""
    front, start, data = value.prepend_axis_num, tuple(value.global_offset), value.data.detach()
    local = (*(1,) * front, *value.local_shape)
    if value.flattened_range is None:
        yield (start, local), data[(None,) * front]
        return
    at = first = value.flattened_range.start
    for box in flat_to_boxes(local, first, value.flattened_range.stop):
        memory = data.reshape(-1)[at - first : at - first + box.numel].view(box.shape)
        yield (tuple(a + b for a, b in zip(start, box.offset, strict=True)), box.shape), memory
        at += box.numel


def same_boxes(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of values that are the same box in memory of their own: the second gets what the first has got."""
    first: dict[tuple[Any, ...], Any] = {}
    for value in values:
        flat = value.flattened_range
        key = tuple(value.global_offset), tuple(value.local_shape), None if flat is None else (flat.start, flat.stop)
        other = first.setdefault(key, value)
        if other is not value:
            yield other, value


def plain(value: Any) -> Any:
    """A state with the data of each of them in its place."""
    if is_named(value):
        return value.unwrap() if type(value).__name__ == _LOCAL else value.data
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def merge(factory: Any, built: Any) -> None:
    """Bring what was loaded into the tensor that a factory has made copies of; views of it have it already."""
    own = factory.data.untyped_storage().data_ptr()
    if any(box.data.untyped_storage().data_ptr() != own for box in _named_in(built) if hasattr(box, "local_shape")):
        with lazy.torch.no_grad():
            factory.data.copy_(factory.merge_fn(plain(built)))
