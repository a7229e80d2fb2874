"""What an optimizer of Megatron has besides states and groups of parameters: grad scalers, and what is not known here. Pure.

(Sources: ``state_dict`` and ``sharded_state_dict`` of Megatron-LM core/optimizer/{optimizer,distrib_optimizer}.py, versions 0.12 to 0.20.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .plain_optimizer import MASTERS
from .training import COMMON_STEP, SCALER

_GROUPS = "param_groups"
_READ = frozenset({_GROUPS, MASTERS, "param_state_sharding_type"})


@dataclass(eq=False)
class Besides:
    """``scalers`` are the states of grad scalers, one for each optimizer of a chain that has one; ``unknown`` the keys that lead to what is
    not known."""

    scalers: list[Mapping[Any, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def besides(meaning: Callable[[Any], Any], value: Any, *, by_number: bool) -> Besides:
    """Walk the value of ``optimizer``. ``by_number``: states of parameters are expected in it, under numbers."""
    found = Besides()
    _optimizer(meaning, value, "optimizer", found, by_number)
    return found


def _optimizer(meaning: Callable[[Any], Any], value: Any, path: str, found: Besides, by_number: bool) -> None:  # noqa: FBT001
    said = meaning(value)
    if isinstance(said, (list, tuple)):
        for number, below in enumerate(said):
            _optimizer(meaning, below, f"{path}.{number}", found, by_number)
        return
    if not isinstance(said, dict):
        found.unknown += [] if said is None else [path]
        return
    for key, below in said.items():
        if key == "optimizer" or type(key) is int:
            _optimizer(meaning, below, f"{path}.{key}", found, by_number)
        elif key == SCALER:
            scaler = meaning(below)
            found.scalers += [scaler] if isinstance(scaler, dict) and scaler else []
            found.unknown += [] if isinstance(scaler, dict) else [f"{path}.{key}"]
        elif key == "state":
            _states(meaning, below, f"{path}.{key}", found, by_number)
        elif key not in _READ and _has_leaves(meaning, below):
            found.unknown.append(f"{path}.{key}")


def _states(meaning: Callable[[Any], Any], value: Any, path: str, found: Besides, by_number: bool) -> None:  # noqa: FBT001
    said = meaning(value)
    for key, below in said.items() if isinstance(said, dict) else ():
        if key != COMMON_STEP and not (by_number and type(key) is int) and _has_leaves(meaning, below):
            found.unknown.append(f"{path}.{key}")


def _has_leaves(meaning: Callable[[Any], Any], value: Any) -> bool:
    """Whether anything is in it: what was stored elsewhere leaves empty containers behind."""
    said = meaning(value)
    if isinstance(said, (dict, list, tuple)):
        return any(_has_leaves(meaning, below) for below in (said.values() if isinstance(said, dict) else said))
    return said is not None
