"""A program that ends without closing its ``Checkpointer``: what was begun ends well, and what was committed is not said to have failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt

SCRIPT = """
import logging, sys, time, torch
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s")
import ckpt
from ckpt.policies import EverySteps, Latest
root, how, heard = sys.argv[1], sys.argv[2], open(sys.argv[3], "w", buffering=1)
options = {"local": f"{root}-local"} if how == "local" else {}
c = ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(1), on_event=lambda e: print(e.kind, e.step, file=heard), **options)
c.restore({"w": torch.zeros(300_000)})
for k in range(3):
    c.step(k + 1, {"w": torch.full((300_000,), float(k + 1))})
if how == "raises":
    raise RuntimeError("training ends here")
if how == "atexit":
    import atexit
    atexit.register(lambda: c.save(4, {"w": torch.full((300_000,), 4.0)}).result())
"""


@pytest.mark.parametrize(("how", "last"), [("ends", 3), ("raises", 3), ("atexit", 4), ("local", 3)])
def test_saves_end_well(tmp_path: Path, how: str, last: int) -> None:
    root, heard = tmp_path / "run", tmp_path / "heard"
    command = [sys.executable, "-c", SCRIPT, str(root), how, str(heard)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == (1 if how == "raises" else 0), done.stderr
    assert "LOG" not in done.stderr and "interpreter shutdown" not in done.stderr, done.stderr
    assert "failed" not in heard.read_text()
    place = f"{root}-local" if how == "local" else str(root)
    there = [s.number for s in ckpt.list_steps(place) if s.committed]
    assert there[-1] == last and (there == [last] or how == "local")  # what was being published stays in the local tier
    into = {"w": torch.zeros(300_000)}
    with ckpt.Checkpointer(root, local=f"{root}-local") if how == "local" else ckpt.Checkpointer(root) as c:
        assert c.restore(into) == last
    assert torch.equal(into["w"], torch.full((300_000,), float(last)))
