"""Gives every tensor of a state its stored name, its layout, and the boxes that lie in this rank's memory. Saving and loading use the same
table, so they cannot disagree.

How a state becomes boxes::

    {"model": module, "optimizer": optimizer, "extra": tensor}           the state, on this rank
        │  scan_state    modules, meshes of all DTensors
        │  collect/bind  a walk: one add() for each tensor, with the name that the state gives it
        ▼
    state_name "model.w" ──layout──► stored name "model.w", global shape, TensorLayout    (equal on every rank: TensorSpec)
                                     └─ pieces(shape, rank) ─► boxes + views of memory    (this rank's own: LocalShard)

Where the layout comes from, in this order: the tensor itself (DTensor, ShardedTensor, a part of an FSDP1 flat parameter), the rules of the
caller's ``Layout``, or replication over all ranks. Optimizer state lies as its parameter does. Two names of one memory and one place are
one stored tensor and an alias.

Most saves see the state of the save before. So a shard that was complete is remembered under everything that it was derived from
(:class:`ShardCache`), and the next walk takes it from there without asking layouts again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ckpt.errors import LayoutError, StateError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.layout import Layout, ResolvedShard
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec

from . import lazy
from .dtensor import is_dtensor, is_sharded_tensor, states_boxes, widened
from .sharded import Sharded, beside_stated, from_sharded_tensor, from_stated
from .subclasses import inner_layouts, wrapper_of
from .tensors import LocalShard, LocalTensor, dtensor_layout, dtype_of, from_dtensor, from_placed, from_plain, identity, local_of
from .torch_objects import refuse_partitioned

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


# Shards that earlier walks found, by name: the second save of a state need not derive layouts again.
#
# Invariant: a remembered shard is used only if everything it was derived from is the same: class, dtype and shape of the tensor, its
# DTensor mesh and placements, and the context (rank, ranks, layout, meshes).


@dataclass(frozen=True, slots=True, eq=False)
class CachedShard:
    """The place of one tensor. ``box`` is all that this rank holds, as one block of the whole local tensor."""

    key: Hashable
    info: TensorSpec
    box: Box
    alive: object
    """Keeps what the key knows by its id."""


@dataclass(eq=False)
class ShardCache:
    """Remembers one shard per name. ``infos`` makes equal :class:`TensorSpec` values one object, so that tables compare quickly."""

    known: dict[str, CachedShard] = field(default_factory=dict)
    context: tuple[int, tuple[int, ...], Layout | None, tuple[Mesh, ...]] | None = None
    """Rank, ranks, layout and meshes that they were found with."""


def key_of(tensor: torch.Tensor) -> Hashable:
    """What the place of a tensor depends on; None for classes that are not plain. It knows objects by their ids: see ``alive_of``."""
    kind = type(tensor)
    if kind is lazy.Tensor or kind is lazy.Parameter:
        return None if tensor.is_nested else (kind, tensor.dtype, tensor.shape, tensor.layout)
    if is_dtensor(tensor):
        spec, local = getattr(tensor, "_spec", None), getattr(tensor, "_local_tensor", None)
        if spec is not None and type(local) is lazy.Tensor:
            return kind, tensor.dtype, tensor.shape, local.shape, local.layout, id(spec.mesh), id(spec.placements)
    return None


def alive_of(tensor: torch.Tensor) -> object:
    """What has to stay alive for a key to stay true."""
    return (tensor._spec.mesh, tensor._spec.placements) if is_dtensor(tensor) else None


class StateOf(NamedTuple):
    """The parameter that an optimizer keeps state for, its name in the state, and what the stored names of that state begin with: then
    come the parameter's stored name and the last segment of the name in the state."""

    tensor: torch.Tensor
    name: str
    prefix: str


