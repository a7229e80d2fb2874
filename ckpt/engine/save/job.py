"""What a save is given, what it leaves for the next one, and what all of its phases on one rank share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.coordination.call import Call
from ckpt.coordination.members import Members
from ckpt.errors import CancelledError, UsageError
from ckpt.formats.branches import Branches
from ckpt.formats.native.coding.codecs import WITHOUT_ANCHOR, check_choice
from ckpt.io_backends import retries
from ckpt.io_backends.registry import real_url
from ckpt.io_backends.retries import Retries
from ckpt.layout.layout import Layout
from ckpt.plan.part import StatePart
from ckpt.plan.redundancy.mirrors import MirrorPlacement
from ckpt.policies.trust_frozen import TrustFrozen
from ckpt.settings.flags import check_flags
from ckpt.tracing.progress_callback import ProgressCallback, reported
from ckpt.tracing.spans import Spans, limit_for
from ckpt.tracing.stall import Stall

from .base.base_chunks import REMEMBERED, RememberedBase, SaveBase
from .base.reuse import SeenVersions
from .leader import Tables
from .meter import SaveMeter
from .plan import Plans
from .progress import ProgressWriter
from .staging import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save did, or with ``dry_run`` would do. ``tensor_bytes`` is the whole checkpoint's, ``rank_bytes`` what this rank wrote
    (headers included) in ``requests`` writes, which storage may split, to ``files`` files; ``sent_bytes`` what it sent to other ranks to
    merge flat shards, ``seconds`` wall time from the call to the commit; ``reused_bytes`` what it referred to in its base, in place of
    writing it; ``mirrored_bytes`` what of ``rank_bytes`` another rank wrote, too: a second copy that cost no network.

    Of a dry run, ``id`` is empty, ``rank_bytes`` is what it is before coding, and ``memory`` the most that writing takes beside the state,
    in bytes. ``seconds`` is an estimate for the slowest rank, from what ``estimated_from`` says; NaN if no earlier save says how fast the
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
    earlier: Callable[[], str | None] | None = None
    """Gives, on the leader, the id of a save that this one comes after, wherever that is; it must not take long."""
    branches: Callable[[], Branches] | None = None
    """Gives, on the leader, the branches of the run that led to this save (``CommitRecord.branches``)."""
    base: SaveBase | None = None
    """What this save may refer to."""
    reusable: bool = False
    """Whether digests of 128 bits are stored of what may stay as it is, so that later saves may refer to it."""
    trust: TrustFrozen | None = None
    """Which frozen tensors are not hashed by every save."""
    placement: MirrorPlacement | None = None
    """Which ranks may write what others own, too, so that it need not be copied; see ``mirrors``."""

    @property
    def mirrors(self) -> MirrorPlacement | None:
        """The placement, if mirrors can make the same files: not of replicas that may differ, nor of chunks that each rank codes or refers
        to as it sees fit. Then all copies go over the network."""
        return self.placement if self.check_replicas and self.codec is None and not self.reusable else None

    @classmethod
    def of(
        cls,
        *,
        layout: Layout | None = None,
        check_replicas: bool = True,
        merge_flat_shards: bool = True,
        codec: str | None = None,
        timeout: float | None = None,
        threads: int | None = None,
        staging: int | None = None,
        progress: ProgressCallback | None = None,
        base: str | None = None,
        reusable: bool = False,
        only: str | Sequence[str] | None = None,
        trainable: bool = False,
    ) -> SaveOptions:
        """What a caller gives, with the defaults of the environment."""
        check_choice(codec)
        check_flags(check_replicas=check_replicas, merge_flat_shards=merge_flat_shards, reusable=reusable)
        return cls(
            layout=layout,
            timeout=settings.timeout(timeout),
            check_replicas=check_replicas,
            threads=settings.threads(threads),
            merge_flat_shards=merge_flat_shards,
            codec=codec,
            part=StatePart.of(only, trainable=trainable),
            spans=settings.spans(),
            staging=staging,
            progress=progress,
            base=SaveBase(url=base) if base is not None else None,
            reusable=reusable or base is not None or codec in WITHOUT_ANCHOR,
        )


def check_capture(capture: object, staging_bytes: int | None) -> None:
    """What a save in the background is asked for, before anything is done for it."""
    if capture not in ("lazy", "eager"):
        raise UsageError(f"capture is 'lazy' or 'eager', not {capture!r}")
    if staging_bytes is not None and staging_bytes <= 0:
        raise UsageError(f"staging_bytes must be a positive number, not {staging_bytes!r}")


@dataclass(eq=False)
class SaveCache:
    """What a job keeps between its saves."""

    plans: Plans = field(default_factory=Plans)
    tables: list[Tables] = field(default_factory=list)
    arena: Arena = field(default_factory=Arena)
    seen: SeenVersions = field(default_factory=SeenVersions)
    bases: list[RememberedBase] = field(default_factory=list)
    """Saves that later ones may refer to without reading anything, the last one that was used last."""

    def remember(self, saved: RememberedBase, base: object) -> None:
        """Take a save that is committed; ``base`` is what it referred to."""
        others = [b for b in self.bases if (b.run, b.name) != (saved.run, saved.name)]
        self.bases = [*sorted(others, key=lambda b: b is base), saved][-REMEMBERED:]

    def forget(self, url: str) -> None:
        """A save was committed at ``url`` that no later one may refer to."""
        run, _, name = url.rstrip("/").rpartition("/")
        self.bases = [b for b in self.bases if (b.run, b.name) != (real_url(run or "/"), name)]


_caches: WeakKeyDictionary[Members, SaveCache] = WeakKeyDictionary()


def save_cache(group: Members) -> SaveCache:
    """The cache of the job that saves with ``group``."""
    return _caches.setdefault(group, SaveCache())


class Heartbeat:
    """Signs of life of one save. Not the save itself: what the save starts holds this, and a reference cycle would keep the state's memory
    until the garbage collector finds it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cancelled = threading.Event()

    def give(self) -> None:
        """A sign of life, from a rank that is meant to go on."""
        if self.cancelled.is_set():
            raise CancelledError("the save was cancelled", where=self.call.url)
        self.call.heartbeat()


