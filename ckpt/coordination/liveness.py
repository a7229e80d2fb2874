"""Finding ranks that died or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from ckpt.errors import DeadlineError
from ckpt.plan.tables import ranks_text

Heard = Callable[[Collection[int]], dict[int, int]]
"""Counts the signs of life of ranks, by their positions in the group."""


class FailureDetector:
    """Finds ranks of which nothing was heard for the call's timeout."""

    def __init__(
        self, kind: str, url: str, timeout: float, ranks: Sequence[int], heard: Callable[[Collection[int]], dict[int, int]]
    ) -> None:
        """``heard`` counts the signs of life of ranks, by their positions in ``ranks``."""
        self.kind = kind
        self.url = url
        self.timeout = timeout
        self.ranks = ranks
        self.heard = heard
        self.last: dict[int, tuple[int, float]] = {}
        self.began = time.monotonic()

    def check(self, waiting_for: Collection[int], phase: str) -> None:
        """Raises:
        DeadlineError: of some of these ranks nothing was heard for too long.
        """
        beats = self.heard(waiting_for)
        now = time.monotonic()
        quiet = []
        for position in waiting_for:
            # A rank counts as silent from its last *change* of count on, by this machine's clock. The first look
            # finds a count but no time, so it counts from the beginning of the wait.
            if position not in self.last or self.last[position][0] != beats[position]:
                self.last[position] = (beats[position], now if position in self.last else self.began)
            if now - self.last[position][1] >= self.timeout:
                quiet.append(self.ranks[position])
        if quiet:
            raise silent(self.kind, self.url, phase, self.timeout, sorted(quiet))


def silent(kind: str, url: str, phase: str, timeout: float, ranks: list[int]) -> DeadlineError:
    """The error for ranks of which nothing was heard."""
    return DeadlineError(
        f"{kind}: nothing was heard of {ranks_text(ranks)} for {timeout:g} s (phase {phase!r})",
        where=url,
        hint="every rank must make the call, without `if rank == 0:`; look whether they died or hang; a larger timeout= gives slow "
        "storage more time; `ckpt ls` shows what is committed",
    )
