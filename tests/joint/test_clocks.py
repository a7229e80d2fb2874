"""Two jobs of one run whose clocks are days apart: whole processes with another time, in all that they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt.runs.step_listing import list_steps

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
