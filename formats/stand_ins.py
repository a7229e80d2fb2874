"""What stands in a read pickle for everything that is not plain data. Inert: none of them does anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from ckpt.dtypes import DTYPES


class GlobalName(NamedTuple):
    """The name of a class, function or constant. It is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """A reference to something that the pickle keeps elsewhere: in ``torch.save`` archives, a storage."""

    id: Any


@dataclass(eq=False, slots=True)
class Made:
    """What a call would have made: ``of`` called with ``args`` and ``kwargs``, then given a ``state``, ``items`` and ``pairs``.

    Two of them are equal only if they are the same one.
    """

    of: Any
    args: Any = ()
    kwargs: Any = None
    state: Any = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None

    @property
    def name(self) -> str:
        """What was called, as ``module.name``; empty if that has no name itself."""
        return str(self.of) if isinstance(self.of, GlobalName) else ""

    def attributes(self) -> dict[str, Any]:
        """The attributes that an object of a plain class would have; those in slots count too."""
        states = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        attributes: dict[str, Any] = {}
        for state in states:
            if isinstance(state, dict):
                attributes.update((k, v) for k, v in state.items() if isinstance(k, str))
        return attributes


_QUICK_KEYS = frozenset({str, float, bool, bytes, type(None), GlobalName, Made})
"""Kinds of value that are quickly hashed, and of which nobody can make many with one hash."""
_PLAIN_KEYS = _QUICK_KEYS | {int, complex}
_MAX_KEY_PARTS = 1000
_MAX_ALIKE = 64
"""Different keys of one pickle that have the same hash; each is compared with all others."""
_FIRST_ALIKE = (1 << 61) - 1
"""Whole numbers from here on have the hashes of smaller ones."""


class Keys:
    """Tells which values of one pickle may be keys: those that are hashed and told apart quickly."""

    def __init__(self) -> None:
        self._alike: dict[int, set[Any]] = {}

    def allow(self, value: Any) -> bool:
        """Whether it may be a key, after all that were asked for before."""
        kind = type(value)
        if kind in _QUICK_KEYS or (kind is int and abs(value) < _FIRST_ALIKE):
            return True
        if not _is_hashed_quickly(value):
            return False
        alike = self._alike.setdefault(hash(value), set())
        alike.add(value)
        return len(alike) <= _MAX_ALIKE


def _is_hashed_quickly(value: Any) -> bool:
    """Hashing walks tuples as often as they are contained, without a limit to their depth."""
    waiting, parts = [value], 0
    while waiting:
        part = waiting.pop()
        parts += 1
        if parts > _MAX_KEY_PARTS:
            return False
        if type(part) in (tuple, frozenset):
            waiting += part
        elif type(part) not in _PLAIN_KEYS:
            return False
    return True


# What a pickle says of tensors, as values: storages, views of them, parts of sharded ones; and the checks of shapes. Pure.

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
        raise ValueError(f"a {type(value).__name__} that is not a count")
    return value


def counts(value: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets: whole numbers that are not negative. A tuple, a list or a ``torch.Size``."""
    if type(value) is Made and value.name == "torch.Size":
        (value,) = value.args
    if type(value) not in (tuple, list, Size):
        raise ValueError(f"a {type(value).__name__} that is not a list of counts")
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
