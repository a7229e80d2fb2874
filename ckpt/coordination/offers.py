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

    def give(self, asks: Mapping[str, Any], channel: ControlChannel) -> None:
        """Leave in the store what the leader asks this rank for."""
        for digest in asked_of(asks, self.position, self._shared):
            channel.give(digest, self._blobs[digest])

    def get(self, digest: str) -> bytes:
        """Bytes that are here."""
        return self._blobs[digest]

    def keep(self, digest: str, data: bytes) -> None:
        """Bytes that came another way."""
        self._blobs[digest] = data

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Those, each once, whose bytes are not here."""
        return [digest for digest in dict.fromkeys(digests) if digest not in self._blobs]

    def fetch(self, digests: Iterable[str], alive: Callable[[], None] = lambda: None) -> None:
        """Have these bytes here. ``alive`` is called while they do not come.

        Raises:
            NotSentError: a rank that is asked for its bytes does not send them; or the store has lost what was left in it.
        """
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


def whom_to_ask(wanted: Mapping[str, int], offers: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The leader's word that asks for bytes: ``wanted`` has a position for each digest, ``offers`` the digests of each position.

    All ranks read it, so it names runs of ranks, which give all that they have but what another one of them gives, or none has to."""
    named = sorted(set(wanted.values()))
    runs: list[list[int]] = []
    for position in named:
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    but = {digest: wanted.get(digest, -1) for p in named for digest in offers[p] if wanted.get(digest) != p}
    return {"ranks": runs, "but": but}


def asked_of(word: Mapping[str, Any], position: int, offers: Iterable[str]) -> list[str]:
    """What the rank at ``position`` is asked for."""
    if not any(first <= position <= last for first, last in word["ranks"]):
        return []
    return [digest for digest in offers if word["but"].get(digest, position) == position]
