"""Policies as data: JSON for configurations, and the short text of ``--keep``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ckpt.errors import UsageError

from .both import EverySteps, join
from .keep import All, Best, KeepPolicy, Latest, Tagged, Within
from .paying import EveryBudget, EveryOptimal
from .policy import JoinedPolicy
from .save import AtSteps, EveryMinutes, OnPreemption, SavePolicy

_CLASSES: dict[str, Any] = {  # type[SavePolicy | KeepPolicy], each with arguments of its own
    cls.__name__: cls
    for cls in (EverySteps, EveryMinutes, EveryBudget, EveryOptimal, AtSteps, OnPreemption, Latest, Within, Best, Tagged, All)
}
_LISTED = {"AtSteps": "steps", "Tagged": "globs", "AnyOf": "policies"}
"""Those whose arguments are one list → its name."""

KEEP_RULES = {
    "latest": "latest=3",
    "every": "every=1000 or every=1000:500 (from step 500)",
    "within": "within=7d, within=36h or within=1d12h",
    "best": "best=loss:min or best=accuracy:max:3",
    "tagged": "tagged or tagged=release*",
    "all": "all",
}
"""The rules that :func:`parse_keep` knows, each with an example."""


def to_json(policy: SavePolicy | KeepPolicy) -> dict[str, object]:
    """The policy as a JSON object: ``{"policy": "EverySteps", "n": 500, "start": 0}``; joined ones are ``AnyOf`` with ``policies``.

    Raises:
        UsageError: it is, or has in it, a policy of another class than those of ``ckpt.policies``.
    """
    return _node(policy)


def _node(policy: Any) -> dict[str, object]:
    if isinstance(policy, JoinedPolicy):
        return {"policy": "AnyOf", "policies": [_node(p) for p in policy.policies]}
    name = type(policy).__name__
    if _CLASSES.get(name) is not type(policy):
        raise UsageError(f"{policy!r} cannot be written as JSON", hint=f"these can: {', '.join(_CLASSES)}")
    values = {f.name: getattr(policy, f.name) for f in fields(policy)}
    return {"policy": name, **{key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}}


def from_json(node: object) -> SavePolicy | KeepPolicy:
    """The policy that :func:`to_json` wrote. Arguments that have a default may be left out.

    Raises:
        UsageError: ``node`` is not such an object.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("policy"), str):
        raise UsageError(f"{node!r} is no policy", hint='a policy is an object such as {"policy": "Latest", "n": 3}')
    name, arguments = node["policy"], {key: value for key, value in node.items() if key != "policy"}
    if name not in _CLASSES and name != "AnyOf":
        raise UsageError(f"there is no policy {name!r}", hint=f"there are {', '.join([*_CLASSES, 'AnyOf'])}")
    if name in _LISTED:
        values = arguments.pop(_LISTED[name], None)
        if not isinstance(values, list) or arguments:
            raise UsageError(f"{name} has one argument, a list: {_LISTED[name]!r}", where=repr(node))
        return join([from_json(v) for v in values]) if name == "AnyOf" else _CLASSES[name](*values)
    try:
        made: SavePolicy | KeepPolicy = _CLASSES[name](**arguments)
    except TypeError as err:
        names = ", ".join(f.name for f in fields(_CLASSES[name])) or "none"
        raise UsageError(f"{name} cannot be made: {err}", where=repr(node), hint=f"its arguments are: {names}") from err
    return made


def parse_keep(text: str) -> KeepPolicy:
    """The keeping policy that ``text`` stands for: one of the forms in :data:`KEEP_RULES`.

    Raises:
        UsageError: it stands for none; the hint has the forms.
    """
    name, equals, value = text.strip().partition("=")
    if name not in KEEP_RULES:
        raise UsageError(f"there is no rule {name!r} to keep checkpoints by", where=text, hint=f"one of {'; '.join(KEEP_RULES.values())}")
    if equals and not value:
        raise UsageError(f"{name}= has no value", where=text, hint=KEEP_RULES[name])
    try:
        policy = _parse(name, value)
    except UsageError as err:
        raise UsageError(err.message, where=text, hint=err.hint or KEEP_RULES[name]) from err
    if policy is None:
        raise UsageError(f"the rule {name!r} has another form", where=text, hint=KEEP_RULES[name])
    return policy


_FORMS = {
    "latest": r"(?P<n>\d{1,18})",
    "every": r"(?P<n>\d{1,18})(?::(?P<start>\d{1,18}))?",
    "within": r"(?=.)(?:(?P<days>\d{1,9}(?:\.\d{1,9})?)d)?(?:(?P<hours>\d{1,9}(?:\.\d{1,9})?)h)?",
    "best": r"(?P<metric>.+?):(?P<mode>min|max)(?::(?P<n>\d{1,18}))?",
    "tagged": r"(?P<glob>.*)",
    "all": "",
}


def _parse(name: str, value: str) -> KeepPolicy | None:
    """None if ``value`` is not of the rule's form."""
    match = re.fullmatch(_FORMS[name], value, re.ASCII)
    if match is None:
        return None
    parts = match.groupdict()
    if name == "latest":
        return Latest(int(parts["n"]))
    if name == "every":
        return EverySteps(int(parts["n"]), start=int(parts["start"] or 0))
    if name == "within":
        return Within(days=float(parts["days"] or 0), hours=float(parts["hours"] or 0))
    if name == "best":
        return Best(parts["metric"], int(parts["n"] or 1), mode="min" if parts["mode"] == "min" else "max")
    if name == "tagged":
        return Tagged(parts["glob"]) if parts["glob"] else Tagged()
    return All()
