"""What a save is asked for, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from ckpt import settings, units
from ckpt.errors import NamesError, ReplicaError, UsageError
from ckpt.formats.native.codecs import WITHOUT_ANCHOR, check_choice
from ckpt.formats.native.commit import Branches
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Job
from ckpt.plan.layout.layout import Layout
from ckpt.plan.values import StatePart
from ckpt.settings import check_flags
from ckpt.state.collect import Collected
from ckpt.telemetry.progress import ProgressCallback

from .base import SaveBase
from .writer import RankWriter

if TYPE_CHECKING:
    from ckpt.plan.copies import MirrorPlacement
    from ckpt.policies.save import TrustFrozen


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save did, or with ``dry_run`` would do. ``tensor_bytes`` is the whole checkpoint's, ``rank_bytes`` what this rank wrote
    (headers included) in ``requests`` writes, which storage may split, to ``files`` files; ``sent_bytes`` what it sent to other ranks to
    merge flat shards, ``seconds`` wall time from the call to the commit; ``reused_bytes`` what it referred to in its base, in place of
    writing it; ``mirrored_bytes`` what of ``rank_bytes`` another rank wrote, too: a second copy that cost no network.

    Of a dry run, ``id`` is empty, ``rank_bytes`` is what it is before coding, and ``memory`` the most that writing takes beside the state,
    in bytes. ``seconds`` is an estimate for the slowest rank, made from ``estimated_from``; NaN if no earlier save shows how fast the
    storage is.
    """

    url: str
    id: str
    tensor_bytes: int
    rank_bytes: int
    sent_bytes: int
    seconds: float
    requests: int = 0
    files: int = 0
    memory: int | None = None
    dry_run: bool = False
    estimated_from: str | None = None
    reused_bytes: int = 0
    mirrored_bytes: int = 0

    def __str__(self) -> str:
        verb = "would save" if self.dry_run else "saved"
        seconds = "" if math.isnan(self.seconds) else f" in {units.duration(self.seconds)}"
        return f"{verb} {units.size(self.tensor_bytes) if self.tensor_bytes else 'values'} to {self.url}{seconds}"


class SaveArguments(TypedDict, total=False):
    """What every way to save takes, as :func:`ckpt.save` says it."""

    only: str | Sequence[str] | None
    trainable: bool
    layout: Layout | None
    check_replicas: bool
    merge_flat_shards: bool
    codec: str | None
    job: Job | None
    progress: bool | ProgressCallback | None


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The arguments of a save, checked."""

    layout: Layout | None
    timeout: float
    check_replicas: bool
    threads: int
    merge_flat_shards: bool = True
    codec: str | None = None
    part: StatePart | None = None
    """What of the state is saved; None: all of it."""
    spans: bool = True
    staging: int | None = None
    metrics: Mapping[str, float] | None = None
    progress: ProgressCallback | None = None
    earlier: Callable[[str | None], str | None] | None = None
    """Gives, on the leader, the id of a save that this one comes after, wherever that is; it must not take long. It hears the id of the one
    that is replaced, and may refuse."""
    branches: Callable[[], Branches] | None = None
    """Gives, on the leader, the branches of the run that led to this save (``CommitRecord.branches``)."""
    base: SaveBase | None = None
    """What this save may refer to."""
    reusable: bool = False
    """Whether digests of 128 bits are stored of what may stay as it is, so that later saves may refer to it."""
    trust: TrustFrozen | None = None
    """Which frozen tensors are not hashed by every save."""
    mirrors: MirrorPlacement | None = None
    """Which ranks write what others own, too, so that it need not be copied."""

    @classmethod
    def of(
        cls,
        arguments: SaveArguments,
        *,
        progress: ProgressCallback | None = None,
        base: str | None = None,
        reusable: bool = False,
        staging: int | None = None,
    ) -> SaveOptions:
        """What a caller gives, with the defaults of the environment."""
        if unknown := arguments.keys() - SaveArguments.__annotations__.keys():
            raise TypeError(f"neither a save nor a Checkpointer has an argument {min(unknown)!r}")
        check_replicas, merge_flat_shards = arguments.get("check_replicas", True), arguments.get("merge_flat_shards", True)
        job = Job.of(arguments.get("job"))
        only, trainable, codec = arguments.get("only"), arguments.get("trainable", False), arguments.get("codec")
        if codec is not None:
            check_choice(codec)
        check_flags(check_replicas=check_replicas, merge_flat_shards=merge_flat_shards, reusable=reusable)
        return cls(
            layout=arguments.get("layout"),
            timeout=settings.timeout(job.timeout),
            check_replicas=check_replicas,
            threads=settings.threads(job.threads),
            merge_flat_shards=merge_flat_shards,
            codec=codec,
            part=None if only is None and trainable is False else StatePart.of(only, trainable=trainable),
            spans=settings.spans() == "on",
            staging=staging,
            progress=progress,
            base=SaveBase(url=base) if base is not None else None,
            reusable=reusable or base is not None or codec in WITHOUT_ANCHOR,
        )


def check_capture(capture: object, staging_bytes: object) -> None:
    """What a save in the background is asked for, before anything is done for it."""
    if capture not in ("lazy", "eager"):
        raise UsageError(f"capture is 'lazy' or 'eager', not {capture!r}")
    if staging_bytes is not None:
        settings.check_whole(staging_bytes, "staging_bytes", 1)


# Optional parts of a save, of which ``save.py`` and the leader enter nothing where they are not asked for.
#
# asked for           what becomes of a chunk                                              told to the leader
# ``base, reusable``  refer to a base that has it, or store the difference (``reuse.py``)  before: the base; after: references
# ``mirrors``         write what another rank owns, too                                    before: how; after: these files
# ``only, trainable`` leave it out                                                         before: globs that match nothing
# ``check_replicas``  compare it with what other ranks have (``replicas.py``)              after: digests

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
