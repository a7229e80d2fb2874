"""A tiny GPTModel with the distributed optimizer, saved by Megatron-Core itself in all of its forms, on CPUs. Run with torchrun:

    torchrun --nproc-per-node 4 tests/real/megatron_writer.py --tp 2 --pp 2 --vpp 2 --out DIR

writes ``DIR/legacy``, ``DIR/dp_reshardable``, ``DIR/fully_reshardable``, ``DIR/dp_zero_gather_scatter``, as the version at hand can, with
the state of three steps on random gradients; in ``DIR/memory/rank_*.pt`` what each rank holds, as the objects of Megatron-Core say; and in
``DIR/buffers`` where the optimizer's buffers have which parameter. Sizes are such that few parameters are multiples of what buffers are
aligned to.
With ``--plain bf16`` (or fp16, fp32) the optimizer is not distributed: ``DIR/legacy`` and ``DIR/plain``. With ``multi_latent_attention`` in
``--config`` the model is one of latent attention.
Works with megatron-core 0.14 and 0.15 (then ``DIR/fully_sharded_model_space`` too), 0.16, and Megatron-LM of August 2026.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron_memory import gradient, placed, save_memory  # beside this script

SIZES = {"layers": 4, "hidden": 24, "heads": 4, "groups": 2, "ffn": 20, "expert": 12, "vocabulary": 42, "padded": 48}
STEPS = 3
CONFIG_OF = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Arguments that the configuration calls otherwise."""
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = ("plain",)
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


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("tp", 1),
        ("pp", 1),
        ("ep", 1),
        ("experts", 0),
        ("bucket", 2000),
        ("hidden", SIZES["hidden"]),
        ("layers", SIZES["layers"]),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--etp", type=int)
    parser.add_argument("--vpp", type=int)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--singleton", action="store_true")
    parser.add_argument("--dense", type=int, default=0, help="first layers without experts")
    parser.add_argument("--config", type=json.loads, default={}, help="further arguments of the model, as JSON")
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--plain", choices=KINDS, help="an optimizer that is not distributed, for weights of this dtype")
    return parser


def config_of(a: argparse.Namespace) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = a.plain or "bf16"
    config = (MLATransformerConfig if a.config.get("multi_latent_attention") else TransformerConfig)(
        num_layers=SIZES["layers"],
        hidden_size=SIZES["hidden"],
        num_attention_heads=SIZES["heads"],
        num_query_groups=SIZES["heads"] if a.config.get("multi_latent_attention") else SIZES["groups"],
        ffn_hidden_size=SIZES["ffn"],
        num_moe_experts=a.experts or None,
        moe_ffn_hidden_size=SIZES["expert"] if a.experts else None,
        moe_layer_freq=_frequency(a),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bf16=kind == "bf16",
        fp16=kind == "fp16",
        params_dtype=KINDS[kind],
        pipeline_dtype=KINDS[kind],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=a.tp,
        pipeline_model_parallel_size=a.pp,
        virtual_pipeline_model_parallel_size=a.vpp,
        expert_model_parallel_size=a.ep,
        expert_tensor_parallel_size=a.etp,
    )
    more = {CONFIG_OF.get(n, n): v for n, v in a.config.items() if n != "position_embedding_type"}
    return dataclasses.replace(config, **more)


def _frequency(a: argparse.Namespace) -> int | list[int]:
    return [int(n >= a.dense) for n in range(SIZES["layers"])] if a.dense else 1


def arguments_of(a: argparse.Namespace) -> argparse.Namespace:
    """What Megatron-LM's training script would have kept as ``args``."""
    told = argparse.Namespace(
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
        moe_layer_freq=_frequency(a),
        vocab_size=SIZES["vocabulary"],
        padded_vocab_size=SIZES["padded"],
        swiglu=True,
        untie_embeddings_and_output_weights=not a.tied,
        transformer_impl="local",
        overlap_grad_reduce=True,
        ddp_bucket_size=a.bucket,
    )
    return argparse.Namespace(**vars(told) | a.config | {"swiglu": a.config.get("gated_linear_unit", True)})