@dataclass(eq=False)
class ShardTable:
    """Places tensors for one rank of a job. ``tensors`` by stored name; ``aliases`` maps tied names to the name that is stored."""

    rank: int
    ranks: tuple[int, ...]
    layout: Layout | None = None
    meshes: tuple[Mesh, ...] = ()
    """Of all DTensors of the state, the largest first."""
    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Name in the state → stored name: a layout may renumber, and the state of an optimizer follows its parameter."""
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name in the state of a tensor that is made of others → the names of these."""
    own: set[str] = field(default_factory=set)
    """Stored names of what belongs to this rank alone, tied names too."""
    optimizer_updated: set[str] = field(default_factory=set)
    """Stored names of parameters, and of the state that optimizers keep for them."""
    forward_mutable: set[str] = field(default_factory=set)
    """Stored names of modules' buffers, which a forward pass may change."""
    frozen: set[str] = field(default_factory=set)
    """Stored names of modules' parameters without gradients."""
    trainable: set[str] = field(default_factory=set)
    """Stored names of modules' parameters with gradients, and of those that an optimizer of the state has state for, or updates with a
    fused kernel. A name may be in ``frozen``, too: it was frozen later, or it is tied."""
    shards: ShardCache = field(default_factory=ShardCache)
    """What earlier walks of the same context found."""
    _replicated: TensorLayout | None = None
    _seen: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Address → stored name, tensor and its memory, of the first that begins there. The tensors live as long as this: their ids stay
    unique."""
    _more: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """The others that begin there and are not the same."""
    _counted: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    anew: dict[str, CachedShard] = field(default_factory=dict)
    """What this walk has found, for the next one to rely on once it proved right."""
    unproven: set[str] = field(default_factory=set)
    """Stored names of tensors that no earlier walk found to be complete."""

    def __post_init__(self) -> None:
        shards, old = self.shards, self.shards.context
        if old is None or old[2] is not self.layout or (old[0], old[1], old[3]) != (self.rank, self.ranks, self.meshes):
            shards.known.clear()
        shards.context = self.rank, self.ranks, self.layout, self.meshes

    @cached_property
    def devices(self) -> set[torch.device]:
        """The GPUs that hold something of the tensors; asked for when all are added."""
        return {part.memory.device for local in self.tensors.values() for part in local.parts if part.memory.is_cuda}

    @property
    def position(self) -> int:
        """Place of this rank among those that take part: what a checkpoint knows it by."""
        return self.ranks.index(self.rank)

    def add(self, state_name: str, tensor: torch.Tensor | Sharded, param: StateOf | None = None) -> LocalTensor:
        """A tensor under the name that the state gives it: DTensor, plain tensor with a rule of the layout, replicated, or a part whose
        place is known from where it comes. State that an optimizer keeps for ``param`` lies as the parameter does, or is one number."""
        if isinstance(tensor, Sharded):
            return self._add_sharded(state_name, tensor)
        if param is None:
            refuse_partitioned(tensor, state_name)
        if states_boxes(tensor):
            return self._add_sharded(state_name, from_stated(tensor, state_name, self.rank), tensor)
        if param is not None and states_boxes(param.tensor):
            beside = beside_stated(tensor, param.tensor, state_name, self.rank)
            if beside is not None:
                return self._add_sharded(state_name, beside, tensor)
        # A walk over a large state asks layouts and meshes for each tensor, which takes far longer than the walk. The
        # key has everything that the answer follows from, so an equal key means an equal answer.
        key = key_of(tensor)
        if param is not None:
            keys = key, key_of(param.tensor)
            key = None if None in keys else (*keys, param.name, param.prefix)
        elif key is None and is_sharded_tensor(tensor):
            return self._add_sharded(state_name, from_sharded_tensor(tensor, state_name))
        known = self.shards.known.get(state_name)
        if known is not None and known.key == key:
            memory: torch.Tensor = tensor if type(tensor) in lazy.PLAIN or not is_dtensor(tensor) else tensor._local_tensor
            memory = memory.detach() if memory.requires_grad else memory
            return self._register(LocalTensor(known.info, [LocalShard(known.box, memory)], state_name), tensor, memory)
        local = self._place(state_name, tensor) if param is None else self._place_state(state_name, tensor, param)
        memory = local_of(tensor)
        self.unproven.add(local.info.name)
        if key is not None and len(local.parts) == 1 and local.parts[0].memory.shape == memory.shape:
            alive = [alive_of(tensor), *([] if param is None else [alive_of(param.tensor)])]
            self.anew[state_name] = CachedShard(key, local.info, local.parts[0].box, alive)
        return self._register(local, tensor, memory)

    def _add_sharded(self, state_name: str, part: Sharded, tensor: torch.Tensor | None = None) -> LocalTensor:
        """``tensor`` is what the state has, if it is one."""
        placed = ResolvedShard(name=state_name, shape=part.shape, layout=part.layout)
        if part.blocks:
            info = TensorSpec(state_name, dtype_of(part.memory, state_name), part.shape, part.layout)
            boxes = [piece.box for piece in part.layout.pieces(part.shape, self.rank)]
            if len(boxes) != len(part.blocks):
                text = f"it has {len(part.blocks)} parts here, where its layout gives rank {self.rank} {len(boxes)}"
                raise LayoutError(text, where=f"tensor {state_name}", hint="make it on the rank that loads it, in the same process group")
            local = LocalTensor(info, [LocalShard(box, block) for box, block in zip(boxes, part.blocks, strict=True)], state_name)
        else:
            local = from_placed(state_name, placed, part.memory, self.rank)
        self.unproven.add(local.info.name)
        registered = self._register(local, part.memory if tensor is None else tensor, local_memory(part))
        self._counted += [(registered.info.name, tensor) for tensor in part.counted]
        return registered

    def add_fields(self, state_name: str, tensor: torch.Tensor, param: StateOf | None = None) -> dict[str, LocalTensor]:
        """The inner tensors of a tensor that is made of others (``subclasses.py``), by field."""
        wrapper = wrapper_of(tensor)
        layout, shape = self._outer_layout(state_name, tensor, param)
        placed: dict[str, LocalTensor] = {}
        for field_name, (inner, inner_layout, inner_shape) in inner_layouts(state_name, wrapper, layout, shape).items():
            name = f"{state_name}#{field_name}"
            if is_dtensor(inner):
                placed[field_name] = self.add(name, inner)
            else:  # what is done through the wrapper shows in its version alone
                part = Sharded(inner, inner_shape, inner_layout, counted=(tensor, wrapper) if tensor is not wrapper else (tensor,))
                placed[field_name] = self._add_sharded(name, part, inner)
        self.fields[state_name] = tuple(f"{state_name}#{field_name}" for field_name in placed)
        return placed

    def _outer_layout(self, state_name: str, tensor: torch.Tensor, param: StateOf | None) -> tuple[TensorLayout, tuple[int, ...]]:
        """Layout and global shape of a tensor that is made of others."""
        owner = tensor if param is None or is_dtensor(tensor) else param.tensor
        if is_dtensor(owner):
            layout = widened(dtensor_layout(state_name, owner), self.meshes, self.rank)
            if owner is not tensor and layout.splits:
                raise _ambiguous(state_name, tensor, owner)
            return layout, tuple(tensor.shape)
        if self.layout is None:
            return self.replicated(), tuple(tensor.shape)
        name = state_name if param is None else param.name
        placed = self.layout.place(name, tuple(owner.shape), self.rank)
        if placed.layout.splits or placed.name != name or placed.logical is not None:
            text = f"a rule of the layout cuts or renames it, and a {type(tensor).__qualname__} is stored as its inner tensors"
            raise LayoutError(text, where=f"tensor {state_name}", hint="make it a DTensor, or leave it out of the layout's rules")
        return placed.layout, tuple(tensor.shape)

    def _place(self, state_name: str, tensor: torch.Tensor) -> LocalTensor:
        if is_dtensor(tensor):
            return self._on_stages(state_name, from_dtensor(state_name, tensor, self.rank, self.meshes))
        if self.layout is None:
            return from_plain(state_name, tensor, self.replicated(), self.rank)
        dtype_of(tensor, state_name)  # before its shape is asked for: what cannot be stored may have none
        return from_placed(state_name, self.layout.place(state_name, tuple(tensor.shape), self.rank), tensor, self.rank)

    def _on_stages(self, name: str, local: LocalTensor) -> LocalTensor:
        """A DTensor, or state of one, that by a rule of the layout for ``name`` lies on several stages, each of which has its own mesh."""
        if self.layout is not None:
            local.info = replace(local.info, layout=self.layout.on_stages(name, local.info.layout, self.rank))
        return local

    def replicated(self) -> TensorLayout:
        """The layout of tensors that all ranks have."""
        if self._replicated is None:
            self._replicated = TensorLayout.replicated(self.ranks)
        return self._replicated

    def add_own(self, state_name: str, tensor: torch.Tensor) -> LocalTensor:
        """A tensor that belongs to this rank alone (:class:`ckpt.PerRank`)."""
        if is_dtensor(tensor) or is_sharded_tensor(tensor):
            raise StateError(
                f"a {type(tensor).__name__} in a PerRank value",
                where=f"tensor {state_name}",
                hint="put it into the state itself, outside PerRank",
            )
        name = own_name(state_name, self.position)
        local = with_state_name(from_plain(name, tensor, TensorLayout(Mesh.flat((self.rank,))), self.rank), state_name)
        self.own.add(name)
        return self._register(local, tensor, local_of(tensor))

    def refresh(self, local: LocalTensor, tensor: torch.Tensor) -> None:
        """Point to the memory that a tensor of the meta device has got."""
        fresh = ShardTable(self.rank, self.ranks, self.layout, self.meshes).add(local.state_name, tensor)
        memory = {part.box: part for part in fresh.parts}
        local.parts = [memory.get(part.box, part) for part in local.parts]

    def _place_state(self, state_name: str, tensor: torch.Tensor, of: StateOf) -> LocalTensor:
        param = of.tensor
        if is_dtensor(tensor):
            return self._on_stages(of.name, from_dtensor(state_name, tensor, self.rank, self.meshes))
        if is_dtensor(param):
            return self._on_stages(of.name, self._beside_dtensor(state_name, tensor, param, of.name))
        if self.layout is None:
            return from_plain(state_name, tensor, self.replicated(), self.rank)
        placed = self.layout.place(of.name, tuple(param.shape), self.rank)
        name = f"{of.prefix}.{placed.name}.{state_name.rpartition('.')[2]}"
        if tensor.shape == param.shape:
            return from_placed(state_name, replace(placed, name=name), tensor, self.rank)
        if tensor.numel() != 1:
            raise _ambiguous(state_name, tensor, param)
        return from_placed(state_name, _one_number(placed, name, tensor), tensor, self.rank)

    def stored_name(self, name: str, tensor: torch.Tensor | Sharded) -> str:
        """The name under which a tensor is stored: a layout may renumber it."""
        if self.layout is None or isinstance(tensor, Sharded) or is_dtensor(tensor):
            return name
        return self.layout.place(name, tuple(tensor.shape), self.rank).name

    def param_shape(self, name: str, param: torch.Tensor) -> tuple[int, ...]:
        """Global shape under which a parameter is stored."""
        if states_boxes(param):
            return from_stated(param, name, self.rank).shape
        if self.layout is None or is_dtensor(param):
            return tuple(param.shape)
        return self.layout.place(name, tuple(param.shape), self.rank).shape

    def _beside_dtensor(self, state_name: str, tensor: torch.Tensor, param: DTensor, param_name: str) -> LocalTensor:
        layout = widened(dtensor_layout(param_name, param), self.meshes, self.rank)
        local = local_of(param)
        if tensor.shape == local.shape and tensor.ndim == param.ndim:
            return from_placed(state_name, ResolvedShard(name=state_name, shape=tuple(param.shape), layout=layout), tensor, self.rank)
        if tensor.numel() != 1:
            raise _ambiguous(state_name, tensor, param)
        return from_plain(state_name, tensor, TensorLayout(layout.mesh), self.rank)

    def _register(self, local: LocalTensor, tensor: torch.Tensor, memory: torch.Tensor) -> LocalTensor:
        name = self.names[local.state_name] = local.info.name
        known = self.tensors.get(name)
        if known is not None:
            return self._join(known, local)
        if name in self.aliases:
            raise StateError("two tensors of the state have this name", where=f"tensor {name}", hint="rename one of them")
        # Tied tensors are found by address first, which is cheap, and compared in full only where addresses are
        # equal. Tensors of the meta device have no address; for them the object itself stands in.
        address = (0 if memory.is_meta else memory.data_ptr()) or id(tensor)
        entry = name, tensor, memory
        before = self._seen.setdefault(address, entry)
        if before is entry:
            self.tensors[name] = local
            return local
        info, key, own = local.info, identity(tensor, memory), name in self.own
        others = self._more.setdefault(address, [])
        for first, other, its_memory in (before, *others):
            same_place = self.tensors[first].info
            if (same_place.layout, same_place.shape, first in self.own) == (info.layout, info.shape, own) and key == identity(
                other, its_memory
            ):
                self.aliases[name] = first
                return self.tensors[first]
        others.append(entry)
        self.tensors[name] = local
        return local

    def originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stored name of each tensor that is not tied to one before it, and the tensor as the state has it; and as others know it."""
        return chain(((name, tensor) for name, tensor, _ in chain(self._seen.values(), *self._more.values())), self._counted)

    def _join(self, known: LocalTensor, more: LocalTensor) -> LocalTensor:
        """Several local tensors make up one stored tensor: experts that a rule stacks."""
        if (
            known.state_name == more.state_name
            or known.info != more.info
            or any(a.box.intersect(b.box) for a in known.parts for b in more.parts)
        ):
            raise StateError(
                "two tensors of the state have this name",
                where=f"tensor {more.info.name} ({known.state_name} and {more.state_name})",
                hint="rename one of them",
            )
        known.parts.extend(more.parts)
        self.unproven.add(known.info.name)
        return known


