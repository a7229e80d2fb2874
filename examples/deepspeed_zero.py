"""A run that began with DeepSpeed's ZeRO resumes with FSDP2, on another number of ranks, without conversion.

torchrun --nproc-per-node 2 examples/deepspeed_zero.py begin runs/zero       # DeepSpeed trains and saves; needs deepspeed
torchrun --nproc-per-node 3 examples/deepspeed_zero.py go-on runs/zero       # FSDP2 loads that, trains, saves with ckpt; does not
ckpt diff --only 'optimizer.*' --no-values runs/zero runs/zero/fsdp2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt

STEPS = 20


def build() -> torch.nn.Module:
    """The model of both parts."""
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss on the batch of one step."""
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return (model(data).squeeze() - data.sum(1)).square().mean()


def begin(run: str, stage: int) -> float:
    """Train with DeepSpeed, and save as it does; the last loss."""
    import deepspeed

    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"train_micro_batch_size_per_gpu": 64, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = torch.zeros(())
    for step in range(1, STEPS + 1):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(run, client_state={"step": STEPS})
    return loss.item()


def go_on(run: str) -> float:
    """Load what DeepSpeed saved into FSDP2, whatever the number of ranks, train on, and save with ckpt; the first loss."""
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())  # its options come from the checkpoint too
    state = {"model": model, "optimizer": optimizer, "step": 0}
    aside = {"optimizer.state.*.master": "masters.*"}  # ZeRO's masters: here the weights are in full precision themselves
    ckpt.load(run, state, only=["model.*", "optimizer.*", "step"], rename=aside, cast=True)
    first, losses = state["step"] + 1, []
    for step in range(first, first + STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    ckpt.save(f"{run}/fsdp2", state | {"step": first + STEPS - 1})
    return losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["begin", "go-on"])
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3], help="of ZeRO")
    given = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    loss = begin(given.run, given.stage) if given.part == "begin" else go_on(given.run)
    if dist.get_rank() == 0:
        print(f"{'last' if given.part == 'begin' else 'first'} loss {loss:.6f}", flush=True)
    dist.barrier()
    if given.part == "go-on":  # DeepSpeed's groups end with their processes
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
