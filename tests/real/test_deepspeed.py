"""DeepSpeed itself, where it is installed (``DS_BUILD_OPS=0 pip install deepspeed``): what it saves, and how its own tools read that."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ckpt
from tests.formats.reading import same
from tests.formats.test_deepspeed import PREFIX, masters_fit

JOB = Path(__file__).parent / "deepspeed_job.py"

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def train(path: Path, ranks: int, *options: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(JOB), "--out", str(path)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


CASES = {
    "zero3": (3, "--stage", "3"),
    "zero3 sub-groups": (2, "--stage", "3", "--zero", '{"sub_group_size": 300}'),
    "zero2 float32 round robin": (2, "--stage", "2", "--dtype", "fp32", "--zero", '{"round_robin_gradients": true}'),
    "zero1 elastic": (2, "--stage", "1", "--zero", '{"elastic_checkpoint": true}'),
    "BF16_Optimizer": (2, "--stage", "1", "--grads", "fp32"),
    "momentum": (3, "--stage", "2", "--optimizer", "sgd"),
}


@pytest.mark.parametrize("case", CASES)
def test_zero(case: str, tmp_path: Path) -> None:
    ranks, *options = CASES[case]
    train(tmp_path, ranks, *options)
    view = ckpt.open(str(tmp_path))
    wrong = "round robin" in case  # there DeepSpeed 0.19 looks for parameters where it would have put them without
    for name in ("merged.oracle",) if wrong else ("gathered.oracle", "merged.oracle"):
        expected = torch.load(tmp_path / name)
        assert expected and all(same(view[f"{PREFIX}{n}"].read(), t) for n, t in expected.items())
    masters_fit(view)
    assert {"model.head.weight", "model.frozen", "model.buf"} <= set(view)


@pytest.mark.parametrize("options", [("--pipeline", "2"), ("--pipeline", "2", "--tied"), ("--experts", "4")])
def test_stages_and_experts(options: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path, 4, "--stage", "1", *options)
    masters_fit(ckpt.open(str(tmp_path)))
