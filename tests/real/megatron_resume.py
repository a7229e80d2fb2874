"""A GPTModel and the distributed optimizer of the installed Megatron-Core go on from files of the format ``torch``, as Megatron-LM loads
them, and save what they then have. On CPUs:

    torchrun --nproc-per-node 4 tests/real/megatron_resume.py --load DIR/iter_0000003 --tp 2 --pp 2 --out OUT

writes ``OUT/legacy``. The model is that of ``megatron_writer.py``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import megatron_writer as writer
from megatron_logits import rank_folder


def spoil(models: list[Any], optimizer: Any) -> None:
    """Nothing that is loaded is there before."""
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter.add_(1)
        for one in optimizer.chained_optimizers:
            for group in one.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1)
            for state in one.optimizer.state.values():
                for tensor in state.values():
                    tensor.add_(1)


def load(folder: Path, models: list[Any], optimizer: Any) -> None:
    """As ``load_checkpoint`` of Megatron-LM does."""
    state = torch.load(folder / "model_optim_rng.pt", map_location="cpu")
    for i, model in enumerate(models):
        model.load_state_dict(state["model" if len(models) == 1 else f"model{i}"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    for one in optimizer.chained_optimizers:  # of torch's AdamW, 0.16 takes the step for a tensor that is in the file
        one._set_main_param_and_optimizer_states = functools.partial(with_step, one, one._set_main_param_and_optimizer_states)
    optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))


def with_step(optimizer: Any, put: Any, param: Any, tensors: dict[str, torch.Tensor]) -> None:
    group, place = optimizer.model_param_group_index_map[param]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
    put(param, {**tensors, "step": state["step"]})


def main() -> None:
    parser = writer.options()
    parser.add_argument("--load", type=Path, required=True)
    a = parser.parse_args()
    writer.started(a)
    config = writer.config_of(a)
    models = writer.models_of(a, config)
    optimizer, _ = writer.trained(a, config, models)
    spoil(models, optimizer)
    load(a.load / rank_folder(), models, optimizer)
    writer.save_legacy(a, models, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
