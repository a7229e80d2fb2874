"""A run of two jobs that share nothing but an object store, one of them without torch."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.errors import ConflictError
from ckpt.runs.step_listing import list_steps

NAMES = ("trainer", "buffer")
BUFFER = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import ckpt, tests.s3.test_joint_run as run
c, state = run.member(sys.argv[1], "buffer"), run.state_of(0)
c.restore(state)
for n in (1, 2):
    c.save(n, run.state_of(n))
    c.wait()
"""


def member(url: str, name: str) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(url, member=ckpt.Member(name, of=NAMES), job=ckpt.Job(timeout=60))


def state_of(n: int) -> dict[str, Any]:
    return {"queue": [n, "é", b"\x00\xff"], "cursor": np.arange(5) * n}


def test_a_member_that_is_killed_after_it_has_prepared_a_step_does_not_undo_it(s3_url: str) -> None:
    buffer = subprocess.Popen([sys.executable, "-c", BUFFER, s3_url])
    try:
        c = member(s3_url, "trainer")
        assert c.restore(state_of(0)) is None
        c.save(1, state_of(1))
        c.wait()
        end = time.monotonic() + 60
        while list_steps(s3_url)[-1].reason != "saved by buffer; awaited: trainer":
            assert time.monotonic() < end and buffer.poll() is None
            time.sleep(0.05)
    finally:
        buffer.kill()
        buffer.wait()
    assert c.latest == 1
    c.save(2, state_of(2))
    c.wait()
    assert c.latest == 2, "whoever is left commits what all have prepared"
    assert c._joint is not None
    c._joint._run.timeout = 1.0
    c.save(3, state_of(3))
    with pytest.raises(ConflictError, match="step 3 was given up: buffer did not save it within 1 s"):
        c.close()
    assert [(s.number, s.committed) for s in list_steps(s3_url)] == [(1, True), (2, True), (3, False)]

    def restored(name: str) -> int | None:
        state = state_of(0)
        with member(s3_url, name) as again:
            n = again.restore(state)
        assert state["queue"] == state_of(2)["queue"] and state["cursor"].tobytes() == state_of(2)["cursor"].tobytes()
        return n

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(restored, NAMES)) == [2, 2]
