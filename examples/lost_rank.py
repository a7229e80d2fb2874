"""A rank is killed, and the job goes on from the memory of the machine: after torchrun's restart, or as a whole new job with other ranks.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/lost_rank.py runs/lost --steps 12 --kill-at 5
    torchrun --nproc-per-node 3 examples/lost_rank.py runs/lost --steps 20           # a new job, on fewer ranks

With some releases of torch (2.13 is one) restarted ranks find the addresses of those before them, and cannot connect: then set
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun.

Every step is saved into memory, and no step trains twice: the losses are, to the last bit, those of a run that nobody killed and that had
the same numbers of ranks at the same steps. The end of the job publishes the newest step to ``runs/lost``. ``--no-memory`` saves every step
there instead, with the same losses.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ckpt
import ckpt.training
from ckpt.policies import EverySteps, Latest

BATCH = 48  # of all ranks together, so that a sample is the same whatever the number of ranks


class Training:
    """``taught`` counts samples, which is where the data goes on; ``noise`` gives each rank numbers of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 250), nn.Tanh(), nn.Linear(250, 1))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)  # 250 rows over 3 and 4 ranks: parts of different sizes
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.noise = torch.Generator().manual_seed(dist.get_rank())
        self.taught = 0

    def state(self) -> dict[str, Any]:
        # A rank that is new draws from a stream derived of those that there were.
        noise = ckpt.training.Generators({"noise": self.noise})
        return {"model": self.model, "optimizer": self.optimizer, "noise": noise, "taught": self.taught}

    def step(self) -> str:
        """One step; the loss of the whole batch, exactly."""
        rank, count = dist.get_rank(), dist.get_world_size()
        data = torch.Generator().manual_seed(self.taught)
        x: Tensor = torch.randn(BATCH, 32, generator=data).chunk(count)[rank]
        noisy = x + 0.01 * torch.randn(x.shape, generator=self.noise)
        loss = (self.model(noisy) - x.square().mean(dim=1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taught += BATCH
        mean = loss.detach().double() / count
        dist.all_reduce(mean)
        return float(mean).hex()


def train(run: str, last: int, kill_at: int | None = None, *, memory: bool = True) -> None:
    """One life of the job: from where it was to step ``last``. ``kill_at``: after this step the last rank is killed.

    The losses, and where each life began, are in ``run.log``.
    """
    leads = dist.get_rank() == 0
    training = Training()
    tiers: dict[str, Any] = {"memory": ckpt.Memory(copies=0), "save": EverySteps(1000)} if memory else {"save": EverySteps(1)}
    with ckpt.Checkpointer(run, keep=Latest(2), job=ckpt.Job(timeout=60), **tiers) as c, Path(f"{run.rstrip('/')}.log").open("a") as log:
        state = training.state()
        start = c.restore(state)
        if start is not None:
            training.taught = state["taught"]
        if leads:
            print(f"life on {dist.get_world_size()} ranks from {c.restored_from}", file=log, flush=True)
        for n in range((start or 0) + 1, last + 1):
            loss = training.step()
            c.step(n, training.state())
            ckpt.fence()  # the next step changes the state
            if leads:
                print(f"step {n}: {loss}", file=log, flush=True)
            if n == kill_at:
                assert c.handle is not None
                c.handle.result()  # else the newest step is the one before
                dist.barrier()
                if dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL that the end of the job is published to")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, help="kill the last rank after this step, in the first life")
    parser.add_argument("--no-memory", action="store_true", help="save every step to the run itself")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        train(given.run, given.steps, given.kill_at if first else None, memory=not given.no_memory)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
