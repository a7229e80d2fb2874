"""Models of other kinds than that of megatron_writer.py: saved as files of ranks, converted, and loaded again by Megatron-Core itself.

    python tests/real/megatron_kinds.py DIR

prints a line for each kind: its name, and what is not as it was saved.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron_writer import options, started

from ckpt import convert

GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
LLAMA = {**GATED, "normalization": "RMSNorm", "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16}
BIASED_ROUTER = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "biases, learned positions": ({}, {}, "learned_absolute"),
    "biases and gates": ({**GATED, "add_qkv_bias": True}, {}, "rope"),
    "norms of queries and keys": ({**LLAMA, "qk_layernorm": True}, {"qk_layernorm": True}, "rope"),
    "shared experts": ({**LLAMA, **EXPERTS, "moe_shared_expert_intermediate_size": 24}, {}, "rope"),
    "a bias of the router": (
        {**LLAMA, **EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        {},
        "rope",
    ),
    "experts with biases": ({**EXPERTS}, {}, "rope"),
    "experts in one parameter": (
        {**LLAMA, **EXPERTS, "moe_grouped_gemm": True},
        {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True},
        "rope",
    ),
}


def model_of(config: dict[str, Any], spec: dict[str, Any], positions: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        **config,
    )
    layers = get_gpt_layer_local_spec(normalization=made.normalization, num_experts=made.num_moe_experts, **spec)
    model = GPTModel(made, layers, vocab_size=64, max_sequence_length=16, position_embedding_type=positions).bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def changed(model: Any, folder: Path) -> list[str]:
    """Names of tensors that are not the same after a conversion."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    rank = folder / "s" / "mp_rank_00"
    rank.mkdir(parents=True)
    arguments = argparse.Namespace(hidden_size=32, num_experts=model.config.num_moe_experts, transformer_impl="local")
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 5, "model": model.state_dict_for_save_checkpoint()}
    torch.save(state, rank / "model_optim_rng.pt")
    saved = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    url = str(folder / "iter_0000005")
    convert(str(folder / "s"), url, to="torch_dist")
    for tensor in model.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    metadata = dist_checkpointing.load_content_metadata(url)
    metadata["dp_cp_group"] = ps.get_data_parallel_group(with_context_parallel=True)
    loaded, missing, unexpected = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, url, strict="return_all")
    model.load_state_dict(loaded["model"], strict=True)
    now = model.state_dict()
    odd = [*(k for k in missing if not k.endswith("_extra_state")), *unexpected]
    return [*odd, *(name for name, tensor in saved.items() if not torch.equal(tensor, now[name]))]


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    started(options().parse_args(["--out", ""]))
    import megatron.core.transformer.moe.experts as experts

    experts.gg = MagicMock(unsafe=True)  # kernels for GPUs, which nothing here runs
    for number, (name, kind) in enumerate(KINDS.items()):
        print(f"{name}: {changed(model_of(*kind), Path(sys.argv[1], str(number)))}", flush=True)


if __name__ == "__main__":
    main()
