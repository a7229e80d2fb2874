"""Elements of a box of a stored tensor, without torch: strided and flat ones, too. For checks that compare tensors, not for loading
them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt.catalog import Extent, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, FormatError
from ckpt.plan.layout.geometry import Box, box_to_flat, flat_to_boxes, row_major_strides
from ckpt.plan.reads import overlapping_chunks

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# Chunks whose elements are not in row-major order where they lie: a part of wider rows, or a transposed tensor in somebody else's file.
#
# They are told as a codec with parameters, ``strided:<shape>:<strides>``: element ``(i₀, i₁, …)`` starts ``Σ iⱼ·strides[j]`` bytes after
# the first, and decoding puts the elements in row-major order. It is never written to a data file of ours.

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


# From a range of a flat buffer to boxes of the tensors in it: what readers of Megatron's and DeepSpeed's states share.

# Optimizers that are divided over ranks keep all parameters of a kind one after another in one flat buffer, and each rank has a range of
# it. The ranges know nothing of tensors: they begin and end in the middle of rows.
#
#     buffer    |-------- A [3, 4] --------|--pad--|------ B [2, 3] ------|
#     ranks     |..... rank 0 .....|...... rank 1 ......|..... rank 2 .....|
#
# A catalog needs boxes. Where rank 0's range ends at element 7 of A, it has three of them at most (2·d − 1 for d dimensions): the rest of
# the row it begins in, whole rows, and the beginning of the row it ends in. They follow one another in the buffer, so that each begins
# where the elements of those before it end:
#
#     A   0  1  2  3      box [0:1, 0:4], 0 elements into the range
#         4  5  6| 7      box [1:2, 0:3], 4 elements into it
#         8  9 10 11
#
# What differs is where a parameter lies in the buffer: ``deepspeed/flat`` has ZeRO's rules, ``megatron/buffers`` those of
# Megatron's buckets.


def flat_pieces(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes of elements ``[start, stop)`` of the row-major flattening of ``shape``, in order, each with how many elements into that
    range it begins."""
    before = 0
    for box in flat_to_boxes(shape, start, stop):
        yield box, before
        before += box.numel
