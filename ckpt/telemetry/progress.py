"""How far a save is: what each rank signs, and what the leader makes of the signs of all ranks. Pure.

A rank's *sign* is a few bytes: how many signs it has given, its phase, bytes done and in all, and its host. The leader reads the signs of
the ranks that it waits for and keeps when each of them changed last, by its own clock. From that follows a ``SaveProgress``, whose size
does not depend on the number of ranks: counts and bytes per phase, and the few ranks that hold the save up.

Times are seconds, and only differences of one clock are ever taken.
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache, partial
from typing import Any, TypeVar

from ckpt.errors import UsageError
from ckpt.text import printable

PHASES = ("begin", "capture", "write", "hash", "done")
"""What a rank is doing: it has not come to the save yet, copies its state, writes and syncs its files, compares replicas, has done its
part."""
BEGIN, CAPTURE, WRITE, HASH, DONE = range(len(PHASES))
SLOWEST = 8
"""Ranks that are named."""
VERSION = 1
HOST = 64
"""Characters of a host's name that are kept."""
_RATE = 2048
"""Signs a second of all ranks together: a store takes some 50,000 requests a second."""
_SIGN = struct.Struct("<IBQQ")
_MOST = 1 << 63
_RANKS = 1 << 24
_SECONDS = 1e10

R = TypeVar("R")


def sign_interval(ranks: int) -> float:
    """Seconds between two signs of one of ``ranks`` ranks."""
    return max(1.0, ranks / _RATE)


