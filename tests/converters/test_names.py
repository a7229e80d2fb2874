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
from tests.matrix.models import Sizes, elsewhere
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


def sizes_of(model: str) -> Sizes:
    """The same numbers as the oracle of tests/matrix takes them."""
    options = MODELS[model][1]
    return Sizes(
        kind=model.split()[0],
        layers=2,
        hidden=32,
        groups=4,
        queries=2,
        head=options.get("head_dim", 4),
        ffn=48,
        experts=4,
        vocabulary=250,
        padding=6,
        tied=model == "llama tied",
        dense=frozenset({0}) if model in ("qwen3-moe mixed", "deepseek-v3") else frozenset(),
    )


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
    made, expected = through(name, disk, numbers), elsewhere(sizes_of(model), disk)
    assert sorted(made) == sorted(expected)
    for n, array in expected.items():
        rows = 250 if n.startswith(("embedding", "output_layer")) else len(array)  # the rest is filling
        assert made[n].shape == array.shape and np.array_equal(made[n][:rows], array[:rows]), n


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
