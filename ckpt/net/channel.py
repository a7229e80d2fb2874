"""What one collective call moves through the job's store: a row of every rank to the leader, and its words to all of them.

Why it is so. The store is one process with one thread, 15 to 20 µs a request, for all ranks of the job. So:

* A rank's row costs two messages that nobody answers: the server joins the rows of a *team*, ranks with neighbouring numbers, to one value,
  and the names of those that are here to another. The leader polls the latter and then gets a value per team. So it hears from teams, not
  ranks, as if one rank of each team spoke for it; but as no rank does, none that is silent takes others with it, and each is named by its
  own signs of life. That ranks of a team are on one machine would save nothing: all of them talk to the store anyway.
* Nothing wakes a rank that waits for the leader: the store's own ``wait`` would block the connection, on which the rank's background save
  and its signs of life depend. It asks again and again, with pauses that double up to what ``longest_pause`` allows for the whole job.
* Bytes that the leader may need (tables, values) stay with the rank, which tells their digests in its row (``call.Offers``).
* Keys of a call are deleted when all have heard its end, or by the next call, when the connection has nothing else to do.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt import errors
from ckpt.errors import CkptError, ConsistencyError, CorruptError, GroupError, RankFailedError, error_from_json
from ckpt.plan.tables import ranks_text
from ckpt.text import parse_json

from .store import MOST, Store, names_of

TEAM = 64
"""Ranks whose rows are one value."""
FEW = 16
"""Ranks of which the leader polls the rows themselves: one round trip less."""
QUESTIONS = 8192
"""Times a second that the ranks of a job ask the store, all together, while they wait for long."""
_FRAME = struct.Struct("<II")
_HERE = struct.Struct("<I")
_FAILED = 1 << 31


def longest_pause(size: int) -> float:
    """Seconds between two looks of one of ``size`` ranks that waits."""
    return max(0.05, size / QUESTIONS)


def looks(size: int) -> Iterator[None]:
    """The moments at which one of ``size`` ranks that waits looks: up to twice as much time lies between two as between those before."""
    longest = longest_pause(size)
    pause = min(longest, max(0.0005, longest * size / 65536))
    # Exponential backoff, but from a start that depends on the size of the job: with few ranks the first look comes
    # after half a millisecond, with thousands the store would not survive that.
    while True:
        began = time.monotonic()
        yield
        time.sleep(max(0.0, began + pause - time.monotonic()))  # a store that is far away is asked again at once
        pause = min(2 * pause, longest)


@dataclass(eq=False)
class WrittenKeys:
    """The keys that one rank has to delete, by the number of the call. All calls before number ``past`` are over on all ranks."""

    past: int = 0
    _keys: dict[int, dict[str, None]] = field(default_factory=dict)

    def remember(self, key: str) -> None:
        """The number of its call, a slash, and a name."""
        self._keys.setdefault(int(key.partition("/")[0]), {})[key] = None

    def forget(self, store: Store) -> None:
        """Delete what is not read any more, when there is time for it."""
        for number in [n for n in list(self._keys) if n < self.past]:
            self.over(store, number)

    def over(self, store: Store, number: int) -> None:
        """Delete the keys of a call that all ranks have left, when there is time for it."""
        store.delete_later(self._keys.pop(number, ()))  # a save in the background forgets, too


class ControlChannel:
    """One rank's end in one call. Ranks go by their positions in the group; the leader's is 0. ``remember`` is told of each key that this
    rank has to delete. Raises what the store does."""

    def __init__(self, store: Store, number: str, position: int, size: int, remember: Callable[[str], None]) -> None:
        self._store = store
        self._number = number
        self._position = position
        self._size = size
        self._remember = remember
        self.turn = 0
        """Number of the phase. Keys have it, not the name: ranks that make different calls must meet to find out."""
        self._words = 0
        self._frames: dict[int, bytes] = {}
        """On the leader: rows by position, as they were last seen."""

    def next_turn(self) -> None:
        self.turn += 1
        self._words = 0

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _set(self, name: str, value: bytes) -> None:
        self._store.set(self._key(name), value)
        for key in names_of(self._key(name), len(value)):
            self._remember(key)

    # ---- rows

    def post(self, row: bytes, *, failed: bool = False) -> None:
        """Give the leader this rank's row. ``failed``: it says why this rank ends the call."""
        name, mark = f"{self.turn}/row/{self._position}", self._position | (_FAILED if failed else 0)
        if failed:
            self._set(f"{self.turn}/failed", row)
        # Rows are joined by the store's APPEND, which has a limit per message. A longer row goes under a key of its
        # own, and an empty frame announces it.
        if len(row) > MOST - _FRAME.size:
            self._set(name, row)
            row = b""
        if self._position == 0:
            for team in range(-(-self._size // TEAM)):
                self._remember(self._key(f"{self.turn}/rows/{team}"))
                self._remember(self._key(f"beats/{team}"))
            self._remember(self._key(f"{self.turn}/here"))
            self._remember(self._key("heard"))
            self._remember(self._key("signed"))
        # The order is what makes polling safe: the row is out before the mark, so whoever sees the mark finds the row.
        self._store.append(self._key(f"{self.turn}/rows/{self._position // TEAM}"), _FRAME.pack(mark, len(row)) + row)
        if self._size > FEW:
            self._store.append(self._key(f"{self.turn}/here"), _HERE.pack(mark))

    def here(self) -> tuple[list[int], bool]:
        """Leader: who has posted a row in this turn, and whether one of them failed."""
        if self._size > FEW:
            (data,) = self._store.appended([self._key(f"{self.turn}/here")])
            marks = np.frombuffer(data, "<u4")
            return (marks & (_FAILED - 1)).tolist(), bool((marks >= _FAILED).any())
        (data,) = self._store.appended([self._key(f"{self.turn}/rows/0")])
        self._frames = dict(_frames(data))
        return [mark % _FAILED for mark in self._frames], any(mark >= _FAILED for mark in self._frames)

    def rows(self, positions: Iterable[int]) -> dict[int, bytes]:
        """Leader: the rows of ranks that are here, by position."""
        if self._size > FEW:
            keys = [self._key(f"{self.turn}/rows/{team}") for team in sorted({p // TEAM for p in positions})]
            self._frames = {mark: row for data in self._store.appended(keys, there=True) for mark, row in _frames(data)}
        frames, self._frames = self._frames, {}
        rows = {mark % _FAILED: row for mark, row in frames.items()}
        return {p: rows[p] or self._store.peek(self._key(f"{self.turn}/row/{p}")) or b"" for p in sorted(rows)}

    def failure(self) -> bytes | None:
        """The row of a rank that failed in this turn, if one did."""
        return self._store.peek(self._key(f"{self.turn}/failed"))

    # ---- words

    def say(self, word: bytes) -> None:
        """Leader: the next word of this turn, a JSON object."""
        self._set(f"{self.turn}/word/{self._words}", word)
        self._words += 1

    @property
    def said(self) -> int:
        """How many words of this turn the leader has said, or this rank has heard."""
        return self._words

    def word(self) -> dict[str, Any] | None:
        """The leader's next word of this turn, if it is there."""
        # Words are numbered, so a rank that was busy when the leader spoke twice reads both, in order.
        data = self._store.peek(self._key(f"{self.turn}/word/{self._words}"))
        if data is None:
            return None
        self._words += 1
        word: dict[str, Any] = parse_json(data)
        return word

    def confirm(self) -> None:
        """This rank has heard the last word of this turn, or does not wait for it."""
        self._store.append(self._key("heard"), b".")

    def confirmed(self, departed: int = 0) -> bool:
        """Leader: whether all others have confirmed this turn, but for so many that are not there any more."""
        return len(self._store.appended([self._key("heard")])[0]) >= self.turn * (self._size - 1) - departed

    # ---- bytes under their digests

    def give(self, digest: str, data: bytes) -> None:
        self._set(f"blob/{digest}", data)

    def given(self, digests: Iterable[str]) -> bool:
        """Whether all are there."""
        return self._store.check([self._key(f"blob/{digest}") for digest in digests])

    def blobs(self, digests: Iterable[str]) -> list[bytes]:
        """Bytes that are there."""
        return self._store.get_all([self._key(f"blob/{digest}") for digest in digests])

    # ---- signs of life

    def heartbeat(self) -> None:
        """Give one. The store answers: a rank that is cut off from it finds that out while it works."""
        # One byte per sign of life, appended to the value of the team: 64 ranks cost the leader one request, and the
        # number of times that a byte occurs is the rank's count.
        self._store.append(self._key(f"beats/{self._position // TEAM}"), bytes([self._position % TEAM]))
        self._store.check([self._key("beats/0")])

    def sign(self, data: bytes, *, first: bool) -> None:
        """Say how far this rank is. Not answered. ``first``: in this call."""
        self._set(f"sign/{self._position}", data)
        if first:
            self._store.append(self._key("signed"), _HERE.pack(self._position))

    def signs(self, positions: Collection[int]) -> dict[int, bytes]:
        """Leader: what these ranks have signed last, as far as they have. Any thread."""
        (data,) = self._store.appended([self._key("signed")])
        signed = [p for p in np.frombuffer(data, "<u4").tolist() if p in positions]
        return dict(zip(signed, self._store.get_all([self._key(f"sign/{p}") for p in signed]), strict=True)) if signed else {}

    def awaited(self) -> set[int]:
        """Leader: who has not posted a row in this turn. Any thread."""
        many = self._size > FEW
        (data,) = self._store.appended([self._key(f"{self.turn}/here" if many else f"{self.turn}/rows/0")])
        marks = np.frombuffer(data, "<u4").tolist() if many else [mark for mark, _ in _frames(data)]
        return set(range(self._size)).difference(mark % _FAILED for mark in marks)

    def beats(self, positions: Collection[int]) -> dict[int, int]:
        """How many signs of life each of these ranks has given in this call."""
        teams = sorted({p // TEAM for p in positions})
        # One request for all teams that are waited for, whatever the number of ranks.
        beats = dict(zip(teams, self._store.appended([self._key(f"beats/{team}") for team in teams]), strict=True))
        return {p: beats[p // TEAM].count(p % TEAM) for p in positions}


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(data):
        mark, size = _FRAME.unpack_from(data, start)
        start += _FRAME.size + size
        yield mark, data[start - size : start]


# Errors on their way between ranks: what a rank reports of its own, and what another one raises for it.


def failure(kind: str, phase: str, failed: dict[int, Any]) -> GroupError:
    """One error for what failed on other ranks; ranks with equal texts are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, err in failed.items():
        by_text.setdefault(f"{err['type']}: {err['message']}" + (f" ({err['where']})" if err["where"] else ""), []).append(rank)
    failures = "; ".join(f"{ranks_text(ranks)} raised {text}" for text, ranks in by_text.items())
    hint = next((err["hint"] for err in failed.values() if err["hint"]), None)
    error = RankFailedError(f"{kind} failed in phase {phase!r}: {failures}", hint=hint)
    error.ranks = tuple(sorted(failed))
    error.causes = tuple(name for rank in sorted(failed) for name in _causes(failed[rank]))
    return error


def _causes(report: dict[str, Any]) -> tuple[str, ...]:
    return (report["type"], *report.get("causes", ()))


def failed_on(rank: int, report: dict[str, Any]) -> CkptError:
    """What to raise for an error of another rank that this one waits for. Damage stays what it is, whoever finds it."""
    if report["type"] == CorruptError.__name__:
        return CorruptError(f"{report['message']} (found by rank {rank})", where=report["where"], hint=report["hint"])
    error = RankFailedError(f"rank {rank} failed: {report['message']}", where=report["where"], hint=report["hint"])
    error.ranks = (rank,)
    error.causes = _causes(report)
    return error


def error_of(kind: str, phase: str, verdict: dict[str, Any]) -> CkptError:
    """What the leader decided for all, as the same class on every rank if it is one of ours; or what happened on one rank."""
    data = verdict["error"]
    if verdict["decided"] and data["type"] in errors.__all__:
        return error_from_json(data)
    return failure(kind, phase, {verdict["rank"]: data})


Row = dict[str, Any]
"""What a rank contributes to one phase: JSON."""


def check_posted(posted: Mapping[int, Row], kind: str, url: str, phase: str) -> None:
    """Check what was posted, by rank, the leader first."""
    errors = {rank: row["error"] for rank, row in posted.items() if "error" in row}
    if errors:
        raise failure(kind, phase, errors)
    leader = next(iter(posted))
    for rank, row in posted.items():
        if (row["kind"], row["url"]) != (kind, url):
            raise ConsistencyError(
                f"rank {rank} calls {row['kind']}({row['url']!r}) while rank {leader} calls {kind}({url!r})",
                hint="make the same calls in the same order on every rank",
            )
