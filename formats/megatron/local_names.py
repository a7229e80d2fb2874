"""Names of parameters as a model has them on one rank, from those that ``names`` has for the whole model. Pure: the way back of
``legacy.names``.

(Sources: Megatron-LM core/models/gpt/gpt_layer_specs.py, core/transformer/moe/experts.py.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .names import EXTRA_STATE, LAYER, expert_name, expert_of, local_norm

Experts = Literal["sequential", "grouped", "transposed"]
_LINEAR = re.compile(r"(?:.+\.)?(?:linear_\w+|output_layer)(?=\.weight\d*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalNames:
    """A layer specification. ``fused``: norms lie in the linear layers that follow them, as with Transformer Engine.

    ``experts``: each is a module of its own (SequentialMLP); all of a rank are one, with a weight for each (TEGroupedMLP); or these weights
    are one, transposed and one after another (GroupedMLP), which is no name of one expert.
    """

    fused: bool = True
    experts: Experts = "sequential"

    @property
    def order(self) -> tuple[str, bool]:
        """The order of the parameters: one of ``names.ORDERS``."""
        return "fused" if self.fused else "local", self.experts != "sequential"

    def name(self, name: str, *, first_layer: int, first_expert: int) -> str:
        """The name on a rank whose first layer and expert have these numbers."""
        match = LAYER.fullmatch(name)
        if match is None:
            return name
        inner, expert = match[3], expert_of(match[3])
        if expert is None:
            inner = inner if self.fused else local_norm(inner)
        elif self.experts == "grouped":
            linear, _, kind = expert.rest.partition(".")
            inner = f"mlp.experts.{linear}.{kind}{expert.number - first_expert}"
        else:
            inner = expert_name(expert.number - first_expert, expert.rest)
        return f"{match[1]}{int(match[2]) - first_layer}.{inner}"


def extra_states(names: Collection[str]) -> list[str]:
    """The names of extra states that a chunk has beside these parameters: those of linear layers, whoever made them. They are None without
    FP8. (Transformer Engine has more, by its version; where they are missing Megatron-LM says so, and goes on.)"""
    modules = dict.fromkeys(m[0] for n in names if (m := _LINEAR.match(n)) is not None)
    if any(n.startswith("decoder.final_layernorm.") for n in names):
        modules["output_layer"] = None  # it is there without a weight of its own too
    return [f"{linear}{EXTRA_STATE}" for linear in modules]


def local_names_of(arguments: Mapping[str, Any]) -> LocalNames:
    """What these of Megatron-LM's arguments ask for: ``transformer_impl``, ``moe_grouped_gemm``, ``moe_use_legacy_grouped_gemm``."""
    fused = arguments.get("transformer_impl", "transformer_engine") != "local"
    if not arguments.get("moe_grouped_gemm"):
        return LocalNames(fused=fused)
    return LocalNames(fused=fused, experts="grouped" if fused and not arguments.get("moe_use_legacy_grouped_gemm") else "transposed")
