"""Gives every tensor of a state its name and layout. Used alike for what is saved and for what is loaded into, so that both agree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ckpt.errors import LayoutError, StateError
from ckpt.layout import TensorLayout
from ckpt.mesh import Mesh
from ckpt.rules import Layout, Placed
from ckpt.splits import Shard

from .dtensor import DTensor
from .meshes import widened
from .tensors import LocalTensor, dtensor_layout, dtype_of, from_dtensor, from_placed, from_plain, identity, local_of


@dataclass(eq=False)
class Placer:
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
    own: set[str] = field(default_factory=set)
    """Stored names of what belongs to this rank alone, tied names too."""
    _replicated: TensorLayout | None = None
    _seen: dict[tuple[object, ...], str] = field(default_factory=dict)
    _keep: list[torch.Tensor] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Place of this rank among those that take part: what a checkpoint knows it by."""
        return self.ranks.index(self.rank)

    def add(self, said: str, tensor: torch.Tensor) -> LocalTensor:
        """A tensor under the name that the state gives it: DTensor, plain tensor with a rule of the layout, or replicated."""
        if isinstance(tensor, DTensor):
            local = from_dtensor(said, tensor, self.rank, self.meshes)
        elif self.layout is not None:
            dtype_of(tensor, said)  # before its shape is asked for: what cannot be stored may have none
            local = from_placed(said, self.layout.place(said, tuple(tensor.shape), self.rank), tensor, self.rank)
        else:
            local = from_plain(said, tensor, self.replicated(), self.rank)
        return self._register(local, tensor)

    def replicated(self) -> TensorLayout:
        """The layout of tensors that all ranks have."""
        if self._replicated is None:
            self._replicated = TensorLayout.replicated(self.ranks)
        return self._replicated

    def add_own(self, said: str, tensor: torch.Tensor) -> LocalTensor:
        """A tensor that belongs to this rank alone (:class:`ckpt.PerRank`)."""
        if isinstance(tensor, DTensor):
            raise StateError("a DTensor in a PerRank value", where=f"tensor {said}", hint="put it into the state itself, outside PerRank")
        name = own_name(said, self.position)
        local = replace_said(from_plain(name, tensor, TensorLayout(Mesh.flat((self.rank,))), self.rank), said)
        self.own.add(name)
        return self._register(local, tensor)

    def refresh(self, local: LocalTensor, tensor: torch.Tensor) -> None:
        """Point to the memory that a tensor of the meta device has got."""
        fresh = Placer(self.rank, self.ranks, self.layout, self.meshes).add(local.said, tensor)
        memory = {held.box: held for held in fresh.parts}
        local.parts = [memory.get(held.box, held) for held in local.parts]

    def add_state(self, said: str, tensor: torch.Tensor, param: torch.Tensor, param_name: str, prefix: str) -> LocalTensor:
        """State that an optimizer keeps for ``param``, which the state knows as ``param_name``: it lies as the parameter does, or
        is one number.

        The stored name is ``prefix``, the parameter's stored name, and the last segment of ``said``.
        """
        key = said.rpartition(".")[2]
        if isinstance(tensor, DTensor):
            return self._register(from_dtensor(said, tensor, self.rank, self.meshes), tensor)
        if isinstance(param, DTensor):
            return self._register(self._beside_dtensor(said, tensor, param, param_name), tensor)
        if self.layout is None:
            return self._register(from_plain(said, tensor, self.replicated(), self.rank), tensor)
        placed = self.layout.place(param_name, tuple(param.shape), self.rank)
        name = f"{prefix}.{placed.name}.{key}"
        if tensor.shape == param.shape:
            return self._register(from_placed(said, replace(placed, name=name), tensor, self.rank), tensor)
        if tensor.numel() != 1:
            raise _ambiguous(said, tensor, param)
        return self._register(from_placed(said, _one_number(placed, name, tensor), tensor, self.rank), tensor)

    def param_shape(self, name: str, param: torch.Tensor) -> tuple[int, ...]:
        """Global shape under which a parameter is stored."""
        if self.layout is None or isinstance(param, DTensor):
            return tuple(param.shape)
        return self.layout.place(name, tuple(param.shape), self.rank).shape

    def _beside_dtensor(self, said: str, tensor: torch.Tensor, param: DTensor, param_name: str) -> LocalTensor:
        layout = widened(dtensor_layout(param_name, param), self.meshes, self.rank)
        local = local_of(param)
        if tensor.shape == local.shape and tensor.ndim == param.ndim:
            return from_placed(said, Placed(name=said, shape=tuple(param.shape), layout=layout), tensor, self.rank)
        if tensor.numel() != 1:
            raise _ambiguous(said, tensor, param)
        return from_plain(said, tensor, TensorLayout(layout.mesh), self.rank)

    def _register(self, local: LocalTensor, tensor: torch.Tensor) -> LocalTensor:
        name = self.names[local.said] = local.info.name
        known = self.tensors.get(name)
        if known is not None:
            return self._join(known, local)
        if name in self.aliases:
            raise StateError("two tensors of the state have this name", where=f"tensor {name}", hint="rename one of them")
        key = (*identity(tensor), local.info.layout, local.info.shape, name in self.own)
        first = self._seen.setdefault(key, name)
        self._keep.append(tensor)  # an id stays unique only as long as its object lives
        if first != name:
            self.aliases[name] = first
            return self.tensors[first]
        self.tensors[name] = local
        return local

    def _join(self, known: LocalTensor, more: LocalTensor) -> LocalTensor:
        """Several local tensors make up one stored tensor: experts that a rule stacks."""
        if known.said == more.said or known.info != more.info or any(a.box.intersect(b.box) for a in known.parts for b in more.parts):
            raise StateError(
                "two tensors of the state have this name",
                where=f"tensor {more.info.name} ({known.said} and {more.said})",
                hint="rename one of them",
            )
        known.parts.extend(more.parts)
        return known


def replace_said(local: LocalTensor, said: str) -> LocalTensor:
    return LocalTensor(local.info, local.parts, said)


def own_name(said: str, position: int) -> str:
    """The stored name of one rank's own tensor."""
    return f"{said}@rank{position}"


def _one_number(placed: Placed, name: str, tensor: torch.Tensor) -> Placed:
    """The place of a single number kept for a parameter, such as Adam's ``step``: on all ranks that hold any of the parameter."""
    shape = tuple(tensor.shape)
    if placed.stack is None:
        return Placed(name=name, shape=shape, layout=TensorLayout(placed.layout.mesh, (), placed.layout.at))
    dim, index = placed.stack
    stacked = next(s for s in placed.layout.splits if isinstance(s, Shard) and s.dim == dim)
    layout = TensorLayout(placed.layout.mesh, (Shard(0, stacked.over, stacked.sizes),), placed.layout.at)
    return Placed(name=name, shape=(placed.shape[dim], *shape), layout=layout, stack=(0, index))


def _ambiguous(said: str, tensor: torch.Tensor, param: torch.Tensor) -> LayoutError:
    return LayoutError(
        f"it has shape {tuple(tensor.shape)}, its parameter {tuple(param.shape)}: whether it is sharded cannot be told",
        where=f"tensor {said}",
        hint="make it a DTensor in the optimizer, or keep it out of the state",
    )
