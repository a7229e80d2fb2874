"""Policies that serve saving and keeping alike, EverySteps and what joins policies of one side; and policies as data: JSON for
configurations, the short text of ``--keep``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, ClassVar, overload

from ckpt.errors import UsageError
from ckpt.settings import check_whole

from .keep import All, AnyKeep, Best, KeepPolicy, Latest, StepInfo, Tagged, Within
from .measured import Before, EveryBudget, EveryOptimal
from .save import AnySave, AtSteps, EveryMinutes, JoinedPolicy, Moment, OnPreemption, SavePolicy, flat


class BothPolicy(SavePolicy, KeepPolicy):
    """Says when to save, and what to keep."""

    __slots__ = ()

    @overload  # type: ignore[override]  # wider than the bases': the result is of the side of what it is joined to
    def __or__(self, other: BothPolicy) -> BothPolicy: ...
    @overload
    def __or__(self, other: SavePolicy) -> SavePolicy: ...
    @overload
    def __or__(self, other: KeepPolicy) -> KeepPolicy: ...
    def __or__(self, other: SavePolicy | KeepPolicy) -> SavePolicy | KeepPolicy:
        return join((self, other))


@dataclass(frozen=True, slots=True, repr=False)
class EverySteps(BothPolicy):
    """The steps ``start``, ``start + n``, ``start + 2n`` and so on, but not step 0; where one is skipped, the first step after it.

    To save: due at those steps. To keep: of the checkpoints from each of those steps to the next, the first.

    Raises:
        UsageError: ``n`` is less than 1, ``start`` less than 0, or one is no whole number.
    """

    needs_leader: ClassVar[bool] = False
    n: int
    start: int = 0

    def __post_init__(self) -> None:
        check_whole(self.n, "EverySteps(n)", 1)
        check_whole(self.start, "EverySteps(start)", 0)

    def mark(self, step: int) -> int | None:
        """The last of the steps that this policy names, up to ``step``; None if there is none yet."""
        mark = self.start + (step - self.start) // self.n * self.n
        return mark if mark >= max(self.start, 1) else None

    def reason(self, now: Moment) -> str | None:
        mark = self.mark(now.step)
        return None if mark is None or mark <= now.since else self._words(mark, now.step)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        first: dict[int, int] = {}
        for s in steps:
            mark = self.mark(s.step)
            if mark is not None:
                first.setdefault(mark, s.step)
        return {step: self._words(mark, step) for mark, step in first.items()}

    def _words(self, mark: int, step: int) -> str:
        words = "every step" if self.n == 1 else f"every {self.n} steps"
        return words if mark == step else f"{words} (the first after {mark})"


class AnyBoth(AnySave, AnyKeep, BothPolicy):  # type: ignore[misc]  # its members are of both sides
    """:class:`AnySave` and :class:`AnyKeep` of the same policies. Made by ``|`` and by :func:`AnyOf`."""

    __slots__ = ()
    policies: tuple[BothPolicy, ...]


@overload
def AnyOf(*policies: BothPolicy) -> BothPolicy: ...
@overload
def AnyOf(*policies: SavePolicy) -> SavePolicy: ...
@overload
def AnyOf(*policies: KeepPolicy) -> KeepPolicy: ...
def AnyOf(*policies: SavePolicy | KeepPolicy) -> SavePolicy | KeepPolicy:
    """The policies of one side joined, as by ``|``: due when any of them is, or kept what any of them keeps.

    Raises:
        UsageError: there is none, or they are not of one side.
    """
    return join(policies)


def join(policies: Sequence[SavePolicy | KeepPolicy]) -> SavePolicy | KeepPolicy:
    """:func:`AnyOf` of policies whose side only the run shows."""
    both = [p for p in policies if isinstance(p, BothPolicy)]
    saving = [p for p in policies if isinstance(p, SavePolicy)]
    keeping = [p for p in policies if isinstance(p, KeepPolicy)]
    if not policies:
        raise UsageError("AnyOf() has no policies")
    if len(both) == len(policies):
        members = flat(both)
        return members[0] if len(members) == 1 else AnyBoth(members)
    if len(saving) == len(policies):
        return AnySave.of(*saving)
    if len(keeping) == len(policies):
        return AnyKeep.of(*keeping)
    raise UsageError(
        f"{', '.join(map(repr, policies))} cannot be joined: they do not all say when to save, nor all what to keep",
        hint="give those for saving and those for keeping apart",
    )


# Whether what a caller gives as ``save=`` and ``keep=`` are policies of that side; if not, what was probably meant.


def check_arguments(**given: object) -> None:
    """Raise UsageError unless each argument is a policy of its side: ``save`` and ``every`` of when to save, others of what to keep."""
    for name, value in given.items():
        saves = name in ("save", "every")
        if isinstance(value, SavePolicy if saves else KeepPolicy):
            continue
        wanted = "when to save" if saves else "what to keep"
        if isinstance(value, SavePolicy | KeepPolicy):
            other = "what to keep" if saves else "when to save"
            meant = f"keep={value!r}, and {name}=EverySteps(500)" if saves else f"save={value!r}"
            raise UsageError(f"{name}= says {wanted}, but {value!r} is a policy of {other}", hint=meant)
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        call = "EverySteps" if saves else "Latest"
        meant = f"{name}={call}({value if number else 500 if saves else 3})"
        raise UsageError(f"{name}= is a policy of {wanted}, not {value!r}", hint=f"{meant}; docs/policies.md has the others")


# Policies as data.

_CLASSES: dict[str, Any] = {  # type[SavePolicy | KeepPolicy], each with arguments of its own
    cls.__name__: cls
    for cls in (EverySteps, EveryMinutes, EveryBudget, EveryOptimal, AtSteps, OnPreemption, Before, Latest, Within, Best, Tagged, All)
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
    given: Any = policy
    if isinstance(given, JoinedPolicy):
        return {"policy": "AnyOf", "policies": [to_json(p) for p in given.policies]}  # type: ignore[arg-type]  # of these sides
    name = type(given).__name__
    if _CLASSES.get(name) is not type(given):
        raise UsageError(f"{policy!r} cannot be written as JSON", hint=f"these can: {', '.join(_CLASSES)}")
    values = {f.name: getattr(given, f.name) for f in fields(given)}
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
