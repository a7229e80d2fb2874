"""Boxes out of the bytes of chunks, into tensors of any strides, dtype and device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt.adapters.memory import RAW, raw_view, reads_otherwise
from ckpt.adapters.tensors import LocalTensor, torch_dtype
from ckpt.dtypes import DType
from ckpt.geometry import Box, row_major_strides


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
    memory = target.view(box)
    same = stored.dtype == target.info.dtype and not reads_otherwise(memory)
    data = stored.data[: len(stored.data) // size * size]
    if data.ctypes.data % size:
        data = data.copy()  # a file need not align its chunks
    typed = torch.from_numpy(data).view(RAW[size] if same else torch_dtype(stored.dtype))
    source = torch.as_strided(typed, box.shape, strides, element)
    (raw_view(memory) if same else memory).copy_(source)
