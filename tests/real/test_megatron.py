"""Checkpoints fresh from the installed Megatron-Core: all forms of one state are equal. Skipped where megatron-core is not installed.

pip install megatron-core==0.16.1; pytest tests/real/test_megatron.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt import convert
from ckpt.converters.mapping.convention import numbers_of_files, translated_views
from ckpt.converters.semantic import check_semantic
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import Arrays, assert_same, dense_norms, read_all, whole_model
from tests.formats.memory import megatron_memory

_FOUND = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = pytest.mark.skipif(not _FOUND, reason="megatron-core is not installed")
WRITER, READER = (Path(__file__).with_name(f"megatron_{name}.py") for name in ("writer", "reader"))


def run(script: Path, folder: Path, ranks: int, options: Sequence[str]) -> Path:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*launcher, str(script), "--out", str(folder), *options], timeout=300, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return folder


def written(folder: Path, ranks: int, *options: str) -> Path:
    return run(WRITER, folder, ranks, options)


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
    forms = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in ("memory", "buffers"))
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


# ----------------------------------------------------------------------------------------- what Megatron-Core loads of ours


def groups(url: Path) -> object:
    """Options of groups with the parameters that are theirs, and steps."""
    return open_catalog(str(url)).state["optimizer"]


@pytest.mark.parametrize(
    ("ranks", "options", "form", "loads"),
    [
        (4, "--tp 2 --pp 2 --vpp 2 --types", "legacy", [(1, ""), (2, "--pp 2"), (4, "--tp 2 --bucket 5000")]),
        (4, "--pp 2 --tied --bucket 100000 --types dp_reshardable", "dp_reshardable", [(4, "--tp 2 --tied"), (2, "--pp 2 --tied")]),
        (4, "--tp 2 --ep 2 --experts 4 --types", "legacy", [(2, "--ep 2 --experts 4"), (4, "--tp 2 --pp 2 --ep 2 --etp 1 --experts 4")]),
        (4, "--tp 2 --ep 2 --experts 4 --dense 1 --types", "legacy", [(4, "--pp 2 --ep 2 --experts 4 --dense 1")]),
        (1, "--experts 4 --singleton --types fully_reshardable", "fully_reshardable", [(2, "--tp 2 --experts 4")]),
    ],
    ids=["dense", "tied", "experts", "some layers with experts", "from singletons"],
)
def test_converted_and_loaded_by_megatron(tmp_path, ranks, options, form, loads):
    """Whatever the parallelism of the job that loads it, model and optimizer are those that were saved, bit for bit."""
    source = written(tmp_path / "c", ranks, *options.split())
    convert(str(source / form), str(tmp_path / "m"), to="torch_dist")
    truth = read_all(source / form)
    for number, (count, other) in enumerate(loads):
        asked = ["--load", str(tmp_path / "m" / "iter_0000003"), *other.split()]
        loaded = run(READER, tmp_path / f"l{number}", count, asked) / "legacy"
        assert_same(read_all(loaded), truth)
        assert groups(loaded) == groups(source / form)


def test_weights_of_transformers_loaded_by_megatron(tmp_path):
    source = written(tmp_path / "c", 1, "--types") / "legacy"
    hf, numbers = str(tmp_path / "hf"), numbers_of_files(str(source))
    convert(str(source), hf, to="hf", views=translated_views(str(source), "llama", "huggingface", {}))
    convert(hf, str(tmp_path / "m"), to="torch_dist", views=translated_views(hf, "llama", "megatron", numbers))
    loaded = run(READER, tmp_path / "l", 2, ["--load", str(tmp_path / "m" / "release"), "--weights", "--tp", "2"])
    expected: Arrays = {n: a.copy() for n, a in dense_norms(whole_model(source / "iter_0000003")).items()}
    for name in ("model.embedding.word_embeddings.weight", "model.output_layer.weight"):
        expected[name][numbers["vocabulary"] :] = 0  # padding
    assert_same(dense_norms(whole_model(loaded / "legacy" / "iter_0000003", tp=2)), expected)


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
    report = convert(str(folder / "fully_reshardable"), str(tmp_path / "m"), to="native", repair=True, job=job).repair
    found, expected = read_all(tmp_path / "m"), read_all(folder / "legacy")
    assert not check_semantic(open_catalog(str(tmp_path / "m"))).problems
    filled = {t.tensor: t.filled for t in report.tensors}
    assert report.filled > 0 and found.keys() == expected.keys()
    for name, array in expected.items():
        assert int((found[name] != array).sum()) <= filled.get(name, 0), name


def test_kinds_of_models(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(Path(__file__).parents[2])}
    kinds = Path(__file__).with_name("megatron_kinds.py")
    done = subprocess.run([sys.executable, str(kinds), str(tmp_path)], timeout=200, env=environment, capture_output=True, text=True)
    told = [line.partition(": ") for line in done.stdout.splitlines() if line.endswith("]")]
    assert done.returncode == 0 and len(told) == 7, done.stderr[-4000:]
    assert {name: changed for name, _, changed in told if changed != "[]"} == {}
