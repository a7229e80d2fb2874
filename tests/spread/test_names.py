"""Where the memory of machines has the checkpoints of a run."""

from __future__ import annotations

import pytest

from ckpt.io_backends.mem.backend import MemBackend
from ckpt.io_backends.registry import open_backend
from ckpt.spread.tier import Memory, is_memory


@pytest.mark.parametrize("root", ["/data/run:5", "s3://bucket/lr:3", "/data/two words", "/data/ü/", "/data/a?b#c", "/data/a\\b", ".", "/"])
def test_a_root_of_any_name_has_its_place(root: str) -> None:
    directory = Memory().on_nodes(root).directory
    assert is_memory(str(directory))
    assert isinstance(open_backend(directory), MemBackend)


def test_roots_of_one_name_have_different_places() -> None:
    places = {str(Memory().on_nodes(root).directory) for root in ("/data/run:5", "/data/run_5", "/other/run:5", "/data/run:5/")}
    assert len(places) == 3
