"""The global order of samples, cut into steps. A position in it means the same on any number of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ckpt.errors import UsageError

Tail: TypeAlias = Literal["carry", "drop", "short"]
"""What becomes of the samples at the end of an epoch that do not fill a step: the step is filled up from the next epoch; they are left out;
or the step is smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """So many samples of this epoch have been taken, by all ranks together."""

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """``samples`` per epoch, taken ``size`` at a time by all ranks together."""

    samples: int
    size: int
    tail: Tail

    def __post_init__(self) -> None:
        if self.samples < 1 or self.size < 1:
            raise UsageError(f"batches of {self.size} out of {self.samples} samples", hint="both must be at least 1")
        if self.tail not in ("carry", "drop", "short"):
            raise UsageError(f"tail is 'carry', 'drop' or 'short', not {self.tail!r}")
        if self.tail == "drop" and self.size > self.samples:
            raise UsageError(f"an epoch has {self.samples} samples, so tail='drop' leaves out all: a batch has {self.size}")

    def settled(self, at: Position) -> Position:
        """Where the next step really begins: at the next epoch if this one has no step left."""
        left = self.samples - at.taken
        if left <= 0 or (self.tail == "drop" and left < self.size):
            return Position(epoch=at.epoch + 1)
        return at

    def step(self, at: Position) -> tuple[list[tuple[int, int, int]], Position]:
        """The step from a position, as ``(epoch, start, stop)`` ranges of the epochs' orders, and the position after it."""
        at = self.settled(at)
        ranges, missing = [], self.size
        while missing:
            stop = min(self.samples, at.taken + missing)
            ranges.append((at.epoch, at.taken, stop))
            missing -= stop - at.taken
            at = self.settled(Position(epoch=at.epoch, taken=stop))
            if self.tail != "carry":
                break
        return ranges, at

    def left(self, at: Position) -> int:
        """How many steps begin in the epoch of a position, from there on."""
        left = self.samples - self.settled(at).taken
        return left // self.size if self.tail == "drop" else -(-left // self.size)


def share(count: int, part: int, parts: int) -> slice:
    """The samples of a step that are for one of ``parts``: contiguous, and as many as the others have, or one more or less."""
    return slice(part * count // parts, (part + 1) * count // parts)


def shuffled(samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch. NumPy promises that a ``RandomState`` never changes what it gives, so a job may be resumed with another
    version."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    order: Sequence[int] = np.random.RandomState(bits).permutation(samples)  # type: ignore[assignment]
    return order
