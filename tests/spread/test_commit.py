"""A save over several nodes that ends at any operation leaves the checkpoint before it, or itself, whole on whatever nodes are left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.io_backends import Backend, PosixBackend
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.nodes import NodeSet, StorageNode


class Ending:
    """A node's files; after ``left`` operations that write, on all nodes together, nothing more can be written."""

    def __init__(self, backend: Backend, left: list[int]) -> None:
        self._backend, self._left = backend, left

    def __getattr__(self, name: str) -> object:
        if name in ("create", "put_if", "delete"):
            self._left[0] -= 1
            if self._left[0] < 0:
                raise StorageError("the process has ended")
        return getattr(self._backend, name)


def nodes_at(path: Path, names: str, left: list[int]) -> NodeSet:
    def node(name: str) -> StorageNode:
        return StorageNode(name=name, domain=name, below=lambda prefix: Ending(PosixBackend(str(path / name / prefix)), left))  # type: ignore[arg-type,return-value]

    return NodeSet(url=run_url("ending"), nodes=[node(n) for n in names], own=0, copies=1)


def test_a_save_that_ends_anywhere(tmp_path: Path) -> None:
    """The same step is saved twice; the second save ends at its n-th write. One rank: all data is on the first node."""
    seen = set()
    for count in range(40):
        path = tmp_path / f"{count}"
        for step, left in ((1, [1 << 30]), (2, [count])):
            nodes = nodes_at(path, "abc", left)
            register_run(nodes)
            try:
                ckpt.save(f"{nodes.url}/step-1", {"w": torch.full((50,), float(step))})
            except StorageError:
                assert step == 2
            unregister_run(nodes)
        left_over = nodes_at(path, "ab", [1 << 30])
        register_run(left_over)
        state = {"w": torch.zeros(50)}
        ckpt.load(f"{left_over.url}/step-1", state)
        unregister_run(left_over)
        assert torch.equal(state["w"], state["w"][0].expand(50)) and state["w"][0] in (1.0, 2.0)
        seen.add(float(state["w"][0]))
        if left[0] >= 0:
            break
    else:
        pytest.fail("the second save never came to its end")
    assert seen == {1.0, 2.0}
