"""Bytes that the leader of a call may need, under their digests. They stay with the ranks, which tell their digests with their rows; the
leader asks for those that it does not know, each of one rank, all at once. What no other rank has, and the leader always needs, is left in
the store at once.

Invariant: only the leader fetches what is offered, while it decides: all ranks then wait for its word, and give what it asks for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from .channel import ControlChannel, looks


class NotSentError(Exception):
    """Bytes are not there. ``positions``: the ranks that offered them."""

    def __init__(self, positions: set[int]) -> None:
        super().__init__()
        self.positions = positions


@dataclass(eq=False)
class Offers:
    """One rank's, in one call. ``channel`` is None for a single process."""

    channel: ControlChannel | None
    position: int
    timeout: float
    _blobs: dict[str, bytes] = field(default_factory=dict)
    """What this rank shared, left, or fetched."""
    _shared: list[str] = field(default_factory=list)
    _new: list[str] = field(default_factory=list)
    """Digests that the next row tells."""
    _of_all: dict[int, Sequence[str]] = field(default_factory=dict)
    """On the leader: digests by position."""
    _latest: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The same of the last rows alone."""

    def share(self, data: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest not in self._blobs:
            self._blobs[digest] = data
            self._shared.append(digest)
            self._new.append(digest)
        return digest

    def leave(self, data: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(data)
        self._blobs[digest] = data
        if self.channel is not None:
            self.channel.give(digest, data)
        return digest

    def new_digests(self) -> list[str]:
        """The digests of what was offered since the last row."""
        new, self._new = self._new, []
        return new

    def hear(self, digests_of: Mapping[int, Sequence[str]]) -> None:
        """Leader: the digests that came with the rows, by position."""
        self._latest = digests_of
        self._of_all = {position: [*self._of_all.get(position, ()), *digests] for position, digests in digests_of.items()}

    def give(self, asks: Iterable[tuple[int, int, Sequence[int]]], channel: ControlChannel) -> None:
        """Leave in the store what the leader asks this rank for."""
        for digest in asked_of(asks, self.position, self._shared):
            channel.give(digest, self._blobs[digest])

    def get(self, digest: str) -> bytes:
        """Bytes that are here."""
        return self._blobs[digest]

    def keep(self, blobs: Mapping[str, bytes]) -> None:
        """Bytes that came another way, by digest."""
        self._blobs.update(blobs)

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Those, each once, whose bytes are not here."""
        return [digest for digest in dict.fromkeys(digests) if digest not in self._blobs]

    def fetch(self, digests: Iterable[str], alive: Callable[[], None] = lambda: None) -> None:
        """Have these bytes here. ``alive`` is called while they do not come."""
        lacking = dict.fromkeys(self.lacking(digests))
        if not lacking:
            return
        if self.channel is None:
            raise NotSentError(set())
        if self.channel.said:  # who asks a second time would ask for one after another
            lacking |= {digest: None for offered in self._latest.values() for digest in offered if digest not in self._blobs}
        wanted: dict[str, int] = {}
        for position, offered in self._of_all.items():
            for digest in offered:
                if digest in lacking:
                    wanted.setdefault(digest, position)
        if wanted:
            self.channel.say(json.dumps({"asks": whom_to_ask(wanted, self._of_all)}).encode())
        end = time.monotonic() + self.timeout
        for _ in looks(1):
            if self.channel.given(lacking):
                break
            alive()
            if not wanted or time.monotonic() >= end:
                raise NotSentError({wanted[d] for d in lacking if d in wanted and not self.channel.given([d])})
        self._blobs.update(zip(lacking, self.channel.blobs(lacking), strict=True))


def whom_to_ask(wanted: Mapping[str, int], offers: Mapping[int, Sequence[str]]) -> list[list[Any]]:
    """The leader's word that asks for bytes: ``wanted`` has a position for each digest, ``offers`` the digests of each position.

    All ranks read it, so it names no digests but their places among the offers of a rank, once for neighbours that are asked for the same
    places: rows of the first position, how many there are, and the places."""
    places: dict[int, list[int]] = {}
    for digest, position in wanted.items():
        places.setdefault(position, []).append(offers[position].index(digest))
    rows: list[list[Any]] = []
    for position in sorted(places):
        asked = sorted(places[position])
        if rows and (rows[-1][0] + rows[-1][1], rows[-1][2]) == (position, asked):
            rows[-1][1] += 1
        else:
            rows.append([position, 1, asked])
    return rows


def asked_of(word: Iterable[tuple[int, int, Sequence[int]]], position: int, offers: Sequence[str]) -> list[str]:
    """What the rank at ``position`` is asked for."""
    return [offers[place] for first, count, places in word if first <= position < first + count for place in places]