def patience(interval: float) -> float:
    """Seconds without a sign after which a rank seems to hang."""
    return max(5.0, 3 * interval)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSign:
    """What one rank says of itself; ``count`` tells two signs apart."""

    count: int
    phase: int
    done: int
    total: int
    host: str

    def to_bytes(self) -> bytes:
        return _SIGN.pack(self.count & 0xFFFFFFFF, self.phase, self.done, self.total) + self.host.encode()[:HOST]

    @classmethod
    def from_bytes(cls, data: bytes) -> RankSign:
        """What ``to_bytes`` gave."""
        count, phase, done, total = _SIGN.unpack_from(data)
        return cls(count=count, phase=phase, done=done, total=total, host=data[_SIGN.size :].decode(errors="replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseProgress:
    """The ranks that are in one phase, and the bytes of their parts."""

    phase: str
    ranks: int
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that is waited for. ``quiet``: seconds without a sign of it; ``still``: seconds in which it has come no further. A rank that
    has given no sign has no ``host``."""

    rank: int
    host: str
    phase: str
    done: int
    total: int
    quiet: float
    still: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveProgress:
    """How far a save is, as its leader last knew. ``at`` is when, by the leader's clock, ``count`` how often it has said so; the next time
    comes after ``interval`` seconds. ``awaited`` ranks have not done their part; ``slowest`` are some of these."""

    id: str
    began: float
    at: float
    count: int
    interval: float
    ranks: int
    phase: str
    leader: int
    host: str
    """The leader's."""
    phases: tuple[PhaseProgress, ...]
    awaited: int
    slowest: tuple[SlowRank, ...]

    @property
    def done(self) -> int:
        """Bytes that are written, of the ranks that have given signs."""
        return sum(p.done for p in self.phases if p.phase != PHASES[CAPTURE])

    @property
    def total(self) -> int:
        return sum(p.total for p in self.phases)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, note: object) -> SaveProgress:
        """Read what ``to_json`` gave. Nothing in it is believed."""
        if isinstance(note, dict) and note.get("version") != VERSION:
            raise ValueError(f"its version is {note.get('version')!r:.40}")
        return _record(cls, note, "it")


@lru_cache(maxsize=16)
def printable_host(name: str) -> str:
    """A host's name as a terminal may show it."""
    text = name[:HOST].encode(errors="backslashreplace").decode()  # the system takes any bytes for a name
    return "".join(c if c.isprintable() else "?" for c in printable(text, one_line=True)[:HOST])


# --------------------------------------------------------------------------------------------------------------- the leader


@dataclass(eq=False, slots=True)
class _Seen:
    """A rank as the leader sees it: its last sign, when the first sign like it came, and since when it has come no further."""

    sign: RankSign | None
    heard: float
    moved: float


@dataclass(eq=False)
class Standing:
    """What the leader knows of all ranks. ``now`` is seconds of one clock that never goes back."""

    ranks: Sequence[int]
    began: float
    _seen: dict[int, _Seen] = field(default_factory=dict)
    """By position."""

    def hear(self, signs: Mapping[int, bytes], now: float) -> None:
        """The signs that are there, by position."""
        for position, data in signs.items():
            sign, before = RankSign.from_bytes(data), self._seen.get(position)
            if before is None or before.sign is None:
                self._seen[position] = _Seen(sign, now, now)
            elif before.sign.count != sign.count:
                moved = (sign.phase, sign.done) != (before.sign.phase, before.sign.done)
                before.sign, before.heard, before.moved = sign, now, now if moved else before.moved

    def totals(self, awaited: Collection[int], phase: int) -> tuple[PhaseProgress, ...]:
        """Ranks and bytes per phase. Ranks that are not ``awaited`` have done their part; who has given no sign is in ``phase``."""
        counts = {number: [0, 0, 0] for number in range(len(PHASES))}
        for position in range(len(self.ranks)):
            seen = self._seen.get(position)
            sign = seen.sign if seen is not None else None
            here = position not in awaited
            count = counts[DONE if here and phase != BEGIN else sign.phase if sign is not None else phase]
            count[0] += 1
            if sign is not None:
                count[1] += sign.total if here and phase != BEGIN else sign.done
                count[2] += sign.total
        return tuple(
            PhaseProgress(phase=PHASES[number], ranks=ranks, done=done, total=total)
            for number, (ranks, done, total) in counts.items()
            if ranks
        )

    def slowest(self, awaited: Collection[int], phase: int, now: float, interval: float) -> tuple[SlowRank, ...]:
        """The ranks that are waited for longest: first those that have fallen silent, then those with most left to do."""
        candidates = []
        for position in awaited:
            seen = self._seen.get(position)
            sign = seen.sign if seen is not None else None
            heard, moved = (seen.heard, seen.moved) if seen is not None else (self.began, self.began)
            left = 1.0 if sign is None or not sign.total else 1 - sign.done / sign.total
            silent = now - heard >= patience(interval)
            candidates.append((not silent, heard if silent else 0.0, -left, position, heard, moved, sign))
        slow = []
        for *_, position, heard, moved, sign in sorted(candidates, key=lambda one: one[:4])[:SLOWEST]:
            slow.append(
                SlowRank(
                    rank=self.ranks[position],
                    host="" if sign is None else printable_host(sign.host),
                    phase=PHASES[phase if sign is None else min(sign.phase, DONE)],
                    done=0 if sign is None else sign.done,
                    total=0 if sign is None else sign.total,
                    quiet=round(now - heard, 3),
                    still=round(now - moved, 3),
                )
            )
        return tuple(slow)


# ------------------------------------------------------------------------------------------------------------------ reading

_COUNTS = {"ranks": _RANKS, "leader": _RANKS, "awaited": _RANKS, "rank": _RANKS, "count": _MOST, "done": _MOST, "total": _MOST}
_TEXTS = {"id": 16, "host": HOST}
_LISTS: dict[str, tuple[type[PhaseProgress | SlowRank], int, str]] = {
    "phases": (PhaseProgress, len(PHASES), "one of its phases"),
    "slowest": (SlowRank, SLOWEST, "one of its ranks"),
}


def _record(kind: type[R], value: object, what: str) -> R:
    """A record of this kind, of JSON that others have written."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return kind(**{field.name: _value(field.name, value.get(field.name)) for field in fields(kind)})  # type: ignore[arg-type]  # dataclasses


def _value(name: str, value: Any) -> Any:
    """The value of a field, which has one meaning in all records."""
    if name in _COUNTS:
        fits = type(value) is int and 0 <= value < _COUNTS[name]
    elif name in _TEXTS:
        fits = isinstance(value, str) and len(value) <= _TEXTS[name] and value == printable(value, one_line=True)
        fits = fits and value == value.encode(errors="replace").decode()  # a lone surrogate is no text
    elif name == "phase":
        fits = value in PHASES
    elif name in _LISTS:
        kind, most, what = _LISTS[name]
        fits = isinstance(value, list | tuple) and len(value) <= most
        value = tuple(_record(kind, one, what) for one in value) if fits else value
    else:
        fits = (type(value) is int or type(value) is float) and 0 <= value < _SECONDS  # which no NaN is
        value = float(value) if fits else value
    if not fits:
        raise ValueError(f"its {name} cannot be {value!r:.40}")
    return value


# Tells a caller how far a save or a load is: a function of bytes done and bytes in all, or a bar on the terminal. No torch.
#
# A thread looks at the counters ten times a second and calls the function. So no thread that moves bytes ever waits for it, and it need not
# be safe for several threads. Where nobody asks, there is no thread. A function that raises is not called again; one that hangs is left
# behind.

log = logging.getLogger("ckpt")

ProgressCallback = Callable[[int, int], object]
"""Takes the bytes that this rank has done, and has to do in all."""

INTERVAL = 0.1
"""Seconds between two calls."""
_PATIENCE = 2.0
"""Seconds that the end of a save or a load waits for a call that is going on."""


def callback_of(*, progress: bool | ProgressCallback | None, leads: bool, title: str) -> ProgressCallback | None:
    """The function that ``progress=`` stands for; True is a bar on the leading rank's terminal."""
    given: object = progress
    if given is None or given is False:
        return None
    if given is True:
        return partial(_draw, title) if leads and sys.stderr.isatty() else None
    check_progress(progress, "True or a function")
    assert callable(progress)
    return progress


def check_progress(progress: object, takes: str = "a function") -> None:
    """Raise UsageError unless ``progress`` is a function or None."""
    if progress is not None and not callable(progress):
        raise UsageError(f"progress= takes {takes} of bytes done and bytes in all, not {progress!r}")


def _draw(title: str, done: int, total: int) -> None:
    """A bar of ``rich``, which is imported when there is something to draw."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(stderr=True)
    bar = ProgressBar(total=max(total, 1), completed=done if total else 1, width=32)
    with console.capture() as drawn:
        console.print(bar, end="")
    end = "\n" if done >= total else ""
    sys.stderr.write(f"\r{title} {drawn.get()} {100 * done // max(total, 1) if total else 100:3d} %{end}")
    sys.stderr.flush()


@contextmanager
def reported(callback: ProgressCallback | None, counts: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """While the block runs, call ``callback`` with ``counts()`` whenever these have changed; after a block that succeeds, with all done."""
    if callback is None:
        yield
        return
    reporter = _Reporter(callback, counts)
    try:
        yield
    except BaseException:
        reporter.stop()
        raise
    reporter.stop()
    reporter.finish()


class _Reporter:
    def __init__(self, callback: ProgressCallback, counts: Callable[[], tuple[int, int]]) -> None:
        self._callback = callback
        self._counts = counts
        self._last: tuple[int, int] = (-1, -1)
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-callback", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL) and not self._failed:
            self._call(self._counts())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_PATIENCE)

    def finish(self) -> None:
        """Report that all is done, unless the function hangs."""
        if not self._thread.is_alive():
            _, total = self._counts()
            self._call((total, total))

    def _call(self, counts: tuple[int, int]) -> None:
        done, total = counts
        if self._failed or counts == self._last or (not total and not self._stopped.is_set()):  # nobody knows yet how much it is
            return
        self._last = counts
        try:
            self._callback(done, total)
        except Exception:  # whoever watches must not harm what is watched
            self._failed = True
            log.warning("the progress callback has raised, and is not called again", exc_info=True)
