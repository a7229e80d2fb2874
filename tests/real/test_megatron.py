"""Checkpoints fresh from the installed Megatron-Core: all forms of one state are equal. Skipped where megatron-core is not installed.

pip install megatron-core==0.16.1; pytest tests/real/test_megatron.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt.converters.converting import convert_checkpoint
from ckpt.converters.semantic import check_semantic
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import assert_same, dense_norms, read_all, whole_model

_FOUND = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = pytest.mark.skipif(not _FOUND, reason="megatron-core is not installed")
WRITER = Path(__file__).with_name("megatron_writer.py")


def written(folder: Path, ranks: int, *options: str) -> Path:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*launcher, str(WRITER), "--out", str(folder), *options], check=True, timeout=300, env=environment, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (4, "--tp 2 --pp 2 --vpp 2 --types dp_reshardable dp_zero_gather_scatter"),
        (4, "--pp 2 --tied --bucket 100000 --types dp_reshardable fully_reshardable"),
        (4, "--tp 2 --ep 2 --experts 4 --types dp_reshardable dp_zero_gather_scatter"),
        (2, "--tp 2 --ep 2 --etp 1 --experts 4 --types dp_reshardable"),
        (2, "--types dp_reshardable dp_zero_gather_scatter"),
    ],
)
def test_forms_of_one_state(tmp_path, ranks, options):
    folder = written(tmp_path / "c", ranks, *options.split())
    forms = sorted(p.name for p in folder.iterdir() if p.is_dir())
    assert len(forms) >= 2
    arrays = {form: read_all(folder / form) for form in forms}
    for form in forms:
        assert_same(arrays[form], arrays["legacy"])
        report = check_semantic(open_catalog(str(folder / form)))
        assert not report.problems, (form, [str(p) for p in report.problems])


def test_weights_are_those_of_the_files(tmp_path):
    folder = written(tmp_path / "c", 4, "--tp", "2", "--pp", "2", "--vpp", "2", "--types", "fully_reshardable")
    expected = dense_norms(whole_model(folder / "legacy" / "iter_0000003", tp=2, pp=2, vpp=2))
    found = read_all(folder / "fully_reshardable")
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize(
    ("ranks", "options", "data_parallel"),
    [
        (3, "--bucket 3000", 3),
        (6, "--pp 2 --vpp 2 --bucket 900", 3),
        (4, "--pp 2 --tied --bucket 2000", 2),
        (4, "--tp 2 --ep 2 --etp 1 --experts 4 --bucket 2000", 2),
        (4, "--pp 2 --ep 2 --experts 4 --bucket 1500 --singleton", 2),
    ],
)
def test_what_is_displaced_is_repaired(tmp_path, ranks, options, data_parallel):
    """Nothing differs from the same state in the other format but what is told to be lost."""
    folder = written(tmp_path / "c", ranks, *options.split(), "--types", "fully_reshardable")
    assert check_semantic(open_catalog(str(folder / "fully_reshardable"))).problems
    job = {"data_parallel_size": data_parallel}
    report = convert_checkpoint(str(folder / "fully_reshardable"), str(tmp_path / "m"), to="native", repair=True, job=job).repair
    found, expected = read_all(tmp_path / "m"), read_all(folder / "legacy")
    assert not check_semantic(open_catalog(str(tmp_path / "m"))).problems
    filled = {t.tensor: t.filled for t in report.tensors}
    assert report.filled > 0 and found.keys() == expected.keys()
    for name, array in expected.items():
        assert int((found[name] != array).sum()) <= filled.get(name, 0), name
