"""One piece of offline work that several processes divide, as the code of a command sees it."""

# The same code runs in every process. Two kinds of work fit behind it:
#
#     LaunchedWork    processes that torchrun or srun started together; they meet, and exchange what they post in a phase
#     TaskedWork      one process, which gives each part to a task that a scheduler such as Ray runs, when and where it has room;
#                     the task runs the code again as TaskPart, up to the phase in which its part is done
#
# Both rely on one habit of that code: before the parts, every process posts the same row in a phase (the digest of what it sees), and what
# a process does is computed from the plan, ``number`` and ``count``.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from ckpt.telemetry.callbacks import ProgressCallback

from .rows import Row

R = TypeVar("R")


class DividedWork(ABC):
    """Part ``number`` of ``count``. ``repeats``: a process that was lost had begun this part; some of it may be done."""

    repeats = False

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count

    @property
    def leads(self) -> bool:
        """Whether this is the first process, which looks, commits and speaks."""
        return self.number == 0

    @abstractmethod
    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        """One phase of the work: the first process decides on the rows of all; every process gets what it decided. The phase that does
        the parts is the one within ``shown``."""

    @abstractmethod
    def shown(self, shares: Sequence[int], show: ProgressCallback | None) -> AbstractContextManager[ProgressCallback]:
        """While the block runs, ``show`` on the first process the bytes that all have done. ``shares`` are those that each has to do; 0 is
        a part without items. Gives what this process's part reports its own bytes to."""
