"""Boxes of stored tensors as numpy arrays, whatever format and codec they are in; and their values as numbers. No torch.

Memory: a box, and for each thread one chunk of at most 64 MiB if it is coded.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.byte_source.chunk import ChunkName
from ckpt.byte_source.digest_reader import DigestReader
from ckpt.byte_source.storage import source_of
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.dtypes import DType
from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.layout.geometry import Box, row_major_strides
from ckpt.plan.overlap import Copy, overlapping_chunks
from ckpt.plan.reads import parts_of
from ckpt.plan.views import LogicalTensor
from ckpt.settings import limits

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
        self._reader = DigestReader(source_of(catalog), "off")
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
                self._plain(copy, extent, box, out)
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

    def _plain(self, copy: Copy, extent: Extent, box: Box, out: Raw) -> None:
        size = out.dtype.itemsize
        strides = row_major_strides(copy.chunk_box.shape)
        for part in parts_of(0, copy, extent, size, whole_chunks=False, max_gap=limits.GAP):
            target = out[slices_of(part.box, box)]
            if target.flags.c_contiguous and target.nbytes == part.length:
                self.catalog.backend.read_into(part.path, part.offset, target.reshape(-1).view(np.uint8).data)
                continue
            data = np.empty(part.length, dtype=np.uint8)
            self.catalog.backend.read_into(part.path, part.offset, data.data)
            first = sum((o - b) * s for o, b, s in zip(part.box.offset, copy.chunk_box.offset, strides, strict=True))
            at = first * size - (part.offset - extent.offset)
            target[...] = np.ndarray(part.box.shape, out.dtype, data.data, at, [s * size for s in strides])

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
