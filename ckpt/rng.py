"""Random number generators in a checkpoint: exact on the same layout, and by a rule on any other (docs/random-and-data.md).

Each rank has a stream, numbered over the mesh dimensions along which streams are distinct. On the layout that saved, a rank goes on with
its own states. On another one stream k goes on with the saved stream k, which all ranks of that number take; streams that the checkpoint
lacks are derived from saved ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from . import tree
from .adapters.generators import CudaStream, Stream, derived, standard_streams, stream_of
from .adapters.mesh_coordinate import MeshCoordinate, MeshLike, StateSharding, holders
from .adapters.per_rank import PerRank, RankChoice
from .errors import ShapeError, UsageError
from .tree import Node

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
            ``distinct`` every rank has a stream of its own.

    Raises:
        UsageError, LayoutError: the mesh has no such dimension.
        StateError: one of ``generators`` is none.

    Example::

        state["rng"] = Generators(mesh=mesh, distinct="dp")  # ranks of one tensor-parallel group drop the same elements
        state["tp_rng"] = Generators({"tp": generator}, mesh=mesh, distinct=("dp", "tp"))  # each rank drops others
    """

    def __init__(
        self,
        generators: Mapping[str, object] | None = None,
        *,
        mesh: MeshLike | None = None,
        distinct: str | Sequence[str] | None = None,
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
                raise ShapeError(f"of {count} streams, no rank saved the one with number {seat.number % count}")
            source, origin = holder_of[seat.number % count], "stream" if seat.number < count else "derived"
        self._check(nodes[source])
        return RankChoice(ranks=[source], take=partial(self._take, source, origin, seat.number))

    def _check(self, node: Node) -> None:
        """Raise ShapeError unless the checkpoint has exactly our generators, of the same kinds. Only CUDA may be there or not."""
        saved = {name: tree.find(child, ["kind"]) for name, child in tree.pairs_of(tree.find(node, ["streams"])) or ()}
        mine = {name: stream.kind for name, stream in self.streams().items()}
        if self._named is None:
            saved.pop("cuda", None)
            mine.pop("cuda", None)
        wrong = [n for n in sorted({*saved, *mine}) if saved.get(n) != mine.get(n)]
        if wrong:
            differences = (f"{n}: {saved.get(n, 'none')} in the checkpoint, {mine.get(n, 'none')} in the state" for n in wrong)
            raise ShapeError(f"other random number generators: {'; '.join(differences)}")

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
