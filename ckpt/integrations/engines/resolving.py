"""What a recording comes to: the boxes of the checkpoint that can be loaded straight into an engine's memory, and everything that cannot.

A loader may write an element several times; the last one counts. So writes are gone through in their order::

    later write                 an earlier one of the same elements
    over all of it              it is dropped: nobody sees what it wrote
    over a part of it           both tensors are refused: the loader gets them as they are, in its order
    loaded straight, after one of a refused tensor: refused too, as refused ones come last when the engine is filled

A refusal makes other writes refused ones, so this is done until there is no new one. What no write has covered then is *unwritten*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.errors import StateError, UsageError
from ckpt.plan.layout.geometry import Box, intersect_all
from ckpt.plan.layout.partition import MOST_BOXES, StridedView, boxes_of_view

from .recording import Recording, Write

# The memory of an engine's parameters: which part of which parameter a tensor is a view of.

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
    """All parameters of an engine."""

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


@dataclass(frozen=True, slots=True, eq=False)
class DirectPart:
    """A box of a tensor of the checkpoint, and the memory of the engine where it belongs: a view of the box's shape, of any strides."""

    box: Box
    memory: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalCopy:
    """Elements that the engine has twice: ``into`` takes what is in ``source`` when that is filled. Both have the same shape."""

    source: torch.Tensor
    into: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PlacedWrite:
    """A write and where it goes: boxes of a parameter. ``parts``: the boxes of the checkpoint that it takes; None if these cannot be
    told."""

    write: Write
    memory: ParameterMemory | None
    boxes: tuple[Box, ...]
    parts: tuple[DirectPart, ...] | None = None
    copies: tuple[LocalCopy, ...] = ()

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Resolution:
    """``parts`` and ``copies`` by name of the checkpoint's tensor; ``refused``: names and reasons; ``overwritten``: name → what was written
    over it; ``unwritten``: parameters, and what is left of each."""

    parts: Mapping[str, Sequence[DirectPart]]
    copies: Sequence[LocalCopy]
    refused: Mapping[str, str]
    overwritten: Mapping[str, str]
    unwritten: Sequence[tuple[ParameterMemory, Sequence[Box]]]
    direct: Sequence[PlacedWrite]
    """The writes that are loaded straight."""


def resolve(recording: Recording, engine: EngineMemory, tensors: Mapping[str, torch.Tensor], staged: Mapping[str, str]) -> Resolution:
    """Decide what is loaded straight. ``staged`` are names that are not to be, each with a reason."""
    refused = dict(recording.refused) | dict(staged)
    placed = [placed_write(write, engine, tensors) for write in recording.writes if write.into.numel()]
    for each in placed:
        if each.write.names and each.parts is None:
            _refuse(refused, each.write, "what is copied is no box of it")
    while True:
        before = len(refused)
        lasting, overwritten = _last_writes(placed, refused)
        direct = [each for each in lasting if is_direct(each.write, refused)]
        parts, copies = _divided(direct, refused)
        if len(refused) == before:
            break
    return Resolution(
        parts=parts,
        copies=copies,
        refused=refused,
        overwritten={name: by for name, by in overwritten.items() if name not in refused},
        unwritten=left_over(placed, [(memory, [memory.visible]) for memory in engine.memories()]),
        direct=direct,
    )


def is_direct(write: Write, refused: Mapping[str, str]) -> bool:
    """Whether it is loaded straight: no write of the loader's own, nor one of a refused tensor."""
    return bool(write.names) and not any(name in refused for name in write.names)


def left_over(
    placed: Sequence[PlacedWrite], memories: Sequence[tuple[ParameterMemory, Sequence[Box]]]
) -> list[tuple[ParameterMemory, Sequence[Box]]]:
    """What of each memory no write has covered."""
    boxes: dict[int, list[Box]] = {}
    for each in placed:
        if each.memory is not None:
            boxes.setdefault(id(each.memory), []).extend(each.boxes)
    rest = []
    for memory, left in memories:
        for box in boxes.get(id(memory), ()):
            left = [part for one in left for part in one.without(box)]
        if left:
            rest.append((memory, left))
    return rest


def overlap(boxes: Sequence[Box], others: Sequence[Box]) -> int:
    """How many elements two lists of boxes have in common, where those of each list are disjoint."""
    if not others:
        return 0
    offsets, shapes = (np.array([getattr(b, what) for b in others], dtype=np.int64) for what in ("offset", "shape"))
    return sum(int(intersect_all(box, offsets, shapes)[2].prod(axis=1).sum()) for box in boxes)


def _refuse(refused: dict[str, str], write: Write, reason: str) -> None:
    for name in write.names:
        refused.setdefault(name, reason)


# ---- one write


