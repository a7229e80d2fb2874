"""Boxes out of the bytes of chunks, into tensors of any strides, dtype and device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt.adapters.memory import RAW, raw_view, reads_otherwise
from ckpt.adapters.tensors import LocalTensor, torch_dtype
from ckpt.dtypes import DType
from ckpt.layout.geometry import Box, row_major_strides


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Bytes that begin ``start`` bytes into a chunk: the row-major ``box`` of elements of ``dtype``."""

    data: npt.NDArray[np.uint8]
    start: int
    box: Box
    dtype: DType


def copy_box(stored: Stored, box: Box, target: LocalTensor) -> None:
    """Copy ``box``, all of whose bytes are there, to where ``target`` has it, converting the dtype if it differs."""
    size = stored.dtype.itemsize
    strides = row_major_strides(stored.box.shape)
    element = sum((o - b) * s for o, b, s in zip(box.offset, stored.box.offset, strides, strict=True)) - stored.start // size
    if stored.dtype == target.info.dtype and (rows := _rows(box, target)) is not None:
        raw = rows.dtype
        np.copyto(rows, np.ndarray(box.shape, raw, stored.data, element * size, tuple(s * size for s in strides)))
        return
    memory = target.view(box)
    same = stored.dtype == target.info.dtype and not reads_otherwise(memory)
    data = stored.data[: len(stored.data) // size * size]
    if data.ctypes.data % size:
        data = data.copy()  # a file need not align its chunks
    typed = torch.from_numpy(data).view(RAW[size] if same else torch_dtype(stored.dtype))
    source = torch.as_strided(typed, box.shape, strides, element)
    (raw_view(memory) if same else memory).copy_(source)


def _rows(box: Box, target: LocalTensor) -> npt.NDArray[np.generic] | None:
    """The memory of ``box`` where numpy is to fill it: on the host, and in rows."""
    # It takes a fifth of the time that torch takes to see what is to do, of which there is much where others read in
    # small pieces; torch is faster where neighbours do not lie together.
    for part in target.parts:
        if part.box.contains(box):
            memory = part.memory
            if not memory.is_cpu or not memory.dim() or memory.stride(-1) != 1 or reads_otherwise(memory):
                return None
            array: npt.NDArray[np.generic] = raw_view(memory.detach()).numpy()
            return array if part.box.shape == box.shape else array[box.relative_to(part.box.offset).slices]
    return None
