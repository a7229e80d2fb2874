"""States whose every byte follows from a number, so that a mixture of two saves, or half of one, cannot pass for either."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ckpt
from ckpt.io_backends.registry import open_backend

_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "model.w": (torch.float32, (40, 8)),
    "model.rows": (torch.int32, (12, 5)),
    "model.norm": (torch.bfloat16, (17,)),
    "model.ids": (torch.int64, (5, 1, 3)),
    "model.mask": (torch.uint8, (1000,)),
    "optimizer.exp_avg": (torch.float64, (7, 3)),
    "optimizer.scalar": (torch.int32, ()),
    "optimizer.none": (torch.float32, (0, 3)),
}


def raw(number: int) -> dict[str, npt.NDArray[np.uint8]]:
    """The bytes of each tensor of state ``number``, by name."""
    random = np.random.default_rng(number)
    return {n: random.integers(0, 256, int(np.prod(s)) * d.itemsize, dtype=np.uint8) for n, (d, s) in _SHAPES.items()}


def _nested(tensors: dict[str, torch.Tensor], number: int | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "step": number, "note": f"state {number}", "history": [number, (number, "x")]}
    for name, tensor in tensors.items():
        group, _, key = name.partition(".")
        state[group][key] = tensor
    return state


def state(number: int, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """State ``number`` as rank ``rank`` of ``size`` has it: tensors of different dtypes and shapes, of which ``model.rows`` is sharded, and
    values that are not tensors."""
    data = raw(number)
    tensors = {n: _tensor(data[n], d, s) for n, (d, s) in _SHAPES.items()}
    tensors["model.rows"] = tensors["model.rows"].chunk(size)[rank]
    return _nested(tensors, number)


def layout(size: int) -> ckpt.Layout:
    """How the states of ``size`` ranks lie."""
    return ckpt.Layout({"dp": size}, rules=[("model.rows", ckpt.Shard(0, "dp")), ("*", ckpt.Replicate())])


def _tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if data.size:
        made.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    return made


def blank() -> dict[str, Any]:
    """A state to load into; no tensor of it has a byte of any ``state``."""
    return _nested({n: torch.zeros(s, dtype=d) for n, (d, s) in _SHAPES.items()}, None)


def number_of(loaded: dict[str, Any]) -> int:
    """The number of a loaded state. AssertionError unless all of it, to the bit, is ``state(number)``."""
    number = loaded["step"]
    assert loaded["note"] == f"state {number}" and loaded["history"] == [number, (number, "x")], loaded
    for name, data in raw(number).items():
        group, _, key = name.partition(".")
        assert _bytes(loaded[group][key]) == data.tobytes(), f"{name} is not that of state {number}"
    return int(number)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def stored(url: str, **options: Any) -> int:
    """The number of the state that is saved at ``url``, all bytes compared."""
    target = blank()
    ckpt.load(url, target, **options)
    return number_of(target)


def copy(url: str, to: str) -> None:
    """As a save to ``to`` would leave it, in a fraction of the time."""
    source, target = open_backend(url), open_backend(to)
    target.prepare()
    for entry in source.list_prefix():
        target.put_if(entry.path, source.read(entry.path), expected=None)
