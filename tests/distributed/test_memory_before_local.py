"""Memory at every step, a local tier less often, and the root: each range of the newest step comes from the nearest place that has it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CorruptError
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps, Latest
from tests.distributed.ranks import Ranks
from tests.distributed.test_spread import NoData, state_of, whole_of
from tests.memory.daemons import daemon_in


def train(folder: str, machines: Sequence[int], steps: range, dim: int, shared: bool, parity: int | None = None) -> tuple[int | None, str]:
    """Rank r runs on ``machines[r]``, which has a daemon and a disk. Nothing is read from the root."""
    machine = machines[dist.get_rank()]
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    root = f"{folder}/root"
    local = (
        ckpt.SharedLocal(f"{folder}/shared", keep=Latest(2))
        if shared
        else ckpt.NodeLocal(f"{folder}/disk{machine}", parity=parity, keep=Latest(2))
    )
    memory = ckpt.Memory(keep=2, copies=0)
    with (
        wrap_backends(lambda b: NoData(b) if b.url.startswith(root) else b),
        ckpt.Checkpointer(root, memory=memory, local=local, save=EverySteps(2), keep=Latest(3), job=ckpt.Job(timeout=20)) as c,
    ):
        state = state_of(-1, dim)
        start = c.restore(state)
        if start is not None:
            assert state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
            assert torch.equal(state["rng"], torch.Generator().manual_seed(start).get_state())
        for n in steps:
            c.step(n, state_of(n, dim))
        c.wait()
        assert (c.unpublished, c.uncopied) == ((), ())
        return start, str(c.restored_from)


def steps_at(url: str | Path) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(str(url)) if s.committed]


@pytest.mark.parametrize("shared", [False, True], ids=["a disk in each node", "a shared directory"])
def test_each_range_comes_from_the_nearest_place(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    run = str(tmp_path)
    with daemon_in(tmp_path / "daemon0") as first, daemon_in(tmp_path / "daemon1") as second:
        assert ranks.run(2, train, run, [0, 1], range(1, 6), 0, shared) == [(None, "None")] * 2
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(first.folder))
        name = first.list()[0].path.partition("/")[0]
        assert steps_at(f"memory://{name}") == [4, 5]
        assert steps_at(tmp_path / ("shared" if shared else "disk0"))[-1] == steps_at(tmp_path / "root")[-1] == 5
        second.stop()
        results = ranks.run(2, train, run, [0, 1], range(0), 1, shared)
        assert [start for start, _ in results] == [5, 5]
        near = "local tier" if shared else "disk of this host"
        assert "memory of this host" in results[0][1] and any(near in text for _, text in results), results
        assert all(text.endswith("root 0 B") for _, text in results), results
        first.stop()
        if not shared:
            shutil.rmtree(tmp_path / "disk1")
        start, text = ranks.run(1, train, run, [0], range(0), 0, shared)[0]
        assert start == 5 and near in text and text.endswith("root 0 B"), text


def die_or_refuse(folder: str, *, dies: bool) -> str:
    """Only memory has a checkpoint. It does not begin anew when that cannot be loaded any more."""
    rank = dist.get_rank()
    socket.gethostname = lambda: f"machine{rank}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{rank}"
    local, memory = ckpt.NodeLocal(f"{folder}/disk{rank}", copies=0), ckpt.Memory(copies=0)
    with ckpt.Checkpointer(f"{folder}/root", memory=memory, local=local, job=ckpt.Job(timeout=20)) as c:
        if dies:
            c.step(1, state_of(1, 0))
            assert c.handle is not None
            c.handle.result()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CorruptError) as error:
            c.restore(state_of(-1, 0))
    return str(error.value)


def test_what_memory_has_lost_is_an_error_where_nothing_else_is(ranks: Ranks, tmp_path: Path) -> None:
    with daemon_in(tmp_path / "daemon0"), daemon_in(tmp_path / "daemon1") as second:
        ranks.run(2, partial(die_or_refuse, dies=True), str(tmp_path), allow_death=True)
        second.stop()
        (text,) = ranks.run(1, partial(die_or_refuse, dies=False), str(tmp_path))
    assert "no checkpoint here can be read" in text and "rank 1 on machine1" in text


def die_or_go_on(folder: str, *, dies: bool) -> tuple[int | None, list[str]]:
    """Step 1 is at the root, step 2 in memory alone. The step that is restored, and what the log says is passed over."""
    rank = dist.get_rank()
    socket.gethostname = lambda: f"machine{rank}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{rank}"
    local, memory = ckpt.NodeLocal(f"{folder}/disk{rank}", copies=0), ckpt.Memory(copies=0)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logging.getLogger("ckpt").addHandler(handler)
    with ckpt.Checkpointer(f"{folder}/root", memory=memory, local=local, job=ckpt.Job(timeout=20)) as c:
        if dies:
            c.save(1, state_of(1, 0))
            c.wait()
            c.step(2, state_of(2, 0))
            assert c.handle is not None
            c.handle.result()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        start = c.restore(state_of(-1, 0))
    return start, [record.getMessage() for record in records if "is passed over" in record.getMessage()]


def test_what_memory_has_lost_is_told_where_an_older_step_is(ranks: Ranks, tmp_path: Path) -> None:
    with daemon_in(tmp_path / "daemon0"), daemon_in(tmp_path / "daemon1") as second:
        ranks.run(2, partial(die_or_go_on, dies=True), str(tmp_path), allow_death=True)
        second.stop()
        ((start, passed),) = ranks.run(1, partial(die_or_go_on, dies=False), str(tmp_path))
    assert start == 1
    assert any("step-00000002 is passed over" in text and "rank 1 on machine1" in text for text in passed), passed


@pytest.mark.slow
def test_parity_of_disks_gives_what_memory_has_lost(ranks: Ranks, tmp_path: Path) -> None:
    """Memory without copies, before disks with parity: a machine is gone with both, and what it had comes from the disks of the others."""
    run = str(tmp_path)
    with daemon_in(tmp_path / "daemon0"), daemon_in(tmp_path / "daemon1") as second, daemon_in(tmp_path / "daemon2"):
        assert ranks.run(3, train, run, [0, 1, 2], range(1, 6), 0, False, 3) == [(None, "None")] * 3
        second.stop()
        shutil.rmtree(tmp_path / "disk1")
        results = ranks.run(2, train, run, [0, 2], range(0), 1, False, 3)
        assert [start for start, _ in results] == [5, 5]
        assert all(text.endswith("root 0 B") for _, text in results) and any(", parity " in text for _, text in results), results
        assert all("memory of this host" in text for _, text in results), results