def placed_write(write: Write, engine: EngineMemory, tensors: Mapping[str, torch.Tensor]) -> PlacedWrite:
    """Find the boxes on both sides of a write."""
    memory = engine.of(write.into)
    if memory is None:
        return PlacedWrite(write, None, ())
    boxes, origin = memory.boxes_of(write.into), write.origin
    if boxes is None:
        return PlacedWrite(write, memory, (memory.visible,))
    if origin is None or (origin.bits is not None and origin.bits != write.into.dtype):
        return PlacedWrite(write, memory, boxes)
    into = write.into if origin.bits is None else write.into.view(origin.view.dtype)
    source, once = origin.view.expand(into.shape), into
    for dim in range(into.ndim):
        if source.stride(dim) == 0 and source.shape[dim] > 1:  # one element goes to many places: to the first, and from there to the others
            source, once = source.narrow(dim, 0, 1), once.narrow(dim, 0, 1)
    there = StridedView(tuple(once.shape), once.stride(), int(once.storage_offset()))
    here = StridedView(tuple(source.shape), source.stride(), int(source.storage_offset()))
    pairs = boxes_of_view(tuple(tensors[origin.name].shape), here, there)
    if pairs is None:
        return PlacedWrite(write, memory, boxes)
    parts = tuple(DirectPart(box, into.as_strided(side.shape, side.strides, side.offset)) for box, side in pairs)
    copies = () if once.shape == into.shape else (LocalCopy(once.expand(into.shape), into),)
    return PlacedWrite(write, memory, boxes, parts, copies)


# ---- several writes of the same elements


def _last_writes(placed: Sequence[PlacedWrite], refused: dict[str, str]) -> tuple[list[PlacedWrite], dict[str, str]]:
    """The writes whose elements are not written again, with what has overwritten others. Adds to ``refused``."""
    lasting: list[PlacedWrite] = []
    overwritten: dict[str, str] = {}
    by_memory: dict[int, list[PlacedWrite]] = {}
    for each in placed:
        by_memory.setdefault(id(each.memory), []).append(each)
    for writes in by_memory.values():
        covered = [_Covered(each) for each in writes]
        if sum(each.numel for each in writes) > _union(writes):
            for n, later in enumerate(covered):
                _write_over(covered[:n], later, refused, overwritten)
        lasting += [each.placed for each in covered if not each.gone]
    return lasting, overwritten


@dataclass(eq=False)
class _Covered:
    placed: PlacedWrite
    gone: bool = False


def _union(writes: Sequence[PlacedWrite]) -> int:
    """How many elements writes of one memory have together; less than the sum of each if any two overlap."""
    memory = writes[0].memory
    if memory is None:
        return 0
    extent = Box.whole(memory.shape)
    left = left_over(writes, [(memory, [extent])])
    return extent.numel - sum(box.numel for _, boxes in left for box in boxes)


def _write_over(earlier: Sequence[_Covered], later: _Covered, refused: dict[str, str], overwritten: dict[str, str]) -> None:
    write, memory = later.placed.write, later.placed.memory
    by = ", ".join(sorted(write.names)) or "load_weights itself"
    for each in earlier:
        common = 0 if each.gone else overlap(later.placed.boxes, each.placed.boxes)
        if not common or not each.placed.write.names:
            continue
        was_direct, is_now = is_direct(each.placed.write, refused), is_direct(write, refused)
        if was_direct and common == each.placed.numel:
            each.gone = True
            overwritten |= dict.fromkeys(each.placed.write.names, by)
        elif was_direct or is_now:
            where = "" if memory is None else f" of {memory.names[0]}"
            _refuse(refused, each.placed.write, f"a part{where} that it fills is filled again by {by}")
            _refuse(refused, write, f"it fills a part{where} that {', '.join(sorted(each.placed.write.names))} has filled before")


# ---- several places for the same elements of the checkpoint


def _divided(direct: Sequence[PlacedWrite], refused: dict[str, str]) -> tuple[dict[str, list[DirectPart]], list[LocalCopy]]:
    """Each element of a tensor is loaded once; other places get a copy. Adds to ``refused``."""
    parts: dict[str, list[DirectPart]] = {}
    copies = [copy for each in direct for copy in each.copies]
    for each in direct:
        (name,) = each.write.names
        parts.setdefault(name, []).extend(each.parts or ())
    for name, own in parts.items():
        if len({part.memory.dtype for part in own}) > 1:
            refused.setdefault(name, "it goes to parameters of different dtypes")
        elif len(own) > MOST_BOXES:
            refused.setdefault(name, f"it goes to more than {MOST_BOXES} places")
        elif len(own) > 1:
            parts[name] = _once(name, own, copies, refused)
    return parts, copies


def _once(name: str, parts: Sequence[DirectPart], copies: list[LocalCopy], refused: dict[str, str]) -> list[DirectPart]:
    kept: list[DirectPart] = []
    for part in sorted(parts, key=lambda p: -p.box.numel):
        hits = [other for other in kept if other.box.intersect(part.box) is not None]
        if not hits:
            kept.append(part)
        elif hits[0].box.contains(part.box):
            inside = part.box.relative_to(hits[0].box.offset)
            copies.append(LocalCopy(hits[0].memory[inside.slices], part.memory))
        else:
            refused.setdefault(name, "parts of it that overlap go to several places")
    return sorted(kept, key=lambda p: (p.box.offset, math.prod(p.box.shape)))
