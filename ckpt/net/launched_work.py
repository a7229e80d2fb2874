"""Divided work of processes that a launcher started: they agree at its begin and its end, and the first one shows how far all are.

Between begin and end nobody sends anything but signs of life, because each process computes from the plan what its part is
(``ckpt.plan.machines``).

    process 0     join ── begin: look, decide ── its part ── end: commit ── report
    process 1     join ── begin ──────────────── its part ── end
                   │        │                       │          │
                   │        │                       │          └ all parts are there, or the error of one process is everybody's
                   │        │                       └ a sign each second: bytes done; an error elsewhere ends it
                   │        └ the same input everywhere
                   └ the same command and arguments everywhere
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from ckpt import settings
from ckpt.errors import ConsistencyError, DeadlineError, UsageError
from ckpt.telemetry.callbacks import ProgressCallback
from ckpt.telemetry.progress import WRITE, RankSign

from .call import Call
from .divided_work import DividedWork
from .group import Group, LaunchedProcesses
from .rows import Row
from .store import Store

R = TypeVar("R")

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
        self._meeting: _Meeting | None = None
        self._told = False
        self._done = (0, 0)
        self._over = threading.Event()

    def join(self, command: str, url: str, arguments: Mapping[str, str]) -> None:
        """Meet the other processes."""
        timeout = settings.timeout(None)
        group = self._processes.connect(min(timeout, JOIN))
        first = group.call(command, url, min(timeout, JOIN))
        self._meeting = _Meeting(group, first)
        try:
            self.agree("join", lambda: dict(arguments), _check_equal)
        except DeadlineError as err:
            err.hint = f"start all {self.count} processes, and look whether one died; {self._processes.alone}"
            raise
        self._meeting = _Meeting(group, group.call(command, url, timeout))
        self._meeting.call.signer = self._sign

    @property
    def call(self) -> Call:
        """The call of all of them that is going on."""
        if self._meeting is None:
            raise UsageError("this process has not joined the others")
        return self._meeting.call

    def agree(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        """One phase of the work: see ``Call.map_reduce``."""
        try:
            return self.call.map_reduce(phase, local, on_leader)
        except BaseException:  # as the call itself does: it has told the others
            self._told = True
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error that came up between two phases."""
        if self._meeting is not None and not self._told:
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

    @property
    def _store(self) -> Store | None:
        return None if self._meeting is None else self._meeting.group.store

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


class _Meeting(NamedTuple):
    group: Group
    call: Call


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
