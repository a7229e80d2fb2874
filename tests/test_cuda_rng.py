"""The random number generator of a GPU: it goes on exactly, comes with CUDA and goes without. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.training import Generators

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_the_gpu_goes_on(tmp_path: Path) -> None:
    own = torch.Generator("cuda").manual_seed(3)
    torch.rand(5, device="cuda")
    state = {"rng": Generators(), "own": Generators({"own": own})}
    ckpt.save(str(tmp_path), state)
    expected = torch.rand(5, device="cuda"), torch.rand(5, device="cuda", generator=own), torch.rand(5)
    ckpt.load(str(tmp_path), state)
    found = torch.rand(5, device="cuda"), torch.rand(5, device="cuda", generator=own), torch.rand(5)
    assert all(map(torch.equal, found, expected))
    assert ckpt.open(str(tmp_path)).per_rank("rng", 0)["streams"]["cuda"]["kind"] == "torch.cuda"


def test_a_gpu_that_the_checkpoint_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_initialized", lambda: False)
        ckpt.save(str(tmp_path), {"rng": Generators()})
    drawn = []
    for _ in range(2):
        torch.cuda.manual_seed(7)
        ckpt.load(str(tmp_path), {"rng": Generators()})
        drawn.append(torch.rand(5, device="cuda"))
    assert torch.equal(*drawn)
    torch.cuda.manual_seed(7)
    assert not torch.equal(drawn[0], torch.rand(5, device="cuda"))
