"""What a Megatron checkpoint has besides the model's tensors, from the state of a checkpoint: the common part of ``torch_dist``, and what
belongs to a distributed optimizer.

(Source: Megatron-LM training/checkpointing.py and core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.14 to 0.17.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt import tree
from ckpt._version import __version__
from ckpt.adapters.optimizers import decode_inline
from ckpt.formats.megatron.names import NOT_TRAINED
from ckpt.formats.megatron.torch_dist import RESHARDABLE
from ckpt.formats.megatron.training import CONTENT, KEPT, MARK

from .choosing import Chosen, Wanted

STATES: Mapping[str, str] = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The tensors that a distributed optimizer has of each parameter: what they are called here, and in the form ``fully_reshardable``."""
_VERSION = 3.0
"""The order of the rows of QKV that is written (``checkpoint_version``)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The state of a distributed optimizer: tensors by parameter and by ``STATES``, and the nodes of its groups, each with its step."""

    states: Mapping[str, Mapping[str, Wanted]]
    groups: Sequence[dict[str, Any]]


def optimizer_of(chosen: Chosen, head: str, parameters: Mapping[str, Wanted]) -> Optimizer | None:
    """The optimizer's state of ``parameters``, which lie below ``head``. None if something is missing that Megatron asks for: one of
    ``STATES`` of a parameter, or in its groups what Megatron tells them apart by, or the step."""
    found: dict[str, dict[str, Wanted]] = {}
    for name in parameters:
        own = {key: chosen.tensors.get(f"optimizer.state.{head}.{name}.{key}") for key in STATES}
        there = {key: wanted for key, wanted in own.items() if wanted is not None and wanted.shape == parameters[name].shape}
        if len(there) == len(own):
            found[name] = there
        elif not name.endswith(NOT_TRAINED):
            return None
    groups = _groups(chosen.state.get("optimizer") if isinstance(chosen.state, dict) else None)
    return Optimizer(states=found, groups=groups) if groups else None


def _groups(node: Any) -> list[dict[str, Any]]:
    """The nodes of an optimizer's groups as Megatron keeps them; empty if they are not Megatron's."""
    if not isinstance(node, dict):
        return []
    steps, named, plain = node.get("state"), node.get("param_groups"), node.get("groups")
    if not isinstance(steps, dict):
        return []
    if isinstance(named, dict) and "$param_groups" in named:
        asked = [(g["options"], [*g["params"], *steps]) for g in named["$param_groups"]]  # a group may have none
    else:
        asked = [(options, list(steps)) for options in plain] if isinstance(plain, list) else []
    found = []
    for options, params in asked:
        step = next((s for s in (_step(steps.get(p)) for p in params) if s is not None), None)
        if step is None or not isinstance(options, dict) or not {"wd_mult", "pre_wd_mult"} & options.keys() or tree.refers(options):
            return []
        found.append({**options, "step": step})
    return found


def _step(node: Any) -> int | float | None:
    """The step of a parameter. A whole number is an int: what Megatron's fused optimizers take."""
    said = node.get("step") if isinstance(node, dict) else None
    if isinstance(said, dict) and "$inline" in said:
        said = decode_inline(said["$inline"]).item()
    if isinstance(said, float) and said.is_integer():
        return int(said)
    return said if isinstance(said, (int, float)) else None


def common_node(chosen: Chosen, optimizer: Optimizer | None, *, stacked: bool) -> dict[str, Any]:
    """The node of ``common.pt``: what of the state Megatron kept, and what tells it in which form the tensors are.

    The arguments say that there are no random number generators, and whether there is an optimizer: Megatron then does not ask for them.
    """
    state = chosen.state if isinstance(chosen.state, dict) and tree.tag_of(chosen.state) is None else {}
    node = {key: state[key] for key in KEPT if key in state and key not in (CONTENT, MARK) and not tree.refers(state[key])}
    node.setdefault("checkpoint_version", _VERSION)
    node.setdefault("iteration", 0)
    if isinstance(state.get("args"), dict):
        node["args"] = {**state["args"], "no_save_rng": True, "no_save_optim": optimizer is None}
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not stacked:
        content["non_homogeneous_layers"] = True
    if optimizer is not None:
        content["distrib_optim_sharding_type"] = RESHARDABLE
        node["optimizer"] = _optimizer_node(optimizer)
        if not _is_suspect(chosen, state):
            node[MARK] = __version__
    return {**node, CONTENT: content}


def _is_suspect(chosen: Chosen, state: Mapping[str, Any]) -> bool:
    """Whether Megatron-Core may have written the optimizer's state wrongly, be this a copy of what it wrote."""
    content = state.get(CONTENT)
    said = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return getattr(chosen.catalog, "suspect", None) is not None or (said == RESHARDABLE and MARK not in state)


def _optimizer_node(optimizer: Optimizer) -> dict[str, Any]:
    """One optimizer, or where experts have groups of their own, as with expert parallelism, a chain of two."""
    dense = [g for g in optimizer.groups if not g.get("is_expert_parallel")]
    experts = [g for g in optimizer.groups if g.get("is_expert_parallel")]
    parts = [{"optimizer": {"param_groups": own}, "param_state_sharding_type": RESHARDABLE} for own in (dense, experts) if own]
    return parts[0] if len(parts) == 1 else tree.mapping_node(list(enumerate(parts)))
