"""Checkpoints in the memory of several machines: every process of the job may die, and a machine with its daemon, too."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.cli.main import cli
from ckpt.nodes import memory_client
from ckpt.policies import EverySteps
from tests.distributed.ranks import Lost, Ranks
from tests.memory.daemons import daemon_in, flip_byte


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(64, 50, generator=torch.Generator().manual_seed(n))


def state_of(n: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole_of(n), mesh, [Shard(dim)]), "b": torch.full((9,), float(n)), "n": n}


def train(
    folder: str, machines: Sequence[int], steps: range, dim: int, root: str, *, dies: bool, parity: int | None = None
) -> tuple[int | None, str]:
    """Rank r runs on ``machines[r]``, which has a memory daemon of its own."""
    machine = machines[dist.get_rank()]
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    complete: list[int | None] = []

    def on_event(event: ckpt.monitors.Event) -> None:
        if event.kind == "save.copied":
            complete.append(event.step)

    memory = ckpt.Memory(parity=parity)
    with ckpt.Checkpointer(f"{folder}/{root}", memory=memory, save=EverySteps(10), job=ckpt.Job(timeout=20), on_event=on_event) as c:
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
            assert c._tiers.spread is not None
            assert c._tiers.spread.finish() == () and not Path(f"{folder}/{root}").exists()
            dist.barrier()
            c._tiers.spread.finish()  # by now all nodes have made theirs
            assert [*steps][-1] in complete or dist.get_rank() or poll(lambda: [*steps][-1] in complete), complete
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return start, str(c.restored_from)


def poll(condition: Callable[[], bool]) -> bool:
    """Events are told in a thread of their own."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[memory_client.MemoryClient]]:
    monkeypatch.setenv("CKPT_MEMORY_SECRET", "of these tests")
    with ExitStack() as stack:
        yield [stack.enter_context(daemon_in(tmp_path / f"daemon{n}")) for n in range(3)]


