"""Threads that save at once with what one thread has made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

JOBS, STEPS = range(3), range(1, 25)


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def state_of(job: int, step: int) -> dict[str, Any]:
    return {"step": step, "t": torch.full((3 + job,), 100.0 * job + step), "queue": list(range(7 * job))}


@pytest.mark.usefixtures("many_switches")
def test_checkpointers_that_one_thread_made_save_in_several(tmp_path: Path) -> None:
    """Memory for copies was shared: a save had another's tensors, with digests that agreed."""
    checkpointers = [ckpt.Checkpointer(tmp_path / f"{job}") for job in JOBS]

    def loop(job: int) -> None:
        for step in STEPS:
            checkpointers[job].save(step, state_of(job, step))
            if step % 2:
                checkpointers[job].wait()
        checkpointers[job].wait()

    with ThreadPoolExecutor(len(JOBS)) as pool:
        list(pool.map(loop, JOBS))
    for job in JOBS:
        for step in STEPS:
            expected, loaded = state_of(job, step), {"step": 0, "t": torch.zeros(3 + job), "queue": []}
            ckpt.load(tmp_path / f"{job}" / f"step-{step:08}", loaded)
            assert torch.equal(loaded.pop("t"), expected.pop("t")), (job, step)
            assert loaded == expected
