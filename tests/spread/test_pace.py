"""Copies to other nodes, and reads for parity, go at the speed that ``max_bandwidth`` allows, by a clock that moves when somebody sleeps,
and else stands still; and those that are not made yet are known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpt
from ckpt import settings
from ckpt.engine.copy.files import CopyTask, FileCopy
from ckpt.io_backends import Backend, PosixBackend
from ckpt.nodes import copies
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import NodeCopier
from ckpt.nodes.nodes import NodeSet, StorageNode

PACE = 8e6


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep so far."""
    seconds: list[float] = []
    clock = SimpleNamespace(sleep=seconds.append, monotonic=lambda: sum(seconds))
    monkeypatch.setattr(copies, "time", clock)
    return seconds


def below(path: Path, name: str, prefix: str) -> Backend:
    return PosixBackend(str(path / name / prefix))


@contextmanager
def saved(path: Path, names: str, parity: int | None, own: int) -> Iterator[NodeSet]:
    """A checkpoint on the first of several nodes, and the nodes as ``own`` sees them."""
    nodes = [StorageNode(name=name, domain=name, below=partial(below, path, name)) for name in names]
    run = NodeSet(url=run_url("pace"), nodes=nodes, own=0, copies=0 if parity else 1, parity=parity)
    register_run(run)
    ckpt.save(f"{run.url}/step-1", {f"w{n}": torch.rand(1_250_000) for n in range(4)})
    unregister_run(run)
    run = NodeSet(url=run.url, nodes=nodes, own=own, copies=run.copies, parity=parity)
    register_run(run)
    yield run
    unregister_run(run)


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
