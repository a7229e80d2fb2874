"""Copies to other nodes go at the speed that ``pace`` allows."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.io_backends import Backend, PosixBackend
from ckpt.spread.copying import NodeCopier
from ckpt.spread.nodes import NodeSet, StorageNode
from ckpt.spread.runs import forget, know, run_url


def below(path: Path, name: str, prefix: str) -> Backend:
    return PosixBackend(str(path / name / prefix))


@pytest.mark.alone
def test_copies_take_their_time(tmp_path: Path) -> None:
    nodes = [StorageNode(name=name, domain=name, below=partial(below, tmp_path, name)) for name in "ab"]
    run = NodeSet(url=run_url("pace"), nodes=nodes, own=0, copies=1)
    know(run)
    state = {f"w{n}": torch.rand(250_000) for n in range(4)}
    ckpt.save(f"{run.url}/step-1", state)
    seconds = {}
    for pace in (None, 8e6):
        copier = NodeCopier(run, pace)
        began = time.monotonic()
        copier.add()
        assert copier.finish(60) and copier.uncopied == ()
        seconds[pace] = time.monotonic() - began
        assert copier.copied >= 4_000_000
        for path in (tmp_path / "b").rglob("data/*"):
            assert path.read_bytes() == (tmp_path / "a" / path.relative_to(tmp_path / "b")).read_bytes()
            path.unlink()
    forget(run)
    assert seconds[8e6] >= 0.5 and seconds[8e6] - (seconds[None] or 0) < 5
