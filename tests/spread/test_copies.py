"""Copies on other nodes: that all are there is noted; what is removed meanwhile leaves nothing; and they go at the speed that
``max_bandwidth`` allows, as do reads for parity, by a clock that moves when somebody sleeps, and else stands still."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpt
from ckpt import settings
from ckpt.engine.copied_files import CopyTask, FileCopy
from ckpt.errors import NoSpaceError
from ckpt.io_backends import PosixBackend, open_backend
from ckpt.io_backends.protocol import Writer
from ckpt.nodes import copies
from ckpt.nodes.backend import register_run
from ckpt.nodes.copies import NodeCopier, SpreadFiles, copies_seen, note_copies
from ckpt.nodes.nodes import NodeSet
from ckpt.runs.removal import remove_step
from ckpt.runs.step_listing import list_steps
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
            assert remove_step(run.url, step)
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
