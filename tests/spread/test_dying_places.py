"""Places that fail while they are read: a disk with a bad sector, or the memory of a machine that dies. Another one has the bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.io_backends import Backend, PosixBackend
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.nodes import NodeSet, StorageNode


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


def below(kind: type[PosixBackend], root: Path, prefix: str) -> Backend:
    return kind(str(root / prefix))


@pytest.mark.parametrize("kinds", [(HalfGone, PosixBackend), (HalfGone, HalfGone, PosixBackend), (Gone, Wrong, PosixBackend)])
def test_another_place_has_the_rest(tmp_path: Path, kinds: tuple[type[PosixBackend], ...]) -> None:
    state = {"w": torch.arange(300_000)}
    roots = [tmp_path / f"node{n}" for n in range(len(kinds))]
    ckpt.save(str(roots[0] / "step-1"), state)
    for root in roots[1:]:
        shutil.copytree(roots[0], root)
    nodes = [StorageNode(name=r.name, domain=r.name, below=partial(below, kind, r)) for kind, r in zip(kinds, roots, strict=True)]
    run = NodeSet(url=run_url("dying"), nodes=nodes, own=0, copies=1)
    register_run(run)
    try:
        into = {"w": torch.zeros_like(state["w"])}
        ckpt.load(f"{run.url}/step-1", into)
    finally:
        unregister_run(run)
    assert torch.equal(into["w"], state["w"])
