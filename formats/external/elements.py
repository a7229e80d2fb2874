"""Elements of a box of a stored tensor, without torch: for checks that compare tensors, not for loading them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt.catalog import Extent, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import FormatError
from ckpt.layout.geometry import Box, box_to_flat
from ckpt.plan.overlap import overlapping_chunks

from .strided import gather, strides_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.io_backends.protocol import Backend

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ExtentSource(Protocol):
    """What has tensors and says where their bytes are: a catalog."""

    @property
    def backend(self) -> Backend: ...

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]: ...


def read_box(stored: ExtentSource, entry: TensorEntry, box: Box) -> npt.NDArray[Any]:
    """The elements of a box as unsigned integers of their size: equal bits are equal numbers.

    Of a chunk whose part of the box is contiguous only that part is read; others are read whole.
    """
    out = np.zeros(box.shape, _UNSIGNED.get(entry.dtype.itemsize, np.uint8))
    copies = overlapping_chunks(entry.grid, box)
    for copy, extent in zip(copies, stored.extents_of([(entry, c.chunk) for c in copies]), strict=True):
        part = copy.box.relative_to(copy.chunk_box.offset)
        flat = box_to_flat(copy.chunk_box.shape, part) if extent.codec is None else None
        if flat is None:
            elements = read_extent(stored.backend, entry.dtype.name, extent, copy.chunk_box.shape)[part.slices]
        else:
            size = entry.dtype.itemsize
            own = extent._replace(offset=extent.offset + flat[0] * size, length=(flat[1] - flat[0]) * size)
            elements = read_extent(stored.backend, entry.dtype.name, own, part.shape)
        out[copy.box.relative_to(box.offset).slices] = elements
    return out


def read_extent(backend: Backend, dtype: str, extent: Extent, shape: Sequence[int]) -> npt.NDArray[Any]:
    """The elements of one chunk of ``shape``, as :func:`read_box` gives them."""
    size = DTYPES[dtype].itemsize
    if size not in _UNSIGNED:
        raise FormatError(f"elements of {dtype} are not compared", where=backend.url)
    data: bytes | bytearray = backend.read(extent.path, extent.offset, extent.length)
    if extent.codec is not None:
        if strides_of(extent.codec) is None:
            raise FormatError(f"chunks that are coded ({extent.codec}) are not compared", where=backend.url, hint="load the tensor instead")
        coded, data = data, bytearray(math.prod(shape) * size)
        gather(extent.codec, memoryview(coded), memoryview(data), size)
    return np.frombuffer(data, _UNSIGNED[size]).reshape(shape)


def cast_bits(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any] | None:
    """The bits of float32 numbers in another dtype, rounded to nearest, ties to even; None for a dtype that is not known here."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype != "bfloat16":
        return None
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
