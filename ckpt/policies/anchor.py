"""Which saves are anchors: later ones store their chunks as differences from them."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import UsageError


@dataclass(frozen=True)
class Anchor:
    """Every ``every``-th save is an anchor, whole by itself; those between are stored as differences from it where that is shorter.

    The first save of a process is one, and so is the one after a save that failed.
    """

    every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise UsageError(f"Anchor(every=) is a number of saves, at least 1, not {self.every!r}", hint="Anchor(every=10)")
