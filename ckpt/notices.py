"""How all ranks of a job come to save after the same step when only one of them knows why: a clock, or a signal.

A thread on each rank looks into the job's store a few times a second, so a training step costs no message. The leader proposes a step;
every rank answers with the first step after which it can save, and waits from the proposed step on; the leader then fixes the first step
that no rank has passed. Invariant: no rank saves after a proposed step before it is fixed, so all save after the same one.
A rank that has ended its loop answers that it never can, and then nothing more is fixed.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from .errors import DeadlineError
from .group import Group
from .store import Store

log = logging.getLogger("ckpt")

PAUSE = 0.1
"""Seconds between two looks into the store."""
NEVER = 1 << 62
"""A step that no job comes to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Why a save is due; ``final``: because the job will be stopped."""

    reason: str
    final: bool = False


@dataclass(eq=False)
class Notices:
    """One rank's end. ``asked``: some rank has been told that the job will be stopped."""

    group: Group
    store: Store
    timeout: float
    asked: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _seen: int = -1
    _number: int = 0
    _proposed: int | None = None
    _due: Due = Due(reason="")
    _fixed: int | None = None
    _said: bool = False
    _error: Exception | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.store = self.store.within(self.timeout)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="ckpt-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This rank's loop is over: no save after a later step waits for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        with suppress(DeadlineError):  # nobody asks any more
            self._answer(self._number, NEVER)

    def _answer(self, number: int, step: int) -> None:
        """Say after which step this rank can save, unless it has said so."""
        key = f"{number}/first/{self.group.rank}"
        if not self.store.check([key]):
            self.store.set(key, str(step).encode())

    def ask(self) -> None:
        """Tell the leader that this rank has had a notice. Costs a message, once."""
        if not self._said:
            self._said = True
            self.store.set("asked", b"1")

    @property
    def pending(self) -> bool:
        return self._proposed is not None

    def propose(self, step: int, due: Due) -> None:
        """Leader: the job is to save, after ``step`` or soon after it."""
        with self._lock:
            self._proposed, self._due = step, due
        self.store.set(f"{self._number}/proposed", json.dumps([step, due.reason, due.final]).encode())

    def due(self, step: int) -> Due | None:
        """After ``step``: why all ranks save now, the same on all of them, or None. Waits if a step is proposed and not fixed yet.

        Raises:
            DeadlineError: a rank has not answered within the timeout, or the store has not.
        """
        with self._lock:
            self._seen = step
            if self._error is not None and self.store.silent:  # one that is gone may have ended with the job
                raise self._error
            if self._proposed is None or step < self._proposed:
                return None
            if not self._lock.wait_for(lambda: self._fixed is not None or self._error is not None, self.timeout):
                raise DeadlineError(f"the ranks have not agreed when to save within {self.timeout:g} s", hint="look whether a rank hangs")
            if self._error is not None:
                raise self._error
            if self._fixed is None or step < self._fixed:
                return None
            self._proposed = self._fixed = None
            self._number += 1
            return self._due

    # ---- the thread

    def _watch(self) -> None:
        while not self._stop.wait(PAUSE):
            try:
                self._look()
            except DeadlineError as err:
                log.warning("no save can be agreed on any more, nor a notice that the job will be stopped be passed on: %s", err)
                with self._lock:
                    self._error = err
                    self._lock.notify_all()
                return

    def _look(self) -> None:
        if self.store.check(["asked"]):
            self.asked.set()
        with self._lock:
            number, fixed = self._number, self._fixed
        if fixed is not None:
            return
        prefix = f"{number}"
        if self.store.check([f"{prefix}/fixed"]):
            step = int(self.store.get(f"{prefix}/fixed"))  # not under the lock: a step of training waits for that
            with self._lock:
                self._fixed = step
                self._lock.notify_all()
        elif not self.store.check([f"{prefix}/first/{self.group.rank}"]) and self.store.check([f"{prefix}/proposed"]):
            step, reason, final = json.loads(self.store.get(f"{prefix}/proposed"))
            with self._lock:
                self._proposed, self._due = step, Due(reason=reason, final=final)
                # The leader waits at the step that it proposes; the others have passed the last one that they have seen.
                first = step if self.group.rank == self.group.leader else self._seen + 1
            self._answer(number, first)
        if self.group.rank == self.group.leader and self._proposed is not None:
            self._fix(number)

    def _fix(self, number: int) -> None:
        """Leader: once every rank has answered, fix the step. What was said about the one before, all have read."""
        keys = self._answers(number)
        if self.store.check(keys) and not self.store.check([f"{number}/fixed"]):
            self.store.set(f"{number}/fixed", str(max(int(self.store.get(key)) for key in keys)).encode())
            for key in (f"{number - 1}/proposed", *self._answers(number - 1), f"{number - 1}/fixed"):
                self.store.delete_key(key)

    def _answers(self, number: int) -> list[str]:
        return [f"{number}/first/{rank}" for rank in self.group.ranks]


def own_store(group: Group) -> Store:
    """A part of the job's store that nobody else uses: the ranks of a group make them in the same order."""
    assert group.store is not None
    group.own_stores += 1
    return group.store.part(f"own/{group.own_stores}")
