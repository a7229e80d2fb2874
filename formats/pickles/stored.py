"""What a pickle says of tensors, as values: storages, views of them, parts of sharded ones; and the checks of shapes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from ckpt.dtypes import DTYPES

from .stand_ins import Made

_MAX_BYTES = 1 << 62
"""Bytes of a tensor: no more than what the arithmetic of 64 bits can say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStorage:
    """A storage of a ``torch.save`` archive: ``key`` names its record, ``nbytes`` is its size; ``dtype`` is None if it is untyped."""

    key: str
    dtype: str | None
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredView:
    """A tensor as ``torch.save`` writes it: a view of a storage. ``offset`` and ``strides`` in elements.

    ``lazy`` names what has still to be done to its elements (``conj``, ``neg``); None if nothing has.
    """

    storage: StoredStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """One rank's part of a tensor of ``shape``: boxes (offset and view of each) of a ShardedTensor or DTensor."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], StoredView], ...]


class Size(tuple[int, ...]):
    """A ``torch.Size``."""


class Device(NamedTuple):
    """A ``torch.device``, as text."""

    text: str


class Array(NamedTuple):
    """A numpy array, or a scalar of numpy if ``shape`` is None: the name of its dtype and its bytes, row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...] | None
    data: bytes


class Meanings(Protocol):
    """What gives meaning to the stand-ins of one pickle (``values.Values``), for those that need the meaning of what is inside theirs."""

    def meaning(self, value: Any) -> Any: ...

    def dtype_name(self, value: Any) -> str: ...

    def damaged(self, what: str, cause: BaseException | None = None) -> NoReturn: ...

    def refuse(self, what: str) -> NoReturn: ...


def count_of(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_BYTES:
        raise ValueError(f"a {type(value).__name__} that is no count")
    return value


def counts(value: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets: whole numbers that are not negative. A tuple, a list or a ``torch.Size``."""
    if type(value) is Made and value.name == "torch.Size":
        (value,) = value.args
    if type(value) not in (tuple, list, Size):
        raise ValueError(f"a {type(value).__name__} that is no list of counts")
    if len(value) > 64:
        raise ValueError(f"{len(value)} dimensions")
    for n in value:
        if type(n) is not int or not 0 <= n < _MAX_BYTES:
            count_of(n)
    return tuple(value)


def shape_of(value: Any, itemsize: int) -> tuple[int, ...]:
    """A shape whose elements of ``itemsize`` bytes could be stored."""
    shape = counts(value)
    if math.prod(shape) * itemsize >= _MAX_BYTES:
        raise ValueError("more elements than can be")
    return shape
