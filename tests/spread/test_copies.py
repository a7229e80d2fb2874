"""Copies on other nodes: that all are there is noted; what is removed meanwhile leaves nothing; and they go at the speed that
``max_bandwidth`` allows, as do reads for parity, by a clock that moves when somebody sleeps, and else stands still. And what a machine
that is silent costs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt
from ckpt import settings
from ckpt.engine.copied_files import CopyTask, FileCopy
from ckpt.engine.save import leader
from ckpt.errors import NoSpaceError, StorageError
from ckpt.formats.native.paths import RunBackend
from ckpt.io_backends import PosixBackend, open_backend
from ckpt.io_backends.protocol import Writer
from ckpt.net.group import group_of
from ckpt.nodes import copies
from ckpt.nodes.backend import SpreadBackend, register_run
from ckpt.nodes.copies import NodeCopier, SpreadFiles, copies_seen, note_copies
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode
from ckpt.nodes.memory_client import MemoryClient, connect
from ckpt.nodes.nodes import NodeSet, StorageNode
from ckpt.runs import removal
from ckpt.runs.node_tier import NodeLocal, SpreadTier
from ckpt.runs.removal import remove_steps
from ckpt.runs.step_listing import list_steps
from ckpt.runs.tiers import Tiers
from tests.distributed.ranks import in_process
from tests.memory.daemons import daemon_in
from tests.spread.directories import Kind, nodes_at, registered


class FullDisk(PosixBackend):
    """Takes small files only."""

    def create(self, path: str, size: int) -> Writer:
        raise NoSpaceError("full")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NodeSet]:
    """Two nodes, of which only the first one has data."""
    with registered(nodes_at(tmp_path, "ab")) as nodes:
        ckpt.save(f"{nodes.url}/step-1", {"w": torch.rand(1000)})
        yield nodes


def copy(nodes: NodeSet) -> None:
    """What a life of the job does."""
    register_run(nodes)
    copier = NodeCopier(nodes, None, lambda step, url, id, seconds: note_copies(nodes, url, id))
    copier.add()
    assert copier.finish(60)


def test_copies_are_noted_and_forgotten(run: NodeSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.nodes.copies.PATIENCE", 0.0)

    def seen() -> list[bool | None]:
        return [copies_seen(f"{tmp_path}/{name}/step-1") for name in "ab"]

    assert seen() == [None, False]  # the first one has all of it
    copy(run)
    assert seen() == [True, True]
    for path in (tmp_path / "b").rglob("data/*"):
        path.unlink()
    copy(nodes_at(tmp_path, "ab", [PosixBackend, FullDisk]))
    assert seen() == [None, False]
    copy(nodes_at(tmp_path, "ab"))
    assert seen() == [True, True]


def test_what_was_removed_meanwhile_is_not_noted(run: NodeSet, tmp_path: Path) -> None:
    note_copies(run, f"{run.url}/step-1", "0" * 16)
    assert list(tmp_path.rglob("copies.json")) == []


@pytest.mark.parametrize("before", [(SpreadFiles, "of"), (FileCopy, "_finish")])
def test_a_step_that_is_removed_while_it_is_copied_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: tuple[type, str]
) -> None:
    in_memory: Kind = lambda directory: open_backend(f"memory://{Path(directory).relative_to(tmp_path)}")  # noqa: E731
    run = nodes_at(tmp_path, "ab", [in_memory] * 2)
    owner, name = before
    original: Callable[..., object] = getattr(owner, name)

    def removed_first(*args: object) -> object:
        for step in list_steps(run.url):
            assert remove_steps(run.url, [step], {})
        return original(*args)

    with daemon_in(tmp_path / "daemon") as daemon, registered(run):
        ckpt.save(f"{run.url}/step-1", {"w": torch.rand(1000)})
        monkeypatch.setattr(owner, name, removed_first)
        copier = NodeCopier(run, None)
        with caplog.at_level(logging.WARNING, "ckpt"):
            copier.add()
            assert copier.finish(60) and copier.uncopied == ()
        assert list(daemon.list()) == [] and not caplog.records


# ---- the speed

PACE = 8e6


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep so far."""
    seconds: list[float] = []
    clock = SimpleNamespace(sleep=seconds.append, monotonic=lambda: sum(seconds))
    monkeypatch.setattr(copies, "time", clock)
    return seconds


