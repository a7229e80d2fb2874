"""Loads a ``torch_dist`` checkpoint into a tiny GPTModel and its distributed optimizer, by Megatron-Core itself, on CPUs and as Megatron-LM
does it; writes what they then have as ``DIR/legacy``. Run with torchrun, with the options of megatron_writer.py:

    torchrun --nproc-per-node 4 tests/real/megatron_reader.py --load CHECKPOINT --pp 2 --out DIR

The model and the optimizer are others than those that were saved until they are loaded. ``--weights`` loads no optimizer.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron_writer import config_of, models_of, options, save_legacy, save_weights, started, trained


def with_steps() -> None:
    """Megatron-Core 0.16 forgets the step when it loads into torch's own AdamW, which keeps it in the state of each parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def kept(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        put(self, model_param, {**{k: v for k, v in state.items() if k not in tensors}, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = kept


def with_other_states(optimizer: Any) -> Any:
    """Random gradients are the same for each job, so moments may be those that were saved before they are loaded."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():
            for tensor in state.values():
                tensor.add_(1)
    return optimizer


def load(a: argparse.Namespace, models: list[Any], optimizer: Any) -> None:
    """As ``load_checkpoint`` of megatron/training/checkpointing.py."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    common = dist_checkpointing.load_common_state_dict(a.load)
    if "args" in common:
        assert common["args"].no_save_rng is True and common["args"].no_save_optim is (optimizer is None)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = ps.get_data_parallel_group(with_context_parallel=True)
    keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    asked = {key: model.sharded_state_dict(metadata=metadata) for key, model in zip(keys, models, strict=True)}
    if optimizer is not None:
        asked["optimizer"] = optimizer.sharded_state_dict(dict(asked), is_loading=True, metadata=metadata)
    loaded, missing, unexpected = dist_checkpointing.load(asked, a.load, strict="return_all")
    assert not unexpected, unexpected
    assert all(key.endswith("_extra_state") for key in missing if optimizer is not None or not key.startswith("optimizer.")), missing
    for key, model in zip(keys, models, strict=True):
        model.load_state_dict(loaded[key], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])


def main() -> None:
    parser = options()
    parser.add_argument("--load", required=True)
    parser.add_argument("--weights", action="store_true")
    a = parser.parse_args()
    started(a)
    with_steps()
    config = config_of(a)
    models = models_of(a, config)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.add_(1)
    if a.weights:
        load(a, models, None)
        save_weights(a, models, {})
    else:
        optimizer = with_other_states(trained(a, config, models)[0])
        load(a, models, optimizer)
        save_legacy(a, models, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
