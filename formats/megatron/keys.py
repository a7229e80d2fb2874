"""Keys of tensors in Megatron-Core's format ``torch_dist``, from the names of parameters: what is read, the other way round. Pure.

Two forms are known. *Stacked*: the layers are places along the first axis of one tensor, as Megatron-Core writes a decoder whose layers are
all alike. *Listed*: each layer has keys of its own. In both, the experts of a layer are places along an axis. (Sources: Megatron-LM
core/transformer/{transformer_block,transformer_layer}.py, core/transformer/moe/experts.py and core/models/gpt/gpt_layer_specs.py of
version 0.16.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .names import LAYER, expert_of, tensor_parallel_axis

_LOCAL_NORM = re.compile(r"(.*\.layers\.\d+\.)pre_mlp_layernorm\.")


class StackedKey(NamedTuple):
    """The key of the tensor that a parameter is part of, and where along the leading axes: layer, expert."""

    key: str
    at: tuple[int, ...]


def place_of(name: str, *, stacked: bool) -> StackedKey:
    """Where a parameter is stored."""
    match = LAYER.fullmatch(name)
    if match is None:
        return StackedKey(name, ())
    before, layer, inner = match[1], match[2], match[3]
    expert = expert_of(inner)
    if expert is not None:
        inner = f"mlp.experts.experts.{expert.rest}"
    experts = () if expert is None else (expert.number,)
    return StackedKey(before + inner, (int(layer), *experts)) if stacked else StackedKey(f"{before}{layer}.{inner}", experts)


def stored_names(names: Iterable[str], *, local: bool) -> dict[str, str]:
    """What Megatron-Core calls each parameter when it saves. ``local`` is the specification of layers without Transformer Engine, which
    names the norm in front of a router after the linear layer that is not there."""
    return {name: _LOCAL_NORM.sub(r"\1mlp.linear_fc1.layer_norm_", name) if local else name for name in names}


def are_alike(tensors: Mapping[str, object]) -> bool:
    """Whether all layers have the same parameters, with the same values in ``tensors`` (their shapes and dtypes), and layers are numbered
    from 0 on without a gap: then Megatron-Core stacks them. Layers of a kind that is not known here are not alike."""
    layers: dict[str, dict[int, dict[str, object]]] = {}
    for name, shape in tensors.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            if not is_known(name):
                return False
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = shape
    return all(sorted(own) == list(range(len(own))) and all(one == own[0] for one in own.values()) for own in layers.values())


def are_listed(arguments: Mapping[str, Any]) -> bool:
    """Whether a job with these arguments asks for layers one by one, whether or not they are alike."""
    for name in ("moe_layer_freq", "linear_attention_freq"):
        value = arguments.get(name)
        if isinstance(value, (list, tuple)) or (isinstance(value, int) and value > 1):
            return True
    return bool(arguments.get("heterogeneous_layers_config_path") or arguments.get("heterogeneous_layers_config_encoded_json"))


def is_known(name: str) -> bool:
    """Whether it is a parameter of which it is known how Megatron-Core stores it."""
    if ".local_experts." in name and LAYER.fullmatch(name) is None:
        return False
    try:
        tensor_parallel_axis(name)
    except KeyError:
        return False
    return True


def extra_states(names: Iterable[str], *, stacked: bool) -> list[str]:
    """Names of the objects that a model asks for besides its parameters: the extra state of each linear layer, norm and attention.

    Which of them have one depends on the version of Transformer Engine, and a load asks for all that its own modules have: so these are
    more than any one model needs.
    """
    modules: dict[str, None] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        own = module.rpartition(".")[2]
        if kind == "weight" and (own.startswith("linear_") or own.endswith("norm")):
            modules.setdefault(module)
            head, attention, _ = name.partition(".self_attention.")
            if attention:
                modules.setdefault(f"{head}.self_attention.core_attention")
    by_key: dict[str, list[tuple[int, ...]]] = {}
    for module in modules:
        place = place_of(f"{module}._extra_state", stacked=stacked)
        by_key.setdefault(place.key, []).append(place.at)
    return [_object(key, at, own) for key, own in by_key.items() for at in own]


def _object(key: str, at: tuple[int, ...], places: Sequence[tuple[int, ...]]) -> str:
    """The name of the object at one of these places (``ShardedObject.unique_key`` of core/dist_checkpointing/mapping.py)."""
    sizes = [max(numbers) + 1 for numbers in zip(*places, strict=True)]
    return f"{key}/shard_{'.'.join(map(str, at or (0,)))}_{'.'.join(map(str, sizes or (1,)))}"
