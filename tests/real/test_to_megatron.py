"""Models of transformers in files that the installed Megatron-Core loads: its logits are theirs. Its own checkpoints in files for other
ranks: it loads all of them, optimizer included. Skipped where it is not installed.

pip install megatron-core==0.16.1; pytest tests/real/test_to_megatron.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import MegatronParallel, convert
from ckpt.converters.mapping.convention import translated_views
from tests.formats.megatron_files import assert_same, read_all, unpacked

_FOUND = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = pytest.mark.skipif(not _FOUND, reason="megatron-core is not installed")
LOGITS = Path(__file__).with_name("megatron_logits.py")
RESUME = Path(__file__).with_name("megatron_resume.py")

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "llama", {}),
    "tied": ("LlamaConfig", "llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "llama", {}),
    "qwen3": ("Qwen3Config", "llama", {"head_dim": 16}),
    "mixtral": ("MixtralConfig", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        "qwen-moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "qwen-moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 16},
    ),
}


def model_at(url: Path, name: str) -> torch.Tensor:
    """Save a model; gives its logits."""
    import transformers

    sys.path.insert(0, str(LOGITS.parent))
    from megatron_logits import tokens

    kind, _, more = MODELS[name]
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, kind)(**{**SIZES, **more})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape) * 0.05)  # norms and biases that are not all one and zero
        model.save_pretrained(str(url))
        with torch.no_grad():
            return model(tokens(SIZES["vocab_size"])).logits


def launch(script: Path, ranks: int, *options: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*launcher, str(script), *options]
    done = subprocess.run(command, check=False, timeout=300, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.partition("Traceback")[2][:3000]


def computed(folder: Path, out: Path, ranks: int, options: dict[str, int]) -> torch.Tensor:
    said = [word for k, n in options.items() for word in (f"--{k}", str(n))]
    launch(LOGITS, ranks, "--load", str(folder), "--out", str(out), *said)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("llama", 1, {}),
        ("llama", 2, {"tp": 2}),
        ("llama", 4, {"tp": 2, "pp": 2, "vpp": 2}),
        ("tied", 1, {}),
        ("tied", 2, {"pp": 2}),
        ("qwen2", 2, {"tp": 2}),
        ("qwen3", 1, {}),
        ("mixtral", 1, {}),
        ("mixtral", 2, {"ep": 2}),
        ("qwen2-moe", 2, {"pp": 2}),
        ("qwen3-moe", 4, {"tp": 2, "ep": 2}),
        ("qwen3-moe", 2, {"tp": 2, "ep": 2, "etp": 1}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, ranks: int, options: dict[str, int]) -> None:
    expected = model_at(tmp_path / "hf", name)
    views = translated_views(str(tmp_path / "hf"), MODELS[name][1], "megatron", {})
    arguments: dict[str, Any] = {"transformer_impl": "local"}
    if "etp" in options:
        arguments["expert_tensor_parallel_size"] = options["etp"]
    sizes = {full: options.get(short, 1) for full, short in (("tensor", "tp"), ("pipeline", "pp"), ("virtual", "vpp"), ("expert", "ep"))}
    parallel = MegatronParallel(**sizes, arguments=arguments)
    convert(str(tmp_path / "hf"), str(tmp_path / "m"), to="megatron", views=views, parallel=parallel)
    found = computed(tmp_path / "m" / "release", tmp_path / "logits.pt", ranks, options)
    assert torch.allclose(found[..., : SIZES["vocab_size"]], expected, rtol=1e-4, atol=1e-5), (found[..., :250] - expected).abs().max()
    assert expected.abs().max() > 1


@pytest.mark.parametrize(
    ("layout", "ranks", "options"),
    [
        ("tp2pp2vpp2", 2, {}),  # two data-parallel ranks, several buckets
        ("dp2", 4, {"tp": 2, "pp": 2, "vpp": 2}),
        ("pp2tied", 2, {"tp": 2}),
        ("moe_singleton", 2, {"tp": 2, "ep": 2, "etp": 1}),
        ("tp2ep2", 4, {"pp": 2, "ep": 2}),
    ],
)
def test_megatron_goes_on_from_it(tmp_path: Path, layout: str, ranks: int, options: dict[str, int]) -> None:
    source = unpacked(tmp_path / "files") / layout / "legacy"
    arguments: dict[str, Any] = {"padded_vocab_size": 48, "expert_tensor_parallel_size": options.get("etp")}
    sizes = {full: options.get(short, 1) for full, short in (("tensor", "tp"), ("pipeline", "pp"), ("virtual", "vpp"), ("expert", "ep"))}
    convert(str(source), str(tmp_path / "m"), to="megatron", parallel=MegatronParallel(**sizes, arguments=arguments))
    said = [word for k, n in options.items() for word in (f"--{k}", str(n))]
    said += ["--tied", "--bucket", "100000"] if layout == "pp2tied" else []
    said += ["--experts", "4"] if layout in ("moe_singleton", "tp2ep2") else []
    launch(RESUME, ranks, "--load", str(tmp_path / "m" / "iter_0000003"), "--out", str(tmp_path / "again"), *said)
    assert_same(read_all(tmp_path / "again" / "legacy"), read_all(source))