class BlockedTime:
    """For how long training waited for one save in the background. Training may still wait for a save when its spans are written: the spans
    of the next save have the rest."""

    def __init__(self, before: BlockedTime | None) -> None:
        self.stall = Stall()
        self.waited = before.unreported if before is not None else 0.0
        """Seconds for which training waited for the save before, and which no spans have yet."""
        self._reported = 0.0

    @property
    def unreported(self) -> float:
        return max(0.0, self.stall.seconds - self._reported)

    def report(self) -> dict[str, int]:
        """Microseconds, for the spans."""
        self._reported = self.stall.seconds
        return {"blocked": round(1e6 * self._reported), "waited": round(1e6 * self.waited)}


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveJob:
    """One rank's side of one save: what all of its phases share."""

    call: Call
    options: SaveOptions
    cache: SaveCache
    spans: Spans
    meter: SaveMeter
    heartbeat: Heartbeat
    notes: ProgressWriter | None
    """On the leader: leaves in the storage how far the save is."""
    blocked: BlockedTime | None
    """Of a save in the background."""
    refused_before: Retries
    """What storage had refused to this process when the save began."""
    began: float

    @classmethod
    def begin(cls, call: Call, options: SaveOptions, blocked: BlockedTime | None = None) -> SaveJob:
        interval, meter = settings.progress(), SaveMeter()
        call.signer = meter.sign
        return cls(
            call=call,
            options=options,
            cache=save_cache(call.group),
            spans=Spans(on=options.spans, limit=limit_for(call.group.size)),
            meter=meter,
            heartbeat=Heartbeat(call),
            notes=ProgressWriter(call, interval) if call.is_leader else None,
            blocked=blocked,
            refused_before=retries.total(),
            began=time.perf_counter(),
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the block runs, tell how far the save is: the caller's function, and, on the leader, a note in the storage."""
        if self.notes is not None:
            self.notes.start()
        try:
            with reported(self.options.progress, lambda: (self.meter.done, self.meter.total)):
                yield
        except BaseException:
            self.cache.bases.clear()  # the base may no longer be what this process remembers: the next save reads it
            raise
        finally:
            if self.notes is not None:
                self.notes.stop()
