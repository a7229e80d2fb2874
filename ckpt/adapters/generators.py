"""Random number generators of Python, NumPy and PyTorch: their states as plain values and tensors, and new states made of old ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ckpt.errors import StateError

_TORCH_CPU_BYTES, _TORCH_CPU_WORDS = 5056, slice(24, 24 + 8 * 624)
"""torch's state of a generator on the CPU: its size, and where the 624 words of its Mersenne Twister lie, each in 8 bytes
(aten/src/ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplStateLegacy)."""


@runtime_checkable
class TorchLike(Protocol):
    """What a generator of one's own needs: the methods of ``torch.Generator``."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor, /) -> object: ...

    def manual_seed(self, seed: int, /) -> object: ...


class Stream(Protocol):
    """One generator. ``kind`` must be the same where its state is set."""

    @property
    def kind(self) -> str: ...

    def get(self) -> dict[str, Any]:
        """The state, as plain values and new tensors."""

    def set(self, state: Any) -> None:
        """Go on from a state."""

    def seed(self, entropy: int) -> None:
        """Begin anew from a number of 256 bits."""


class PythonStream:
    """A ``random.Random``, or the module ``random`` itself."""

    kind = "python"

    def __init__(self, generator: random.Random | ModuleType) -> None:
        self.generator = generator

    def get(self) -> dict[str, Any]:
        version, words, gauss = self.generator.getstate()
        return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}

    def set(self, state: Any) -> None:
        self.generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))

    def seed(self, entropy: int) -> None:
        self.generator.seed(entropy)


class LegacyStream:
    """A ``numpy.random.RandomState``, or the global one of ``numpy.random``."""

    def __init__(self, generator: np.random.RandomState | ModuleType) -> None:
        self.generator: Any = generator

    @property
    def kind(self) -> str:
        return f"numpy.RandomState({self.generator.get_state(legacy=False)['bit_generator']})"

    def get(self) -> dict[str, Any]:
        values: dict[str, Any] = _with_tensors(self.generator.get_state(legacy=False))
        return values

    def set(self, state: Any) -> None:
        self.generator.set_state(_with_arrays(state))

    def seed(self, entropy: int) -> None:
        name = self.generator.get_state(legacy=False)["bit_generator"]
        fresh = getattr(np.random, name)(np.random.SeedSequence(entropy)).state
        self.generator.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


class NumpyStream:
    """A ``numpy.random.Generator``."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    @property
    def kind(self) -> str:
        return f"numpy.{type(self.generator.bit_generator).__name__}"

    def get(self) -> dict[str, Any]:
        values: dict[str, Any] = _with_tensors(self.generator.bit_generator.state)
        return values

    def set(self, state: Any) -> None:
        self.generator.bit_generator.state = _with_arrays(state)

    def seed(self, entropy: int) -> None:
        bits = self.generator.bit_generator
        bits.state = type(bits)(np.random.SeedSequence(entropy)).state


class TorchStream:
    """A ``torch.Generator``, or what has its methods."""

    def __init__(self, generator: TorchLike) -> None:
        self.generator = generator

    @property
    def kind(self) -> str:
        device = getattr(self.generator, "device", None)
        return f"torch.{device.type}" if isinstance(device, torch.device) else type(self.generator).__name__

    def get(self) -> dict[str, Any]:
        return {"state": self.generator.get_state().clone()}

    def set(self, state: Any) -> None:
        self.generator.set_state(state["state"])

    def seed(self, entropy: int) -> None:
        self.generator.manual_seed(entropy % 2**63)
        state = self.generator.get_state()
        if self.kind == "torch.cpu" and state.numel() == _TORCH_CPU_BYTES:
            # torch takes 32 bits of a seed: of 10,000 ranks two would probably be equal. So the whole state is filled.
            words = np.random.MT19937(np.random.SeedSequence(entropy)).state["state"]["key"]
            state.numpy()[_TORCH_CPU_WORDS].view(np.uint64)[:] = words
            self.generator.set_state(state)


class CudaStream:
    """The generator of the current CUDA device, whichever that is when it is asked."""

    kind = "torch.cuda"

    def get(self) -> dict[str, Any]:
        return {"state": torch.cuda.get_rng_state().clone()}

    def set(self, state: Any) -> None:
        torch.cuda.set_rng_state(state["state"])

    def seed(self, entropy: int) -> None:
        torch.cuda.manual_seed(entropy % 2**63)


def stream_of(generator: object, name: str) -> Stream:
    """The stream of a generator."""
    if isinstance(generator, random.Random):
        return PythonStream(generator)
    if isinstance(generator, np.random.RandomState):
        return LegacyStream(generator)
    if isinstance(generator, np.random.Generator):
        return NumpyStream(generator)
    if isinstance(generator, TorchLike):
        return TorchStream(generator)
    raise StateError(
        f"not a random number generator: {type(generator).__name__}",
        where=name,
        hint="give a torch.Generator, numpy.random.Generator, random.Random, or an object with get_state, set_state and manual_seed",
    )


def standard_streams() -> dict[str, Stream]:
    """The global generators of this process: Python's, NumPy's, torch's on the CPU, and the current CUDA device's if CUDA is in use."""
    streams: dict[str, Stream] = {
        "python": PythonStream(random),
        "numpy": LegacyStream(np.random),
        "torch": TorchStream(torch.default_generator),
    }
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {**streams, "cuda": CudaStream()} if in_use else streams


def derived(state: object, *labels: object) -> int:
    """256 bits that depend on a stream's state and on labels, and on nothing else."""
    digest = hashlib.sha256(b"ckpt.rng 1")
    _feed(digest, [state, *labels])
    return int.from_bytes(digest.digest(), "little")


def _feed(into: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, Mapping):
        value = [[key, value[key]] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        into.update(b"[")
        for child in value:
            _feed(into, child)
        into.update(b"]")
    elif isinstance(value, np.ndarray):
        into.update(f"{value.dtype.name}{value.shape}".encode() + value.astype(value.dtype.newbyteorder("<")).tobytes())
    else:
        into.update(f"{value!r};".encode())


def _with_tensors(value: Any) -> Any:
    """Arrays as tensors of their own: they would be text in the checkpoint's index."""
    if isinstance(value, Mapping):
        return {key: _with_tensors(child) for key, child in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_arrays(child) for key, child in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