@contextmanager
def saved(path: Path, names: str, parity: int | None, own: int) -> Iterator[NodeSet]:
    """A checkpoint on the first of several nodes, and the nodes as ``own`` sees them."""
    with registered(nodes_at(path, names, parity=parity)) as first:
        ckpt.save(f"{first.url}/step-1", {f"w{n}": torch.rand(1_250_000) for n in range(4)})
    with registered(replace(first, own=own)) as run:
        yield run


@pytest.mark.parametrize(("names", "parity", "own"), [("ab", None, 0), ("abc", 3, 1)])
def test_the_pace_is_kept(tmp_path: Path, slept: list[float], names: str, parity: int | None, own: int) -> None:
    with saved(tmp_path, names, parity, own) as run:
        copier = NodeCopier(run, PACE)
        copier.add()
        assert copier.finish(60) and copier.uncopied == ()
    assert copier.copied >= 10_000_000 and sum(slept) == pytest.approx(copier.copied / PACE)
    assert max(slept) <= settings.HASH_BUFFER / PACE  # in steps, and not all at the end
    (made,) = (path for path in (tmp_path / names[1]).rglob("*") if path.suffix in (".safetensors", ".xor"))
    if parity is None:
        assert made.read_bytes() == (tmp_path / "a" / made.relative_to(tmp_path / "b")).read_bytes()


def test_what_is_still_being_copied_counts_as_uncopied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits no longer for a node that hangs hears of its steps."""
    asked, goes_on = threading.Event(), threading.Event()
    original = FileCopy.jobs

    def hanging(copy: FileCopy) -> Iterator[CopyTask]:
        asked.set()
        assert goes_on.wait(60)
        return original(copy)

    monkeypatch.setattr(FileCopy, "jobs", hanging)
    with saved(tmp_path, "ab", None, 0) as run:
        copier = NodeCopier(run, None)
        copier.add()
        assert asked.wait(60) and not copier.finish(0) and copier.uncopied == (1,)
        goes_on.set()
        assert copier.finish(60) and copier.uncopied == ()


def test_without_a_pace_nobody_sleeps(tmp_path: Path, slept: list[float]) -> None:
    with saved(tmp_path, "ab", None, 0) as run:
        copier = NodeCopier(run, None)
        copier.add()
        assert copier.finish(60) and copier.copied >= 20_000_000 and slept == []


# ------------------------------------------------------------------------------------------------------------------------------------------
# Checkpoints over several nodes: saves that end anywhere, places that fail while they are read, and which files are on this machine.


class Ending:
    """A node's files; after ``left`` operations that write, on all nodes together, nothing more can be written."""

    def __init__(self, left: list[int], root: str) -> None:
        self._backend, self._left = PosixBackend(root), left

    def __getattr__(self, name: str) -> object:
        if name in ("create", "put_if", "delete"):
            self._left[0] -= 1
            if self._left[0] < 0:
                raise StorageError("the process has ended")
        return getattr(self._backend, name)


