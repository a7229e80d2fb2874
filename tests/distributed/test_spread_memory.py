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
from tests.memory.daemons import daemon_in, flip_byte


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(64, 50, generator=torch.Generator().manual_seed(n))


def state_of(n: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole_of(n), mesh, [Shard(dim)]), "b": torch.full((9,), float(n)), "n": n}


def train(folder: str, machines: Sequence[int], steps: range, dim: int, root: str, *, dies: bool) -> tuple[int | None, str]:
    """Rank r runs on ``machines[r]``, which has a memory daemon of its own."""
    machine = machines[dist.get_rank()]
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    with ckpt.Checkpointer(f"{folder}/{root}", memory=ckpt.Memory(), save=EverySteps(10), timeout=20) as c:
        state = state_of(-1, dim)
        start = c.restore(state)
        if start is not None:
            assert state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
            assert torch.equal(state["b"], state_of(start, dim)["b"])
        for n in steps:
            c.step(n, state_of(n, dim))
        if dies:
            assert c.handle is not None
            c.handle.result()
            assert c._spread is not None
            assert c._spread.finish() == () and not Path(f"{folder}/{root}").exists()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return start, str(c.restored_from)


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[client.MemoryClient]]:
    monkeypatch.setenv("CKPT_MEMORY_SECRET", "of these tests")
    with ExitStack() as stack:
        yield [stack.enter_context(daemon_in(tmp_path / f"daemon{n}")) for n in range(3)]


def test_all_trainers_die_and_then_a_machine(ranks: Ranks, tmp_path: Path, daemons: list[client.MemoryClient]) -> None:
    """Killed after step 2; resumed in another layout from what the daemons have; then a machine is gone, and two ranks go on."""
    lost = ranks.run(3, train_and_die, str(tmp_path), allow_death=True)
    assert all(isinstance(one, Lost) and one.exitcode == -signal.SIGKILL for one in lost), lost
    for known in daemons[1].list():  # all that one machine has is wrong: each byte comes from the other copy
        if "step-00000002/data/" in known.path:
            flip_byte(daemons[1], known.path)
    results = ranks.run(3, resume, str(tmp_path), [0, 1, 2], 1)
    assert [start for start, _ in results] == [2] * 3
    assert all("only this job can open: memory of this host" in text and text.endswith("root 0 B") for _, text in results), results
    daemons[1].stop()
    results = ranks.run(2, resume, str(tmp_path), [0, 2], 0)
    assert [start for start, _ in results] == [2] * 2
    assert all("/root/step-00000002: memory of this host" in text and text.endswith("root 0 B") for _, text in results), results


def test_machines_without_ranks_give_what_they_have(ranks: Ranks, tmp_path: Path, daemons: list[client.MemoryClient]) -> None:
    """A new job on a machine that had no part in the run, and knows the others by CKPT_MEMORY. One of these is gone."""
    ranks.run(3, train_and_die, str(tmp_path), allow_death=True)
    addresses = [d.address() for d in daemons]
    secrets = {d.secret() for d in daemons}
    assert len(secrets) == 1  # CKPT_MEMORY_SECRET
    daemons[0].stop()
    with daemon_in(tmp_path / "daemon3"):
        (start, text), (_, again) = ranks.run(1, resume_elsewhere, str(tmp_path), addresses)[0]
    assert start == 2 and "memory of this host 0 B, memory of host" in text and text.endswith("root 0 B"), text
    assert "step-00000003" in again  # saved by the new job, and then nearer than what the others have
    assert all("step-00000001/checkpoint.json" in " ".join(k.path for k in d.list()) for d in daemons[1:])  # nothing is changed there


def resume_elsewhere(folder: str, addresses: list[str]) -> list[tuple[int | None, str]]:
    os.environ["CKPT_MEMORY_SECRET"] = "of these tests"
    os.environ["CKPT_MEMORY"] = ",".join(addresses)
    first = train(folder, [3], range(3, 4), 1, "root", dies=False)
    return [first, train(folder, [3], range(0), 0, "root", dies=False)]


def train_and_die(folder: str) -> None:
    train(folder, [0, 1, 2], range(1, 3), 0, "root", dies=True)


def resume(folder: str, machines: Sequence[int], dim: int) -> tuple[int | None, str]:
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
