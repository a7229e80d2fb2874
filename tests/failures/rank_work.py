"""What a rank does in ``test_dead_ranks.py``: one save or load, in which it raises, dies, hangs or is slow at a chosen point."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from tests.failures.states import blank, layout, number_of, state

BEFORE, NEW, AGAIN = 1, 2, 3
DEADLINE = 4.0
"""``timeout=`` of all calls."""
HANG = 60.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What one rank does. ``at``: ``"call"`` before it calls, ``"hook"`` in an object of its state, or a pattern for the beginning of an
    operation on the storage, as a ``FaultyProcess`` writes it down. ``how``: ``raise``, ``exit``, ``kill``, ``kill soon`` (0.3 s later),
    ``hang``, or ``slow`` (``seconds`` at each such operation)."""

    rank: int
    at: str
    how: str
    after: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One save or load of ``size`` ranks. ``big``: MiB of a further tensor. ``store_on_rank0``: the job's store dies with rank 0."""

    name: str
    kind: str = "save"
    size: int = 2
    troubles: tuple[Trouble, ...]
    big: int = 0
    store_on_rank0: bool = False
    again: bool = False
    """All ranks save once more afterwards."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended on one rank."""

    error: str | None = None
    """Name of the class of what was raised."""
    ours: bool = False
    """It is a CkptError."""
    text: str = ""
    hint: str | None = None
    seconds: float
    loaded: int | None = None
    """Number of the state that was loaded."""
    again: str | None = None
    """What the second save raised."""


@dataclass(eq=False)
class Actor:
    """One rank's misbehaviour."""

    trouble: Trouble | None
    folder: Path
    size: int

    def act(self, at: str) -> None:
        if self.trouble is None or not re.match(self.trouble.at, at):
            return
        how = self.trouble.how
        if how == "raise":
            raise RuntimeError("my own defect")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "kill soon":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if how == "slow":
            time.sleep(self.trouble.seconds)
        if how == "hang":
            self.hang()

    def hang(self) -> None:
        """Until all others are done, so that the test need not wait longer than they do."""
        end = time.monotonic() + HANG
        while len(list(self.folder.iterdir())) < self.size - 1 and time.monotonic() < end:
            time.sleep(0.05)
        os._exit(9)


class Troubled(FaultyProcess):
    """Backends that misbehave when their rank does."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor

    def operate(self, what: str, effect: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        after = self.actor.trouble is not None and self.actor.trouble.after
        if not after:
            self.actor.act(what)
        result = effect()
        if after:
            self.actor.act(what)
        return result


@dataclass
class Hook:
    """An object of the user's in the state."""

    actor: Actor | None = None
    saved: dict[str, Any] = field(default_factory=lambda: {"x": 1})

    def state_dict(self) -> dict[str, Any]:
        if self.actor is not None:
            self.actor.act("hook")
        return self.saved

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.saved = values


def whole(target: dict[str, Any], hook: Hook, big: int) -> dict[str, Any]:
    """A state with the things that these tests add."""
    target["hook"] = hook
    if big:
        target["model"]["big"] = torch.zeros(big << 20, dtype=torch.uint8)
    return target


def attempt(case: Case, url: str, folder: str) -> Outcome:
    """Save state ``NEW`` or load what is there, on this rank; in ``folder`` each rank that is done leaves a file."""
    rank = dist.get_rank()
    trouble = next((t for t in case.troubles if t.rank == rank), None)
    actor = Actor(trouble, Path(folder), case.size)
    dist.barrier()  # starting takes longer on some ranks than on others, and is not what is timed
    began = time.monotonic()
    try:
        actor.act("call")
        with wrap_backends(Troubled(actor).wrap):
            loaded = _call(case, url, rank, Hook(actor))
    except (CkptError, RuntimeError) as err:
        seconds = time.monotonic() - began
        hint = err.hint if isinstance(err, CkptError) else None
        done = Outcome(error=type(err).__name__, ours=isinstance(err, CkptError), text=str(err), hint=hint, seconds=seconds)
    else:
        done = Outcome(seconds=time.monotonic() - began, loaded=loaded)
    Path(folder, str(rank)).touch()
    return _again(case, url, rank, done) if case.again else done


def _call(case: Case, url: str, rank: int, hook: Hook) -> int | None:
    if case.kind == "save":
        target = whole(state(NEW, rank, case.size), hook, case.big)
        wrong = hook.actor is not None and hook.actor.trouble is not None and hook.actor.trouble.at == "wrong type"
        ckpt.save(url, list(target) if wrong else target, layout=layout(case.size), job=ckpt.Job(timeout=DEADLINE))  # type: ignore[arg-type]
        return None
    target = whole(blank(), hook, case.big)
    ckpt.load(url, target, job=ckpt.Job(timeout=DEADLINE))
    return number_of(target)


def _again(case: Case, url: str, rank: int, done: Outcome) -> Outcome:
    again = None
    try:
        ckpt.save(url, whole(state(AGAIN, rank, case.size), Hook(), case.big), layout=layout(case.size), job=ckpt.Job(timeout=DEADLINE))
    except (CkptError, RuntimeError) as err:
        again = repr(err)
    return Outcome(**(done.__dict__ | {"again": again}))
