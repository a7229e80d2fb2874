"""Boxes of stored tensors as numpy arrays, whatever format and codec they are in; and their values as numbers. No torch.

Memory: a box, and for each thread one chunk of at most 64 MiB if it is coded.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.dtypes import DType
from ckpt.engine.digest_reader import ChunkName, DigestReader
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.plan.layout.geometry import Box, row_major_strides
from ckpt.plan.reads import Copy, overlapping_chunks, parts_of
from ckpt.plan.views import LogicalTensor

Raw = npt.NDArray[Any]
"""Elements as bits: unsigned integers of their size, or 16 bytes."""

_RAW: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8"), 16: np.dtype("V16")}
_FLOAT8 = {"float8_e4m3fn": (4, 3, 7), "float8_e5m2": (5, 2, 15), "float8_e4m3fnuz": (4, 3, 8), "float8_e5m2fnuz": (5, 2, 16)}
"""Bits of exponent and mantissa, and bias."""


def raw_dtype(kind: DType) -> np.dtype[Any]:
    """The dtype of the bits of such elements."""
    return _RAW[kind.itemsize]


class Elements:
    """Reads boxes of one catalog. Bytes are not compared with digests: that is what ``ckpt verify`` does. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._coded = threading.local()
        self._reader = DigestReader(catalog.backend, "off")
        self._tiled: set[tuple[int, tuple[int, ...]]] = set()

    def of_view(self, view: LogicalTensor, box: Box) -> Raw:
        """A box of a logical tensor; what no stored tensor has is zero."""
        first = self.catalog.tensors[view.pieces[0].source] if view.pieces else None
        out: Raw = np.zeros(box.shape, _RAW[first.dtype.itemsize if first is not None else 1])
        for piece in view.overlapping(box):
            entry = self.catalog.tensors[piece.source]
            if first is not None and entry.dtype != first.dtype:
                message = (
                    f"{first.name} and {entry.name} would make one tensor, and have the dtypes {first.dtype.name} and {entry.dtype.name}"
                )
                raise UsageError(message, where=self.catalog.url, hint="convert with one dtype, and compare the result")
            stored = self.of_tensor(entry, piece.part)
            kept = [axis for axis in piece.axes if axis is not None]
            left = [axis for axis in range(stored.ndim) if axis not in kept]
            out[slices_of(piece.box, box)] = stored.transpose([*left, *kept]).reshape(piece.box.shape)
        return out

    def of_tensor(self, entry: TensorEntry, box: Box) -> Raw:
        """A box of a stored tensor."""
        self._check_tiling(entry)
        out: Raw = np.empty(box.shape, _RAW[entry.dtype.itemsize])
        copies = overlapping_chunks(entry.grid, box)
        for copy, extent in zip(copies, self.catalog.extents(entry, [c.chunk for c in copies]), strict=True):
            if extent.codec is None:
                size = out.dtype.itemsize
                strides = row_major_strides(copy.chunk_box.shape)
                for part in parts_of(0, copy, extent, size, whole_chunks=False, max_gap=settings.GAP):
                    target = out[slices_of(part.box, box)]
                    if target.flags.c_contiguous and target.nbytes == part.length:
                        self.catalog.backend.read_into(part.path, part.offset, target.reshape(-1).view(np.uint8).data)
                        continue
                    data = np.empty(part.length, dtype=np.uint8)
                    self.catalog.backend.read_into(part.path, part.offset, data.data)
                    first = sum((o - b) * s for o, b, s in zip(part.box.offset, copy.chunk_box.offset, strides, strict=True))
                    at = first * size - (part.offset - extent.offset)
                    target[...] = np.ndarray(part.box.shape, out.dtype, data.data, at, [s * size for s in strides])
            else:
                chunk = self._decoded(entry, copy, extent, out.dtype)
                out[slices_of(copy.box, box)] = chunk[slices_of(copy.box, copy.chunk_box)]
        return out

    def _check_tiling(self, entry: TensorEntry) -> None:
        """Raise CorruptError if some elements are in no chunk, or in several: these would be whatever was in memory before."""
        key = (id(entry.grid), entry.shape)
        if key in self._tiled:
            return
        fault = entry.grid.fault(entry.shape)
        if fault is not None:
            message = f"{fault.times} stored chunks have {fault.box} of tensor {entry.name}, not one"
            raise CorruptError(message, where=self.catalog.url, hint="run `ckpt verify` to see what else is damaged")
        self._tiled.add(key)

    def _decoded(self, entry: TensorEntry, copy: Copy, extent: Extent, kind: np.dtype[Any]) -> Raw:
        latest: tuple[Extent, Raw] | None = getattr(self._coded, "chunk", None)
        if latest is not None and latest[0] == extent:
            return latest[1]
        blob = np.empty(extent.length, dtype=np.uint8)
        self.catalog.backend.read_into(extent.path, extent.offset, blob.data)
        decoded: Raw = np.empty(copy.chunk_box.shape, kind)
        self._reader.decode(
            ChunkName(entry.name, copy.chunk_box, extent), blob.data, decoded.reshape(-1).view(np.uint8).data, kind.itemsize
        )
        self._coded.chunk = (extent, decoded)
        return decoded