def test_all_trainers_die_and_then_a_machine(
    ranks: Ranks, tmp_path: Path, daemons: list[memory_client.MemoryClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 2; resumed in another layout from what the daemons have; then a machine is gone, and two ranks go on."""
    lost = ranks.run(3, train_and_die, str(tmp_path), allow_death=True)
    assert all(isinstance(one, Lost) and one.exitcode == -signal.SIGKILL for one in lost), lost
    for known in daemons[1].list():  # all that one machine has is wrong: each byte comes from the other copy
        if "step-00000002/data/" in known.path:
            flip_byte(daemons[1], known.path)
    results = ranks.run(3, resume, str(tmp_path), [0, 1, 2], 1)
    assert [start for start, _ in results] == [2] * 3
    assert all("only this job can open: memory of this host" in text and text.endswith("root 0 B") for _, text in results), results
    for daemon in daemons:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(daemon.folder))
        status = json.loads(CliRunner().invoke(cli, ["memory", "status", "--json"]).stdout)
        assert list(status["copies"].values()) == [True] * 2 and "complete" in CliRunner().invoke(cli, ["memory", "status"]).stdout
    daemons[1].stop()
    results = ranks.run(2, resume, str(tmp_path), [0, 2], 0)
    assert [start for start, _ in results] == [2] * 2
    step = tmp_path / "root" / "step-00000002"
    assert all(f"{step}: memory of this host" in text and text.endswith("root 0 B") for _, text in results), results
    assert not any("memory of host" in text for _, text in results), results  # who reads a chunk for others has its file near


def test_machines_without_ranks_give_what_they_have(ranks: Ranks, tmp_path: Path, daemons: list[memory_client.MemoryClient]) -> None:
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


def test_parity_gives_what_a_lost_machine_had(ranks: Ranks, tmp_path: Path, daemons: list[memory_client.MemoryClient]) -> None:
    """Half of a copy's memory; all trainers are killed and a machine is gone, and two ranks go on in another layout without the root."""
    lost = ranks.run(3, train_and_die, str(tmp_path), 3, allow_death=True)
    assert all(isinstance(one, Lost) and one.exitcode == -signal.SIGKILL for one in lost), lost
    objects = [known for daemon in daemons for known in daemon.list() if "step-00000002/" in known.path]
    data, parity = (sum(known.size for known in objects if ending in known.path) for ending in (".safetensors", ".xor"))
    assert data / 2 <= parity <= data / 2 + 3 * 4096
    daemons[1].stop()
    results = ranks.run(2, resume, str(tmp_path), [0, 2], 1, 3)
    assert [start for start, _ in results] == [2] * 2
    assert all(text.endswith("root 0 B") for _, text in results) and any(", parity " in text for _, text in results), results


def train_and_die(folder: str, parity: int | None = None) -> None:
    train(folder, [0, 1, 2], range(1, 3), 0, "root", dies=True, parity=parity)


def resume(folder: str, machines: Sequence[int], dim: int, parity: int | None = None) -> tuple[int | None, str]:
    return train(folder, machines, range(0), dim, "root", dies=False, parity=parity)


def test_only_the_newest_is_published(ranks: Ranks, tmp_path: Path) -> None:
    """Saves into memory at every step: the end publishes the newest one, not each that is kept, and none counts as late."""
    with daemon_in(tmp_path / "daemon"):
        published, alerts = ranks.run(1, three_steps, str(tmp_path))[0]
    assert published == [3] and alerts == []


def three_steps(folder: str) -> tuple[list[int | None], list[str | None]]:
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon"
    events: list[ckpt.monitors.Event] = []
    memory = ckpt.Memory(keep=3, copies=0)
    with ckpt.Checkpointer(f"{folder}/root", memory=memory, save=EverySteps(10), job=ckpt.Job(timeout=20), on_event=events.append) as c:
        for n in range(1, 4):
            c.step(n, state_of(n, 0))
    return [s.number for s in ckpt.list_steps(f"{folder}/root")], [e.reason for e in events if e.kind == "alert"]


# ----------------------------------------------------------------------------------------------------- more than one machine is lost


def one_published_one_not(folder: str) -> None:
    """Step 2 is at the root and in memory, step 3 only in memory, with all copies; then everybody dies."""
    c = on_machine(folder, dist.get_rank(), save=EverySteps(2))
    for n in range(1, 4):
        c.step(n, state_of(n, 0))
        assert c.handle is not None
        c.handle.result()
        if n == 2:
            c.wait()
    assert c._tiers.spread is not None and c._tiers.spread.finish() == ()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def on_machine(folder: str, machine: int, **options: Any) -> ckpt.Checkpointer:
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    return ckpt.Checkpointer(f"{folder}/root", memory=ckpt.Memory(), job=ckpt.Job(timeout=20), **options)


def restore_on(folder: str, machines: Sequence[int]) -> tuple[int | None, dict[str, int]]:
    with on_machine(folder, machines[dist.get_rank()], save=EverySteps(100)) as c:
        state = state_of(-1, 0)
        start = c.restore(state)
        assert start is not None and state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
        assert c.restored_from is not None
        return start, dict(c.restored_from.sources)


def files_of(daemon: memory_client.MemoryClient, step: int) -> dict[str, int]:
    """Bytes of the data files that a daemon has, by path."""
    return {k.path: k.size for k in daemon.list() if f"step-{step:08d}/data/" in k.path}


def writers_of(daemon: memory_client.MemoryClient) -> set[int]:
    """The ranks whose parts of sharded tensors a daemon has."""
    return {int(match[1]) for path in files_of(daemon, 3) if (match := re.search(r"data/[0-9a-z]+-(\d+)\.safetensors$", path))}


@pytest.mark.parametrize("together", [False, True], ids=["a holder of each is left", "both holders are gone"])
def test_half_of_the_machines_are_gone(tmp_path: Path, *, together: bool) -> None:
    """If one has all that is left of another that is gone, too, step 3 is lost; of step 2 only what is missing comes from the root."""
    with ExitStack() as stack:
        daemons = [stack.enter_context(daemon_in(tmp_path / f"daemon{n}")) for n in range(4)]
        four = Ranks(4)
        four.run(4, one_published_one_not, str(tmp_path), allow_death=True)
        holders = [writers_of(d) for d in daemons]
        assert all(n in held and len(held) == 2 for n, held in enumerate(holders)), holders
        (second,) = [n for n in range(1, 4) if 0 in holders[n]]
        gone = {0, second if together else next(n for n in range(1, 4) if n != second and n not in holders[0])}
        files = [files_of(d, 2) for d in daemons]
        for n in gone:
            daemons[n].stop()
        left = [n for n in range(4) if n not in gone]
        lost = {path: size for n in gone for path, size in files[n].items()}
        missing = sum(size for path, size in lost.items() if not any(path in files[n] for n in left))
        ended = four.run(2, restore_on, str(tmp_path), left)
    at_root = sum(sources["root"] for _, sources in ended)
    assert [start for start, _ in ended] == [2 if together else 3] * 2
    assert sum(sum(sources.values()) for _, sources in ended) > 64 * 50 * 4
    assert (missing > 0) == together and missing <= at_root <= 1.02 * missing, (at_root, missing)


# ------------------------------------------------------------------------------------------------------------- clocks


def train_by_clock(folder: str, machines: Sequence[int], days: dict[int, float], back_to: int | None, steps: range, salt: int) -> None:
    machine = machines[dist.get_rank()]
    now, now_ns, ahead = time.time, time.time_ns, days[machine] * 86400
    time.time, time.time_ns = lambda: now() + ahead, lambda: now_ns() + int(ahead * 1e9)
    with on_machine(folder, machine, save=EverySteps(100)) as c:
        if back_to is not None:
            assert c.restore(state_of(-1, 0), step=back_to) == back_to
        for n in steps:
            c.step(n, state_of(n + salt, 0))


def contents_of(folder: str, machines: Sequence[int]) -> list[int]:
    """What steps 4 and 3 have."""
    found = []
    with on_machine(folder, machines[dist.get_rank()], save=EverySteps(100)) as c:
        for step in (None, 3):
            state = state_of(-1, 1)
            assert c.restore(state, step=step) == (step or 4)
            assert torch.equal(state["w"].full_tensor(), whole_of(state["n"]))
            found.append(state["n"])
    return found


def test_clocks_are_days_apart(ranks: Ranks, tmp_path: Path, daemons: list[memory_client.MemoryClient]) -> None:
    """The leader of the second life is five days behind that of the first one, goes back a step and trains another way. Nobody gets the
    first life's steps any more."""
    days = {0: 3.0, 1: 0.0, 2: -2.0}
    ranks.run(3, train_by_clock, str(tmp_path), [0, 1, 2], days, None, range(1, 4), 0)
    ranks.run(3, train_by_clock, str(tmp_path), [2, 0, 1], days, 2, range(3, 5), 100)
    daemons[0].stop()
    assert ranks.run(2, contents_of, str(tmp_path), [1, 2]) == [[104, 103]] * 2
