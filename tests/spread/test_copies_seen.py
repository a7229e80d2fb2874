"""That all copies of a checkpoint are there is noted beside it on every node, and no longer once some are missing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import NoSpaceError
from ckpt.io_backends import Backend, PosixBackend
from ckpt.io_backends.protocol import Writer
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import NodeCopier, copies_seen, note_copies
from ckpt.nodes.nodes import NodeSet, StorageNode


class FullDisk(PosixBackend):
    """Takes small files only."""

    def create(self, path: str, size: int) -> Writer:
        raise NoSpaceError("full")


def below(path: Path, kind: type[PosixBackend], prefix: str) -> Backend:
    return kind(str(path / prefix))


def nodes_at(path: Path, second: type[PosixBackend] = PosixBackend) -> NodeSet:
    kinds = {"a": PosixBackend, "b": second}
    nodes = [StorageNode(name=name, domain=name, below=partial(below, path / name, kind)) for name, kind in kinds.items()]
    return NodeSet(url=run_url("seen"), nodes=nodes, own=0, copies=1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NodeSet]:
    """Two nodes, of which only the first one has data."""
    nodes = nodes_at(tmp_path)
    register_run(nodes)
    ckpt.save(f"{nodes.url}/step-1", {"w": torch.rand(1000)})
    yield nodes
    unregister_run(nodes)


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
    copy(nodes_at(tmp_path, FullDisk))
    assert seen() == [None, False]
    copy(nodes_at(tmp_path))
    assert seen() == [True, True]


def test_what_was_removed_meanwhile_is_not_noted(run: NodeSet, tmp_path: Path) -> None:
    note_copies(run, f"{run.url}/step-1", "0" * 16)
    assert list(tmp_path.rglob("copies.json")) == []
