"""Finding ranks that died or hang."""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import DeadlineError
from .plan.tables import ranks_text


class Watch:
    """Finds ranks of which nothing was heard for the call's timeout."""

    def __init__(self, kind: str, url: str, timeout: float, heard: Callable[[int], bytes | None]) -> None:
        """``heard`` gives the last sign of life of a rank."""
        self.kind = kind
        self.url = url
        self.timeout = timeout
        self.heard = heard
        self.last: dict[int, tuple[bytes | None, float]] = {}
        self.began = time.monotonic()

    def check(self, waiting_for: list[int], phase: str) -> None:
        """Raises:
        DeadlineError: of some of these ranks nothing was heard for too long.
        """
        now = time.monotonic()
        silent = []
        for rank in waiting_for:
            beat = self.heard(rank)
            if rank not in self.last or self.last[rank][0] != beat:
                self.last[rank] = (beat, now if rank in self.last else self.began)
            if now - self.last[rank][1] >= self.timeout:
                silent.append(rank)
        if silent:
            raise DeadlineError(
                f"{self.kind}: nothing was heard of {ranks_text(silent)} for {self.timeout:g} s (phase {phase!r})",
                where=self.url,
                hint="every rank must make the call, without `if rank == 0:`; look whether they died or hang; a larger timeout= gives slow "
                "storage more time; `ckpt ls` shows what is committed",
            )
