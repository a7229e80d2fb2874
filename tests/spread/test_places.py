"""Checkpoints over several nodes: saves that end anywhere, places that fail while they are read, and which files are on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.formats.native.paths import RunBackend
from ckpt.io_backends import PosixBackend, open_backend
from tests.spread.directories import Kind, nodes_at, registered


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