def test_a_save_that_ends_anywhere(tmp_path: Path) -> None:
    """The same step is saved twice; the second save ends at its n-th write. One rank: all data is on the first node. Whatever nodes are
    left have the checkpoint before it, or itself, whole."""
    seen = set()
    for count in range(40):
        path = tmp_path / f"{count}"
        for step, left in ((1, [1 << 30]), (2, [count])):
            ending: Kind = partial(Ending, left)  # type: ignore[assignment]
            with registered(nodes_at(path, "abc", [ending] * 3)) as nodes:
                try:
                    ckpt.save(f"{nodes.url}/step-1", {"w": torch.full((50,), float(step))})
                except StorageError:
                    assert step == 2
        state = {"w": torch.zeros(50)}
        with registered(nodes_at(path, "ab")) as left_over:
            ckpt.load(f"{left_over.url}/step-1", state)
        assert torch.equal(state["w"], state["w"][0].expand(50)) and state["w"][0] in (1.0, 2.0)
        seen.add(float(state["w"][0]))
        if left[0] >= 0:
            break
    else:
        pytest.fail("the second save never came to its end")
    assert seen == {1.0, 2.0}


class HalfGone(PosixBackend):
    """Of what is read and hashed, the first half comes."""

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        half = len(buffer) // 2
        super().read_hashed(path, offset, buffer[:half], update)
        raise StorageError("Input/output error", where=path)


class Gone(PosixBackend):
    """Nothing can be read and hashed."""

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        raise StorageError("Input/output error", where=path)


class Wrong(PosixBackend):
    """What is read and hashed has a flipped bit."""

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        self.read_into(path, offset, buffer)
        buffer[-1] ^= 1
        update(buffer)


@pytest.mark.parametrize("kinds", [(HalfGone, PosixBackend), (HalfGone, HalfGone, PosixBackend), (Gone, Wrong, PosixBackend)])
def test_another_place_has_the_rest(tmp_path: Path, kinds: tuple[type[PosixBackend], ...]) -> None:
    """A disk with a bad sector, or the memory of a machine that dies while it is read."""
    state = {"w": torch.arange(300_000)}
    names = "abc"[: len(kinds)]
    ckpt.save(str(tmp_path / "a" / "step-1"), state)
    for name in names[1:]:
        shutil.copytree(tmp_path / "a", tmp_path / name)
    into = {"w": torch.zeros_like(state["w"])}
    with registered(nodes_at(tmp_path, names, kinds)) as run:
        ckpt.load(f"{run.url}/step-1", into)
    assert torch.equal(into["w"], state["w"])


FILE = "data/0mwtkbhqxvz7aeg3-0000{}.safetensors"


