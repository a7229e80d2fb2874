"""The state of a distributed optimizer of Megatron, in whichever of its formats it is written: tensors of parameters, and groups that say
the step.

(Source: Megatron-LM core/optimizer/distrib_optimizer.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt import tree
from ckpt.adapters.optimizers import decode_inline
from ckpt.converters.select.selection import OutputTensor
from ckpt.formats.megatron.names import NOT_TRAINED
from ckpt.formats.megatron.training import KEYS

STATES: Mapping[str, str] = {key: KEYS[key] for key in ("param", "exp_avg", "exp_avg_sq")}
"""What Megatron calls the tensors that it has of each parameter, and what a catalog calls them."""
HEAD = "optimizer.state."
VERSION = 3.0
"""Of the order of queries, keys and values that is written; Megatron's ``checkpoint_version``."""
RELEASE = "release"
"""What Megatron-LM calls a checkpoint that is of no iteration: a training begins with it."""
Group = Mapping[str, tree.Node]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """``states`` by Megatron's key and by parameter; ``groups`` are nodes: their options, and the step."""

    states: Mapping[str, Mapping[str, OutputTensor]]
    groups: Sequence[Group]


def optimizer_of(
    tensors: Mapping[str, OutputTensor],
    parameters: Mapping[str, OutputTensor],
    state: tree.Node,
    *,
    root: str,
    fits: Callable[[Group], bool],
) -> Optimizer | None:
    """The optimizer of ``parameters``, which lie below the key ``root`` of the ``state``. None if something is missing that Megatron asks
    for: one of ``STATES`` of a parameter that is trained, groups that ``fits`` says yes to, or one step for all parameters of a group."""
    trained = {name: wanted for name, wanted in parameters.items() if not name.endswith(NOT_TRAINED)}
    by_key: dict[str, dict[str, OutputTensor]] = {key: {} for key in STATES}
    for key, called in STATES.items():
        for name, wanted in trained.items():
            own = tensors.get(f"{HEAD}{root}.{name}.{called}")
            if own is None or own.shape != wanted.shape:
                return None
            by_key[key][name] = own
    groups = _groups(state.get("optimizer") if isinstance(state, dict) else None)
    return Optimizer(states=by_key, groups=groups) if groups and all(map(fits, groups)) else None


def _groups(node: tree.Node) -> list[Group]:
    """The groups in the node of an optimizer, each with its step; empty if they are not Megatron's."""
    if not isinstance(node, dict) or tree.tag_of(node) is not None:
        return []
    steps = {p: _step(child) for p, child in tree.pairs_of(node.get("state")) or () if isinstance(p, str)}
    named, plain = node.get("param_groups"), node.get("groups")
    if isinstance(named, dict) and "$param_groups" in named:
        asked = [(group["options"], group["params"]) for group in named["$param_groups"]]
    else:
        asked = [(options, ()) for options in plain] if isinstance(plain, list) else []
    groups: list[Group] = []
    for options, params in asked:
        step_values = {steps.get(p) for p in params} - {None} or {*steps.values()} - {None}  # a group may have no parameters
        if len(step_values) != 1 or not isinstance(options, dict) or tree.tag_of(options) is not None:
            return []
        groups.append({**options, "step": step_values.pop()})
    return groups


def _step(node: tree.Node) -> int | float | None:
    """The step of one parameter, which torch's optimizers keep in a tensor."""
    # A whole number is an int: what fused optimizers take.
    step_node = tree.find(node, ["step"])
    if isinstance(step_node, dict) and "$inline" in step_node:
        value = decode_inline(step_node["$inline"])
        step_node = value.item() if value.numel() == 1 else None
    if isinstance(step_node, float) and step_node.is_integer():
        return int(step_node)
    return step_node if isinstance(step_node, (int, float)) else None
