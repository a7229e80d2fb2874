"""What a save is given, what it reports and leaves for the next one, what all of its phases on one rank share, and the note of its
progress."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.errors import CancelledError, CkptError, UsageError
from ckpt.formats.native.clearing import check_no_link
from ckpt.formats.native.coding.codecs import WITHOUT_ANCHOR, check_choice
from ckpt.formats.native.commit import Branches, new_id
from ckpt.formats.native.progress import ProgressFile
from ckpt.io_backends import retries
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.io_backends.retries import Retries
from ckpt.net.call import FIRST_SIGN, Call
from ckpt.net.liveness import Members
from ckpt.plan.copies import MirrorPlacement
from ckpt.plan.layout.layout import Layout
from ckpt.plan.values import StatePart
from ckpt.policies.save import TrustFrozen
from ckpt.settings import check_flags
from ckpt.telemetry.callbacks import ProgressCallback, Stall, reported
from ckpt.telemetry.progress import BEGIN, PHASES, WRITE, SaveProgress, Standing, printable_host, sign_interval
from ckpt.telemetry.spans import Spans, limit_for

from .base import REMEMBERED, RememberedBase, SaveBase
from .leader import Tables
from .plan import Plans
from .reuse import SeenVersions
from .staging import Arena, SaveMeter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    pass

# How far a save is, left in its storage for ``ckpt watch`` by a thread of the leader.
#
# Invariants: nothing waits for this thread for longer than ``_JOIN`` seconds, and no save fails of it. It writes nothing before a save has
# taken ``FIRST_SIGN`` seconds. The file is gone before the commit, unless the storage hangs; then it goes when the storage answers.

log = logging.getLogger("ckpt")

OBJECT_STORE = 5.0
"""Seconds between two notes on object stores, which take money for each."""
_JOIN = 2.0
_UNBEGUN = 5.0
"""Seconds for which ranks may come late before that is noted."""
_ARRIVES = 0.25
"""Seconds that the first signs take at most, as a rule."""
_RESTS = 4
"""Times as long as a note took it rests at least: the storage is busy with the save."""
_FAILURES = 3


class ProgressWriter:
    """The leader's thread of one save. ``id`` is set when the save has one; a save whose ranks do not all come is noted under another.
    ``interval``: see ``settings.progress``."""

    def __init__(self, call: Call, interval: float | None) -> None:
        self.id = ""
        """Empty until the save has one."""
        self._call = call
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-progress", daemon=True)

    def start(self) -> None:
        """Begin to note, unless that is turned off."""
        if self._interval != 0:
            try:
                self._thread.start()
            except RuntimeError as err:  # the system gives no more threads
                log.debug("how far the save %s is is not noted: %s", self._call.url, err)

    def stop(self) -> None:
        """Remove what was noted. Again: nothing happens."""
        if self._thread.ident is not None and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_JOIN)

    def _run(self) -> None:
        if self._stopped.wait(FIRST_SIGN):
            return
        file: ProgressFile | None = None
        try:
            backend = open_backend(self._call.url)
            interval = self._interval or (OBJECT_STORE if backend.io_hints.coalesce_gap else 1.0)
            notes = _Notes(self._call, max(interval, sign_interval(self._call.group.size)))
            first = interval if self.id else max(interval, _UNBEGUN)
            if self._stopped.wait(max(_ARRIVES, first - FIRST_SIGN)):
                return
            failures, pause = 0, 0.0
            while failures < _FAILURES and not self._stopped.wait(pause):
                began = time.monotonic()
                try:
                    file = self._file(backend, file)
                    file.write(notes.note(file.id, pause or notes.interval))
                    failures = 0
                except CkptError as err:
                    failures += 1
                    log.debug("how far the save %s is cannot be noted: %s", self._call.url, err)
                pause = max(notes.interval, _RESTS * (time.monotonic() - began))
        except BaseException as err:  # noqa: BLE001  nobody needs it: the save goes on
            log.debug("how far the save %s is is not noted any more: %s", self._call.url, err)
        finally:
            if file is not None:
                with suppress(BaseException):
                    file.remove()

    def _file(self, backend: Backend, file: ProgressFile | None) -> ProgressFile:
        if file is None and not self.id:  # whoever has an id has looked
            check_no_link(backend)
        id = self.id or (file.id if file is not None else new_id())
        if file is not None and file.id != id:
            file.remove()
        return file if file is not None and file.id == id else ProgressFile(backend, id)


class _Notes:
    """What the leader notes of one save, again and again."""

    def __init__(self, call: Call, interval: float) -> None:
        self.interval = interval
        self._call = call
        self._began = time.time() - FIRST_SIGN
        self._standing = Standing(call.group.ranks, time.monotonic() - FIRST_SIGN)
        self._count = 0
        self._host = printable_host(socket.gethostname())

    def note(self, id: str, interval: float) -> SaveProgress:
        """How far the save is now. The next note comes after ``interval`` seconds."""
        signs = self._call.awaited()
        now = time.monotonic()
        self._standing.hear({position: sign for position, sign in signs.items() if sign is not None}, now)
        phase = BEGIN if self._call.phase_name == PHASES[BEGIN] else WRITE
        self._count += 1
        return SaveProgress(
            id=id,
            began=self._began,
            at=time.time(),
            count=self._count,
            interval=interval,
            ranks=self._call.group.size,
            phase=PHASES[phase],
            leader=self._call.group.leader,
            host=self._host,
            phases=self._standing.totals(signs, phase),
            awaited=len(signs),
            slowest=self._standing.slowest(signs, phase, now, self.interval),
        )


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


class SaveArguments(TypedDict, total=False):
    """What every way to save takes, as :func:`ckpt.save` says it."""

    only: str | Sequence[str] | None
    trainable: bool
    layout: Layout | None
    check_replicas: bool
    merge_flat_shards: bool
    codec: str | None
    timeout: float | None
    threads: int | None
    process_group: ProcessGroup | None
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
        arguments: SaveArguments,
        *,
        progress: ProgressCallback | None = None,
        base: str | None = None,
        reusable: bool = False,
        staging: int | None = None,
    ) -> SaveOptions:
        """What a caller gives, with the defaults of the environment."""
        if unknown := arguments.keys() - SaveArguments.__annotations__.keys():
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
        check_replicas, merge_flat_shards = arguments.get("check_replicas", True), arguments.get("merge_flat_shards", True)
        codec = arguments.get("codec")
        if codec is not None:
            check_choice(codec)
        check_flags(check_replicas=check_replicas, merge_flat_shards=merge_flat_shards, reusable=reusable)
        return cls(
            layout=arguments.get("layout"),
            timeout=settings.timeout(arguments.get("timeout")),
            check_replicas=check_replicas,
            threads=settings.threads(arguments.get("threads")),
            merge_flat_shards=merge_flat_shards,
            codec=codec,
            part=StatePart.of(arguments.get("only"), trainable=arguments.get("trainable", False)),
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
        place = None if run.endswith(":/") else real_url(run or "/")  # at the root of a storage there is no run
        self.bases = [b for b in self.bases if (b.run, b.name) != (place, name)]


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
