"""Divided work whose parts are tasks: a scheduler runs each one where it has room, and again elsewhere if its process is lost.

    command            begin: look, decide ──┬──────────────────────────────────────────── end: commit ── report
    task of part 0                           ├ the same command up to here ── its part ──┤ row
    task of part 1                           └ the same command up to here ── its part ──┘ row

A task is the command, replayed. In the phases before the parts it must see what the command saw, and it is given what the command decided,
so no task speaks with another one. What it needs for that is its *order*: JSON, which is also what the scheduler carries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ckpt.errors import ConsistencyError
from ckpt.telemetry.callbacks import ProgressCallback
from ckpt.text import parse_json

from .divided_work import DividedWork
from .rows import Row

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidedPhase:
    """A phase before the parts: what the command posted in it, and what it decided."""

    name: str
    posted: Row
    decided: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOrder:
    """What a task needs to do part ``number`` of ``count``."""

    number: int
    count: int
    phases: tuple[DecidedPhase, ...]
    repeats: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PartOrder:
        return cls(**{**fields, "phases": tuple(DecidedPhase(**phase) for phase in fields["phases"])})


RunParts = Callable[[Sequence[PartOrder], ProgressCallback], dict[int, Row]]
"""Runs all parts, reports the bytes that all have done and have to do, and gives the row of each part by its number. It raises the error
of the first part that fails."""


class TaskedWork(DividedWork):
    """The command's side: it decides, has the parts done, and commits."""

    def __init__(self, count: int, run: RunParts) -> None:
        super().__init__(0, count)
        self._run = run
        self._phases: list[DecidedPhase] = []
        self._shares: Sequence[int] | None = None
        self._show: ProgressCallback | None = None

    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        if self._shares is None:
            posted = parse_json(json.dumps(local()))
            decided = on_leader({0: posted})
            self._phases.append(DecidedPhase(name=phase, posted=posted, decided=decided))
            return decided
        phases = tuple(self._phases)
        orders = [PartOrder(number=n, count=self.count, phases=phases) for n, share in enumerate(self._shares) if share]
        return on_leader(self._run(orders, self._report) if orders else {})

    @contextmanager
    def shown(self, shares: Sequence[int], show: ProgressCallback | None) -> Iterator[ProgressCallback]:
        self._shares, self._show = shares, show
        try:
            yield self._report
        finally:
            self._shares = None

    def _report(self, done: int, total: int) -> None:
        """``total`` is that of the parts that have begun; the user sees that of all."""
        if self._show is not None and self._shares is not None:
            self._show(min(done, sum(self._shares)), sum(self._shares))


class PartEnded(BaseException):  # an end, not an error: nothing between a phase and the task may take it for one
    """A task has done its part, or failed at it; what the command does after it is not the task's."""

    def __init__(self, row: Row | None, error: BaseException | None) -> None:
        super().__init__()
        self.row, self.error = row, error


class TaskPart(DividedWork):
    """A task's side. ``progress`` has the bytes that it has done and has to do."""

    def __init__(self, order: PartOrder) -> None:
        super().__init__(order.number, order.count)
        self.repeats = order.repeats
        self.progress = (0, 0)
        self._left = list(order.phases)
        self._in_part = False

    @property
    def leads(self) -> bool:
        """The command leads, never a task, not even that of part 0."""
        return False

    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        if self._in_part:
            try:
                row = local()
            except BaseException as err:
                raise PartEnded(None, err) from err
            raise PartEnded(row, None)
        decided = self._left.pop(0) if self._left else None
        if decided is None or (decided.name, decided.posted) != (phase, parse_json(json.dumps(local()))):
            raise ConsistencyError(
                "a task does not see the same checkpoint as the command that started it, or has another version of ckpt",
                hint="give the command a URL that is the same storage on every machine, and install the same ckpt on all",
            )
        shared: R = decided.decided
        return shared

    @contextmanager
    def shown(self, shares: Sequence[int], show: ProgressCallback | None) -> Iterator[ProgressCallback]:
        def report(done: int, total: int) -> None:
            self.progress = (done, total)

        self._in_part = True
        yield report
