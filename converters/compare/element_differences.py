"""How the elements of two tensors differ: counts, largest differences, the first place. Pure arithmetic with numpy; no torch."""

# Two numbers are equal if they compare equal or both are NaN; of complex numbers, both parts. Everything else is measured:
#
#     finite, finite                      |a − b|, as a float of 64 bits; exact for integers of one kind up to 2⁵³ apart
#     NaN or infinite, and another        infinite: no tolerance covers it
#
# A pair is a difference if |a − b| > absolute + relative · max(|a|, |b|). Tensors are compared window by window, and windows block by
# block: results of parts are joined by adding counts and taking the largest and the first, in any order.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.dtypes import DType
from ckpt.errors import UsageError
from ckpt.layout.geometry import Box

from .elements import Raw, numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Elements of tensors that fit ``glob`` may differ by ``absolute + relative · max(|a|, |b|)``."""

    glob: str
    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.absolute < np.inf and 0 <= self.relative < np.inf):
            raise UsageError(f"a tolerance of {self.absolute} and {self.relative} is none", hint="numbers from 0 up")


@dataclass(frozen=True, slots=True)
class ElementDifferences:
    """How elements of one tensor differ: of one window, or of all so far."""

    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[int, ...] | None = None

    def joined(self, other: ElementDifferences) -> ElementDifferences:
        firsts = [f for f in (self.first, other.first) if f is not None]
        return ElementDifferences(
            self.elements + other.elements,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            min(firsts, default=None),
        )


def differing(left: Raw, right: Raw, kinds: tuple[DType, DType], tolerance: Tolerance, box: Box) -> ElementDifferences:
    """What differs between the elements of ``box`` on both sides."""
    if kinds[0] == kinds[1] and kinds[0].name == "float4_e2m1fn_x2":  # two values in an element: bits are all there is to compare
        return _bits(left, right, box)
    a, b = numbers(left, kinds[0]), numbers(right, kinds[1])
    with np.errstate(all="ignore"):
        same = _equal(a, b)
        where = np.nonzero(np.atleast_1d(~same))
        if not len(where[0]):
            return ElementDifferences()
        a, b = np.atleast_1d(a)[where], np.atleast_1d(b)[where]
        apart = _apart(a, b)
        larger = np.maximum(_size(a), _size(b))
        relative = np.where(np.isfinite(apart), apart / larger, np.inf)
        outside = ~(np.isfinite(apart) & (apart <= tolerance.absolute + tolerance.relative * np.where(np.isfinite(larger), larger, 0.0)))
    if not outside.any():
        return ElementDifferences()
    index = int(np.argmax(outside))
    first = tuple(o + int(w[index]) for o, w in zip(box.offset, where, strict=False)) if box.shape else ()
    return ElementDifferences(int(outside.sum()), float(apart.max()), float(relative.max()), first)


def _equal(a: Any, b: Any) -> Any:
    """Where numbers are equal, NaNs too; of complex ones both parts."""
    if "c" in (a.dtype.kind, b.dtype.kind):
        return _equal(a.real, b.real) & _equal(a.imag, b.imag)
    return (a == b) | ((a != a) & (b != b))


def _apart(a: Any, b: Any) -> Any:
    """|a − b| as floats, exact for integers of one kind up to 2⁵³ apart; infinite where one of both is not finite."""
    if a.dtype.kind in "iu" and a.dtype == b.dtype:
        high, low = np.maximum(a, b), np.minimum(a, b)
        return (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
    apart = np.abs(a.astype(np.complex128) - b) if "c" in (a.dtype.kind, b.dtype.kind) else np.abs(a.astype(np.float64) - b)
    return np.where(np.isnan(apart), np.inf, apart)


def _size(a: Any) -> Any:
    """|a| as floats: that of the most negative integer has no integer."""
    return np.abs(a.astype(np.float64) if a.dtype.kind in "iu" else a)


def have_same_bits(left: Raw, right: Raw) -> bool:
    """Whether elements are the same, NaNs and signs of zeros too: cheaper than ``differing``, which is not asked then."""
    return np.array_equal(left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8))


def _bits(left: Raw, right: Raw, box: Box) -> ElementDifferences:
    where = np.nonzero(np.atleast_1d(left != right))
    first = tuple(o + int(w[0]) for o, w in zip(box.offset, where, strict=False))
    return ElementDifferences(len(where[0]), float("inf"), float("inf"), first)