def local_memory(part: Sharded) -> torch.Tensor:
    """The memory by which a part is known again: the first of its blocks, or all of it."""
    return part.blocks[0] if part.blocks else part.memory


def with_state_name(local: LocalTensor, state_name: str) -> LocalTensor:
    return LocalTensor(local.info, local.parts, state_name)


def own_name(state_name: str, position: int) -> str:
    """The stored name of one rank's own tensor."""
    return f"{state_name}@rank{position}"


def _one_number(placed: ResolvedShard, name: str, tensor: torch.Tensor) -> ResolvedShard:
    """The place of a single number kept for a parameter, such as Adam's ``step``: on all ranks that hold any of the parameter."""
    shape = tuple(tensor.shape)
    if placed.stack is None:
        return ResolvedShard(name=name, shape=shape, layout=TensorLayout(placed.layout.mesh, (), placed.layout.at))
    dim, index = placed.stack
    layout = TensorLayout(placed.layout.mesh, placed.layout.splits[:1], placed.layout.at)
    return ResolvedShard(name=name, shape=(placed.shape[dim], *shape), layout=layout, stack=(0, index))


def _ambiguous(state_name: str, tensor: torch.Tensor, param: torch.Tensor) -> LayoutError:
    return LayoutError(
        f"it has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}: whether it is sharded is unknown",
        where=f"tensor {state_name}",
        hint="make it a DTensor in the optimizer, or keep it out of the state",
    )
