"""A GPTModel of the installed Megatron-Core that loads files of the format ``torch``, strictly, and says what logits it computes. On CPUs:

    torchrun --nproc-per-node 4 tests/real/megatron_logits.py --load DIR/release --out FILE.pt --tp 2 --pp 2

The model is made by the arguments in the files, with the local layer specification. ``FILE.pt`` has the logits for ``tokens()``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from megatron_writer import without_gpus


def rank_folder() -> str:
    """Where the files of this rank are, in the directory of an iteration: ``get_checkpoint_name`` of Megatron-LM."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if ps.get_pipeline_model_parallel_world_size() > 1 else ""
    return name + (f"_{ps.get_expert_model_parallel_rank():03d}" if ps.get_expert_model_parallel_world_size() > 1 else "")


def tokens(vocabulary: int) -> torch.Tensor:
    return torch.arange(2 * 16).reshape(2, 16) * 7 % vocabulary


class Tracker:
    """Stands for the tracker of random numbers of GPUs, of which nothing is drawn."""

    def fork(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def is_initialized(self) -> bool:
        return True


def without_trackers() -> None:
    import megatron.core.tensor_parallel as tensor_parallel
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe

    random.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: Tracker()
    moe.te_general_gemm = getattr(moe, "te_general_gemm", None)  # a name that 0.16 has with Transformer Engine alone


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "ep", "vpp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--etp", type=int)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = (
        {
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_topk": args.moe_router_topk,
            "moe_router_pre_softmax": getattr(args, "moe_router_pre_softmax", False),
            "moe_layer_freq": args.moe_layer_freq,
            "moe_shared_expert_intermediate_size": getattr(args, "moe_shared_expert_intermediate_size", None),
            "moe_shared_expert_gate": getattr(args, "moe_shared_expert_gate", False),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
        if args.num_experts
        else {}
    )
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        **experts,
    )


def models_of(args: argparse.Namespace, state: dict[str, Any]) -> list[Any]:
    """The chunks of this rank, with what the file has."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config, virtual = config_of(args), args.virtual_pipeline_model_parallel_size
    models = []
    for chunk in range(virtual or 1):
        stage: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk} if virtual else {}
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=args.normalization, vp_stage=chunk if virtual else None
            ),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=ps.is_pipeline_first_stage(**stage),
            post_process=ps.is_pipeline_last_stage(**stage),
            parallel_output=False,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            **({"vp_stage": chunk} if virtual else {}),
        )
        own = state["model" if not virtual else f"model{chunk}"]
        model.load_state_dict(own, strict=True)
        models.append(model.eval())
    return models


def logits_of(args: argparse.Namespace, models: list[Any]) -> torch.Tensor | None:
    """What comes out of the last stage; None on the others."""
    from megatron.core import parallel_state as ps

    ids = tokens(args.vocab_size)
    places = torch.arange(ids.shape[1])[None].expand(*ids.shape)
    mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)[None, None]
    hidden = torch.zeros(ids.shape[1], ids.shape[0], args.hidden_size)
    stages, stage = ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()
    peers = ps.get_pipeline_model_parallel_group() if stages > 1 else None
    for number, model in enumerate(models):
        for turn in range(stages):
            if turn == stage:
                if number or stage:
                    model.set_input_tensor(hidden)
                hidden = model(ids, places, mask)
            if peers is not None and (number, turn) != (len(models) - 1, stages - 1):
                hidden = hidden.contiguous()
                dist.broadcast(hidden, dist.get_process_group_ranks(peers)[turn], group=peers)
    return hidden if stage == stages - 1 else None


def main() -> None:
    a = parsed()
    without_gpus()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    without_trackers()
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        a.tp,
        a.pp,
        virtual_pipeline_model_parallel_size=a.vpp if a.vpp > 1 else None,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
    )
    state = torch.load(
        a.load / rank_folder() / "model_optim_rng.pt", map_location="cpu"
    )  # Megatron-Core has told torch which classes are safe
    with torch.no_grad():
        logits = logits_of(state["args"], models_of(state["args"], state))
    if logits is not None and dist.get_rank() == dist.get_world_size() - 1:
        torch.save(logits, a.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
