"""Memory under a save in the background: freed before it was captured, or shared with a forked child."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.save.staging import Arena
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.errors import ConsistencyError, NotFoundError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Captures wait until it is set."""
    opened, fill = threading.Event(), ChunkSource.fill_batch

    def held(self: ChunkSource, *args: Any, **more: Any) -> None:
        assert opened.wait(30)
        fill(self, *args, **more)

    monkeypatch.setattr(ChunkSource, "fill_batch", held)
    return opened


def test_memory_that_is_freed_before_it_was_captured(tmp_path: Path, gate: threading.Event) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False)  # what is small is captured in the call
    handle = ckpt.save_async(str(tmp_path / "a"), {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    model.weight.untyped_storage().resize_(0)
    gate.set()
    with pytest.raises(ConsistencyError, match=r"model\.weight was freed or moved"):
        handle.result(30)
    with pytest.raises(NotFoundError):
        ckpt.open(str(tmp_path / "a"))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path, gate: threading.Event) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ckpt.save_async(str(tmp_path / "a"), {"model": model, "optimizer": optimizer})
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends the child if it hangs
        ckpt.fence()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    gate.set()
    handle.result(30)


def test_a_forked_child_does_not_write_into_its_parents_arena() -> None:
    memory = Arena().reserve(1 << 16)
    memory.fill_(1)
    child = os.fork()
    if not child:
        memory.numpy()[:] = 9  # numpy's: torch's threads do not live on in a child
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.eq(1).all()
