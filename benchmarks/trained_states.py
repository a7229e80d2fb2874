"""States of a real training run, for measurements of codecs: a language model's weights, masters and moments at chosen steps.

A transformer of bytes reads Python sources. The weights are bfloat16; float32 masters and AdamW moments belong to them, as in training
with mixed precision: each step casts the weights up, computes their gradients in float32, updates the masters, and rounds them back.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

State = dict[str, dict[str, Tensor]]
"""Kind of tensor (``KINDS``) → name → tensor."""
KINDS = ("weights", "masters", "exp_avg", "exp_avg_sq")
WARM_UP = 50
"""Steps in which the learning rate rises to its value; it stays there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One run."""

    name: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    sources: str = "stdlib"
    """Which Python sources: a key of ``sysconfig.get_paths()``."""
    begin_from: str | None = None
    """The run whose last weights this one goes on from, with moments of zero; else it begins with random weights."""
    width: int = 128
    layers: int = 2
    context: int = 64
    batch: int = 8
    seed: int = field(default=0)


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.heads = width // 32

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, training.width)
        self.positions = nn.Embedding(training.context, training.width)
        self.blocks = nn.ModuleList(Block(training.width) for _ in range(training.layers))
        self.norm, self.head = nn.LayerNorm(training.width), nn.Linear(training.width, 256, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def corpus(sources: str, limit: int = 16 << 20) -> Tensor:
    """The first ``limit`` bytes of all Python sources under a path of ``sysconfig``, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()[sources]).rglob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def train(training: Training, steps: set[int], begin: dict[str, Tensor] | None) -> Iterator[tuple[int, float, State]]:
    """Step, loss and state (copies) at each of ``steps``. ``begin`` has masters to go on from."""
    torch.manual_seed(training.seed)
    model = ByteModel(training)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, tensor in (begin or {}).items():
        masters[name].copy_(tensor)
    weights = {name: m.bfloat16() for name, m in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=training.lr, betas=training.betas, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARM_UP))
    text, chooser = corpus(training.sources), torch.Generator().manual_seed(training.seed)
    window = torch.arange(training.context + 1)
    for step in range(1, max(steps) + 1):
        starts = torch.randint(len(text) - training.context - 1, (training.batch, 1), generator=chooser)
        batch = text[starts + window].long()
        computed = {name: w.float().requires_grad_() for name, w in weights.items()}
        logits = functional_call(model, computed, (batch[:, :-1],))
        loss = F.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
        gradients = torch.autograd.grad(loss, list(computed.values()))
        for master, gradient in zip(masters.values(), gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        schedule.step()
        for name, master in masters.items():
            weights[name].copy_(master)
        if step in steps:
            moments = {kind: {n: optimizer.state[m][kind] for n, m in masters.items()} for kind in KINDS[2:]}
            state: State = {"weights": weights, "masters": masters, **moments}
            yield step, loss.item(), {kind: {n: t.detach().clone() for n, t in group.items()} for kind, group in state.items()}
