"""Runs a ``load_weights`` over tensors without values, and notes which part of which it copies where.

A :class:`RecordingTensor` stands for a tensor of the checkpoint. Below it is a tensor of the meta device that has the checkpoint's shape:
what a loader does with it (narrow, view, transpose, chunk, an index) is done to that one, and its strides and offset then say which
elements are meant. No list of operations is kept and none is known by name; torch says of each whether what it returns is a view::

    loader                         what is known of the result
    w = the tensor (8, 4)          w: strides (4, 1), offset 0
    w = w.narrow(0, 4, 4).t()      w: shape (4, 4), strides (1, 4), offset 16
    param[:, :4].copy_(w)          Write(into=param[:, :4], origin=w): nothing is copied

Copies and casts that keep every value (``contiguous``, ``to`` of a wider dtype) keep what is known. Anything else (arithmetic, ``cat``,
an index that is a tensor) makes values that lie nowhere in the checkpoint: the names that it was made of are *refused*, with the reason,
and the loader gets them as they are later. So are names that go into memory which is no parameter's; that memory is followed further.

Every operation of the loader goes by here, so what it writes by itself (zeros for padding) is known too. A loader that asks for a value
(``if w.max() > 1``) cannot go on: :class:`ValueNeededError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckpt.errors import CkptError

# What stands for tensors of a checkpoint while a loader runs: it has their shapes, and knows which of their elements it is.


class ValueNeededError(CkptError):
    """A loader asks for a value of tensors that have none yet. ``names`` are those of the tensors."""

    def __init__(self, names: Set[str], what: str) -> None:
        super().__init__(f"load_weights needs a value of {', '.join(sorted(names))} ({what})")
        self.names = frozenset(names)
        self.what = what


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Elements of a checkpoint's tensor: those that ``view``, of the meta device, has in a memory that begins with the tensor's first.

    ``bits``: the dtype as which their bits are read, if that is not their own; ``cast``: the dtype that they have been converted to.
    """

    name: str
    view: torch.Tensor
    bits: torch.dtype | None = None
    cast: torch.dtype | None = None