def without_sizes_of_heads() -> None:
    """Let the local attention be built for latent attention, which tells it sizes that it does not take; it is never run."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    made = DotProductAttention.__init__

    def made_without(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{k: v for k, v in options.items() if k not in ("k_channels", "v_channels")})

    DotProductAttention.__init__ = made_without


def models_of(a: argparse.Namespace, config: Any) -> list[Any]:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1234)
    if a.config.get("multi_latent_attention"):
        without_sizes_of_heads()
    spec: Any = get_gpt_layer_local_spec(
        num_experts=a.experts or None,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=bool(a.config.get("multi_latent_attention")),
    )
    models = []
    for chunk in range(a.vpp or 1):
        stage: dict[str, Any] = {}
        if a.vpp:
            ps.set_virtual_pipeline_model_parallel_rank(chunk)
            stage = {"ignore_virtual": False, "vp_stage": chunk}
        if a.dense or "moe_layer_freq" in a.config:  # layers without experts among the others
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage.get("vp_stage"))
        model = GPTModel(
            config,
            spec,
            vocab_size=SIZES["padded"],
            max_sequence_length=64,
            pre_process=ps.is_pipeline_first_stage(**stage),
            post_process=ps.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=a.tied,
            position_embedding_type=a.config.get("position_embedding_type", "rope"),
            **({"vp_stage": chunk} if a.vpp else {}),
        )
        models.append(model.to(KINDS[a.plain or "bf16"]))
    return models


def trained(a: argparse.Namespace, config: Any, models: list[Any]) -> tuple[Any, list[Any]]:
    """An optimizer after some steps, and the models as they were wrapped for it."""
    import megatron.core.optimizer.optimizer as module
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=not a.plain, grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=a.bucket
    )
    wrapped = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
    module.get_grad_norm_fp32 = lambda *_, **__: 1.0
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=not a.plain,
        clip_grad=0.0,
        initial_loss_scale=8.0,
    )
    optimizer = get_megatron_optimizer(options, wrapped)
    named = [found for w in wrapped for found in placed(w.module)]
    for step in range(STEPS):
        for name, p in named:
            p.main_grad.copy_(gradient(name, p, step))
        optimizer.step()
    return optimizer, wrapped


def save_torch_dist(a: argparse.Namespace, models: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    for kind in PLAIN if a.plain else a.types:
        folder = Path(a.out, kind)
        metadata = {
            **({} if a.plain else {"distrib_optim_sharding_type": kind}),
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


def _directory(a: argparse.Namespace) -> str:
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if a.pp > 1 else ""
    return name + (f"_{ps.get_expert_model_parallel_rank():03d}" if a.ep > 1 else "")


def save_legacy(a: argparse.Namespace, models: list[Any], optimizer: Any) -> None:
    folder = save_weights(a, models, {"optimizer": optimizer.state_dict()})
    if not a.plain:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))


def save_weights(a: argparse.Namespace, models: list[Any], more: dict[str, Any]) -> Path:
    """The files of ranks without the parameter state of the optimizer; gives the directory of this rank."""
    from megatron.core import parallel_state as ps

    root = Path(a.out, "legacy")
    folder = root / f"iter_{STEPS:07d}" / _directory(a)
    folder.mkdir(parents=True, exist_ok=True)
    if ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0:
        state = {_key(i, models): m.state_dict_for_save_checkpoint() for i, m in enumerate(models)}
        state |= {"args": arguments_of(a), "checkpoint_version": 3.0, "iteration": STEPS, **more}
        torch.save(state, folder / "model_optim_rng.pt")
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    return folder


def say_where(a: argparse.Namespace, wrapped: list[Any]) -> None:
    """Beside each file of the legacy format, Megatron's own word on where its buffers have which parameter."""
    for path in Path(a.out, "legacy").glob(f"*/{_directory(a)}/distrib_optim.pt"):
        told = []
        for model in wrapped:
            names = {parameter: name for name, parameter in model.module.named_parameters()}
            for expert, buffers in enumerate((model.buffers, model.expert_parallel_buffers)):
                for buffer in buffers:
                    places = {names[p]: [*place] for p, place in buffer.param_index_map.items()}
                    buckets = [[bucket.grad_data.numel(), bucket.numel_unpadded] for bucket in buffer.buckets]
                    told.append({"expert": bool(expert), "params": places, "buckets": buckets})
        target = Path(a.out, "buffers", f"{path.parent.name}.json")
        target.parent.mkdir(exist_ok=True)  # all ranks of a buffer say the same
        target.write_text(json.dumps(told))


def started(a: argparse.Namespace) -> None:
    """Begin as a job of this parallelism."""
    SIZES.update(hidden=a.hidden, layers=a.layers)
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


def main() -> None:
    a = options().parse_args()
    started(a)
    config = config_of(a)
    models = models_of(a, config)
    optimizer, wrapped = trained(a, config, models)
    save_torch_dist(a, models, optimizer)
    save_legacy(a, models, optimizer)
    save_memory(Path(a.out, "memory"), models, optimizer, gated=a.config.get("gated_linear_unit", True))
    dist.barrier()
    say_where(a, wrapped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # what writes files starts processes of its own, which import this module again
