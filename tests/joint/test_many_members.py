"""Many whole Checkpointers as the members of one run, in the threads of one process: what they restore, what a save costs each of them, and
what stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import ckpt
from ckpt.errors import ConflictError
from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.policies import Latest
from ckpt.runs import joint
from ckpt.runs.step_listing import list_steps
from tests.api.checked import empty_directory

T = TypeVar("T")


class Member:
    """A job of the run, with a count of what it asks the root of the run for."""

    def __init__(self, root: str, name: str, names: tuple[str, ...]) -> None:
        self.name, self.state = name, {"w": np.zeros(3, np.int64), "name": name}
        self.checkpointer = ckpt.Checkpointer(root, member=ckpt.Member(name, of=names), job=ckpt.Job(timeout=300), keep=Latest(2))
        assert self.checkpointer._joint is not None
        self.run, self._counts = self.checkpointer._joint._run, FaultyProcess()
        self.run._backend = FaultyBackend(self.run._backend, process=self._counts)

    @property
    def requests(self) -> tuple[str, ...]:
        """The size of an object comes with its bytes, wherever a request is a message."""
        return tuple(what for what in self._counts.log if not what.startswith("size "))

    def restore(self) -> int | None:
        step = self.checkpointer.restore(self.state)
        assert (self.state["w"].tolist(), self.state["name"]) == ([step or 0] * 3, self.name)
        return step

    def save(self, n: int) -> str | None:
        """Gives why the step does not exist."""
        self.state["w"] = np.full(3, n)
        self.checkpointer.save(n, self.state)
        try:
            self.checkpointer.wait()
        except ConflictError as err:
            return err.message
        return None


@pytest.fixture
def root() -> Iterator[str]:
    with empty_directory() as path:
        yield path


def made(root: str, names: tuple[str, ...]) -> list[Member]:
    """Each in a thread of its own: those of one thread are one job, whose saves follow each other."""
    members: list[Member] = []
    for name in names:
        thread = threading.Thread(target=lambda name=name: members.append(Member(root, name, names)))  # type: ignore[misc]
        thread.start()
        thread.join()
    return members


def each(members: list[Member], do: Callable[[Member], T]) -> list[T]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(do, members))


def polls_until(over: Callable[[], bool], *, between: bool = True) -> Callable[[float], Iterator[None]]:
    """In place of ``joint._polls``: who waits looks at once, then (``between``) again and again, and for the last time when it is ``over``.
    No deadline of a member ends it, which a busy machine would miss."""

    def polls(end: float) -> Iterator[None]:
        end = time.monotonic() + 240
        yield None
        while not over():
            assert time.monotonic() < end
            time.sleep(0.01)
            if between:
                yield None
        yield None

    return polls


def have_marks(root: str, n: int, names: Collection[str]) -> bool:
    """That these members have saved their part of step ``n``."""
    return all(any(Path(root, f"step-{n:08d}", "members").glob(f"*/{name}-*")) for name in names)


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_many_members_end_on_one_step_whoever_goes_and_a_save_costs_each_three_requests(
    count: int, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, threads = tuple(f"m{n:02}" for n in range(count)), threading.active_count()
    members = made(root, names)
    assert each(members, Member.restore) == [None] * count
    for n in (1, 2, 3):
        before = {m.name: len(m.requests) for m in members}
        record = Path(root, f"step-{n:08d}", "checkpoint.json")
        # How often a member looks before the last one has committed is time, and at most once a second.
        with monkeypatch.context() as patch:
            patch.setattr(joint, "_polls", polls_until(record.exists, between=False))
            assert each(members, lambda m, n=n: m.save(n)) == [None] * count  # type: ignore[misc]
        asked = {m.name: m.requests[before[m.name] :] for m in members}
        others = sorted(len(asked[name]) for name in names[1:])
        # Two that see the marks of all at one moment both try to commit, and one looks at what the other put.
        assert others[0] >= 2 and others[-2:] <= [5, 5] and sum(others) <= 3 * count + 2 * sum(length > 3 for length in others), asked
    assert [s.number for s in list_steps(root) if s.committed] == [2, 3], "the first member keeps two"

    began, before = time.monotonic(), {m.name: len(m.requests) for m in members}
    members[0].run.request(9)
    while time.monotonic() < began + 1.5:
        for m in members[1:]:
            m.checkpointer.requested()
    seconds = time.monotonic() - began
    assert max(len(m.requests) - before[m.name] for m in members[1:]) <= 1 + seconds
    assert {m.checkpointer.requested() for m in members[1:]} <= {None, 9}

    gone = members.pop(count // 2)
    for m in members:
        m.run.timeout = count / 2
    why = f"step 4 was given up: {gone.name} did not save it within {count / 2:g} s"
    with monkeypatch.context() as patch:
        patch.setattr(joint, "_polls", polls_until(lambda: have_marks(root, 4, [m.name for m in members])))
        assert each(members, lambda m: m.save(4)) == [why] * (count - 1)
    for m in [*members, gone]:
        m.checkpointer.close()
    members = made(root, names)
    assert each(members, Member.restore) == [3] * count
    for n in (4, 5):
        assert each(members, lambda m, n=n: m.save(n)) == [None] * count  # type: ignore[misc]
    for m in members:
        m.checkpointer.close()
        assert [s.number for s in list_steps(f"{root}/{m.name}")] == [4, 5]
    assert [s.number for s in list_steps(root)] == [4, 5]
    assert sorted(os.listdir(root)) == sorted(["joint.json", "requested.json", "step-00000004", "step-00000005", *names])
    assert threading.active_count() < threads + 3 * count, "no thread waits for a step that is over"


# ----------------------------- Two jobs of one run whose clocks are days apart: whole processes with another time, in all that they import.

SHIFT = """
import datetime, os, time
_by = int(os.environ["SHIFT_SECONDS"])
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime
time.time, time.time_ns = lambda: _time() + _by, lambda: _time_ns() + _by * 10**9