class RecordingTensor(torch.Tensor):
    """Stands for values of the checkpoint's tensors ``names``; where they lie there is ``origin``, None if nowhere.

    ``geometry`` is a tensor of the meta device that is what this one seems to be.
    """

    geometry: torch.Tensor
    names: frozenset[str]
    origin: Origin | None

    @staticmethod
    def __new__(
        cls: type[RecordingTensor], geometry: torch.Tensor, names: frozenset[str], origin: Origin | None, device: torch.device
    ) -> RecordingTensor:
        made: RecordingTensor = torch.Tensor._make_wrapper_subclass(
            cls, geometry.shape, strides=geometry.stride(), storage_offset=geometry.storage_offset(), dtype=geometry.dtype, device=device
        )
        made.geometry, made.names, made.origin = geometry, names, origin
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"RecordingTensor({', '.join(sorted(self.names))}, shape={list(self.geometry.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _VALUES:
            raise ValueNeededError(names_in((args, kwargs)), getattr(func, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise ValueNeededError(names_in((args, kwargs)), f"{func} after the recording")


class RecordedNumber:
    """What ``item()`` of a tensor with one element gives. It can be filled into a parameter, and nothing else."""

    def __init__(self, tensor: RecordingTensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Lets torch take it as an argument; a recording sees it there before this is called."""
        raise ValueNeededError(names_in((args, kwargs)), getattr(func, "__name__", str(func)))

    def _needed(self, *_: object) -> Any:
        raise ValueNeededError(self.tensor.names, "arithmetic with item()")

    __float__ = __int__ = __index__ = __bool__ = __abs__ = __neg__ = __round__ = _needed
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _needed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _needed
    __hash__ = None  # type: ignore[assignment]


_VALUES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "__complex__", "numpy", "tolist")
)


def names_in(values: Any) -> frozenset[str]:
    leaves = [x.tensor if isinstance(x, RecordedNumber) else x for x in tree_leaves(values)]
    return frozenset().union(*(x.names for x in leaves if isinstance(x, RecordingTensor)))


Weights = Iterable[tuple[str, torch.Tensor]]
LoadWeights = Callable[[Weights], object]
"""What engines call ``load_weights``: takes names and whole tensors of a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """What a loader puts into ``into``: elements of the checkpoint, ``origin``, one for each or one for all; something made of the tensors
    ``names``; or if there are none, something of its own."""

    into: torch.Tensor
    names: frozenset[str] = frozenset()
    origin: Origin | None = None


_SAME_VALUES = ("aten::clone", "aten::_unsafe_view", "aten::lift_fresh_copy")
_ITS_KIND = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
"""Ends of names of operations that make a tensor of the same kind, whatever the values."""


@dataclass(eq=False)
class Recording:
    """What was noted. ``refused``: names of the checkpoint and why they have to be loaded as they are."""

    writes: list[Write] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def record_writes(load_weights: LoadWeights, tensors: Mapping[str, torch.Tensor], memory: Set[int]) -> Recording:
    """Run a loader.

    Args:
        tensors: what it is given. Those of the meta device stand for the checkpoint's; with others it does what it always does.
        memory: addresses of the storages (``untyped_storage()._cdata``) that belong to parameters.
    """
    recording = Recording()
    mode = _RecordingMode(recording, memory)

    def weights() -> Weights:
        for name, tensor in tensors.items():
            stands_in = RecordingTensor(tensor, frozenset([name]), Origin(name, tensor), torch.device("cpu")) if tensor.is_meta else tensor
            yield name, stands_in

    with torch.no_grad(), _NumberMode(mode), mode:
        load_weights(weights())
    if mode.needed:  # the loader kept the error to itself
        raise mode.needed[0]
    return recording


class _NumberMode(TorchFunctionMode):
    """``param.fill_(w.item())`` is a copy."""

    def __init__(self, mode: _RecordingMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.item and isinstance(args[0], RecordingTensor) and args[0].numel() == 1:
            return RecordedNumber(args[0])
        listed = [x for x in (*args, *(kwargs or {}).values()) if type(x) is RecordedNumber or isinstance(x, (list, tuple))]
        numbers = [x for x in tree_leaves(listed) if type(x) is RecordedNumber] if listed else []
        if func is torch.Tensor.fill_ and numbers and type(args[0]) is not RecordingTensor:
            into: torch.Tensor = args[0]
            self.mode.copied(into, numbers[0].tensor)
            return into
        try:
            if numbers:
                raise ValueNeededError(numbers[0].tensor.names, getattr(func, "__name__", str(func)))
            return func(*args, **kwargs or {})
        except ValueNeededError as error:
            self.mode.needed.append(error)
            raise


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader."""

    def __init__(self, recording: Recording, memory: Set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.memory = memory
        self.needed: list[ValueNeededError] = []
        self.carries: dict[int, frozenset[str]] = {}
        """Storages that are no parameter's and have values of the checkpoint: of which tensors."""
        self.alive: list[torch.Tensor] = []
        """Tensors of these storages: as long as they live, no other has the same address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        stand_ins = [x for x in tensors if isinstance(x, RecordingTensor)]
        names = frozenset().union(*map(self.names_of, tensors))
        schema = func._schema
        written = _written(schema, args, kwargs)
        if not names:
            self.noted(written, names)
            return func(*args, **kwargs)
        if schema.name in ("aten::copy_", "aten::fill_") and type(args[0]) is not RecordingTensor and isinstance(args[1], RecordingTensor):
            self.copied(args[0], args[1])
            return args[0]
        if not stand_ins:
            return self.carried(func, args, kwargs, written, names)
        first = stand_ins[0]
        if not written and len(tensors) == 1:
            if any(r.alias_info is not None for r in schema.returns):
                return self.viewed(func, first, args, kwargs)
            if schema.name in _SAME_VALUES or schema.name == "aten::_to_copy":
                return self.repeated(func, first, args, kwargs)
            if schema.name.endswith(_ITS_KIND):
                return func(first.geometry, *args[1:], **{"device": first.device, **kwargs})
        return self.made(func, first, args, kwargs, written, names)

    def names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        if isinstance(tensor, RecordingTensor):
            return tensor.names
        return self.carries.get(tensor.untyped_storage()._cdata, frozenset()) if self.carries else frozenset()

    def refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.recording.refused.setdefault(name, reason)

    def noted(self, written: Sequence[torch.Tensor], names: frozenset[str]) -> None:
        self.recording.writes += [Write(t.detach(), names) for t in written if t.untyped_storage()._cdata in self.memory]

    def copied(self, into: torch.Tensor, source: RecordingTensor) -> None:
        """``into`` takes the values of ``source``."""
        if into.untyped_storage()._cdata not in self.memory:
            self.refuse(source.names, "it is copied into a tensor that is no parameter")
            self.carry([into], source.names | self.names_of(into))
            return
        origin = source.origin
        changed = origin is not None and source.dtype != into.dtype
        if changed and origin and (origin.bits is not None or not _holds(origin.cast, origin.view.dtype)):
            self.refuse(source.names, f"it is converted to {_short(source.dtype)} on its way into a parameter of {_short(into.dtype)}")
        self.recording.writes.append(Write(into.detach(), source.names, origin))

    # ---- what an operation returns

    def viewed(self, func: Any, source: RecordingTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A view, or several, of the same values."""
        geometry = func(source.geometry, *args[1:], **kwargs)
        origin = source.origin
        parts: Any = None
        if origin is not None:
            op, bits = func._schema.name, origin.bits
            if func is torch.ops.aten.view.dtype:
                if origin.cast is None and geometry.shape == source.shape:
                    bits = None if geometry.dtype == origin.view.dtype else geometry.dtype
                    return self.like(geometry, source, Origin(origin.name, origin.view, bits))
            elif _place(origin.view) == _place(source.geometry) or op not in ("aten::as_strided", "aten::_reshape_alias"):
                try:
                    parts = func(origin.view, *args[1:], **kwargs)
                except RuntimeError:  # a copy in between made it one that the checkpoint's memory does not allow
                    parts = None
            if parts is not None:
                several = isinstance(geometry, (list, tuple))
                pairs = zip(geometry if several else [geometry], parts if several else [parts], strict=True)
                views = [self.like(g, source, Origin(origin.name, part, bits, origin.cast)) for g, part in pairs]
                return views if several else views[0]
        self.refuse(source.names, f"{func._schema.name.removeprefix('aten::')} of it is no view of the stored tensor")
        return tree_map_only(torch.Tensor, lambda g: self.like(g, source, None), geometry)

    def repeated(self, func: Any, source: RecordingTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """The same values elsewhere, in another dtype perhaps."""
        device = kwargs.pop("device", None) or source.device
        kwargs.pop("pin_memory", None)
        geometry = func(source.geometry, *args[1:], **kwargs)
        origin = source.origin
        if origin is not None and geometry.dtype != source.dtype:
            if origin.bits is not None or not _holds(origin.cast, origin.view.dtype):
                self.refuse(source.names, f"it is converted to {_short(source.dtype)}, and then to {_short(geometry.dtype)}")
                origin = None
            else:
                origin = Origin(origin.name, origin.view, None, geometry.dtype)
        if origin is not None and func._schema.name == "aten::_unsafe_view":
            return self.like(geometry, source, self.reshaped(origin, geometry.shape, source))
        return RecordingTensor(geometry, source.names, origin, torch.device(device))

    def reshaped(self, origin: Origin, shape: torch.Size, source: RecordingTensor) -> Origin | None:
        try:
            return Origin(origin.name, origin.view.view(shape), origin.bits, origin.cast)
        except RuntimeError:
            self.refuse(source.names, "reshape of it is no view of the stored tensor")
            return None

    def like(self, geometry: torch.Tensor, source: RecordingTensor, origin: Origin | None) -> RecordingTensor:
        return RecordingTensor(geometry, source.names, origin, source.device)

    def made(
        self, func: Any, first: RecordingTensor, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[Any], names: frozenset[str]
    ) -> Any:
        """Values that are computed: no part of the checkpoint."""
        what = func._schema.name.removeprefix("aten::")
        self.refuse(names, f"load_weights computes with it ({what})")
        device = kwargs.pop("device", None) or first.device
        inside = {id(t) for t in written if isinstance(t, RecordingTensor)}
        outside = [t for t in written if id(t) not in inside]
        self.noted(outside, names)
        self.carry([t for t in outside if t.untyped_storage()._cdata not in self.memory], names)
        for tensor in written:
            if isinstance(tensor, RecordingTensor):
                tensor.names, tensor.origin = names, None
        if written and len(func._schema.returns) <= 1:
            return written[0]
        shapes = tree_map_only(
            torch.Tensor, lambda t: t.geometry if isinstance(t, RecordingTensor) else t.detach().to("meta"), (args, kwargs)
        )
        try:
            result = func(*shapes[0], **shapes[1])
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ValueNeededError(names, what) from error
        if any(not isinstance(x, torch.Tensor) for x in tree_leaves(result) if x is not None):
            raise ValueNeededError(names, what)
        return tree_map_only(torch.Tensor, lambda g: RecordingTensor(g, names, None, torch.device(device)), result)

    # ---- memory of the loader's own that has values of the checkpoint

    def carry(self, tensors: Iterable[torch.Tensor], names: frozenset[str]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            self.carries[address] = self.carries.get(address, frozenset()) | names
            self.alive.append(tensor)

    def carried(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any], names: frozenset[str]) -> Any:
        """Done with what such memory has now, which is nothing: only where it goes is of interest. Parameters stay as they are."""
        self.refuse(names, "it is copied into a tensor that is no parameter")
        if any(t.untyped_storage()._cdata in self.memory for t in written):
            self.noted(written, names)
            return written[0]
        result = func(*args, **kwargs)
        plain = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if any(not isinstance(x, torch.Tensor) for x in tree_leaves(result) if x is not None):
            raise ValueNeededError(names, func._schema.name.removeprefix("aten::"))
        self.carry([*plain, *written], names)
        return result


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    if not schema.is_mutable:
        return []
    by_place = [
        args[n] if n < len(args) else kwargs.get(a.name) for n, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    return [x for x in tree_leaves(by_place) if isinstance(x, torch.Tensor)]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _holds(wide: torch.dtype | None, narrow: torch.dtype) -> bool:
    """Whether each value of ``narrow`` is one of ``wide``."""
    if wide is None or wide == narrow:
        return True
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return bool(a.eps <= b.eps and a.max >= b.max and a.tiny <= b.tiny and a.smallest_normal * a.eps <= b.smallest_normal * b.eps)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
