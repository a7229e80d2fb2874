"""Checkpoints in the memory of several machines: every process of the job may die, and a machine with its daemon, too."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.memory import client
from ckpt.policies import EverySteps
from tests.distributed.ranks import Lost, Ranks
from tests.memory.daemons import daemon_in


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(64, 50, generator=torch.Generator().manual_seed(n))


def state_of(n: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole_of(n), mesh, [Shard(dim)]), "n": n}


def train(folder: str, machines: Sequence[int], steps: range, dim: int, root: str, *, dies: bool) -> tuple[int | None, dict[str, int]]:
    """Rank r runs on ``machines[r]``, which has a memory daemon of its own."""
    machine = machines[dist.get_rank()]
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    with ckpt.Checkpointer(f"{folder}/{root}", memory=ckpt.Memory(), save=EverySteps(10), timeout=20) as c:
        state = state_of(-1, dim)
        start = c.restore(state)
        if start is not None:
            assert state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
        for n in steps:
            c.step(n, state_of(n, dim))
        if dies:
            assert c.handle is not None
            c.handle.result()
            assert c._spread is not None
            assert c._spread.finish() == () and not Path(f"{folder}/{root}").exists()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return start, dict(c.restored_bytes)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[client.MemoryClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(daemon_in(tmp_path / f"daemon{n}")) for n in range(3)]


def test_all_trainers_die_and_then_a_machine(ranks: Ranks, tmp_path: Path, daemons: list[client.MemoryClient]) -> None:
    """Killed after step 2; resumed in another layout from what the daemons have; then a machine is gone, and two ranks go on."""
    lost = ranks.run(3, train_and_die, str(tmp_path), allow_death=True)
    assert all(isinstance(one, Lost) and one.exitcode == -signal.SIGKILL for one in lost), lost
    results = ranks.run(3, resume, str(tmp_path), [0, 1, 2], 1)
    assert [start for start, _ in results] == [2] * 3
    assert not any("root" in nbytes for _, nbytes in results)
    daemons[1].stop()
    results = ranks.run(2, resume, str(tmp_path), [0, 2], 0)
    assert [start for start, _ in results] == [2] * 2
    assert not any("root" in nbytes for _, nbytes in results)


def train_and_die(folder: str) -> None:
    train(folder, [0, 1, 2], range(1, 3), 0, "root", dies=True)


def resume(folder: str, machines: Sequence[int], dim: int) -> tuple[int | None, dict[str, int]]:
    return train(folder, machines, range(0), dim, "root", dies=False)


def test_only_the_newest_is_published(ranks: Ranks, tmp_path: Path) -> None:
    """Saves into memory at every step: the end publishes the newest one, not each that is kept, and none counts as late."""
    with daemon_in(tmp_path / "daemon"):
        published, alerts = ranks.run(1, three_steps, str(tmp_path))[0]
    assert published == [3] and alerts == []


def three_steps(folder: str) -> tuple[list[int | None], list[str | None]]:
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon"
    events: list[ckpt.monitors.Event] = []
    memory = ckpt.Memory(keep=3, copies=0)
    with ckpt.Checkpointer(f"{folder}/root", memory=memory, save=EverySteps(10), timeout=20, on_event=events.append) as c:
        for n in range(1, 4):
            c.step(n, state_of(n, 0))
    return [s.number for s in ckpt.list_steps(f"{folder}/root")], [e.reason for e in events if e.kind == "alert"]
