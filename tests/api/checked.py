"""Saves that are read back by the oracle, and comparisons to the bit that use none of the package's code."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import ckpt
from tests.formats import oracle

SHM = "/dev/shm"

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype, shape, row-major bytes."""


def raw(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor, by numpy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype != torch.complex128:
        tensor = tensor.view(_PLAIN[tensor.element_size()])
    return np.asarray(tensor.cpu().numpy()).tobytes()


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor)


def pattern(dtype: torch.dtype, *shape: int, seed: int = 1) -> torch.Tensor:
    """A tensor of any dtype whose bytes depend on the seed; bools are 0 and 1, all else has any bits, NaNs too."""
    count = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8).view(dtype).reshape(shape)


def save(url: str, state: dict[str, Any], **options: Any) -> Stored:
    """Save, and give all that the oracle finds there. The data files are opened by safetensors too."""
    ckpt.save(url, state, **options)
    found = oracle.read(url)
    for path in data_files(url):
        with safe_open(path, framework="pt") as file:
            assert list(file.keys())
    return found


def save_exactly(url: str, state: dict[str, Any], expected: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Save, and see that exactly these tensors are stored, to the bit."""
    found = save(url, state, **options)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name] == described(tensor), name


@contextmanager
def empty_directory() -> Iterator[str]:
    """In memory where there is one: a disk takes its time for every fsync."""
    path = mkdtemp(prefix="ckpt-api-", dir=SHM if os.path.isdir(SHM) else None)
    try:
        yield path
    finally:
        while os.path.exists(path):  # a Checkpointer that is not closed may add to its log meanwhile
            shutil.rmtree(path, ignore_errors=True)


def data_files(url: str) -> list[Path]:
    """A checkpoint without tensors has none."""
    return sorted(Path(url, "data").glob("*"))


def files_below(url: str) -> dict[str, bytes]:
    """Every file of a directory, by relative path."""
    return {str(p.relative_to(url)): p.read_bytes() for p in sorted(Path(url).rglob("*")) if p.is_file()}


def same(a: object, b: object) -> bool:
    """Whether two nested values are equal, types, NaNs and signs of zeros included; tensors and arrays to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return described(a) == described(b)
    if isinstance(a, (np.ndarray, np.generic)) and isinstance(b, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(any(same(k, j) and same(v, b[j]) for j in b if j == k or j is k) for k, v in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, complex) and isinstance(b, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    return a == b


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dicts, lists and tuples, by path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors_in(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from tensors_in(child, f"{path}.{i}" if path else str(i))
