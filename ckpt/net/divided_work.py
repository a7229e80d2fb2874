"""One piece of offline work that several processes divide, as the code of a command sees it."""

from __future__ import annotations

import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ckpt import settings
from ckpt.errors import ConsistencyError, DeadlineError, UsageError
from ckpt.telemetry.progress import WRITE, ProgressCallback, RankSign
from ckpt.text import parse_json

from .call import Call
from .channel import Row
from .group import LaunchedProcesses
from .store import Store

# The same code runs in every process. Two kinds of work fit behind it:
#
#     LaunchedWork    processes that torchrun or srun started together; they meet, and exchange what they post in a phase
#     TaskedWork      one process, which gives each part to a task that a scheduler such as Ray runs, when and where it has room;
#                     the task runs the code again as TaskPart, up to the phase in which its part is done
#
# Both rely on one habit of that code: before the parts, every process posts the same row in a phase (the digest of what it sees), and what
# a process does is computed from the plan, ``number`` and ``count``.


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


class SinglePart(DividedWork):
    """A part that needs no other process, such as that of an element of an array job: each decides for itself, on what it sees."""

    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        return on_leader({self.number: parse_json(json.dumps(local()))})

    @contextmanager
    def shown(self, shares: Sequence[int], show: ProgressCallback | None) -> Iterator[ProgressCallback]:
        yield show or (lambda done, total: None)


# Divided work of processes that a launcher started: they agree at its begin and its end, and the first one shows how far all are.
#
# Between begin and end nobody sends anything but signs of life, because each process computes from the plan what its part is
# (``ckpt.plan.machines``).
#
#     process 0     join ── begin: look, decide ── its part ── end: commit ── report
#     process 1     join ── begin ──────────────── its part ── end
#                    │        │                       │          │
#                    │        │                       │          └ all parts are there, or the error of one process is everybody's
#                    │        │                       └ a sign each second: bytes done; an error elsewhere ends it
#                    │        └ the same input everywhere
#                    └ the same command and arguments everywhere


JOIN = 120.0
"""Seconds in which all processes have to come."""
SHOWN = 1.0
"""Seconds between two looks at how far the processes are."""
END = 10.0
"""Seconds that processes wait for the first one to end, and this one for the others to see it."""
_OVER, _LEFT = "over", "left"


class LaunchedWork(DividedWork):
    """This process's part in work that ``processes`` divide. It begins with ``join``."""

    def __init__(self, processes: LaunchedProcesses) -> None:
        super().__init__(processes.rank, processes.size)
        self._processes = processes
        self._call: Call | None = None
        self._store: Store | None = None
        self._told = False
        self._done = (0, 0)
        self._over = threading.Event()

    def join(self, command: str, url: str, arguments: Mapping[str, str]) -> None:
        """Meet the other processes."""
        timeout = settings.timeout(None)
        group = self._processes.connect(min(timeout, JOIN))
        self._store, self._call = group.store, group.call(command, url, min(timeout, JOIN))
        try:
            self.agree("join", lambda: dict(arguments), _check_equal)
        except DeadlineError as err:
            err.hint = f"start all {self.count} processes, and look whether one died; {self._processes.alone}"
            raise
        self._call = group.call(command, url, timeout)
        self._call.signer = self._sign

    @property
    def call(self) -> Call:
        """The call of all of them that is going on."""
        if self._call is None:
            raise UsageError("this process has not joined the others")
        return self._call

    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        """One phase of the work: see ``Call.map_reduce``."""
        try:
            return self.call.map_reduce(phase, local, on_leader)
        except BaseException:  # as the call itself does: it has told the others
            self._told = True
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error that came up between two phases."""
        if self._call is not None and not self._told:
            self._told = True
            self.call.fail("begin", error)

    # ---- how far all are

    @contextmanager
    def shown(self, shares: Sequence[int], show: ProgressCallback | None) -> Iterator[ProgressCallback]:
        """What it gives raises RankFailedError or CorruptError if another process failed."""

        def report(done: int, total: int) -> None:
            self._done = (done, total)
            self.call.check_failures()

        if show is None or not self.leads:
            yield report
            return
        self._over.clear()
        thread = threading.Thread(target=self._show, args=(shares, show), name="ckpt-progress", daemon=True)
        thread.start()
        try:
            yield report
        finally:
            self._over.set()
            thread.join(SHOWN)

    def _sign(self, number: int) -> RankSign:
        done, total = self._done
        return RankSign(count=number, phase=WRITE, done=done, total=total, host=socket.gethostname())

    def _show(self, shares: Sequence[int], show: ProgressCallback) -> None:
        done = [0] * len(shares)
        with suppress(DeadlineError):  # the call itself says so
            while not self._over.wait(SHOWN):
                awaited = self.call.awaited()
                for position, share in enumerate(shares):
                    sign = awaited.get(position)
                    done[position] = (
                        share if position not in awaited else done[position] if sign is None else RankSign.from_bytes(sign).done
                    )
                done[self.number] = self._done[0]
                show(sum(map(min, done, shares)), sum(shares))

    # ---- the end

    def end(self, code: int) -> None:
        """On the first process, when it has said all: let the others end, with this exit code. Waits for them if it serves their store."""
        store = self._store
        if store is None:
            return
        with suppress(DeadlineError):
            store.set(_OVER, b"%d" % code)
            for _ in _looks():
                if not self._processes.serves or int(store.peek(_LEFT) or 0) >= self.count - 1:
                    break

    def await_end(self) -> int | None:
        """On the others: the exit code of the first process, once it has said all; None if it died, or does not end in time."""
        store = self._store
        if store is None:
            return None
        with suppress(DeadlineError):
            for _ in _looks():
                if (code := store.peek(_OVER)) is not None:
                    store.add(_LEFT, 1)
                    return int(code)
        return None


def _looks() -> Iterator[None]:
    """Moments of the next ``END`` seconds."""
    pause = threading.Event()
    for _ in range(int(END / 0.05)):
        yield
        pause.wait(0.05)


def _check_equal(rows: dict[int, Row]) -> Row:
    """Raise ConsistencyError unless all processes were given the same."""
    (first, expected), *others = rows.items()
    for rank, row in others:
        for name in sorted(expected.keys() | row.keys()):
            if expected.get(name) != row.get(name):
                raise ConsistencyError(
                    f"the processes were given different arguments: {name} is {row.get(name)} in process {rank}, "
                    f"and {expected.get(name)} in process {first}",
                    hint="start all of them with the same command",
                )
    return {}


# Divided work whose parts are tasks: a scheduler runs each one where it has room, and again elsewhere if its process is lost.
#
#     command            begin: look, decide ──┬──────────────────────────────────────────── end: commit ── report
#     task of part 0                           ├ the same command up to here ── its part ──┤ row
#     task of part 1                           └ the same command up to here ── its part ──┘ row
#
# A task is the command, replayed. In the phases before the parts it must see what the command saw, and it is given what the command
# decided, so no task speaks with another one. What it needs for that is its *order*: JSON, which is also what the scheduler carries.


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
