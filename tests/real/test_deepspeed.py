"""DeepSpeed itself, where it is installed (``DS_BUILD_OPS=0 pip install deepspeed``): what it saves, and how its own tools read that."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from tests.formats.megatron_files import read_all
from tests.formats.memory import deepspeed_memory
from tests.formats.reading import same
from tests.formats.test_deepspeed import PREFIX

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
    "zero1 float32": (3, "--stage", "1", "--dtype", "fp32"),
    "zero2": (3, "--stage", "2"),
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
    if (tmp_path / "memory").exists():
        as_held(tmp_path)
    masters_fit(view)
    assert {"model.head.weight", "model.frozen", "model.buf"} <= set(view)


def masters_fit(view: ckpt.View) -> None:
    """Every trained parameter has a master that rounds to its weight: elements that were put elsewhere would not."""
    masters = [n for n in view if n.endswith(".master")]
    for n in masters:
        weight = view[f"model.{n.removeprefix(PREFIX).removesuffix('.master')}"].read()
        assert same(view[n].read().to(weight.dtype), weight), n
    assert masters


def as_held(path: Path) -> None:
    """Weights, masters and moments of all trained parameters are what the ranks held in memory."""
    found = read_all(path)
    expected = deepspeed_memory(path / "memory")
    masters = sum(n.endswith(".master") for n in found)
    assert masters == sum(n.endswith(".master") for n in expected) and len(expected) >= 3 * masters
    assert [n for n, array in expected.items() if not np.array_equal(found[n], array)] == []


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, "--stage 1 --pipeline 2"),
        (4, "--stage 1 --pipeline 2 --tied"),
        (4, "--stage 1 --experts 4"),
        (4, "--stage 2 --experts 4"),
        (4, "--stage 2 --experts 8"),
        (4, "--stage 2 --experts 4 --mixed"),
    ],
)
def test_stages_and_experts(ranks: int, options: str, tmp_path: Path) -> None:
    train(tmp_path, ranks, *options.split())
    as_held(tmp_path)
    masters_fit(ckpt.open(str(tmp_path)))


@pytest.mark.parametrize("stage", ["1", "3"])
def test_the_example(stage: str, tmp_path: Path) -> None:
    """FSDP2 on three ranks goes on where DeepSpeed on two ended: the same next loss as DeepSpeed's own weights give."""
    example = Path(__file__).parents[2] / "examples/deepspeed_zero.py"

    def run(ranks: int, part: str) -> float:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(example), part]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(tmp_path), "--stage", stage], env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout.rpartition("loss ")[2])

    run(2, "begin")
    expected = ckpt.open(str(tmp_path))
    weights = {n.removeprefix("model."): expected[n].read() for n in expected if n.startswith("model.")}
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    model.load_state_dict(weights)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(21))
    loss = (model(data).squeeze() - data.sum(1)).square().mean().item()
    assert run(3, "go-on") == pytest.approx(loss, abs=1e-5)
    saved = ckpt.open(str(tmp_path / "fsdp2"))
    assert saved.state()["step"] == 40 and saved["optimizer.state.model.0.weight.step"].read() == 40
    assert not any(n.endswith(".master") for n in saved)
