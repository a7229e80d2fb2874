"""What a checkpoint went on from (docs/format.md §2): a run that goes back to an earlier step begins a branch. No torch.

    1 ── 2 ── 3 ── 4          branches of 1 to 4: none
         └── 3' ── 5'         of 3' and 5': [(b, after 2)]
              └── 4"          of 4": [(b, after 2), (c, after 3)], and c is later than b

Invariants: every record names all branches that led to it, so it tells its own past whatever else was removed. The id of a branch sorts
after every id that the run had when it began, so the branch written last is the one with the highest id, whatever clocks say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias


class Branch(NamedTuple):
    """``id``: like that of a save. ``after``: the step that the run went back to."""

    id: str
    after: int


Branches: TypeAlias = tuple[Branch, ...]
"""Those that led to a checkpoint, the first one first; ``after`` never falls."""


def branches_of(rows: Iterable[Any]) -> Branches:
    """What JSON made lists of."""
    return tuple(Branch(id, after) for id, after in rows)


def begun_last(several: Iterable[Branches]) -> Branches:
    """Of the branches of some checkpoints those of the branch that was begun last."""
    return max(several, key=_last_id, default=())


def _last_id(branches: Branches) -> str:
    """A run that never went back comes before all others."""
    return branches[-1].id if branches else ""


def left_at(branches: Branches, step: int, live: Branches, tip: int) -> int | None:
    """The last step that a checkpoint of ``step`` with these branches shares with the branch ``live``, which is at step ``tip``; None if
    that went on from it."""
    common = next((i for i, (one, other) in enumerate(zip(branches, live, strict=False)) if one != other), min(len(branches), len(live)))
    until = live[common].after if common < len(live) else tip
    if common < len(branches):
        return min(until, branches[common].after)
    return None if step <= until else until
