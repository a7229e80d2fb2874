"""How all ranks of a job come to save after the same step when only one of them knows why: a clock, or a signal.

    rank 0, leads    ends step 41: due ── proposes 41, waits ──── answers: 41, 44, 43 ── fixes 44 ── goes on, saves after 44
    rank 1           has ended step 43 ── answers 44 ── ends step 44, waits ──────────────────────── sees 44, saves after 44
    rank 2           has ended step 42 ── answers 43 ── ends step 43, waits ──────────── sees 44 ── goes on, saves after 44

A thread on each rank looks into the job's store now and then, at one key, so a training step costs no message. The leader proposes a step;
every rank answers with the first step after which it can save, and waits from the proposed step on; the leader then fixes the first step
that no rank has passed. Looks go on for as long as the job does, and the store has one thread for all of its ranks: the more ranks, the
longer the pauses. Where that is long the leader proposes a step that the job comes to only when all ranks know of it.
Invariant: no rank saves after a proposed step before it is fixed, so all save after the same one.
A rank that has ended its loop answers that it never can, and then nothing more is fixed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt.errors import DeadlineError
from ckpt.text import parse_json

from .channel import longest_pause
from .group import Group
from .store import Store

log = logging.getLogger("ckpt")

PAUSE = 0.1
"""Seconds between two looks of a rank into the store, at least."""
LOOKS = 2500
"""Looks a second of all ranks together, at most. At 20 µs each they take a twentieth of the store's thread."""
NEVER = 1 << 62
"""A step that no job comes to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Why a save is due; ``final``: because the job will be stopped."""

    reason: str
    final: bool = False


@dataclass(eq=False)
class StepAgreement:
    """One rank's end. ``asked``: some rank has been told that the job will be stopped."""

    group: Group
    store: Store
    timeout: float
    asked: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _seen: int = -1
    _seen_at: float = 0.0
    _step_seconds: float = 0.0
    """How long the last step took."""
    _number: int = 0
    _proposed: int | None = None
    _due: Due = Due(reason="")
    _fixed: int | None = None
    _asked: bool = False
    _answered: int = -1
    """The last number that this rank has answered."""
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
        if self._answered < number:
            self._answered = number
            self.store.append(f"{number}/first", f"{step},".encode())

    def ask(self) -> None:
        """Tell the leader that this rank has had a notice. Costs a message, once."""
        if not self._asked:
            self._asked = True
            self.store.set("asked", b"1")

    @property
    def pending(self) -> bool:
        return self._proposed is not None

    def propose(self, step: int, due: Due) -> None:
        """Leader: the job is to save, after ``step`` or soon after it."""
        with self._lock:
            # In a large job ranks look into the store seldom. A step that comes before all have looked would make the
            # fast ranks wait in it, so the leader adds as many steps as the longest pause takes.
            if self._pause > PAUSE and self._step_seconds > 0:
                step += int((self._pause + longest_pause(self.group.size)) / self._step_seconds)
            self._proposed, self._due = step, due
        self.store.set(f"{self._number}/proposed", json.dumps([step, due.reason, due.final]).encode())

    def due(self, step: int) -> Due | None:
        """After ``step``: why all ranks save now, the same on all of them, or None. Waits if a step is proposed and not fixed yet."""
        with self._lock:
            now = time.monotonic()
            self._step_seconds, self._seen_at = now - self._seen_at if self._seen_at else 0.0, now
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

    @property
    def _pause(self) -> float:
        """Seconds between two looks of a rank where nothing is proposed."""
        return max(PAUSE, self.group.size / LOOKS)

    def _watch(self) -> None:
        leads = self.group.rank == self.group.leader  # it alone looks for what it decides on, and often
        look = self._lead if leads else self._follow
        soon = PAUSE if leads else max(PAUSE, longest_pause(self.group.size))
        while not self._stop.wait(soon if leads or self._proposed is not None else self._pause):
            try:
                look()
            except DeadlineError as err:
                log.warning("no save can be agreed on any more, nor a notice that the job will be stopped be passed on: %s", err)
                with self._lock:
                    self._error = err
                    self._lock.notify_all()
                return

    def _follow(self) -> None:
        with self._lock:
            number, proposed, fixed = self._number, self._proposed, self._fixed
        if proposed is None:
            if (data := self.store.peek(f"{number}/proposed")) is not None:
                step, reason, final = parse_json(data)
                with self._lock:
                    self._proposed, self._due = step, Due(reason=reason, final=final)
                    first = self._seen + 1  # it has passed the last step that it has seen; the leader waits at the one that it proposes
                self._answer(number, first)
        elif fixed is None and (data := self.store.peek(f"{number}/fixed")) is not None:
            self._fix(int(data))

    def _lead(self) -> None:
        """Once every rank has answered, fix the step."""
        # What was said about the one before, all have read.
        with self._lock:
            number, proposed, fixed = self._number, self._proposed, self._fixed
        if not self.asked.is_set() and self.store.peek("asked") is not None:
            self.asked.set()
        if proposed is not None and fixed is None:
            self._answer(number, proposed)
            (answers,) = self.store.appended([f"{number}/first"])
            steps = [int(step) for step in answers.split(b",")[:-1]]
            if len(steps) == self.group.size:
                self.store.set(f"{number}/fixed", str(max(steps)).encode())
                self._fix(max(steps))
                self.store.delete_later(f"{number - 1}/{name}" for name in ("proposed", "first", "fixed"))

    def _fix(self, step: int) -> None:
        with self._lock:  # which is not held while the store is asked: a step of training waits for it
            self._fixed = step
            self._lock.notify_all()
