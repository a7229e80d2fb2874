"""Policies: when a training loop saves, and which checkpoints stay. Pure values; no torch, no storage, no clock.

``AnyOf`` is also called ``Any`` here; it is not a name of ``ckpt`` itself, where it would hide ``typing.Any``.
"""

from __future__ import annotations

from .both import (
    KEEP_RULES,
    AnyOf,
    Before,
    BothPolicy,
    EveryBudget,
    EveryOptimal,
    EverySteps,
    from_json,
    machine_deadline,
    parse_keep,
    to_json,
)
from .both import AnyOf as Any
from .keep import All, Best, KeepPolicy, Latest, StepInfo, Tagged, Verdict, Verdicts, Within, retention
from .save import Anchor, AtSteps, EveryMinutes, Moment, OnPreemption, SaveCost, SavePolicy, TrustFrozen

__all__ = [
    "KEEP_RULES",
    "All",
    "Anchor",
    "Any",
    "AnyOf",
    "AtSteps",
    "Before",
    "Best",
    "BothPolicy",
    "EveryBudget",
    "EveryMinutes",
    "EveryOptimal",
    "EverySteps",
    "KeepPolicy",
    "Latest",
    "Moment",
    "OnPreemption",
    "SaveCost",
    "SavePolicy",
    "StepInfo",
    "Tagged",
    "TrustFrozen",
    "Verdict",
    "Verdicts",
    "Within",
    "from_json",
    "machine_deadline",
    "parse_keep",
    "retention",
    "to_json",
]
