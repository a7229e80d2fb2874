"""The whole of ckpt over a storage that only fsspec knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import StorageError
from ckpt.io_backends import Fault, FaultyProcess, wrap_backends
from ckpt.policies import EverySteps, Latest
from tests.io_backends.bucket import Bucket, buckets


@pytest.fixture(params=["objects", "directories"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with buckets():
        yield "testbucket://b/run" if request.param == "objects" else f"local://{tmp_path}/run"


def state_of(number: float) -> dict[str, Any]:
    return {"w": torch.full((300, 70), number), "large": torch.arange(3_000_000) + int(number), "n": number}


def test_save_load_open_verify(root: str) -> None:
    url = f"{root}/step-1"
    ckpt.save(url, state_of(1.0), codec="zstd")
    ckpt.save(url, state_of(2.0))  # in its place
    state = {"w": torch.zeros(300, 70), "large": torch.zeros(3_000_000, dtype=torch.int64), "n": 0.0}
    ckpt.load(url, state)
    assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(v)) for k, v in state_of(2.0).items())
    assert torch.equal(torch.as_tensor(ckpt.open(url)["w"][3:5]), torch.full((2, 70), 2.0))
    assert verify(url).ok


def test_a_training_loop(root: str) -> None:
    with ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(2)) as c:
        for n in range(1, 5):
            c.step(n, state_of(n))
    assert [s.number for s in ckpt.list_steps(root)] == [3, 4]
    state = state_of(0)
    with ckpt.Checkpointer(root) as c:
        assert c.restore(state) == 4
    assert torch.equal(state["w"], state_of(4)["w"])


def test_a_failed_save_leaves_what_was_there(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """A replacing save that fails before it is published changes nothing; after that it stands, and what fails is told."""
    url = f"{root}/whole"  # of a step, a failed save would be noted in the log of the run by a thread, whose operations count too
    ckpt.save(url, state_of(1.0))
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        ckpt.save(url, state_of(1.0))
    publish = next(at for at, what in enumerate(count.log) if what.startswith("put_if"))
    for at in [*range(0, publish, 3), publish]:
        with wrap_backends(FaultyProcess(Fault(at=at, kind="error")).wrap), pytest.raises(StorageError):
            ckpt.save(url, state_of(2.0))
        assert float(ckpt.open(url)["w"][0, 0]) == 1.0
    assert publish + 4 < count.operations  # older files go
    for at in range(publish + 1, count.operations, 4):
        caplog.clear()
        with wrap_backends(FaultyProcess(Fault(at=at, kind="error")).wrap):
            ckpt.save(url, state_of(float(at)))
        assert float(ckpt.open(url)["w"][0, 0]) == at
        assert "injected fault" in caplog.text
    assert verify(url).ok


def test_a_network_that_is_gone(root: str) -> None:
    if root.startswith("local"):
        pytest.skip("there is no network")
    Bucket.answers["pipe_file"] = ConnectionError("no route to host")
    with pytest.raises(StorageError, match="no route to host"):
        ckpt.save(f"{root}/step-1", state_of(1.0))
    assert ckpt.list_steps(root) == []
