"""What an optimizer of Megatron has besides states and groups of parameters: grad scalers, and what is not known here. Pure.

(Sources: ``state_dict`` and ``sharded_state_dict`` of Megatron-LM core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.12 to 0.20.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .legacy.plain_optimizer import MASTERS
from .training import COMMON_STEP, SCALER

_GROUPS = "param_groups"
_READ = frozenset({_GROUPS, MASTERS, "param_state_sharding_type"})


@dataclass(eq=False)
class OptimizerExtras:
    """``scalers`` are the states of grad scalers, one for each optimizer of a chain that has one; ``unknown`` the keys that lead to what is
    not known."""

    scalers: list[Mapping[Any, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def optimizer_extras(meaning: Callable[[Any], Any], value: Any, *, by_number: bool) -> OptimizerExtras:
    """Walk the value of ``optimizer``. ``by_number``: states of parameters are expected in it, under numbers."""
    rest = OptimizerExtras()
    _optimizer(meaning, value, "optimizer", rest, by_number)
    return rest


def _optimizer(meaning: Callable[[Any], Any], value: Any, path: str, rest: OptimizerExtras, by_number: bool) -> None:  # noqa: FBT001
    content = meaning(value)
    if isinstance(content, (list, tuple)):
        for number, below in enumerate(content):
            _optimizer(meaning, below, f"{path}.{number}", rest, by_number)
        return
    if not isinstance(content, dict):
        rest.unknown += [] if content is None else [path]
        return
    for key, below in content.items():
        if key == "optimizer" or type(key) is int:
            _optimizer(meaning, below, f"{path}.{key}", rest, by_number)
        elif key == SCALER:
            scaler = meaning(below)
            rest.scalers += [scaler] if isinstance(scaler, dict) and scaler else []
            rest.unknown += [] if isinstance(scaler, dict) else [f"{path}.{key}"]
        elif key == "state":
            _states(meaning, below, f"{path}.{key}", rest, by_number)
        elif key not in _READ and _has_leaves(meaning, below):
            rest.unknown.append(f"{path}.{key}")


def _states(meaning: Callable[[Any], Any], value: Any, path: str, rest: OptimizerExtras, by_number: bool) -> None:  # noqa: FBT001
    content = meaning(value)
    for key, below in content.items() if isinstance(content, dict) else ():
        if key != COMMON_STEP and not (by_number and type(key) is int) and _has_leaves(meaning, below):
            rest.unknown.append(f"{path}.{key}")


def _has_leaves(meaning: Callable[[Any], Any], value: Any) -> bool:
    """Whether anything is in it: what was stored elsewhere leaves empty containers behind."""
    content = meaning(value)
    if isinstance(content, (dict, list, tuple)):
        return any(_has_leaves(meaning, below) for below in (content.values() if isinstance(content, dict) else content))
    return content is not None
