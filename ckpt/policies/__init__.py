"""Policies: when a training loop saves, and which checkpoints stay. Pure values; no torch, no storage, no clock.

``AnyOf`` is also called ``Any`` here; it is not a name of ``ckpt`` itself, where it would hide ``typing.Any``.
"""

from __future__ import annotations

from .both import AnyOf, BothPolicy, EverySteps
from .both import AnyOf as Any
from .keep import All, Best, KeepPolicy, Latest, StepInfo, Tagged, Within
from .paying import EveryBudget, EveryOptimal
from .policy import Anchor, TrustFrozen
from .retention import Verdict, Verdicts, retention
from .save import AtSteps, EveryMinutes, Moment, OnPreemption, SaveCost, SavePolicy
from .spelling import KEEP_RULES, from_json, parse_keep, to_json

__all__ = [
    "KEEP_RULES",
    "All",
    "Anchor",
    "Any",
    "AnyOf",
    "AtSteps",
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
    "parse_keep",
    "retention",
    "to_json",
]
