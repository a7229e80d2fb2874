"""What stands for tensors of a checkpoint while a loader runs: it has their shapes, and knows which of their elements it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ckpt.errors import CkptError


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
            cls,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=device,
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
