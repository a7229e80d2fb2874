"""Models whose tensors are plain and do not know their own place, as Megatron's: the parts of one rank, cut by hand, and a Layout.

The parts are trained with the gradients of the whole model, cut alike, by an AdamW of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Layout, Replicate, Shard, Uneven, experts, pipeline
from tests.distributed.models import (
    BLOCKS,
    EXPERTS,
    NOT_FUSED,
    TORCH_LAYOUTS,
    VOCAB,
    Model,
    Part,
    Trained,
    adamw,
    loss_of,
    trained,
    whole_model,
)

CUT = dict.fromkeys(("embed.weight", "head.weight", "up.weight", "up.bias", "gate.weight", "gate.bias"), 0)
CUT |= {"down.weight": 1, "out.weight": 1}
"""End of a name → the dimension that tensor parallelism cuts."""

SIZES = {"embed": VOCAB, "head": VOCAB, "up": 33, "gate": 7, "down": 33, "out": 7}


def pipeline_tensor(seed: int) -> Trained:
    """PP 2 × TP 2: a stage has one block, the first the embedding, the last the norm and the head; layers are counted from 0 on each."""
    stage, tp = divmod(dist.get_rank(), 2)
    whole = whole_model(seed)
    mine = whole_model(seed)
    mine.blocks = nn.ModuleList([mine.blocks[stage]])
    if stage == 0:
        del mine.norm, mine.head
    else:
        del mine.embed
    parts = {}
    for name in mine.state_dict():
        dim = next((d for end, d in CUT.items() if name.endswith(end)), None)
        parts[name] = Part(name=name.replace("blocks.0.", f"blocks.{stage}."), dim=dim, index=tp)
    rules = [(f"*{end}", Shard(dim, "tp"), Uneven(dim, SIZES[end.split(".")[0]])) for end, dim in CUT.items()]
    layout = Layout({"pp": 2, "tp": 2}, [*rules, ("*", Replicate())], numbered=[pipeline("blocks.{n}", layers=BLOCKS, stages=2)])
    return _trained(whole, mine, parts, layout, count=2)


def expert_parallel(seed: int) -> Trained:
    """EP 2 × DP 2: an expert-parallel rank has two experts, counted from 0; everything else is on all ranks."""
    ep = dist.get_rank() // 2
    whole, mine = whole_model(seed, moe=True), whole_model(seed, moe=True)
    local = EXPERTS // 2
    for block in mine.blocks:
        block.mlp.experts = nn.ModuleList([block.mlp.experts[ep * local + i] for i in range(local)])
    parts = {name: Part(name=_global_expert(name, ep * local)) for name in mine.state_dict()}
    layout = Layout({"ep": 2, "dp": 2}, [("*", Replicate())], numbered=[experts("experts.{n}", count=EXPERTS, ranks=2)])
    return _trained(whole, mine, parts, layout, count=1)


def _global_expert(name: str, first: int) -> str:
    head, found, tail = name.partition(".experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}.experts.{first + int(number)}.{rest}"


def _trained(whole: Model, mine: nn.Module, parts: dict[str, Part], layout: Layout, *, count: int) -> Trained:
    """``count`` is into how many parts a cut dimension goes."""

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = parts[name]
        return tensor if part.dim is None else tensor.chunk(count, part.dim)[part.index]

    for name, param in list(mine.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        setattr(mine.get_submodule(owner), attribute, nn.Parameter(cut(name, param.detach()).clone()))
    optimizer, teacher = adamw(mine), adamw(whole)
    return Trained(model=mine, optimizer=optimizer, train=_step(whole, teacher, mine, optimizer, parts, cut), layout=layout, parts=parts)


def _step(
    whole: Model,
    teacher: torch.optim.Optimizer,
    mine: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: dict[str, Part],
    cut: Callable[[str, torch.Tensor], torch.Tensor],
) -> Callable[[], None]:
    def step() -> None:
        loss_of(whole).backward()
        for name, param in mine.named_parameters():
            grad = whole.get_parameter(parts[name].name).grad
            assert grad is not None
            param.grad = cut(name, grad).clone()
        for name, buffer in mine.named_buffers():
            buffer.copy_(whole.get_buffer(parts[name].name))
        for each in (teacher, optimizer):
            each.step()
            each.zero_grad()

    return step


PLAIN_LAYOUTS: dict[str, tuple[int, Callable[[int], Trained]]] = {"pp2-tp2": (4, pipeline_tensor), "moe-ep2-dp2": (4, expert_parallel)}
"""Number of ranks, and what builds it from a seed."""


# ---------------------------------------------------------------------------------------------------------- any layout


def world_size(layout: str) -> int:
    """Number of ranks of a layout: a name of ``TORCH_LAYOUTS``, perhaps with ``moe-`` before it, or of ``PLAIN_LAYOUTS``."""
    return (PLAIN_LAYOUTS.get(layout) or TORCH_LAYOUTS[layout.removeprefix("moe-")])[0]


def build(layout: str, seed: int) -> Trained:
    """The model in one of the layouts, with the weights that the seed gives; to be called on its ranks."""
    if layout in PLAIN_LAYOUTS:
        return PLAIN_LAYOUTS[layout][1](seed)
    model = whole_model(seed, moe=layout.startswith("moe-"))
    return trained(TORCH_LAYOUTS[layout.removeprefix("moe-")][1](model), fused=layout != NOT_FUSED)
