"""What the runs of a proof have noted, compared: the first step at which a resumed one differs, and what usually causes it. No torch.

Each rank of each run writes a line of JSON for each step: kind → name → what was there. That is a number, the digests of the rows of a
batch, or a digest or text of anything else. Numbers and rows can also be compared between runs on other numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ckpt.text import parse_object

KINDS = ("batch", "observed", "learning rate", "metric", "value", "parameter", "optimizer state", "tensor", "generator", "not in the state")
"""What is compared, causes first: of several differences of one step the first is the one to look at."""
_TELLING = ("batch", "observed", "learning rate", "parameter", "optimizer state")
"""Kinds whose differences between two runs from the start show that the job does not repeat itself. Others may be clocks."""
_SHOWN = 20
"""Differences that a report has, all of the first step that differs."""

Noted: TypeAlias = "float | str | list[str]"
Name: TypeAlias = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that a run does otherwise than the uninterrupted one. ``rank`` is None where ranks were compared together; ``expected`` and
    ``actual`` are None where a run does not have it."""

    step: int
    rank: int | None
    kind: str
    name: str
    expected: Noted | None
    actual: Noted | None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        sides = f"{_text(self.actual)}, not {_text(self.expected)}"
        return f"step {self.step}{rank}: {self.kind} {self.name}: {sides}"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """One run of a proof, and what it did otherwise. ``exact``: it was compared bit for bit, else to rounding."""

    name: str
    ranks: int
    first_step: int
    last_step: int
    exact: bool = True
    differences: tuple[Difference, ...] = ()
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """What a proof found. ``unrepeatable``: names left out, since two runs from the start have other values there, as of a clock."""

    at: int
    runs: tuple[RunOutcome, ...]
    unrepeatable: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every run did what the uninterrupted one did."""
        return not any(run.differences for run in self.runs)

    def __str__(self) -> str:
        wrong = next((run for run in self.runs if run.differences), None)
        if wrong is None:
            return f"the job resumes exactly after step {self.at}"
        lines = [f"the {wrong.name} run on {wrong.ranks} {'rank' if wrong.ranks == 1 else 'ranks'} differs first at {wrong.differences[0]}"]
        lines += [f"  also: {difference}" for difference in wrong.differences[1:4]]
        lines += [f"  … and {len(wrong.differences) - 4} more at this step"] if len(wrong.differences) > 4 else []
        return "\n".join([*lines, f"  usual cause: {wrong.cause}"])


@dataclass(eq=False)
class Notes:
    """What one run has noted. ``steps``: step → rank → kind and name → value; ``restored``: the same right after a restore."""

    ranks: int
    steps: dict[int, dict[int, dict[Name, Noted]]] = field(default_factory=dict)
    restored: dict[int, dict[int, dict[Name, Noted]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Notes:
        notes = cls(ranks)
        for rank in range(ranks):
            path = folder / f"rank-{rank}.jsonl"
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                row = parse_object(line)
                into = notes.restored if row["restored"] else notes.steps
                items = {(kind, name): value for kind, named in row["items"].items() for name, value in named.items()}
                into.setdefault(row["step"], {})[rank] = items
        return notes

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything that shows the values of the model on any number of ranks."""
        return any(kind in ("metric", "observed") for ranks in self.steps.values() for items in ranks.values() for kind, _ in items)

    def outcome(self, name: str, differences: Sequence[Difference] = (), cause: str | None = None, *, exact: bool = True) -> RunOutcome:
        first, last = min(self.steps, default=0), max(self.steps, default=0)
        return RunOutcome(
            name=name, ranks=self.ranks, first_step=first, last_step=last, exact=exact, differences=tuple(differences[:_SHOWN]), cause=cause
        )


