"""The steps of a run for a job that asks again and again. No torch.

A run may have ten thousand steps, and each has a record of its own, so a save must not read them all to remove one. What a process has read
it keeps, and believes as long as the storage shows, in a listing that costs little, that the record is still the same object
(``Backend.version_tokens``). Nothing is concluded from a name alone: another job, or ``ckpt tag``, may have replaced what is behind it.

Invariants: a token is older than the record that is kept with it, so that a record replaced in between is read again. Only checkpoints that
are committed and that no link leads to are kept.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.io_backends.registry import open_backend

from .step_listing import Step, in_order, look, read_steps

_APART = "/data/"
"""Paths with this in them are no commit records: most of the objects of a run have it."""
_FEW = 4000
"""Steps of a run that is looked at after each save."""


class _Kept(NamedTuple):
    token: str
    step: Step


class KnownSteps:
    """What one process knows of the run at ``root``. Any thread may ask."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._kept: dict[str, _Kept] = {}
        self._count = 0
        """Directories of the run, when it was listed last."""
        self.waiting = self._most_waiting = 0
        """Saves since :meth:`due`, and how many may be."""

    def due(self) -> bool:
        """Whether to look at the run now that one more save has ended. A look costs what the run has steps, whatever has changed, so there
        is one save for each ``_FEW`` steps between two of them: what is to be removed waits, but is one step in ``_FEW`` at most."""
        if self.waiting < self._most_waiting:
            self.waiting += 1
            return False
        self.waiting, self._most_waiting = 0, self._count // _FEW
        return True

    def list(self) -> list[Step]:
        """As :func:`ckpt.list_steps`, of the present moment; only records that are new or changed are read."""
        backend = open_backend(self._root)
        itself, names = look(backend, self._root)
        self._count = len(names)
        if itself is not None:
            return [itself]
        tokens = backend.version_tokens(names, COMMIT_PATH, skip=_APART)  # before any record is read
        if tokens is None:
            return in_order(read_steps(backend, self._root, names).values())
        before = self._kept
        same = {n: before[n] for n in names if n in before and tokens.get(n) == before[n].token and backend.link(n) is None}
        new = read_steps(backend, self._root, [n for n in names if n not in same])
        kept = {n: _Kept(tokens[n], s) for n, s in new.items() if n in tokens and s.committed and s.link is None}
        self._kept = {**same, **kept}
        return in_order([*(kept.step for kept in same.values()), *new.values()])
