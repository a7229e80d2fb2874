"""A step that is removed while its files are copied to other nodes leaves nothing there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.copy.files import FileCopy
from ckpt.io_backends import Backend, open_backend
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import NodeCopier, SpreadFiles
from ckpt.nodes.nodes import NodeSet, StorageNode
from ckpt.runs.removal import remove_step
from ckpt.runs.step_listing import list_steps
from tests.memory.daemons import daemon_in


def in_memory(name: str, prefix: str) -> Backend:
    return open_backend(f"memory://{name}/{prefix}".rstrip("/"))


@pytest.mark.parametrize("before", [(SpreadFiles, "of"), (FileCopy, "_finish")])
def test_nothing_stays_and_nobody_is_alarmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: tuple[type, str]
) -> None:
    nodes = [StorageNode(name=name, domain=name, below=partial(in_memory, name)) for name in "ab"]
    run = NodeSet(url=run_url("removed"), nodes=nodes, own=0, copies=1)
    owner, name = before
    original: Callable[..., object] = getattr(owner, name)

    def removed_first(*args: object) -> object:
        for step in list_steps(run.url):
            assert remove_step(run.url, step)
        return original(*args)

    with daemon_in(tmp_path / "daemon") as daemon:
        register_run(run)
        ckpt.save(f"{run.url}/step-1", {"w": torch.rand(1000)})
        monkeypatch.setattr(owner, name, removed_first)
        copier = NodeCopier(run, None)
        with caplog.at_level(logging.WARNING, "ckpt"):
            copier.add()
            assert copier.finish(60) and copier.uncopied == ()
        assert list(daemon.list()) == [] and not caplog.records
        unregister_run(run)
