"""A tiny GPTModel with the distributed optimizer, saved by Megatron-Core itself in all of its forms, on CPUs. Run with torchrun:

    torchrun --nproc-per-node 4 tests/real/megatron_writer.py --tp 2 --pp 2 --vpp 2 --out DIR

writes ``DIR/legacy``, ``DIR/dp_reshardable``, ``DIR/fully_reshardable``, ``DIR/dp_zero_gather_scatter``, as the version at hand can, with
the state of three steps on random gradients. Sizes are such that few parameters are multiples of what buffers are aligned to.
Works with megatron-core 0.14 (then ``DIR/fully_sharded_model_space`` too) and 0.16.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SIZES = {"layers": 4, "hidden": 24, "heads": 4, "groups": 2, "ffn": 20, "expert": 12, "vocabulary": 42, "padded": 48}
STEPS = 3
TYPES = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter", "fully_sharded_model_space")


def without_gpus() -> None:
    """Let Megatron-Core believe that CPUs are its devices."""
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.FloatTensor = torch.FloatTensor
    torch.Tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    torch.nn.Parameter.type = torch.Tensor.type
    for name in ("tensor", "zeros", "empty", "ones", "full", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    if not hasattr(np, "product"):
        np.product = np.prod


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("ep", 1), ("experts", 0), ("bucket", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--etp", type=int)
    parser.add_argument("--vpp", type=int)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--singleton", action="store_true")
    parser.add_argument("--types", nargs="*", default=TYPES)
    return parser.parse_args()


def config_of(a: argparse.Namespace) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=SIZES["layers"],
        hidden_size=SIZES["hidden"],
        num_attention_heads=SIZES["heads"],
        num_query_groups=SIZES["groups"],
        ffn_hidden_size=SIZES["ffn"],
        num_moe_experts=a.experts or None,
        moe_ffn_hidden_size=SIZES["expert"] if a.experts else None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
    )


def arguments_of(a: argparse.Namespace) -> argparse.Namespace:
    """What Megatron-LM's training script would have kept as ``args``."""
    return argparse.Namespace(
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
        num_layers=SIZES["layers"],
        hidden_size=SIZES["hidden"],
        num_attention_heads=SIZES["heads"],
        num_query_groups=SIZES["groups"],
        group_query_attention=True,
        kv_channels=SIZES["hidden"] // SIZES["heads"],
        ffn_hidden_size=SIZES["ffn"],
        num_experts=a.experts or None,
        vocab_size=SIZES["vocabulary"],
        padded_vocab_size=SIZES["padded"],
        swiglu=True,
        untie_embeddings_and_output_weights=not a.tied,
        transformer_impl="local",
        overlap_grad_reduce=True,
        ddp_bucket_size=a.bucket,
    )


def models_of(a: argparse.Namespace, config: Any) -> list[Any]:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1234)
    spec = get_gpt_layer_local_spec(num_experts=a.experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    models = []
    for chunk in range(a.vpp or 1):
        stage: dict[str, Any] = {}
        if a.vpp:
            ps.set_virtual_pipeline_model_parallel_rank(chunk)
            stage = {"ignore_virtual": False, "vp_stage": chunk}
        model = GPTModel(
            config,
            spec,
            vocab_size=SIZES["padded"],
            max_sequence_length=64,
            pre_process=ps.is_pipeline_first_stage(**stage),
            post_process=ps.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=a.tied,
            position_embedding_type="rope",
            **({"vp_stage": chunk} if a.vpp else {}),
        )
        models.append(model.bfloat16())
    return models


def trained(a: argparse.Namespace, config: Any, models: list[Any]) -> Any:
    """An optimizer after some steps; gradients are random, and those of shared embeddings are equal on the stages that have them."""
    import megatron.core.optimizer.optimizer as module
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=a.bucket
    )
    wrapped = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
    module.get_grad_norm_fp32 = lambda *_, **__: 1.0
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(options, wrapped)
    for step in range(STEPS):
        for w in wrapped:
            for buffer in w.buffers + w.expert_parallel_buffers:
                buffer.grad_data.copy_(torch.randn(buffer.numel, generator=torch.Generator().manual_seed(100 + step)))
            for name, p in w.module.named_parameters():
                if getattr(p, "shared_embedding", False) or "layernorm" in name or "router" in name:
                    p.main_grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(200 + step)))
        optimizer.step()
    return optimizer


def save_torch_dist(a: argparse.Namespace, models: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    for kind in a.types:
        folder = Path(a.out, kind)
        metadata = {
            "distrib_optim_sharding_type": kind,
            "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
            "singleton_local_shards": a.singleton,
            "non_homogeneous_layers": a.singleton,
            "chained_optim_avoid_prefix": True,
        }
        parts = {_key(i, models): m.sharded_state_dict(metadata=metadata) for i, m in enumerate(models)}
        try:
            parts["optimizer"] = optimizer.sharded_state_dict(dict(parts), is_loading=False, metadata=metadata)
            parts |= {"args": arguments_of(a), "checkpoint_version": 3.0, "iteration": STEPS}
            if dist.get_rank() == 0:
                folder.mkdir(parents=True)
            dist.barrier()
            content = {k: v for k, v in metadata.items() if k != "dp_cp_group"}
            dist_checkpointing.save(parts, str(folder), content_metadata=content)
        except (dist_checkpointing.core.CheckpointingException, NotImplementedError) as err:
            print(f"{kind} is not written by this version: {err}", flush=True)


def _key(number: int, models: list[Any]) -> str:
    return "model" if len(models) == 1 else f"model{number}"


def save_legacy(a: argparse.Namespace, models: list[Any], optimizer: Any) -> None:
    from megatron.core import parallel_state as ps

    root = Path(a.out, "legacy")
    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if a.pp > 1 else ""
    name += f"_{ps.get_expert_model_parallel_rank():03d}" if a.ep > 1 else ""
    folder = root / f"iter_{STEPS:07d}" / name
    folder.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0:
        state = {_key(i, models): m.state_dict_for_save_checkpoint() for i, m in enumerate(models)}
        state |= {"args": arguments_of(a), "checkpoint_version": 3.0, "iteration": STEPS, "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "model_optim_rng.pt")
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def main() -> None:
    a = parsed()
    without_gpus()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        a.tp,
        a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
        create_gloo_process_groups=True,
    )
    config = config_of(a)
    models = models_of(a, config)
    optimizer = trained(a, config, models)
    save_torch_dist(a, models, optimizer)
    save_legacy(a, models, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # what writes files starts processes of its own, which import this module again
