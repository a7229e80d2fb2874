"""Checkpoints fresh from the installed Megatron-Core: all forms of one state are equal. Skipped where megatron-core is not installed.

pip install megatron-core==0.16.1; pytest tests/real/test_megatron.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.converters.semantic import check_semantic
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import assert_same, read_all
from tests.formats.memory import megatron_memory

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
        (8, "--tp 2 --pp 2 --vpp 2 --ep 2 --experts 4 --types dp_reshardable"),
        (4, "--pp 2 --tied --bucket 100000 --types dp_reshardable fully_reshardable"),
        (4, "--pp 2 --vpp 2 --tied --bucket 100000 --types dp_zero_gather_scatter"),
        (4, "--tp 2 --ep 2 --experts 4 --types dp_reshardable dp_zero_gather_scatter"),
        (4, "--tp 2 --ep 2 --experts 4 --singleton --types dp_reshardable"),
        (4, "--ep 4 --experts 4 --types dp_reshardable dp_zero_gather_scatter"),
        (8, "--pp 2 --ep 2 --experts 8 --bucket 500 --types dp_reshardable"),
        (4, "--tp 2 --ep 2 --etp 1 --experts 4 --types dp_reshardable"),
        (4, "--tp 4 --types dp_reshardable"),
        (3, "--bucket 700 --types dp_reshardable dp_zero_gather_scatter"),
        (2, '--pp 2 --config {"decoder_first_pipeline_num_layers":1} --types dp_reshardable'),
        (2, '--pp 2 --vpp 2 --layers 6 --config {"decoder_first_pipeline_num_layers":2} --types dp_reshardable'),
        (2, '--pp 2 --layers 3 --config {"account_for_embedding_in_pipeline_split":true} --types dp_reshardable'),
        (2, '--pp 2 --vpp 2 --layers 5 --config {"pipeline_model_parallel_layout":"Et|t|tt|tL"} --types dp_reshardable'),
        (4, '--tp 2 --pp 2 --config {"add_bias_linear":true,"add_qkv_bias":true,"qk_layernorm":true} --types dp_reshardable'),
        (2, '--tp 2 --config {"gated_linear_unit":false,"position_embedding_type":"learned_absolute"} --types dp_reshardable'),
        (4, '--tp 2 --ep 2 --experts 4 --config {"moe_shared_expert_intermediate_size":8} --types dp_reshardable'),
        (4, '--tp 2 --ep 2 --experts 4 --config {"moe_layer_freq":[0,1,0,1]} --types dp_reshardable'),
        (4, '--pp 2 --vpp 2 --ep 2 --experts 4 --config {"moe_layer_freq":[0,1,1,1]} --types dp_reshardable'),
    ],
)
def test_forms_of_one_state(tmp_path, ranks, options):
    """Weights, masters and moments are what the ranks held in memory."""
    folder = written(tmp_path / "c", ranks, *options.split())
    forms = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name != "memory")
    assert len(forms) >= 2
    expected = megatron_memory(folder / "memory", tied="--tied" in options)
    for form in forms:
        assert_same(read_all(folder / form), expected)
        report = check_semantic(open_catalog(str(folder / form)))
        assert not report.problems, (form, [str(p) for p in report.problems])


@pytest.mark.parametrize("options", ["--tp 2 --pp 2 --vpp 2", "--tp 2 --ep 2 --experts 4 --singleton", "--tp 2 --ep 2 --etp 1 --experts 4"])
def test_weights_of_full_states(tmp_path, options):
    """Whatever became of the optimizer's states in this form, the weights are those of the ranks."""
    folder = written(tmp_path / "c", 4, *options.split(), "--types", "fully_reshardable")
    expected = {n: a for n, a in megatron_memory(folder / "memory").items() if n.startswith("model.")}
    found = read_all(folder / "fully_reshardable")
    assert_same({n: a for n, a in found.items() if n.startswith("model.")}, expected)
