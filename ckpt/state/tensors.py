"""One tensor of this rank: what all ranks must agree about (:class:`TensorSpec`), and the boxes of it that lie in this rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt.dtypes import DTYPES, DType
from ckpt.errors import LayoutError, StateError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.layout import ResolvedShard
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import DTensorAxis, Split
from ckpt.plan.layout.placements import split_from_dtensor
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec

from . import lazy
from .dtensor import is_dtensor, mesh_of, widened

DIMENSIONS = 31
"""Of a tensor of a state: arrays of numpy have 32 at most, and cells of grids need one more."""

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


# Bytes of tensors: views where the memory is contiguous and on the host, copies elsewhere. The element order is row-major, the
# byte order little-endian.


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major. No copy if it is contiguous and on the host."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = raw_view(tensor).contiguous().cpu()
    elif not tensor.is_contiguous():
        tensor = raw_view(tensor).contiguous()
    return _bytes_view(tensor)


def _bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    # Not by ``reshape``: that keeps whatever stride a single element has.
    return tensor.as_strided((tensor.numel(),), (1,)).view(lazy.torch.uint8).numpy().data


def raw_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides under a plain dtype of the same item size. Not for views that conjugate or negate."""
    return tensor.view(lazy.RAW[tensor.element_size()])


def writable_bytes(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a tensor as bytes that can be read into, or None if it is not contiguous host memory that holds the values as they
    are."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0 or reads_otherwise(tensor):
        return None
    return _bytes_view(tensor)


def reads_otherwise(tensor: torch.Tensor) -> bool:
    """Whether it is a view that conjugates or negates what is in memory."""
    return tensor.is_conj() or tensor.is_neg()


class LocalShard(NamedTuple):
    """A box of a global tensor and the memory that holds it here: a view of shape ``box.shape``, any strides. Not to be compared, as
    tensors are not. A state may have very many: hence a tuple."""

    box: Box
    memory: torch.Tensor


@dataclass(eq=False, slots=True)
class LocalTensor:
    """A tensor as this rank sees it. ``state_name`` is the name that the state gives it; the stored name is ``info.name``."""

    info: TensorSpec
    parts: list[LocalShard]
    state_name: str

    def view(self, box: Box) -> torch.Tensor:
        """The memory of ``box``, which must lie in one of the parts."""
        for part in self.parts:
            if part.box.contains(box):
                if part.box == box:
                    return part.memory
                view = part.memory
                for dim, (start, size) in enumerate(zip(box.relative_to(part.box.offset).offset, box.shape, strict=True)):
                    view = view.narrow(dim, start, size)
                return view
        raise LayoutError(f"this rank has no memory for {box}", where=f"tensor {self.info.name}")

    def pieces(self, box: Box) -> list[tuple[Box, torch.Tensor]]:
        """The memory of ``box``, piece by piece where several parts have some of it (stacked experts)."""
        if len(self.parts) > 1:
            inside = [common for part in self.parts if (common := part.box.intersect(box)) is not None]
            if len(inside) > 1 and sum(common.numel for common in inside) == box.numel:
                return [(common, self.view(common)) for common in inside]
        return [(box, self.view(box))]

    def gather(self, box: Box) -> torch.Tensor:
        """The values of ``box``: its memory, or a copy where several parts have some of it."""
        (_, first), *more = pieces = self.pieces(box)
        if not more:
            return first
        gathered = lazy.torch.empty(box.shape, dtype=first.dtype, device=first.device)
        for common, part in pieces:
            target = gathered[common.relative_to(box.offset).slices]
            _ = target.copy_(part) if reads_otherwise(part) else raw_view(target).copy_(raw_view(part))
        return gathered


def dtype_of(tensor: torch.Tensor, name: str) -> DType:
    """The table's row for a tensor's dtype."""
    if lazy.torch.nn.parameter.is_lazy(tensor):
        raise StateError("the parameter of a lazy module has no shape yet", where=f"tensor {name}", hint="run a forward pass first")
    kind = type(local_of(tensor))
    if tensor.is_nested or kind.__torch_dispatch__ is not lazy.Tensor.__torch_dispatch__:
        if tensor.is_nested:
            raise StateError("a nested tensor cannot be stored", where=f"tensor {name}", hint="store its values and offsets")
        hint = "leave it out (only=, or trainable=True where it is frozen), or have a plain tensor in its place"
        if hasattr(kind, "__tensor_flatten__"):
            hint = "its inner tensors are stored where the state itself has it, not in PerRank and not among an optimizer's options"
        raise StateError(f"a tensor of class {kind.__module__}.{kind.__qualname__} cannot be stored", where=f"tensor {name}", hint=hint)
    if tensor.dim() > DIMENSIONS:
        raise StateError(
            f"a tensor has at most {DIMENSIONS} dimensions here, and this one {tensor.dim()}", where=f"tensor {name}", hint="reshape it"
        )
    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout is not lazy.torch.strided:
        raise StateError(
            f"a tensor of dtype {tensor.dtype} and memory layout {tensor.layout} cannot be stored",
            where=f"tensor {name}",
            hint="convert it first; sparse tensors as their indices and values",
        )
    return dtype


def torch_dtype(dtype: DType) -> torch.dtype:
    kind = getattr(lazy.torch, dtype.name, None)
    if not isinstance(kind, lazy.torch.dtype):
        raise StateError(f"this version of torch has no dtype {dtype.name}", hint="load it with a newer torch")
    return kind


# ----------------------------------------------------------------------------------------------------------- kinds


def from_dtensor(name: str, tensor: DTensor, rank: int, meshes: Sequence[Mesh] = ()) -> LocalTensor:
    """A DTensor on any mesh, with any mix of Shard, Replicate and the strided shards of FSDP over TP. ``meshes`` are those of its state."""
    layout = widened(dtensor_layout(name, tensor), meshes, rank)
    shape = tuple(tensor.shape)
    local = local_of(tensor)
    wanted = layout.local_shape(shape, rank)
    if layout.mesh.coordinate(rank) is not None and tuple(local.shape) != wanted and local.numel() + Box.whole(wanted).numel > 0:
        raise LayoutError(
            f"placements {tensor.placements} give rank {rank} a part of shape {wanted}, but it holds {tuple(local.shape)}",
            where=f"tensor {name}",
        )
    info = TensorSpec(name, dtype_of(local, name), shape, layout)
    return LocalTensor(info, parts_of(info, local, rank), name)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor, without autograd."""
    local = tensor
    if is_dtensor(tensor):
        if lazy.torch.is_grad_enabled():
            with lazy.torch.no_grad():  # with autograd, to_local records a node
                local = tensor.to_local()
        else:
            local = tensor.to_local()
        if type(local).__name__ == "AsyncCollectiveTensor":
            local = local.wait()  # type: ignore[attr-defined]
    elif type(tensor).__name__ == "AsyncCollectiveTensor":
        local = tensor.wait()  # type: ignore[attr-defined]
    return local.detach() if local.requires_grad else local


def dtensor_layout(name: str, tensor: DTensor) -> TensorLayout:
    mesh = mesh_of(tensor.device_mesh)
    return TensorLayout(mesh, tuple(_splits(name, tensor, mesh.names, mesh.sizes)))


def _splits(name: str, tensor: DTensor, names: Sequence[str], sizes: Sequence[int]) -> list[Split]:
    """DTensor's placements, in the order in which they cut."""
    # Each split reads its own kind of placement.
    order: list[tuple[Split, int]] = []
    for number in reversed(range(len(sizes))):
        placement = tensor.placements[number]
        if placement.is_replicate():
            continue
        split = split_from_dtensor(placement, DTensorAxis(over=names[number], shape=tuple(tensor.shape), later=tuple(order)))
        if split is None:
            own = type(placement).__module__.startswith("torch.")
            hint = "redistribute it to Shard or Replicate first" if own else "install or write a plug-in for its class (CONTRIBUTING.md)"
            raise LayoutError(f"{placement} of {type(placement).__qualname__} cannot be stored", where=f"tensor {name}", hint=hint)
        order.insert(split[1], (split[0], sizes[number]))
    return [split for split, _ in order]


def from_plain(name: str, tensor: torch.Tensor, layout: TensorLayout, rank: int) -> LocalTensor:
    """A plain tensor whose layout has no splits: replicated, or one rank's own."""
    info = TensorSpec(name, dtype_of(tensor, name), tuple(tensor.shape), layout)
    return LocalTensor(info, parts_of(info, local_of(tensor), rank), name)


def from_placed(state_name: str, placed: ResolvedShard, tensor: torch.Tensor, rank: int) -> LocalTensor:
    """A plain tensor that a :class:`ckpt.Layout` gave its place."""
    info = TensorSpec(placed.name, dtype_of(tensor, state_name), placed.shape, placed.layout, placed.logical)
    local = local_of(tensor)
    if placed.stack is None:
        return LocalTensor(info, parts_of(info, local, rank), state_name)
    dim, index = placed.stack
    rows = [p for p in placed.layout.pieces(placed.shape, rank) if p.box.offset[dim] <= index < p.box.end[dim]]
    parts = []
    for p in rows:
        offset = tuple(index if d == dim else o for d, o in enumerate(p.box.offset))
        shape = tuple(1 if d == dim else s for d, s in enumerate(p.box.shape))
        memory = local.unsqueeze(dim)
        for d, (start, size) in enumerate(zip(p.local.offset, p.local.shape, strict=True)):
            memory = memory if d == dim else memory.narrow(d, start, size)
        parts.append(LocalShard(Box(offset, shape), memory))
    return LocalTensor(info, parts, state_name)


def parts_of(info: TensorSpec, local: torch.Tensor, rank: int) -> list[LocalShard]:
    """Views of the local memory for each piece that the layout gives this rank."""
    parts = []
    for piece in info.layout.pieces(info.shape, rank):
        if info.layout.is_flat:
            start, count = piece.local.offset[0], piece.local.shape[0]
            memory = local.reshape(-1).narrow(0, start, count).view(piece.box.shape)
        else:
            memory = local
            if piece.local.shape != tuple(local.shape):
                for dim, (start, size) in enumerate(zip(piece.local.offset, piece.local.shape, strict=True)):
                    memory = memory.narrow(dim, start, size)
        parts.append(LocalShard(piece.box, memory))
    return parts


def identity(tensor: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of the same memory (tied tensors), ``local`` of ``tensor``. A part without memory is known by the tensor
    object alone."""
    if local.numel() == 0 or local.device.type == "meta" or local.untyped_storage().nbytes() == 0:
        return (id(tensor),)
    return (local.data_ptr(), local.device, local.dtype, tuple(tensor.shape), local.stride(), local.is_conj(), local.is_neg())