def slices_of(inner: Box, outer: Box) -> tuple[Any, ...]:
    """The index of one box in another; it ends in dots, which make it a view of a single element too."""
    return (*(slice(a - o, a - o + n) for a, n, o in zip(inner.offset, inner.shape, outer.offset, strict=True)), ...)


def numbers(raw: Raw, kind: DType) -> npt.NDArray[Any]:
    """Elements as numbers that numpy computes with: floats of 64 bits, complex ones of 128, integers as they are."""
    if kind.name in _FLOAT8 or kind.name == "float8_e8m0fnu":
        return np.asarray(_float8(kind.name)[raw])
    if kind.name == "bfloat16":
        widened: Raw = (raw.astype(np.uint32) << 16).view(np.float32)
    elif kind.name == "complex32":
        widened = raw[..., None].view(np.float16)
    elif kind.numpy is not None:
        widened = raw.view(np.dtype(kind.numpy).newbyteorder("<"))
    else:
        raise FormatError(f"elements of {kind.name} are not numbers by themselves")
    wide = {"f": np.float64, "c": np.complex128, "b": np.int64}.get(widened.dtype.kind)
    with np.errstate(invalid="ignore"):  # NaNs that signal
        widened = widened if wide is None else widened.astype(wide)
    if kind.name != "complex32":
        return widened
    made = np.empty(raw.shape, np.complex128)  # not a + bj: infinity times 1j is not a number
    made.real, made.imag = widened[..., 0], widened[..., 1]
    return made


def _float8(name: str) -> npt.NDArray[np.float64]:
    """The value of each byte. (Source: the OCP 8-bit floating point specification 1.0, and for ``fnuz`` arXiv 2206.02915.)"""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.asarray(np.where(codes == 255, np.nan, np.exp2(codes - 127.0)))
    exponent_bits, mantissa_bits, bias = _FLOAT8[name]
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, mantissa * np.exp2(1.0 - bias), (1 + mantissa) * np.exp2(exponent - float(bias)))
    values: npt.NDArray[np.float64] = np.where(codes < 128, size, -size)
    if name.endswith("fnuz"):
        values[128] = np.nan
    elif name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] > 0, np.nan, np.where(codes[top] < 128, np.inf, -np.inf))
    return values


# How the elements of two tensors differ: counts, largest differences, the first place. Pure arithmetic with numpy; no torch.

# Two numbers are equal if they compare equal or both are NaN; of complex numbers, both parts. Everything else is measured:
#
#     finite, finite                      |a − b|, as a float of 64 bits; exact for integers of one kind up to 2⁵³ apart
#     NaN or infinite, and another        infinite: no tolerance covers it
#
# A pair is a difference if |a − b| > absolute + relative · max(|a|, |b|). Tensors are compared window by window, and windows block by
# block: results of parts are joined by adding counts and taking the largest and the first, in any order.


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
            self.elements + other.elements, max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel), min(firsts, default=None)
        )


def differing(left: Raw, right: Raw, kinds: tuple[DType, DType], tolerance: Tolerance, box: Box) -> ElementDifferences:
    """What differs between the elements of ``box`` on both sides."""
    if kinds[0] == kinds[1] and kinds[0].name == "float4_e2m1fn_x2":  # two values in an element: bits are all there is to compare
        odd = np.nonzero(np.atleast_1d(left != right))
        return ElementDifferences(len(odd[0]), np.inf, np.inf, tuple(o + int(w[0]) for o, w in zip(box.offset, odd, strict=False)))
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
