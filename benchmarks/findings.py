"""What the scenarios give that compare more than saves and loads of one kind: a table, notes, checks, and all figures as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .report import Check, aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one scenario. ``columns`` and ``rows`` are cells of the table, ``figures`` the same and more in numbers."""

    scenario: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: Mapping[str, Any]
    checks: Sequence[Check] = ()
    notes: Sequence[str] = field(default=())

    def lines(self) -> list[str]:
        """The table and the notes as lines of text."""
        return ["", f"{self.scenario}: {self.title}", *aligned([self.columns, *self.rows]), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """Without the checks, which a run lists with all others."""
        return {key: value for key, value in asdict(self).items() if key != "checks"}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        return cls(**found)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: median(s[key] for s in samples) for key in samples[0]}


def at_most(name: str, value: float, limit: float, unit: str = "") -> Check:
    """A check that ``value`` is at most ``limit``."""
    unit = f" {unit}" if unit else ""
    return Check(name=f"{name} <= {limit:g}{unit}", ok=value <= limit, detail=f"{value:.3g}{unit}")


def at_least(name: str, value: float, limit: float) -> Check:
    """A check that ``value`` is at least ``limit``."""
    return Check(name=f"{name} >= {limit:g}", ok=value >= limit, detail=f"{value:.3g}")
