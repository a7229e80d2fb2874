"""A local tier on several ranks: each publishes its own files, all go on from the same copy, and none waits for one that is gone."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import StorageError, UsageError
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps, Latest, OnPreemption
from ckpt.runs import tier_chain
from tests.distributed.ranks import Lost, Ranks


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(64, 50, generator=torch.Generator().manual_seed(n))


def state_of(n: int) -> dict[str, Any]:
    """A tensor that is cut over the ranks, and one that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole_of(n), mesh, [Shard(0)]), "b": torch.full((9,), float(n)), "n": n}


class Watched:
    """A backend that notes what this process creates and publishes, and fails as long as the file ``away`` is there."""

    def __init__(self, backend: Any, made: list[str], away: Path | None, dies: bool) -> None:
        self._backend, self._made, self._away, self._dies = backend, made, away, dies

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if self._away is not None and self._away.exists():
                raise StorageError("the storage does not answer")
            if name in ("create", "put_if"):
                if self._dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._made.append(args[0])
            return found(*args, **options)

        return call


def train(folder: str, steps: range, dies: bool = False, away: range = range(0), away_on: int = -1) -> dict[str, Any]:
    """Go on, and save every step; what this rank saw. At the steps ``away`` rank ``away_on`` cannot reach the root."""
    root, local, gone = f"{folder}/root", f"{folder}/local", Path(folder, f"away-{dist.get_rank()}")
    made: list[str] = []
    rank = dist.get_rank()
    with wrap_backends(lambda b: Watched(b, made, gone, dies and rank == 1) if b.url.startswith(root) else b):
        with ckpt.Checkpointer(root, local=local, save=EverySteps(1), keep=Latest(3), job=ckpt.Job(timeout=6 if dies else 20)) as c:
            state = state_of(-1)
            start = c.restore(state)
            if start is not None:
                assert state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
            for n in steps:
                if dist.get_rank() == away_on:
                    gone.touch() if n in away else gone.unlink(missing_ok=True)
                c.step(n, state_of(n))
                if n not in away:
                    c.wait()
                while n in away and n not in c.unpublished:
                    time.sleep(0.01)
        return {"start": start, "from": c.restored_from.url if c.restored_from is not None else None, "made": made, "left": c.unpublished}


def numbers(root: Path) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(str(root)) if s.committed]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_each_rank_publishes_what_it_wrote(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, train, str(tmp_path), range(1, 2))
    data = [{p for f in found for p in f["made"] if p.startswith("data/") and f is mine} for mine in found]
    assert len(data[0]) == len(data[1]) == 1 and data[0] != data[1]
    assert [any(p.startswith("index") for p in f["made"]) for f in found] == [True, False]
    assert found[0]["made"][-1] == "checkpoint.json" and "checkpoint.json" not in found[1]["made"]
    assert files(tmp_path / "root") == files(tmp_path / "local")
    assert verify(str(tmp_path / "root" / "step-00000001")).ok


def test_ranks_go_on_together_from_the_nearest_copy(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train, str(tmp_path), range(1, 4))
    local, root = tmp_path / "local" / "step-00000003", tmp_path / "root" / "step-00000003"
    assert (numbers(tmp_path / "local"), numbers(tmp_path / "root")) == ([3], [1, 2, 3])
    found = ranks.run(3, train, str(tmp_path), range(0))
    assert [(f["start"], f["from"]) for f in found] == [(3, str(local))] * 3
    path = sorted(local.glob("data/*"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # only the last rank's part
    found = ranks.run(2, train, str(tmp_path), range(0))
    assert [(f["start"], f["from"]) for f in found] == [(3, str(root))] * 2
    shutil.rmtree(tmp_path / "local")
    found = ranks.run(1, train, str(tmp_path), range(4, 5))
    assert [(f["start"], f["from"]) for f in found] == [(3, str(root))]
    assert files(tmp_path / "local" / "step-00000004") == files(tmp_path / "root" / "step-00000004")


def test_a_rank_that_is_killed_while_it_publishes(ranks: Ranks, tmp_path: Path) -> None:
    """The others are told by the deadline; the next start, on another number of ranks, publishes what they saved."""
    began = time.monotonic()
    lost = ranks.run(2, train, str(tmp_path), range(1, 2), True, timeout=40, allow_death=True)
    assert isinstance(lost[1], Lost) and lost[1].exitcode == -signal.SIGKILL
    assert isinstance(lost[0], Lost) and "could not be published" in str(lost[0].error) and "rank 1" in str(lost[0].error)
    assert time.monotonic() - began < 40
    assert numbers(tmp_path / "local") == [1] and numbers(tmp_path / "root") == []
    found = ranks.run(3, train, str(tmp_path), range(0))
    assert [f["start"] for f in found] == [1] * 3
    assert files(tmp_path / "root" / "step-00000001") == files(tmp_path / "local" / "step-00000001")


@pytest.mark.parametrize("who", [0, 1])
def test_the_root_is_away_for_one_rank_for_a_while(ranks: Ranks, tmp_path: Path, who: int) -> None:
    found = ranks.run(2, train, str(tmp_path), range(1, 6), False, range(3, 5), who)
    assert [f["left"] for f in found] == [()] * 2
    assert {1, 2, 5} - {*numbers(tmp_path / "root")} <= {1} and numbers(tmp_path / "local") == [5]  # 4 may just have made it
    assert files(tmp_path / "root" / "step-00000005") == files(tmp_path / "local" / "step-00000005")


def not_shared(folder: str, first: str) -> str:
    """Each rank has a directory of its own, as on nodes with a disk each."""
    tier_chain.LOOK = 0.5
    c = ckpt.Checkpointer(f"{folder}/root", local=f"{folder}/local-{dist.get_rank()}", job=ckpt.Job(timeout=20))
    call = partial(c.restore, state_of(0)) if first == "restore" else partial(c.save, 1, state_of(1))
    with pytest.raises(UsageError, match=r"not the same directory on all ranks: rank 1") as raised:
        call()
    c.close()
    return str(raised.value)


@pytest.mark.parametrize("first", ["restore", "save"])
def test_disks_that_ranks_do_not_share_are_refused(ranks: Ranks, tmp_path: Path, first: str) -> None:
    found = ranks.run(2, not_shared, str(tmp_path), first)
    assert "cannot see what rank 0 writes there" in found[0]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["ckpt-log.json"] * (first == "save")  # it is a save that failed


def preempted(folder: str) -> tuple[bool, list[int | None]]:
    with ckpt.Checkpointer(
        f"{folder}/root", local=f"{folder}/local", save=EverySteps(1000) | OnPreemption(), job=ckpt.Job(timeout=20)
    ) as c:
        for n in range(1, 200):
            dist.all_reduce(torch.ones(1))
            if n == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            c.step(n, state_of(n))
            if c.preempted:
                return True, numbers(Path(folder, "root"))
            time.sleep(0.02)
    return False, []


def test_the_last_save_before_a_stop_is_published(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, preempted, str(tmp_path))
    assert found[0] == found[1] and found[0][0] and len(found[0][1]) == 1
    assert numbers(tmp_path / "local") == found[0][1]
