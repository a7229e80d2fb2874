"""Training goes on while its storage does not, as long as ``give_up_after`` allows, and all ranks decide alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.engine.save import background
from ckpt.errors import CkptError, RankFailedError, ReplicaError, StorageError, UsageError, storage_failed
from ckpt.io_backends.faulty import Fault, FaultyBackend, FaultyProcess
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps
from ckpt.runs.events import Event
from tests.distributed.ranks import Ranks
from tests.memory.daemons import daemon_in


class Outage(FaultyProcess):
    """While it is ``down``, nothing can be written to backends for which ``hit`` is true."""

    def __init__(self, hit: Callable[[str], bool]) -> None:
        super().__init__()
        self.down = False
        self._hit = hit

    def wrap(self, inner: Backend) -> FaultyBackend:
        return FaultyBackend(inner, process=self) if self._hit(inner.url) else inner  # type: ignore[return-value]  # both are backends

    def _begin(self, what: str, *, is_write: bool) -> Fault | None:
        super()._begin(what, is_write=is_write)
        writes = is_write or what.split()[0] in ("create", "put_if", "prepare", "commit")
        return Fault(at=0, kind="error") if self.down and writes else None


def state_of(n: int) -> dict[str, Any]:
    return {"x": torch.full((64,), float(n)), "own": ckpt.PerRank(torch.full((64,), float(n)))}


def loop(folder: str, who: int, tier: str) -> tuple[list[int], list[tuple[str, int | None]], list[str], list[int | None]]:
    """The storage of rank ``who`` is down at steps 2, 3, and 5 to 7. Gives the steps that raised, the events that matter on this rank, what
    its log had, and what is committed in the end."""
    rank, root = dist.get_rank(), f"{folder}/{tier}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon"
    tiers: dict[str, Any] = {"root": {}, "local": {"local": f"{folder}/disk"}, "memory": {"memory": ckpt.Memory(copies=0)}}
    outage = Outage(lambda url: (not url.startswith(root) or tier == "root") and rank == who)
    raised: list[int] = []
    events: list[Event] = []
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    with (
        wrap_backends(outage.wrap),
        ckpt.Checkpointer(root, save=EverySteps(1), job=ckpt.Job(timeout=20), give_up_after=3, on_event=events.append, **tiers[tier]) as c,
    ):
        for n in range(1, 10):
            outage.down = n in (2, 3, 5, 6, 7)
            try:
                c.step(n, state_of(n))
            except CkptError as err:
                raised.append(n if storage_failed(err) else -n)
            assert c.handle is not None
            c.handle.wait(30)
        c.wait()
        committed = [s.number for s in c.steps()]
    ours = [line for line in lines if "injected fault" in line]
    return raised, [(e.kind, e.step) for e in events if e.kind in ("save.failed", "save.durable")], ours, committed


def test_training_outlives_its_storage(ranks: Ranks, tmp_path: Path) -> None:
    with daemon_in(tmp_path / "daemon"):
        results = ranks.run_in_turn(
            2, [(loop, str(tmp_path), who, tier) for tier, who in (("root", 1), ("local", 0), ("memory", 1))] + [(waits, str(tmp_path))]
        )
    down = (2, 3, 5, 6, 7)
    for leader, other in results[:3]:
        assert leader[0] == other[0] == [8], "the third failure in a row, not the third of all"
        assert sorted(leader[1]) == sorted([("save.failed" if n in down else "save.durable", n) for n in range(1, 10)])
        assert len(leader[2]) == 5 and other[2] == [], "one line of each failure, on one rank"
        assert set(leader[3]) == set(other[3]) and 9 in leader[3] and not set(down) & set(leader[3])


def waits(folder: str) -> None:
    """Saves that are waited for at once; what cannot be published; what is raised at the end; and what is no failure of the storage."""
    rank = dist.get_rank()
    outage = Outage(lambda url: url.startswith(f"{folder}/waits"))
    with wrap_backends(outage.wrap):
        c = ckpt.Checkpointer(f"{folder}/waits", job=ckpt.Job(timeout=20), give_up_after=2)
        for n in (1, 2, 3):
            outage.down = n == 2 and rank == 1
            c.save(n, state_of(n))
            c.wait()
        assert [s.number for s in c.steps()] == [1, 3]
        outage.down = rank == 1
        c.save(4, state_of(4))
        with pytest.raises(CkptError, match="injected fault"):
            c.close()  # no training goes on that it could spare
    outage.down = True
    with wrap_backends(outage.wrap):
        c = ckpt.Checkpointer(f"{folder}/waits", local=f"{folder}/fast", job=ckpt.Job(timeout=20), publish_timeout=0.0, give_up_after=2)
        c.save(5, state_of(5))
        c.wait()
        c.save(6, state_of(6))
        with pytest.raises(StorageError, match="could not be published"):
            c.wait()
        outage.down = False
        c.close()
    with ckpt.Checkpointer(f"{folder}/waits", job=ckpt.Job(timeout=20), give_up_after=9) as c:
        assert [s.number for s in c.steps()] == [1, 3, 6]
        with pytest.raises(UsageError if rank == 1 else RankFailedError):
            c.step(7000, {"own": object() if rank == 1 else 1.0}) and c.wait()  # type: ignore[func-returns-value]


class Unreadable(FaultyProcess):
    """No bytes of tensors can be read."""

    def _begin(self, what: str, *, is_write: bool) -> Fault | None:
        super()._begin(what, is_write=is_write)
        return Fault(at=0, kind="error") if what.startswith("read_into data/") else None


class Together:
    """An object that takes its values in a collective call, as DeepSpeed makes parameters of partitions."""

    def __init__(self) -> None:
        self.values = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dist.all_reduce(state["values"].clone())


def reads(folder: str) -> None:
    """Each rank has its own part, so none reads for another; one cannot read."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "together": Together()}
    ckpt.save(f"{folder}/reads", state)
    for who in range(2):
        fault = wrap_backends(Unreadable().wrap) if dist.get_rank() == who else nullcontext()
        error = StorageError if dist.get_rank() == who else RankFailedError
        with fault, pytest.raises(error, match=f"rank {who}|injected fault"):
            ckpt.load(f"{folder}/reads", state, job=ckpt.Job(timeout=20), read=ckpt.ReadOptions(exchange=False))


def test_nothing_is_set_where_another_rank_could_not_read(ranks: Ranks, tmp_path: Path) -> None:
    """What sets it may be collective: the others waited for the failed rank until their process group gave up."""
    ranks.run(2, reads, str(tmp_path))


def test_an_outage_hides_no_other_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: object) -> None:
        raise ReplicaError("replicas differ")

    def unreachable() -> dict[str, Any]:
        raise StorageError("the data set is not reachable")

    with ckpt.Checkpointer(tmp_path, save=EverySteps(1), give_up_after=9) as c:
        with monkeypatch.context() as patched:
            patched.setattr(background, "write_and_commit", differs)
            c.save(1, {"w": torch.ones(3)}).wait()
        with pytest.raises(ReplicaError):
            c.step(2, unreachable)
        assert c.step(3, {"w": torch.ones(3)})
    assert ckpt.latest(tmp_path) == c.url(3)


def test_how_many_failures() -> None:
    for limit in (0, True, 1.5, None):
        with pytest.raises(UsageError, match="give_up_after"):
            ckpt.Checkpointer("run", give_up_after=limit)  # type: ignore[arg-type]
