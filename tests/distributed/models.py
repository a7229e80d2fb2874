"""Small models in every parallel layout, trained for two steps, and their whole state as torch itself gathers it.

Sizes do not divide: 33 and 7 rows over any number of ranks, 5 rows of which a fourth rank gets none, and a parameter of one element.
Nothing here may use ckpt to find out what a tensor is: ``full_state`` is what the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ckpt

VOCAB, DIM, BLOCKS, EXPERTS = 33, 12, 2, 4
LEARNING_RATE = 0.01


class Norm(nn.Module):
    """A norm with a weight and buffers that change in training."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.add_(x.detach().mean((0, 1)) * 0.1)
                self.seen.add_(1)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Dense(nn.Module):
    """Two ways through 33 and through 7 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 33)
        self.down = nn.Linear(33, DIM)
        self.gate = nn.Linear(DIM, 7)
        self.out = nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) + self.out(torch.tanh(self.gate(x)))


class Experts(nn.Module):
    """All experts see all tokens: routing would change nothing about where the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = torch.softmax(self.router(x), -1)
        return sum((share[..., i : i + 1] * torch.tanh(e(x)) for i, e in enumerate(self.experts)), torch.zeros_like(x))


class Scale(nn.Module):
    """A parameter of one element: all ranks but one have an empty part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.norm = Norm()
        self.mlp = Experts() if moe else Dense()
        self.few = nn.Linear(DIM, 5, bias=False)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.scale(self.mlp(h)) + self.few(h).mean(-1, keepdim=True)


class Model(nn.Module):
    """Embedding, blocks, norm, head. The names of its state are the same in every layout."""

    def __init__(self, *, moe: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(moe) for _ in range(BLOCKS))
        self.norm = Norm()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole_model(seed: int, *, moe: bool = False, tied: bool = False) -> Model:
    """The model in one piece, all of it decided by the seed."""
    torch.manual_seed(seed)
    return Model(moe=moe, tied=tied)


def adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.AdamW:
    """Two groups with options of their own, as usual: no decay for what has one dimension. A fused step is one operation, which saves time:
    torch plans each of DTensors. The other one takes lists of tensors."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": LEARNING_RATE / 2},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.8, 0.95), fused=fused, foreach=not fused)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same everywhere."""
    generator = torch.Generator().manual_seed(99)
    tokens = torch.randint(VOCAB, (4, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module) -> torch.Tensor:
    tokens, targets = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


# -------------------------------------------------------------------------------------------------------------- trained


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a plain tensor of this rank belongs: the name that all layouts use, and, if it is a part, the dimension that is cut and which
    of the parts (as ``torch.chunk`` makes them) it is."""

    name: str
    dim: int | None = None
    index: int = 0


@dataclass(kw_only=True)
class Trained:
    """A model in some layout with its optimizer. For plain parts of tensors, ``layout`` tells ckpt where they belong and ``parts`` (by name
    in the model) tells the oracle."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Callable[[], None]
    layout: ckpt.Layout | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    def steps(self, count: int) -> Trained:
        for _ in range(count):
            self.train()
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def trained(model: nn.Module, *, fused: bool = True) -> Trained:
    """A model that can be called as it is, with AdamW."""
    optimizer = adamw(model, fused=fused)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model=model, optimizer=optimizer, train=step)


# ------------------------------------------------------------------------------------------------------ torch's own layouts


def fsdp(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Rows and columns over the ranks of one mesh dimension; whatever is not cut is replicated on it."""
    rows, columns = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate()), "head": rows})
    _replicated(model.norm, mesh)
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp.up": rows, "mlp.down": columns, "mlp.gate": rows, "mlp.out": columns})
        for whole in (block.norm, block.few, block.scale):
            _replicated(whole, mesh)
    return model


def _replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own tensors DTensors that every rank of the mesh has whole."""
    distribute_module(
        module,
        mesh,
        input_fn=lambda _, inputs, m: tuple(DTensor.from_local(x, m, [Replicate()]) for x in inputs),
        output_fn=lambda _, output, m: output.to_local(),
    )


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh over the first ranks: ``mesh_of(dp=2, tp=2)``."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _fsdp_tp(model: Model) -> Model:
    mesh = mesh_of(dp=2, tp=2)
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])


TORCH_LAYOUTS: dict[str, tuple[int, Callable[[Model], nn.Module]]] = {
    "single": (1, lambda model: model),
    "ddp2": (2, DistributedDataParallel),
    "fsdp2": (2, lambda model: fsdp(model, mesh_of(dp=2))),
    "fsdp3": (3, lambda model: fsdp(model, mesh_of(dp=3))),
    "fsdp4": (4, lambda model: fsdp(model, mesh_of(dp=4))),
    "hsdp2x2": (4, lambda model: fsdp(model, mesh_of(copies=2, dp=2))),
    "tp2": (2, lambda model: tensor_parallel(model, mesh_of(tp=2))),
    "fsdp2-tp2": (4, _fsdp_tp),
}
"""Number of ranks, and what makes the model of one piece one of this layout."""
NOT_FUSED = "fsdp3"
"""The layout whose optimizer is not fused."""
