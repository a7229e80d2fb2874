"""Optional parts of a save, of which ``save.py`` and the leader enter nothing where they are not asked for.

asked for           what becomes of a chunk                                              told to the leader
``base, reusable``  refer to a base that has it, or store the difference (``reuse.py``)  before: the base; after: references
``placement``       write what another rank owns, too                                    before: how; after: these files
``only, trainable`` leave it out                                                         before: globs that match nothing
``check_replicas``  compare it with what other ranks have (``replicas.py``)              after: digests
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt.errors import NamesError, ReplicaError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan.copies import MirrorPlacement
from ckpt.plan.values import StatePart
from ckpt.state.collect import Collected

from .writer import RankWriter

_GLOBS = "names are paths in the state, such as model.layers.0.lora_A.weight and optimizer.state.<parameter>.exp_avg; * matches dots too"


class Extension:
    """One optional part of one rank's save, called in this order."""

    def begin(self, row: Row) -> None:
        """Add to what the leader hears before any file is written; ``row["options"]`` is a text that must be equal on all ranks."""

    def equip(self, writer: RankWriter) -> None:
        """Give the writer what it needs for this."""

    def written(self, row: Row, writer: RankWriter) -> None:
        """Add to what the leader hears when this rank's files are durable."""

    def committed(self, writer: RankWriter) -> None:
        """The checkpoint is there."""


@dataclass(frozen=True, eq=False)
class PartOnly(Extension):
    """A part of the state is saved: ``collected``, of which the walk has left out the rest."""

    part: StatePart
    collected: Collected

    def begin(self, row: Row) -> None:
        row["options"] += f" {self.part.text()}"
        row["idle"] = self.collected.idle
        row["nothing_trained"] = self.part.trainable and not self.collected.trains


def check_part(call: Call, rows: Iterable[Row]) -> None:
    """Raise NamesError unless the part has something on some rank."""
    rows = list(rows)
    idle = set.intersection(*(set(row["idle"]) for row in rows))
    if idle:
        globs = ", ".join(map(repr, sorted(idle)))
        raise NamesError(f"only= has globs that no name of the state matches: {globs}", where=call.url, hint=_GLOBS)
    if all(row["nothing_trained"] for row in rows):
        text = "trainable=True leaves nothing that is trained: no parameter of the state requires a gradient"
        hint = "put the module itself into the state, not its state_dict(), and set requires_grad of what you train; or leave it out"
        raise NamesError(text, where=call.url, hint=hint)


@dataclass(frozen=True, eq=False)
class Mirrors(Extension):
    """This rank writes files of other ranks, too: the last ``count`` of its own list."""

    placement: MirrorPlacement
    count: int

    def begin(self, row: Row) -> None:
        row["options"] += f" mirrors={self.placement.text}"

    def written(self, row: Row, writer: RankWriter) -> None:
        own = len(row["files"]) - self.count
        row["files"], row["mirrored"] = row["files"][:own], row["files"][own:]


def compare_mirrors(call: Call, rows: Mapping[int, Row]) -> None:
    """Raise ReplicaError if a file that several ranks have written is not the same everywhere. Headers have the digests of all chunks, so
    theirs speak for all bytes."""
    files = {path: (rank, rest) for rank, row in rows.items() for path, *rest in row["files"]}
    for rank, row in rows.items():
        for path, *rest in row.get("mirrored", ()):
            owner, expected = files.get(path, (None, None))
            if rest != expected:
                whose = "no rank" if owner is None else f"rank {owner}"
                raise ReplicaError(
                    f"{path}, written on rank {rank} as a second copy, is not the file of {whose}",
                    where=call.url,
                    hint="memory of one of them has changed during the save; save again, and look at the memory of these machines",
                )
