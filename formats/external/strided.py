"""Chunks whose elements are not in row-major order where they lie: a part of wider rows, or a transposed tensor in somebody else's file.

They are told as a codec with parameters, ``strided:<shape>:<strides>``: element ``(i₀, i₁, …)`` starts ``Σ iⱼ·strides[j]`` bytes after the
first, and decoding puts the elements in row-major order. It is never written to a data file of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt.errors import CorruptError
from ckpt.layout.geometry import row_major_strides

PREFIX = "strided:"


def strided(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> str | None:
    """The codec of a chunk of ``shape`` whose elements of ``itemsize`` bytes lie ``strides`` bytes apart; None if it needs none."""
    needed = [s for n, s in zip(shape, strides, strict=True) if n > 1]
    natural = [s * itemsize for n, s in zip(shape, row_major_strides(shape), strict=True) if n > 1]
    return None if needed == natural else f"{PREFIX}{_text(shape)}:{_text(strides)}"


def strides_of(codec: str | None) -> tuple[int, ...] | None:
    """The strides that a codec of :func:`strided` says; None for others."""
    return _numbers(codec.rpartition(":")[2]) if codec is not None and codec.startswith(PREFIX) else None


def reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; −1 if the two do not fit each other."""
    if len(strides) != len(shape) or any(s < 0 for s in strides):
        return -1
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize if all(shape) else 0


def gather(codec: str, stored: memoryview, out: memoryview, itemsize: int) -> None:
    """Put the elements in row-major order into ``out``."""
    shape, strides = (_numbers(part) for part in codec.removeprefix(PREFIX).split(":"))
    if reach(shape, strides, itemsize) != len(stored) or int(np.prod(shape, dtype=np.int64)) * itemsize != len(out):
        raise CorruptError(f"{len(stored)} bytes are not a chunk that is {codec}", hint="import the checkpoint again")
    kind = np.dtype((np.void, itemsize))
    elements = np.ndarray(shape, kind, buffer=stored, strides=strides)
    np.copyto(np.ndarray(shape, kind, buffer=out), elements)


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
