"""A program that ends without closing its ``Checkpointer``: what was begun ends well, and what was committed is not said to have failed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt

LAST = {"ends": 3, "raises": 3, "atexit": 4, "local": 3}
"""The last step that is there, by how a program ends; with ``local`` it has a local tier."""

SCRIPT = """
import logging, os, sys, time, torch
import ckpt
from ckpt.policies import EverySteps, Latest
codes = {}
for how in ("ends", "raises", "atexit", "local"):
    child = os.fork()  # each goes on as a program that has just imported torch, and ends as any program does
    if not child:
        break
    codes[how] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(codes)
    sys.exit()
root = f"{sys.argv[1]}/{how}"
os.dup2(os.open(f"{root}.err", os.O_WRONLY | os.O_CREAT), 2)
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s")
heard = open(f"{root}.heard", "w", buffering=1)
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


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder of all programs, and with which codes they ended."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=True)
    return folder, ast.literal_eval(done.stdout)


@pytest.mark.parametrize(("how", "last"), LAST.items())
def test_saves_end_well(ended: tuple[Path, dict[str, int]], how: str, last: int) -> None:
    folder, codes = ended
    root, said = folder / how, (folder / f"{how}.err").read_text()
    assert codes[how] == (1 if how == "raises" else 0), said
    assert "LOG" not in said and "interpreter shutdown" not in said, said
    assert "failed" not in (folder / f"{how}.heard").read_text()
    place = f"{root}-local" if how == "local" else str(root)
    there = [s.number for s in ckpt.list_steps(place) if s.committed]
    assert there[-1] == last and (there == [last] or how == "local")  # what was being published stays in the local tier
    into = {"w": torch.zeros(300_000)}
    with ckpt.Checkpointer(root, local=f"{root}-local") if how == "local" else ckpt.Checkpointer(root) as c:
        assert c.restore(into) == last
    assert torch.equal(into["w"], torch.full((300_000,), float(last)))
