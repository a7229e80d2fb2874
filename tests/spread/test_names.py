"""Where the memory of machines has the checkpoints of a run, and what messages call it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, StorageError
from ckpt.io_backends.registry import open_backend
from ckpt.net.group import current_group
from ckpt.nodes.memory_backend import MemoryBackend
from ckpt.policies import EverySteps
from ckpt.runs.node_tier import Memory, SpreadTier, is_memory


@pytest.mark.parametrize("root", ["/data/run:5", "s3://bucket/lr:3", "/data/two words", "/data/ü/", "/data/a?b#c", "/data/a\\b", ".", "/"])
def test_a_root_of_any_name_has_its_place(root: str) -> None:
    directory = Memory().on_nodes(root).directory
    assert is_memory(str(directory))
    assert isinstance(open_backend(directory), MemoryBackend)


def test_roots_of_one_name_have_different_places() -> None:
    places = {str(Memory().on_nodes(root).directory) for root in ("/data/run:5", "/data/run_5", "/other/run:5", "/data/run:5/")}
    assert len(places) == 3


def test_errors_and_logs_name_the_directory_that_the_user_gave(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the job that the error is of has ended."""
    local = tmp_path / "local"
    c = ckpt.Checkpointer(str(tmp_path / "root"), save=EverySteps(1), local=ckpt.NodeLocal(local))
    c.step(1, {"w": torch.ones(3)})
    c.wait()
    shutil.rmtree(local)
    local.write_text("no directory any more")
    c.step(2, {"w": torch.ones(3)})
    with pytest.raises(CkptError) as error:
        c.close()
    assert f"the save of {local}/step-00000002 in the background failed" in caplog.text
    assert str(local) in str(error.value) and "spread://" not in f"{caplog.text}{error.value}"


def test_what_lies_in_memory_is_called_as_commands_know_it() -> None:
    tier = SpreadTier(Memory().on_nodes("/data/run"), "/data/run", current_group(), 5.0)
    for url in (tier.url, tier.own_url):
        assert str(StorageError("gone", where=f"{url}/step-00000001")) == f"gone ({Memory().on_nodes('/data/run').directory}/step-00000001)"
    tier.close()
