"""What a ``torch_dist`` checkpoint has besides tensors, in its common part: values of the state, and groups of a distributed optimizer.

(Source: Megatron-LM training/checkpointing.py and core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.14 to 0.17.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt import tree
from ckpt._version import __version__
from ckpt.formats.megatron.torch_dist import RESHARDABLE
from ckpt.formats.megatron.training import CONTENT, KEPT, MARK

from .choosing import Chosen
from .megatron_states import VERSION, Group, Optimizer


def is_told_apart(group: Group) -> bool:
    """Whether a group has what Megatron knows its groups by when it loads them."""
    return bool({"wd_mult", "pre_wd_mult"} & group.keys()) and not tree.refers(dict(group))


def common_node(chosen: Chosen, optimizer: Optimizer | None, *, stacked: bool) -> dict[str, Any]:
    """The node of ``common.pt``: what of the state Megatron kept, and what tells it in which form the tensors are.

    The arguments say that there are no random number generators, and whether there is an optimizer: Megatron then does not ask for them.
    """
    state = chosen.state if isinstance(chosen.state, dict) and tree.tag_of(chosen.state) is None else {}
    node = {key: state[key] for key in KEPT if key in state and key not in (CONTENT, MARK) and not tree.refers(state[key])}
    node.setdefault("checkpoint_version", VERSION)
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
    kinds = [[dict(group) for group in own] for own in (dense, experts) if own]
    parts = [{"optimizer": {"param_groups": own}, "param_state_sharding_type": RESHARDABLE} for own in kinds]
    return parts[0] if len(parts) == 1 else tree.mapping_node(list(enumerate(parts)))
