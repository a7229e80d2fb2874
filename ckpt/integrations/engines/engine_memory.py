"""The memory of an engine's parameters: which part of which parameter a tensor is a view of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt.errors import StateError, UsageError
from ckpt.layout.geometry import Box
from ckpt.layout.strided import StridedView, boxes_of_view

Parameters = torch.nn.Module | Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMemory:
    """One parameter's own memory, or that of several that are tied: ``names``.

    ``order`` are its dimensions, the widest stride first. In this order it is ``visible``, a box of a row-major tensor of ``shape``: a part
    of it where rows are padded. ``required``: whether a checkpoint has to fill it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    order: tuple[int, ...]
    shape: tuple[int, ...]
    visible: Box
    required: bool

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the storage, and one past the last."""
        start = int(self.tensor.storage_offset())
        return start * self.tensor.itemsize, (start + math.prod(self.shape)) * self.tensor.itemsize

    def boxes_of(self, part: torch.Tensor) -> tuple[Box, ...] | None:
        """The boxes, in ``order``, that a view of this memory shows; None if that cannot be told."""
        if part.itemsize != self.tensor.itemsize:
            return None
        view = StridedView(tuple(part.shape), part.stride(), int(part.storage_offset() - self.tensor.storage_offset()))
        boxes = boxes_of_view(self.shape, view)
        return None if boxes is None else tuple(box for box, _ in boxes)

    def text(self, box: Box) -> str:
        """A part of the parameter as its owner indexes it."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        own = Box(tuple(box.offset[d] for d in back), tuple(box.shape[d] for d in back))
        return self.names[0] if box == self.visible else f"{self.names[0]}{own}"


class EngineMemory:
    """All parameters of an engine.

    Raises:
        UsageError: ``into`` is neither a module nor a dict.
        StateError: one has no memory, or a memory of which it shows an element twice.
    """

    def __init__(self, into: Parameters) -> None:
        named: list[tuple[str, torch.Tensor, bool]]
        if isinstance(into, torch.nn.Module):
            named = [(name, tensor, True) for name, tensor in into.named_parameters(remove_duplicate=False)]
            named += [(name, tensor, False) for name, tensor in into.named_buffers(remove_duplicate=False)]
        elif isinstance(into, Mapping):
            named = [(name, tensor, True) for name, tensor in into.items()]
        else:
            raise UsageError(f"the engine is a module, or a dict of parameters, not {type(into).__name__}")
        self.named = {name: tensor for name, tensor, _ in named}
        self.storages: dict[int, list[ParameterMemory]] = {}
        for name, tensor, required in sorted(named, key=lambda row: -row[1].numel()):
            if tensor.numel():
                self._add(name, tensor.detach(), required=required)

    def _add(self, name: str, tensor: torch.Tensor, *, required: bool) -> None:
        if tensor.is_meta:
            hint = "give the engine memory first: module.to_empty(device=...)"
            raise StateError("the parameter is on the meta device: it has no memory to load into", where=name, hint=hint)
        memories = self.storages.setdefault(tensor.untyped_storage()._cdata, [])
        new = _memory(name, tensor, required=required)
        for n, known in enumerate(memories):
            if known.span[0] <= new.span[0] and new.span[1] <= known.span[1]:
                names = (*known.names, name)
                memories[n] = ParameterMemory(names, known.tensor, known.order, known.shape, known.visible, known.required or required)
                return
        memories.append(new)

    def memories(self) -> list[ParameterMemory]:
        return [memory for memories in self.storages.values() for memory in memories]

    def of(self, part: torch.Tensor) -> ParameterMemory | None:
        """The parameter that a tensor, of one of the known storages, lies in; None if it lies in several or between them."""
        if not part.numel():
            return None
        start = part.storage_offset() * part.itemsize
        reach = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) * part.itemsize
        for memory in self.storages[part.untyped_storage()._cdata]:
            if memory.span[0] <= start and start + reach < memory.span[1]:
                return memory
        return None

    def replaced(self, into: Parameters) -> list[str]:
        """Names of parameters that are not where they were, or new."""
        now = EngineMemory(into).named
        same = {name for name, tensor in now.items() if name in self.named and _place(tensor) == _place(self.named[name])}
        return sorted((now.keys() | self.named.keys()) - same)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _memory(name: str, tensor: torch.Tensor, *, required: bool) -> ParameterMemory:
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-tensor.stride()[d], -tensor.shape[d], d)))
    sizes, strides = [tensor.shape[d] for d in order], [tensor.stride()[d] for d in order]
    shape = list(sizes)
    walked = [d for d in range(tensor.ndim) if sizes[d] > 1]
    for outer, inner in itertools.pairwise(walked):  # rows may be longer than what is seen of them
        shape[inner] = strides[outer] // max(strides[inner], 1)
        if shape[inner] < sizes[inner] or strides[outer] % max(strides[inner], 1):
            raise _not_its_own(name, tensor)
    if walked and strides[walked[-1]] != 1:
        raise _not_its_own(name, tensor)
    return ParameterMemory((name,), tensor, order, tuple(shape), Box.whole(sizes), required)


def _not_its_own(name: str, tensor: torch.Tensor) -> StateError:
    text = f"a parameter of shape {list(tensor.shape)} with strides {list(tensor.stride())} does not have its memory for itself"
    return StateError(text, where=name, hint="give it contiguous memory")
