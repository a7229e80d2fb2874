"""Random number generators in a checkpoint: exact on the same layout, and by a rule on any other (docs/random-and-data.md).

Each rank has a stream, numbered over the mesh dimensions along which streams are distinct. On the layout that saved, a rank goes on with
its own states. On another one stream k goes on with the saved stream k, which all ranks of that number take; streams that the checkpoint
lacks are derived from saved ones.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from ckpt.errors import MismatchError, StateError, UsageError
from ckpt.plan import tree
from ckpt.plan.tree import Node
from ckpt.state.dtensor import MeshCoordinate, MeshLike, StateSharding, holders
from ckpt.state.walk import PerRank, RankChoice

# Random number generators of Python, NumPy and PyTorch: their states as plain values and tensors, and new states made of old ones.

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


__all__ = ["Generators"]

log = logging.getLogger("ckpt")

Origin: TypeAlias = Literal["own", "stream", "derived"]


class Generators(PerRank):
    """The states of this rank's random number generators, to be put into a state: ``{"rng": Generators(), …}``.

    They are read when a save is called, and set in place by a load.

    Args:
        generators: name → ``torch.Generator``, ``numpy.random.Generator``, ``numpy.random.RandomState``, ``random.Random``, or an object
            with ``get_state``, ``set_state`` and ``manual_seed`` such as torch's have. Left out: the global generators of Python, NumPy and
            torch on the CPU, and that of the current CUDA device if CUDA is in use.
        mesh: the parallel dimensions of all ranks of the job: a ``DeviceMesh``, a :class:`ckpt.Layout`, a :class:`ckpt.Mesh`, or names and
            sizes.
        distinct: the dimensions along which streams differ. Ranks that differ only in others hold the same stream. Without ``mesh`` and
            ``distinct`` every rank has its own stream.

    Raises:
        UsageError, LayoutError: the mesh has no such dimension.
        StateError: one of ``generators`` is none.

    Example::

        state["rng"] = Generators(mesh=mesh, distinct="dp")  # ranks of one tensor-parallel group drop the same elements
        state["tp_rng"] = Generators({"tp": generator}, mesh=mesh, distinct=("dp", "tp"))  # each rank drops others
    """

    def __init__(
        self, generators: Mapping[str, object] | None = None, *, mesh: MeshLike | None = None, distinct: str | Sequence[str] | None = None
    ) -> None:
        if generators is not None and not isinstance(generators, Mapping):
            raise UsageError(f"generators are a dict of them by name, not {generators!r}", hint='Generators({"tp": generator})')
        super().__init__(None)
        self._named = None if generators is None else {name: stream_of(g, name) for name, g in generators.items()}
        self._seating = StateSharding(mesh, distinct, "distinct")
        self.origin: Origin | None = None
        """Where the last load took the states from: what this rank saved itself (``"own"``), what was saved for its stream (``"stream"``),
        or a saved stream from which its own was derived (``"derived"``)."""

    def __repr__(self) -> str:
        return f"Generators({', '.join(self.streams())})"

    def streams(self) -> dict[str, Stream]:
        return standard_streams() if self._named is None else self._named

    def saved(self, rank: int, ranks: Sequence[int]) -> dict[str, Any]:
        """This rank's states as they are now."""
        streams = {name: {"kind": stream.kind, "state": stream.get()} for name, stream in self.streams().items()}
        return {"seat": self._seating.seat(rank, ranks).node(), "streams": streams}

    def choose(self, nodes: Mapping[int, Node], world_size: int, rank: int, ranks: Sequence[int]) -> RankChoice | None:
        """As :meth:`PerRank.choose`, by the rule that the module's docstring gives."""
        seat, position = self._seating.seat(rank, ranks), list(ranks).index(rank)
        origin: Origin
        if world_size == len(ranks) and position in nodes and MeshCoordinate.of(nodes[position]) == seat:
            source, origin = position, "own"
        else:
            count, holder_of = holders(nodes, "streams")
            if seat.number % count not in holder_of:
                raise MismatchError(f"of {count} streams, no rank saved the one with number {seat.number % count}")
            source, origin = holder_of[seat.number % count], "stream" if seat.number < count else "derived"
        # The checkpoint has exactly our generators, of the same kinds. Only CUDA may be there or not.
        saved = {name: tree.find(child, ["kind"]) for name, child in tree.pairs_of(tree.find(nodes[source], ["streams"])) or ()}
        mine = {name: stream.kind for name, stream in self.streams().items()}
        if self._named is None:
            saved.pop("cuda", None)
            mine.pop("cuda", None)
        wrong = [n for n in sorted({*saved, *mine}) if saved.get(n) != mine.get(n)]
        if wrong:
            differences = (f"{n}: {saved.get(n, 'none')} in the checkpoint, {mine.get(n, 'none')} in the state" for n in wrong)
            raise MismatchError(f"other random number generators: {'; '.join(differences)}")
        return RankChoice(ranks=[source], take=partial(self._take, source, origin, seat.number))

    def _take(self, source: int, origin: Origin, number: int, values: list[Any]) -> None:
        states = {name: stream["state"] for name, stream in values[0]["streams"].items()}
        streams = self._ready(states)
        for name, stream in streams.items():
            if origin == "derived" or name not in states:
                stream.seed(derived(states.get(name, states.get("torch")), name, number))
            else:
                stream.set(states[name])
        self.origin = origin
        if origin == "derived":
            log.warning("random stream %d was not saved: derived from that of rank %d (%s)", number, source, ", ".join(streams))

    def _ready(self, states: Mapping[str, object]) -> dict[str, Stream]:
        """The streams to set. That of a CUDA device comes and goes with the machine."""
        streams = dict(self.streams())
        if self._named is None and "cuda" in states and "cuda" not in streams:
            if torch.cuda.is_available():
                streams["cuda"] = CudaStream()
            else:
                log.warning("the checkpoint has the state of a CUDA generator, and there is no CUDA here: left out")
        elif self._named is None and "cuda" in streams and "cuda" not in states:
            log.warning("the checkpoint has no state of a CUDA generator: derived from that of torch on the CPU")
        return streams
