"""What may be removed: a keeping policy, and the rules that no policy can turn off.

Never removed are the highest committed step, also of those that the run has not abandoned, the one that was written last, what is tagged,
what a kept or unknown checkpoint uses, and the last whole checkpoint before a kept part.
What is not committed is left alone: whether it is an orphan or belongs to a save in progress is not for a policy to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from .keep import KeepPolicy, StepInfo, check_aware, check_keeping

_NAMED = 3
"""So many referring steps are named in a reason; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is to become of one checkpoint, and why."""

    step: int
    outcome: Literal["kept", "removed", "left"]
    """``left``: it is not committed, and retention does not judge it."""
    reasons: tuple[str, ...]
    """At least one: rules that no policy turns off first, then what the policy says, then the steps that refer to it."""

    def __str__(self) -> str:
        return f"{self.outcome}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One verdict for each step, the lowest first."""

    verdicts: tuple[Verdict, ...]
    removed: tuple[int, ...]
    """The steps to remove, in an order that is safe to stop at any point: a checkpoint comes after those that use its bytes."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps to keep, the lowest first."""
        return tuple(v.step for v in self.verdicts if v.outcome == "kept")

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)


def retention(keep: KeepPolicy, steps: Sequence[StepInfo], now: datetime, *, abandoned: bool = True) -> Verdicts:
    """Judge all ``steps`` of a run. ``abandoned=False``: of those that the run has abandoned only what is tagged or used stays.

    A step that refers to another and is not among the committed ``steps`` may be a save that goes on, so what it refers to is kept.

    Raises:
        UsageError: a step is there twice, ``now`` has no time zone, or ``keep`` is no keeping policy.
    """
    check_keeping(keep)
    check_aware(now, "now")
    explained = keep.explain(steps, now)
    committed = sorted((s for s in steps if s.committed), key=lambda s: s.step)
    live = [s for s in committed if not s.abandoned]
    judged = committed if abandoned else live
    last_written = {max(some, key=lambda s: (s.created, s.step)).step for some in (judged, live) if some}
    newest = {s.step for s in (*live[-1:], *judged[-1:])}
    reasons = {s.step: _lasting(s, newest=s.step in newest, last_written=s.step in last_written) for s in committed}
    for s in judged:
        reason = explained[s.step]
        if reason is not None:
            reasons[s.step].append(reason)
    kept = _with_what_they_use(committed, {step for step, why in reasons.items() if why})
    for s in committed:
        reasons[s.step] += _references([r for r in s.referred_by if r != s.step and (r in kept or r not in reasons)])
        reasons[s.step] += _parts([r for r in s.base_of if r != s.step and (r in kept or r not in reasons)])
    left_behind = {s.step for s in committed if s.abandoned}
    verdicts = tuple(_verdict(step, reasons.get(step), abandoned=step in left_behind) for step in explained)
    return Verdicts(verdicts, _users_first([s for s in committed if s.step not in kept]))


def _lasting(step: StepInfo, *, newest: bool, last_written: bool) -> list[str]:
    """Why no policy can remove ``step``, references apart."""
    reasons = ["highest"] if newest and step.abandoned else ["newest"] if newest else ["written last"] if last_written else []
    if step.tags:
        reasons.append(f"tagged {', '.join(map(repr, sorted(step.tags)))}")
    return reasons


def _with_what_they_use(committed: Sequence[StepInfo], kept: set[int]) -> set[int]:
    """``kept``, what steps outside ``committed`` refer to, and what any of these refer to, and so on."""
    known = {s.step for s in committed}
    used: dict[int, list[int]] = {}
    for s in committed:
        for referrer in s.users:
            used.setdefault(referrer, []).append(s.step)
    # The transitive closure of "uses bytes of": a kept checkpoint needs those that it refers to, and these need
    # theirs.
    needed = set(kept)
    open_ends = [*kept, *(r for r in used if r not in known)]
    while open_ends:
        new = [step for step in used.get(open_ends.pop(), ()) if step not in needed]
        needed.update(new)
        open_ends += new
    return needed


def _references(referrers: Iterable[int]) -> list[str]:
    return _of_steps(referrers, "refers to it", "refer to it")


def _parts(parts: Iterable[int]) -> list[str]:
    return _of_steps(parts, "is a part, and may lie over it", "are parts, and may lie over it")


def _of_steps(users: Iterable[int], one: str, several: str) -> list[str]:
    steps = sorted(set(users))
    if len(steps) < 2:
        return [f"step {step} {one}" for step in steps]
    named = ", ".join(map(str, steps[:_NAMED]))
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return [f"steps {named}{more} {several}"]


def _verdict(step: int, reasons: list[str] | None, *, abandoned: bool) -> Verdict:
    if reasons is None:
        return Verdict(step=step, outcome="left", reasons=("not committed",))
    if reasons:
        return Verdict(step=step, outcome="kept", reasons=tuple(reasons))
    return Verdict(step=step, outcome="removed", reasons=(*(["abandoned"] if abandoned else []), "no rule keeps it"))


def _users_first(steps: Sequence[StepInfo]) -> tuple[int, ...]:
    """All ``steps``, each after those that refer to it; where that leaves a choice, the lower one first."""
    # A depth-first search without recursion, since chains of references may be thousands long. A step is listed after
    # all that refer to it: wherever removing stops, nothing that remains refers to something that is gone.
    referrers = {s.step: iter(sorted(r for r in s.users if r != s.step)) for s in steps}
    order: dict[int, None] = {}
    begun: set[int] = set()
    for first in sorted(referrers):
        path = [] if first in begun else [first]
        while path:
            step = path[-1]
            begun.add(step)
            following = next((r for r in referrers[step] if r in referrers and r not in begun), None)  # goes on where it was
            if following is not None:
                path.append(following)
            else:
                order[path.pop()] = None
    return tuple(order)