class Shifted(_datetime):
    __slots__ = ()

    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=_by)

datetime.datetime = Shifted
"""
JOB = """
import json, sys, time
import numpy as np
import ckpt
from ckpt.policies import Latest
root, name, first, last = sys.argv[1:3] + [int(n) for n in sys.argv[3:]]
state = {"w": np.zeros(3, np.int64), "name": name}
with ckpt.Checkpointer(root, member=ckpt.Member(name, of=("trainer", "buffer")), job=ckpt.Job(timeout=60), keep=Latest(2)) as c:
    start = c.restore(state)
    assert state["name"] == name and set(state["w"].tolist()) == {start or 0}
    for n in range(first, last + 1):
        state["w"][:] = n
        c.save(n, state)
        c.wait()
    print(json.dumps([start, c.latest, time.time()]))
"""
DAY = 24 * 3600


def test_a_run_of_two_jobs_whose_clocks_are_two_days_apart(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHIFT)
    root = str(tmp_path / "run")

    def start(by: int, *command: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        environment = {**os.environ, "SHIFT_SECONDS": str(by), "PYTHONPATH": path}
        return subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)

    def life(first: int, last: int, shifts: Sequence[int]) -> list[list[float]]:
        names = ("trainer", "buffer")
        jobs = [start(by, "-c", JOB, root, n, str(first), str(last)) for n, by in zip(names, shifts, strict=True)]
        try:
            return [json.loads(job.communicate(timeout=120)[0]) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
                job.wait()

    def check_steps(kept: list[int]) -> None:
        """That these are there, and at most the one beside them that the clocks call the last written, which no rule removes."""
        there = [s.number for s in list_steps(root) if s.committed]
        assert there[-len(kept) :] == kept and len(there) <= len(kept) + 1
        for name in ("trainer", "buffer"):
            assert [s.number for s in list_steps(f"{root}/{name}")] == there

    before: int | None = None
    for first, shifts in ((1, (DAY, -DAY)), (4, (-DAY, DAY))):
        last = first + 2
        one, other = life(first, last, shifts)
        assert one[:2] == other[:2] == [before, last], "both go on from the last step, and see the same one"
        assert abs(abs(one[2] - other[2]) - 2 * DAY) < 600, "their clocks are apart"
        check_steps([last - 1, last])
        before = last
    slow = request.config.getoption("--slow")
    for by in (-DAY, DAY) if slow else (-DAY,):
        gc = start(by, "-m", "ckpt", "gc", root, "--keep", "latest=1", "--yes")
        gc.communicate(timeout=60)
        assert gc.returncode == 0
        check_steps([6])
    if slow:
        one, other = life(7, 7, (-DAY, -DAY))
        assert one[:2] == other[:2] == [6, 7]
