"""Bytes of tensors: views where the memory is contiguous and on the host, copies elsewhere. The element order is row-major, the
byte order little-endian."""

from __future__ import annotations

import torch

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype of each item size that every operation supports: bytes are moved as these, so exotic dtypes need no kernels."""


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major. No copy if it is contiguous and on the host."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        tensor = raw_view(tensor).contiguous().cpu()
    elif not tensor.is_contiguous():
        tensor = raw_view(tensor).contiguous()
    return _bytes_view(tensor)


def _bytes_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    # Not by ``reshape``: that keeps whatever stride a single element has.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def raw_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides under a plain dtype of the same item size. Not for views that conjugate or negate."""
    return tensor.view(RAW[tensor.element_size()])


def writable_bytes(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a tensor as bytes that can be read into, or None if it is not contiguous host memory that holds the values as they
    are."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0 or reads_otherwise(tensor):
        return None
    return _bytes_view(tensor)


def reads_otherwise(tensor: torch.Tensor) -> bool:
    """Whether it is a view that conjugates or negates what is in memory."""
    return tensor.is_conj() or tensor.is_neg()
