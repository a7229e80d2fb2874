"""A process that has no torch saves and loads values, alone and as a member of a run whose other job has tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.formats.registry import open_catalog
from tests.api.torchless import NAMES, plain, values

BLOCKED = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('tests.api.torchless', run_name='__main__')"
INSTALLED = BLOCKED.replace("sys.modules['torch'] = None; ", "")


def run(work: str, url: object, code: str = BLOCKED) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, work, str(url)], stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.parametrize("code", [BLOCKED, INSTALLED], ids=["without torch", "torch not imported"])
def test_a_process_without_torch_saves_and_loads_values(tmp_path: Path, code: str) -> None:
    assert str(ckpt.save(tmp_path / "theirs", values(3))).startswith("saved values to ")
    assert printed(run("alone", tmp_path, code)) == ["b c d"], "what was not finished at step 2, and what nobody had"
    stored = open_catalog(str(tmp_path / "theirs"))
    for name in ("now", "later"):
        state = values(0)
        ckpt.load(tmp_path / name, state)
        assert plain(state) == plain(values(3))
        same = open_catalog(str(tmp_path / name))
        assert (same.state, same.ranks[0]) == (stored.state, stored.ranks[0])


def test_a_process_without_torch_is_told_what_needs_it_before_anything_changes(tmp_path: Path) -> None:
    class Tensors:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.ones(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    own = ckpt.PerRank(torch.ones(2))
    state = {"a": 2, "counter": Tensors(), "dtype": [torch.float32], "w": torch.ones(3), "own": own}
    ckpt.save(tmp_path / "theirs", state)
    whose = ("the tensor counter.w of the checkpoint", "dtype of the checkpoint", "the tensor own@rank0 of the checkpoint", "a tensor")
    others = ("the value at 'dtype.0'", "ckpt.training.Generators")
    expected = [f"{what} needs PyTorch, which is not installed" for what in (*whose, *others)]
    assert [line.partition("; ")[0] for line in printed(run("refused", tmp_path / "theirs"))] == expected


def test_a_member_without_torch_saves_with_one_that_has_tensors(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for start in (0, 1):
        buffer = run("buffer", root)
        state = {"w": torch.zeros(5)}
        with ckpt.Checkpointer(root, member=ckpt.Member("trainer", of=NAMES), job=ckpt.Job(timeout=60)) as c:
            assert (c.restore(state) or 0) == start
            assert state["w"].tolist() == [start] * 5
            state["w"].fill_(start + 1)
            c.save(start + 1, state)
            c.wait()
        assert printed(buffer) == [f"{start} True"]
    assert [step.number for step in ckpt.list_steps(root) if step.committed] == [1, 2]
