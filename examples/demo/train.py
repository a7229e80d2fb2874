"""Trains a small byte-level transformer with FSDP2, and tensor parallelism if asked, and checkpoints everything that a resume needs.

One process per rank: ``torchrun --nproc-per-node 4 examples/demo/train.py runs/a --tp 2``. Started again, on any number of ranks and
with any ``--tp``, it resumes from the newest committed checkpoint of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt

BYTES = 256
"""The vocabulary: a token is a byte."""


# --------------------------------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (w(x).view(batch, time, -1, self.head).transpose(1, 2) for w in (self.q, self.k, self.v))  # -1: the heads of this rank
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, *, width: int, layers: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; both arguments are ``[batch, time]``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the model over the mesh: its matrices over ``tp``, then everything over ``dp``."""
    if "tp" in (mesh.mesh_dim_names or ()):
        columns, rows = ColwiseParallel(), RowwiseParallel()
        parallelize_module(
            model, mesh["tp"], {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
        )
        for block in model.blocks:
            plan = {f"attention.{name}": columns for name in "qkv"} | {"attention.out": rows, "up": columns, "down": rows}
            parallelize_module(block, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


# ---------------------------------------------------------------------------------------------------------------------- data


class Text:
    """Windows of a text in an order that is shuffled anew in each pass. Its state is one number, the same on every rank."""

    def __init__(self, data: bytes, context: int) -> None:
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self.context = context
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def batch(self, size: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens after them, ``[size / parts, context]`` each: this rank's part of the next ``size`` windows."""
        windows = [self.window(self.position + i) for i in range(part, size, parts)]
        self.position += size
        both = torch.stack(windows)
        return both[:, :-1], both[:, 1:]

    def window(self, number: int) -> Tensor:
        per_pass = (len(self.data) - 1) // self.context
        passed, at = divmod(number, per_pass)
        order = torch.randperm(per_pass, generator=torch.Generator().manual_seed(passed))
        start = int(order[at]) * self.context
        return self.data[start : start + self.context + 1]


class Dice:
    """The random numbers of this rank, which dropout uses."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])


def spread(values: Any, rank: int, world: int) -> Any:
    """Which of the saved ranks a rank takes its random numbers from, if their numbers differ."""
    return values[rank * len(values) // world]


# ------------------------------------------------------------------------------------------------------------------ training


def rate(step: int) -> float:
    """Factor of the learning rate: ten steps of warm-up, then down along a cosine."""
    return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / 200)))


def train(args: argparse.Namespace) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp")) if args.tp > 1 else None
    mesh = mesh or init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dp = mesh.get_local_rank("dp")

    torch.manual_seed(0)
    model = Transformer(width=args.width, layers=args.layers, heads=4, context=args.context)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    text = Text(args.text.read_bytes(), args.context)
    torch.manual_seed(1000 + dp)  # ranks of one tensor-parallel group drop the same elements

    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "text": text,
        "dice": ckpt.PerRank(Dice(), reshard=spread),
        "step": 0,
    }
    source = args.source or next((s.url for s in reversed(ckpt.list_steps(args.run)) if s.committed), None)
    if source is not None:
        ckpt.load(source, state)
        say(f"loaded {source} on {world} ranks")

    for step in range(state["step"] + 1, args.steps + 1):
        tokens, targets = text.batch(args.batch, dp, mesh["dp"].size())
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] = step
        log(args.losses, step, average(loss.detach(), mesh["dp"]))
        if args.save_every and step % args.save_every == 0:
            report = ckpt.save(f"{args.run}/step-{step:08d}", state)
            say(f"saved step {step}: {report.tensor_bytes / 2**20:.1f} MiB in {report.seconds:.2f} s")


def average(loss: Tensor, mesh: DeviceMesh) -> float:
    dist.all_reduce(loss, group=mesh.get_group())
    return loss.item() / mesh.size()


def log(path: Path | None, step: int, loss: float) -> None:
    """Now and then a line for people, and always one with every bit of the number for programs."""
    if step == 1 or step % 5 == 0:
        say(f"step {step}: loss {loss:.4f}")
    if path is not None and dist.get_rank() == 0:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer on a text, with checkpoints.")
    parser.add_argument("run", help="where checkpoints are; the newest committed one is resumed")
    parser.add_argument("--source", help="a checkpoint to start from instead of the newest one of the run")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("text.txt"))
    parser.add_argument("--losses", type=Path, help="a file to add the loss of each step to")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="0: never")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="windows per step, of all ranks together")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that lets go of its last tensor now would abort the interpreter's own way out (torch 2.13)


if __name__ == "__main__":
    main()