class Reference:
    """The uninterrupted run, and what of it can be compared at all: ``again`` is one more from the start, up to step ``at``."""

    def __init__(self, notes: Notes, again: Notes, at: int) -> None:
        self.notes, self.at = notes, at
        self.unrepeatable: set[tuple[str, str]] = {
            (d.kind, d.name) for step in again.steps if step in notes.steps for d in _same_ranks(step, notes.steps[step], again.steps[step])
        }
        generators = {name for ranks in notes.steps.values() for items in ranks.values() for name in items if name[0] == "generator"}
        later = [items for step, ranks in notes.steps.items() if step >= at for items in ranks.values()]
        self._idle = {name for name in generators if len({str(items.get(name)) for items in later}) == 1}
        """Generators that nothing draws from: their states do not matter."""

    def repeats(self, again: Notes) -> RunOutcome:
        """Whether the job does the same if it begins anew. Else nothing can be said of a resume."""
        for step in sorted(again.steps):
            differences = list(_same_ranks(step, self.notes.steps.get(step, {}), again.steps[step]))
            if any(d.kind in _TELLING for d in differences):
                self.unrepeatable = set()
                if differences[0].kind in ("batch", "observed"):
                    what = "shuffling, or a worker of the data loader that draws from a generator with no seed, "
                    what += "such as numpy.random.default_rng()"
                else:
                    what = "weights made without a seed, or kernels that are not deterministic (torch.use_deterministic_algorithms(True))"
                return again.outcome("interrupted", differences, f"two runs from the start differ, so no resume can be exact: {what}")
        return again.outcome("interrupted")

    def compare(self, resumed: Notes, tolerance: float) -> RunOutcome:
        """What a resumed run does otherwise: bit for bit on as many ranks, else as far as numbers and batches go, to ``tolerance``."""
        exact = resumed.ranks == self.notes.ranks
        steps = sorted({step for step in (*self.notes.steps, *resumed.steps) if step > self.at})
        for step in steps:
            there, here = self.notes.steps.get(step, {}), resumed.steps.get(step, {})
            differences = _same_ranks(step, there, here) if exact else _other_ranks(step, there, here, tolerance)
            wrong = [d for d in differences if (d.kind, d.name) not in self.unrepeatable | self._idle]
            if any(d.kind != "batch" for d in wrong):  # batches alone: a trainer that skips those before the step gets them again
                return resumed.outcome("resumed", wrong, self._cause(wrong, resumed), exact=exact)
        return resumed.outcome("resumed", exact=exact)

    def _cause(self, wrong: Sequence[Difference], resumed: Notes) -> str:
        """What usually lies behind the differences of the first step that has any."""
        first = wrong[0]
        after_restore = list(_same_ranks(self.at, self.notes.steps.get(self.at, {}), resumed.restored.get(self.at, {})))
        hints = [d for d in after_restore if (d.kind, d.name) not in self.unrepeatable | self._idle]
        left_out = dict.fromkeys(d.name for d in (*hints, *wrong) if d.kind == "not in the state")
        drawn = dict.fromkeys(d.name for d in hints if d.kind == "generator")
        if first.actual is None or first.expected is None:
            return "one of the runs has no such value: what is in the state, or what is observed, depends on how the job began"
        if first.kind == "batch":
            ranks = self.notes.steps.get(min(self.notes.steps), {})
            if first.actual == ranks.get(first.rank or 0, {}).get((first.kind, first.name)):
                return f"the data loader begins again: it is not in the state, or nothing sets its position. {_LOADER}"
            generators = f", or its generator ({', '.join(drawn)}). Put ckpt.training.Generators() into the state" if drawn else ""
            return f"the samples of this step are others: the position of the loader is not restored{generators}. {_LOADER}"
        scheduler = [name for name in left_out if any(word in name for word in ("LR", "Scheduler", "Annealing", "OnPlateau"))]
        if first.kind == "learning rate":
            what = f"{', '.join(scheduler)} is not in the state" if scheduler else "the scheduler is not in the state"
            return f'{what}, so its schedule begins again. Save it: state["scheduler"] = scheduler'
        if first.kind == "not in the state":
            return f"{', '.join(left_out)}: not in the state that is saved, so it begins anew (an average of the weights, for example)"
        if left_out:
            return f"{', '.join(left_out)}: not in the state that is saved, and not what it was"
        if drawn or first.kind == "generator":
            names = ", ".join(drawn) or first.name
            return (
                f"the random numbers of {names} go on from another state. Put ckpt.training.Generators() into the state; a DataLoader "
                "without generator= draws from torch's at each start"
            )
        if first.kind == "observed":
            return f"{first.name} depends on something that is not in the state"
        changed = [d.name for d in hints if d.kind in ("parameter", "optimizer state", "tensor", "value")]
        if changed:
            return f"{changed[0]} is restored otherwise than it was saved: look at only=, strict= and what changes it in a load"
        return (
            "the state as restored is the same: something that no object of it has, such as gradients that were accumulated over the save"
        )


_LOADER = "ckpt.training.ResumableLoader and LoaderState keep it"


def _same_ranks(step: int, there: Mapping[int, Mapping[Name, Noted]], here: Mapping[int, Mapping[Name, Noted]]) -> Iterator[Difference]:
    """What differs at a step, rank by rank and bit for bit; causes first."""
    pairs = [(rank, there.get(rank, {}), here.get(rank, {})) for rank in sorted({*there, *here})]
    for kind in KINDS:
        for rank, expected, actual in pairs:
            for name in sorted({key for key in (*expected, *actual) if key[0] == kind}):
                left, right = expected.get(name), actual.get(name)
                if repr(left) != repr(right):  # a NaN is equal to a NaN
                    yield Difference(step=step, rank=rank, kind=kind, name=name[1], expected=left, actual=right)


def _other_ranks(
    step: int, there: Mapping[int, Mapping[Name, Noted]], here: Mapping[int, Mapping[Name, Noted]], tolerance: float
) -> Iterator[Difference]:
    """What differs at a step of which the ranks divide the work otherwise: the batches of all ranks together, and the means of numbers."""
    if not there or not here:
        sides = [None if ranks else "none" for ranks in (here, there)]
        yield Difference(step=step, rank=None, kind="value", name="step", expected=sides[0], actual=sides[1])
        return
    for kind in ("batch", "observed", "learning rate", "metric"):
        names = {name for ranks in (there, here) for items in ranks.values() for name in items if name[0] == kind}
        for name in sorted(names):
            left, right = (_together([items[name] for items in ranks.values() if name in items]) for ranks in (there, here))
            if left is not None and right is not None and not _near(left, right, tolerance):
                yield Difference(step=step, rank=None, kind=kind, name=name[1], expected=left, actual=right)


def _together(values: Iterable[Noted]) -> float | list[str] | None:
    """One value of all ranks: the mean of numbers, the rows of batches; None of what cannot be compared so."""
    values = list(values)
    numbers = [value for value in values if isinstance(value, float)]
    if values and len(numbers) == len(values):
        return math.fsum(numbers) / len(numbers)
    rows = [row for value in values if isinstance(value, list) for row in value]
    return sorted(set(rows)) or None


def _near(left: float | list[str], right: float | list[str], tolerance: float) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance * 1e-3) or (math.isnan(left) and math.isnan(right))
    return left == right


def _text(value: Noted | None) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"{len(value)} rows {', '.join(row[:8] for row in value[:3])}{'…' * (len(value) > 3)}"
    return f"{value!r}" if isinstance(value, float) else value


__all__ = ["Difference", "Notes", "Reference", "ResumeReport", "RunOutcome"]