def test_nearby_is_what_the_nodes_of_this_machine_have(tmp_path: Path) -> None:
    """Memory and disk of this machine, and what a reference leads to there; not the other machine, and nothing that is missing: what shared
    reads are divided by."""
    for node, step, number in (("memory", 2, 0), ("disk", 2, 1), ("far", 2, 2), ("far", 2, 0), ("disk", 1, 0), ("far", 1, 1)):
        file = tmp_path / node / f"step-{step}" / FILE.format(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    run = nodes_at(tmp_path, ("memory", "disk", "far"))
    hosts = {"memory": "here", "disk": "here", "far": "there"}
    run.nodes = [replace(node, domain=hosts[node.name], host=hosts[node.name]) for node in run.nodes]
    own = [FILE.format(n) for n in range(4)]
    references = [f"../step-1/{FILE.format(n)}" for n in range(2)]
    with registered(run):
        step = open_backend(f"{run.url}/step-2")
        assert {*(step.nearby(own) or ())} == {*own[:2]}
        assert {*(RunBackend(step).nearby([*own, *references]) or ())} == {*own[:2], references[0]}


def test_a_storage_that_all_reach_alike_has_nothing_near(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    assert backend.nearby(["a"]) is None and RunBackend(backend).nearby(["a"]) is None


# ------------------------------------------------------------------------------------------------------------------------------------------
# Retention, and a machine that is silent: its process is stopped, as if its network were gone.

DEADLINE = 4.0


def serve(pipe: Any, folder: str, directory: str) -> None:
    os.environ["CKPT_MEMORY_DIR"] = folder
    server = NodeServer(open_backend(directory), b"secret", DEADLINE)
    pipe.send(server.addresses)
    signal.pause()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[int, NodeConnections, MemoryClient]]:
    """The process that serves the memory of node b, connections to it, and that memory. This process has another one."""
    with daemon_in(tmp_path / "b") as memory, daemon_in(tmp_path / "a"):
        process, pipe = in_process(serve, str(tmp_path / "b"), "memory://run")
        connections = NodeConnections("b", pipe.recv(), b"secret", DEADLINE, same_network=True)
        yield process.pid, connections, memory
        connections.close()
        process.kill()
        process.join()


def tier_of(path: Path, connections: NodeConnections) -> SpreadTier:
    """The memory of this process and of node b."""
    tier = SpreadTier(NodeLocal("memory://run"), str(path / "root"), group_of(None), DEADLINE)
    other = StorageNode(name="b", domain="b", below=partial(RemoteNode, connections), in_memory=True)
    tier.nodes = replace(tier.nodes, nodes=[*tier.nodes.nodes, other])
    tier._know()
    return tier


def stop_at(monkeypatch: pytest.MonkeyPatch, pid: int, owner: object, name: str) -> None:
    """Stop a process when this one comes to the function of this name."""
    inner = getattr(owner, name)

    def stopped_first(*args: object, **named: object) -> object:
        os.kill(pid, signal.SIGSTOP)
        return inner(*args, **named)

    monkeypatch.setattr(owner, name, stopped_first)


@pytest.mark.slow
@pytest.mark.alone
def test_a_save_that_a_silent_machine_fails_waits_for_it_once(
    tmp_path: Path, peer: tuple[int, NodeConnections, MemoryClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before the index is written: what the save has made goes, without a further deadline for each file."""
    pid, connections, _ = peer
    url = Tiers(str(tmp_path / "root"), local=(tier := tier_of(tmp_path, connections)).url, spread=tier).place(1)
    stop_at(monkeypatch, pid, leader, "write_index")
    began = time.monotonic()
    with pytest.raises(StorageError, match="node b is lost"):
        ckpt.save(url, {"w": torch.ones(1000)})
    assert time.monotonic() - began < 2 * DEADLINE
    monkeypatch.undo()
    os.kill(pid, signal.SIGCONT)
    ckpt.save(url, {"w": torch.zeros(1000)})
    assert torch.equal(ckpt.open(url)["w"][:], torch.zeros(1000))
    tier.close()


@pytest.mark.alone
@pytest.mark.parametrize("when", ["before", "record", "files"])
def test_a_silent_machine_holds_retention_for_one_deadline_at_most(
    tmp_path: Path,
    peer: tuple[int, NodeConnections, MemoryClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when: str,
) -> None:
    """It is stopped before retention, before a record goes, or before files go. One warning names it, what is to stay does on the others,
    and retention goes on when it answers again."""
    pid, connections, memory = peer
    tier = tier_of(tmp_path, connections)
    tiers = Tiers(str(tmp_path / "root"), local=tier.url, spread=tier)
    tiers.retain_after_save()
    for n in (1, 2):
        ckpt.save(tiers.place(n), {"w": torch.full((1000,), float(n))})
        copy(tier.nodes)

    if when == "before":
        os.kill(pid, signal.SIGSTOP)
    else:
        stop_at(monkeypatch, pid, *{"record": (removal, "_hide"), "files": (SpreadBackend, "delete_many")}[when])
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "ckpt"):
        tiers.retain_after_save()
    assert time.monotonic() - began < DEADLINE
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "node b is lost" in warning and "until a later save" in warning
    assert [s.number for s in list_steps("memory://run") if s.committed] == ([2] if when == "files" else [1, 2])
    monkeypatch.undo()
    os.kill(pid, signal.SIGCONT)
    while any("step-00000001" in known.path for client in (memory, connect()) for known in client.list()):
        assert time.monotonic() < began + 30
        tiers.retain_after_save()
    assert torch.equal(ckpt.open(tiers.place(2))["w"][:], torch.full((1000,), 2.0))
    tier.close()
