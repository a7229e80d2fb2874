"""Trains a small model in one process, saves by policy, and resumes from the newest checkpoint when started again.

``python examples/plain_loop.py runs/plain``. Stop it with Ctrl-C, ``kill`` or ``kill -9`` and start it again: it resumes where it stopped.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ckpt
from ckpt.policies import Best, EverySteps, Latest, OnPreemption


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The data of one step. It follows from the step alone, so a job that resumes at step n sees what it would have seen anyway."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, x.square().mean(dim=1, keepdim=True)


def train(run: str, steps: int, every: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    # Everything that must survive. Modules, optimizers and schedules go in as they are; so do tensors, numbers and strings.
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": torch.get_rng_state()}

    # Saves every so many steps, and once more when the job will be stopped; keeps the two newest checkpoints and the best one.
    with ckpt.Checkpointer(run, save=EverySteps(every) | OnPreemption(), keep=Latest(2) | Best("loss", mode="min")) as c:
        start = c.restore(state)  # fills everything in the state; None if there is no checkpoint yet
        if start is None:
            print("starting from scratch")
        else:
            torch.set_rng_state(state["rng"])  # dropout resumes where it was
            print(f"resuming after step {start}")
        for step in range(1 if start is None else start + 1, steps + 1):
            x, y = (t.to(device) for t in batch_of(step))
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits, if a save in the background has not copied the weights yet
            schedule.step()
            state["rng"] = torch.get_rng_state()
            if c.step(step, state, metrics={"loss": loss.item()}):
                print(f"step {step}: loss {loss.item():.6f}, saving")
            if c.preempted:
                print(f"stopping: step {step} is saved")
                return
        c.wait()
        for saved in c.steps():
            print(f"there is {saved.url}, loss {saved.metrics['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.every)


if __name__ == "__main__":
    main()
