"""The translations that come with the package, on models that transformers itself makes and saves, against numpy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.converters.mapping.terms import Dimensions
from ckpt.converters.mapping.translation import builtin, load_translation, of_arguments, of_config, padded_vocabulary
from tests.plan.test_views import read

Arrays = dict[str, np.ndarray]
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {**BASE, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK: dict[str, Any] = {**BASE, **LATENT, "num_key_value_heads": 8, "moe_intermediate_size": 24, "n_routed_experts": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", BASE),
    "llama tied": ("LlamaConfig", {**BASE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", BASE),
    "qwen3": ("Qwen3Config", {**BASE, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 16}),
    "qwen3-moe mixed": ("Qwen3MoeConfig", {**MOE, "mlp_only_layers": [0]}),
    "deepseek-v3": ("DeepseekV3Config", {**DEEPSEEK, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
}


@cache
def saved(model: str, root: Path) -> tuple[Arrays, Arrays, Dimensions]:
    """What transformers writes, what its modules hold, each as the float32 bits of random weights; and the numbers."""
    import transformers
    from safetensors.numpy import load_file

    kind, options = MODELS[model]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options), dtype=torch.float32)
    made.save_pretrained(root / model.replace(" ", "-"))
    folder = root / model.replace(" ", "-")
    numbers = of_config(json.loads((folder / "config.json").read_text()))
    disk = {n: a.view(np.int32).astype(np.int64) for n, a in load_file(folder / "model.safetensors").items()}
    memory = {n: t.contiguous().view(torch.int32).numpy().astype(np.int64) for n, t in made.state_dict().items()}
    return disk, memory, numbers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


def through(name: str, arrays: Arrays, numbers: Dimensions) -> Arrays:
    """To the right; and back, which must give what went in."""
    t = load_translation(name)
    right = {n: read(v, arrays) for n, v in t.views({n: a.shape for n, a in arrays.items()}, "rightwards", numbers).items()}
    back = t.views({n: a.shape for n, a in right.items()}, "leftwards", numbers)
    assert set(back) == set(arrays)
    for n, expected in arrays.items():
        assert np.array_equal(read(back[n], right), expected), n
    return right


def fused(disk: Arrays, layer: str, what: str, numbers: Dimensions) -> np.ndarray:
    """Megatron-LM's order of rows, as its own converters make it (tools/checkpoint/loader_llama_mistral.py, set_attn_state)."""
    q, k, v = (disk[f"{layer}.self_attn.{p}_proj.{what}"] for p in "qkv")
    groups, size = numbers["query_groups"], numbers["head_size"]
    rest = q.shape[1:]
    parts = [q.reshape(groups, -1, *rest), k.reshape(groups, size, *rest), v.reshape(groups, size, *rest)]
    return np.concatenate(parts, axis=1).reshape(-1, *rest)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *[(m, "llama") for m in ("llama", "llama tied", "qwen2", "qwen3")],
        ("mixtral", "mixtral"),
        *[(m, "qwen-moe") for m in ("qwen2-moe", "qwen3-moe", "qwen3-moe mixed")],
        ("deepseek-v3", "deepseek-v3"),
    ],
)
def test_to_megatron_and_back(model: str, name: str, root: Path) -> None:
    disk, _, numbers = saved(model, root)
    numbers = Dimensions({**numbers, "padded_vocabulary": padded_vocabulary(250, tensor_parallel=2)})
    made = through(name, disk, numbers)
    embedding = made["embedding.word_embeddings.weight"]
    assert embedding.shape == (256, 32)
    assert np.array_equal(embedding[:250], disk["model.embed_tokens.weight"])
    assert ("output_layer.weight" in made) == (model != "llama tied")
    for n in range(2):
        layer, its = f"model.layers.{n}", f"decoder.layers.{n}"
        if model != "deepseek-v3":
            for what in ("weight", "bias"):
                if f"{layer}.self_attn.q_proj.{what}" in disk:
                    assert np.array_equal(made[f"{its}.self_attention.linear_qkv.{what}"], fused(disk, layer, what, numbers))
        norm = disk[f"{layer}.post_attention_layernorm.weight"]
        if f"{layer}.mlp.gate_proj.weight" in disk:
            both = np.concatenate([disk[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
            assert np.array_equal(made[f"{its}.mlp.linear_fc1.weight"], both)
            assert np.array_equal(made[f"{its}.mlp.linear_fc1.layer_norm_weight"], norm)
        else:
            assert np.array_equal(made[f"{its}.pre_mlp_layernorm.weight"], norm)
            gate, up = ("w1", "w3") if model == "mixtral" else ("gate_proj", "up_proj")
            where = "block_sparse_moe" if model == "mixtral" else "mlp"
            both = np.concatenate([disk[f"{layer}.{where}.experts.3.{p}.weight"] for p in (gate, up)])
            assert np.array_equal(made[f"{its}.mlp.experts.local_experts.3.linear_fc1.weight"], both)


@pytest.mark.parametrize(
    ("model", "name"),
    [("mixtral", "transformers-mixtral"), *[(m, "transformers-moe") for m in ("qwen2-moe", "qwen3-moe", "qwen3-moe mixed", "deepseek-v3")]],
)
def test_files_and_modules_of_transformers(model: str, name: str, root: Path) -> None:
    disk, memory, numbers = saved(model, root)
    made = through(name, disk, numbers)
    assert set(made) == set(memory)
    for n, expected in memory.items():
        assert np.array_equal(made[n], expected), n


def test_to_the_names_of_metas_release(root: Path) -> None:
    disk, _, numbers = saved("llama", root)
    made = through("llama-plain", disk, numbers)
    for n, heads in (("q", 8), ("k", 4)):
        halves = disk[f"model.layers.1.self_attn.{n}_proj.weight"]
        assert np.array_equal(
            made[f"layers.1.attention.w{n}.weight"], halves.reshape(heads, 2, -1, 32).transpose(0, 2, 1, 3).reshape(-1, 32)
        )
    assert np.array_equal(made["layers.0.feed_forward.w3.weight"], disk["model.layers.0.mlp.up_proj.weight"])


def test_all_that_come_with_the_package_can_be_read() -> None:
    assert set(builtin()) >= {"llama", "llama-plain", "mixtral", "qwen-moe", "deepseek-v3", "transformers-moe", "transformers-mixtral"}
    for name in builtin():
        assert load_translation(name).terms


def test_numbers_of_megatrons_arguments() -> None:
    arguments = {
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "padded_vocab_size": 256,
        "vocab_size": 250,
        "num_experts": None,
    }
    expected = {
        "heads": 8,
        "query_groups": 2,
        "head_size": 16,
        "query_rows": 128,
        "key_rows": 32,
        "vocabulary": 250,
        "padded_vocabulary": 256,
    }
    assert of_arguments(arguments) == expected
    assert of_arguments({**arguments, "group_query_attention": False})["query_groups"] == 8
    assert padded_vocabulary(250, divisor=64, tensor_parallel=4) == 256
    assert padded_vocabulary(257, tensor_parallel=2) == 512
