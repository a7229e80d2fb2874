"""A job that calls dcp.save and dcp.load, with ckpt's format: two arguments differ. Run it again to resume, on any number of ranks.

torchrun --nproc-per-node 2 examples/dcp_storage.py runs/dcp
torchrun --nproc-per-node 1 examples/dcp_storage.py runs/dcp --steps 40
ckpt verify runs/dcp/step-20
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.integrations.dcp import CkptReader, CkptWriter


def train(run: str, steps: int) -> float:
    """Train up to a step, from the newest checkpoint on; the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(256, 16)
    start, loss = 0, torch.zeros(())
    newest = [s for s in ckpt.list_steps(run) if s.committed][-1:]
    if newest:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, storage_reader=CkptReader(newest[0].url))
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        start = state["step"]
    for step in range(start + 1, steps + 1):
        loss = (model(data).squeeze() - data.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dcp.save(state, storage_writer=CkptWriter(f"{run}/step-{step}"))
    if dist.get_rank() == 0:
        print(f"steps {start + 1} to {steps}; loss {loss.item():.6f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the run")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(given.run, given.steps)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that lets go of its last tensor now would abort the interpreter's own way out (torch 2.13)


if __name__ == "__main__":
    main()
