"""What the saves of a job go on from: the branches that their records name (``formats.branches``). No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from ckpt import units
from ckpt.formats.native.commit import Branch, Branches, begun_last, new_id

from .step_listing import Step

log = logging.getLogger("ckpt")


def branches_after(step: Step, run: Iterable[Step], *, complete: bool) -> Branches:
    """The branches of what is saved after going on from ``step``: its own if it is the last of the run, and else a new one. ``complete``:
    whether ``run`` is all that there is."""
    run = list(run)
    if complete and step.abandoned is None and _last(run) == step.number:
        return step.branches
    return _forked(step.branches, step.number or 0, run)


def _last(run: Sequence[Step]) -> int:
    """The highest step that the run has reached on the branch that was written last, or on one that cannot be read; -1: there is none."""
    return max((s.number for s in run if s.number is not None and s.abandoned is None and (s.committed or s.damaged)), default=-1)


def _forked(branches: Branches, after: int, run: Iterable[Step]) -> Branches:
    ids = [id for s in run for id in (s.id, *(b.id for b in s.branches)) if id is not None]
    known = max((*ids, *(b.id for b in branches)), default=None)
    return (*(b for b in branches if b.after <= after), Branch(new_id(known), after))


class Lineage:
    """Of one job; on the leader, which writes the records. ``look`` lists the run.

    A job that restored nothing, or that was brought back to an earlier step past the ``Checkpointer``, is known by its numbers: a save of
    a step goes on from those below.
    """

    def __init__(self, look: Callable[[], Sequence[Step]]) -> None:
        self._look = look
        self._branches: Branches = ()
        self._last: int | None = None
        """The last step that was restored or saved; None: nobody knows."""

    def restored(self, step: int | None, branches: Branches = ()) -> None:
        """The job goes on from ``step``; None: the run had none."""
        self._branches, self._last = branches, -1 if step is None else step

    def of(self, n: int) -> Branches:
        """The branches that led to the save of step ``n``, which is about to be written."""
        if self._last is None:
            run = self._look()
            self._branches, self._last = begun_last(s.branches for s in run), _last(run)
            newer = [s.number for s in run if s.number is not None and s.number >= n and s.abandoned is None and s.committed]
            if newer:
                message = (
                    "step %d is saved in a run that has %s already (%s%s), and nothing was restored: a save of the same step is replaced, "
                    "later restarts leave higher ones out; call restore() before the first save, or save a new run to another directory"
                )
                log.warning(message, n, units.plural(len(newer), "step"), ", ".join(map(str, newer[:5])), ", …" if len(newer) > 5 else "")
        if n < self._last:
            self._branches = _forked(self._branches, max(n - 1, 0), self._look())
        self._last = n
        return self._branches
