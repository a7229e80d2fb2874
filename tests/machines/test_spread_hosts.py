"""A host is cut off in the middle of a second copy: nobody hangs, what other hosts have is restored whole, and the copy is made later."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Layout, Replicate, Shard
from ckpt.nodes import memory_client
from ckpt.nodes.copies import copies_seen
from ckpt.policies import EverySteps
from ckpt.runs.tiers import Tiers
from tests.machines import work
from tests.machines.bed import Bed
from tests.machines.jobs import Job

pytestmark = pytest.mark.alone

TIMEOUT, MARGIN = 3.0, 4.0


def state_of(n: int) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"w": torch.randn(240, 100, generator=torch.Generator().manual_seed(n)).chunk(world)[rank].clone(), "n": n}


def begin(folder: str) -> ckpt.Checkpointer:
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/{os.uname().nodename}"
    layout = Layout({"dp": int(os.environ["WORLD_SIZE"])}, [("w", Shard(0, "dp")), ("*", Replicate())])
    return ckpt.Checkpointer(f"{folder}/root", memory=ckpt.Memory(), save=EverySteps(100), job=ckpt.Job(timeout=TIMEOUT), layout=layout)


def save_twice(folder: str) -> tuple[bool, tuple[int, ...], float]:
    """Rank 1 waits in the copy of step 2 until its host is cut off. Whether the copies of this host ended, what lacks some, and seconds."""
    c = begin(folder)
    for n in (1, 2):
        if n == 2 and os.environ["RANK"] == "1":
            work.stop_at("copy", Path.cwd(), 1)
        c.step(n, state_of(n))
        assert c.handle is not None and c._tiers.spread is not None and c._tiers.spread._copier is not None
        c.handle.result()
        if n == 1:
            assert c._tiers.spread.finish() == ()
    copier = c._tiers.spread._copier
    if os.environ["RANK"] != "1":
        while not any(step.id in copier._complete for step in ckpt.list_steps(copier._nodes.url) if step.number == 2):
            time.sleep(0.02)
        Path(f"{os.environ['RANK']}.copied").touch()
    began = time.monotonic()
    finished, seconds = copier.finish(60), time.monotonic() - began
    while not Path("1.there").exists() and time.monotonic() < began + 60:  # who ends takes his node along
        time.sleep(0.05)
    return finished, c.uncopied, seconds


def restore(folder: str) -> tuple[int | None, tuple[int, ...], bool | None, int]:
    """The step, what lacks copies, whether its copies were seen, and bytes of this host's daemon that a save has borrowed."""
    c = begin(folder)
    state = state_of(0)
    state["w"].zero_()
    start = c.restore(state)
    assert c._tiers.spread is not None and state["n"] == start and torch.equal(state["w"], state_of(start or 0)["w"])
    uncopied = c._tiers.spread.finish()
    daemon = memory_client.connect()
    (run,) = {known.path.split("/")[0] for known in daemon.list()}
    return start, uncopied, copies_seen(f"memory://{run}/step-{start:08d}"), daemon.status()["lent"]


def test_cut_off_in_the_middle_of_a_copy(bed: Bed, tmp_path: Path) -> None:
    try:
        with Job(bed, save_twice, str(tmp_path), hosts=(0, 1, 2)) as job:
            job.await_file("1.there")
            for other in (0, 2):
                job.await_file(f"{other}.copied")
            bed.cut(1)
            job.go_on()
            ended = job.results(60)
        assert [finished for finished, *_ in ended] == [True] * 3
        assert [uncopied for _, uncopied, _ in ended] == [(), (2,), ()]
        assert ended[1][2] < TIMEOUT + MARGIN and max(seconds for *_, seconds in ended) < 3 * (TIMEOUT + MARGIN), ended
        with Job(bed, restore, str(tmp_path), hosts=(0, 2)) as job:  # what is left of step 2 is not all of it
            assert job.results() == [(1, (), True, 0)] * 2
        bed.mend()
        with Job(bed, restore, str(tmp_path), hosts=(0, 1, 2)) as job:
            assert job.results() == [(2, (), True, 0)] * 3
    finally:
        bed.mend()


def wait_for(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


def train(folder: str) -> tuple[list[float], list[str], list[int]]:
    """Host 2 is cut off before retention after step 3, until that has ended. How long each retention took, what it warned of, and the steps
    that this host has in the end."""
    seconds, warnings = list[float](), list[str]()
    handler, retain, rank = logging.Handler(logging.WARNING), Tiers.retain_after_save, int(os.environ["RANK"])
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    c = begin(folder)

    def timed(tiers: Tiers) -> None:
        if len(seconds) == 2:
            Path("saved").touch()
            wait_for("cut")
        began = time.monotonic()
        retain(tiers)
        seconds.append(time.monotonic() - began)

    if rank == 0:
        Tiers.retain_after_save = timed  # type: ignore[method-assign]
    for n in range(1, 6):
        c.step(n, state_of(n))
        assert c.handle is not None
        c.handle.result()
        if n in (3, 5) and rank == 0:
            Path(f"retained-{n}").touch()
        if n in (3, 5):
            wait_for("mended" if n == 3 else "retained-5")
    steps = {int(known.path.split("step-")[1][:8]) for known in memory_client.connect().list()}
    return seconds, [text for text in warnings if "old checkpoints" in text], sorted(steps)


@pytest.mark.slow
def test_cut_off_before_retention(bed: Bed, tmp_path: Path) -> None:
    """It is waited for once, one warning names it, and the next save frees the memory of all hosts."""
    try:
        with Job(bed, train, str(tmp_path), hosts=(0, 1, 2)) as job:
            job.await_file("saved")
            bed.cut(2)
            (job.folder / "cut").touch()
            job.await_file("retained-3")
            bed.mend()
            (job.folder / "mended").touch()
            ended = job.results()
    finally:
        bed.mend()
    seconds, warnings, _ = ended[0]
    assert seconds[2] < TIMEOUT and len(warnings) == 1 and "node h2:" in warnings[0], (seconds, warnings)
    assert [steps for *_, steps in ended] == [[4, 5]] * 3
