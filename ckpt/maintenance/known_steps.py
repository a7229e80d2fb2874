"""The steps of a run for a job that asks again and again, and for one that wants only the newest. No torch.

A run may have ten thousand steps, and each has a record of its own, so a save must not read them all to remove one. What a process has read
it keeps, and believes as long as the storage shows, in a listing that costs little, that the record is still the same object
(``Backend.version_tokens``). Nothing is concluded from a name alone: another job, or ``ckpt tag``, may have replaced what is behind it.

Invariants: a token is older than the record that is kept with it, so that a record replaced in between is read again. Only checkpoints that
are committed and that no link leads to are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.io_backends.registry import open_backend

from .step_listing import Step, in_order, list_steps, look, read_steps, step_number

_APART = "/data/"
"""Paths with this in them are no commit records: most of the objects of a run have it."""


class _Kept(NamedTuple):
    token: str
    step: Step


class KnownSteps:
    """What one process knows of the run at ``root``. Any thread may ask."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._kept: dict[str, _Kept] = {}

    def list(self) -> list[Step]:
        """As :func:`list_steps`, of the present moment; only records that are new or changed are read."""
        backend = open_backend(self._root)
        tokens = backend.version_tokens(COMMIT_PATH, skip=_APART)  # before anything is read
        itself, names = look(backend, self._root)
        if itself is not None:
            return [itself]
        if tokens is None:
            return in_order(read_steps(backend, self._root, names).values())
        before = self._kept
        same = {n: before[n] for n in names if n in before and tokens.get(n) == before[n].token and backend.link(n) is None}
        new = read_steps(backend, self._root, [n for n in names if n not in same])
        kept = {n: _Kept(tokens[n], s) for n, s in new.items() if n in tokens and s.committed and s.link is None}
        self._kept = {**same, **kept}
        return in_order([*(kept.step for kept in same.values()), *new.values()])


def newest_first(root_url: str, lowest: int = 0, highest: int | None = None) -> Iterator[tuple[int, list[Step]]]:
    """The numbered steps of a run from ``highest`` down to ``lowest``, with all that have a number; each is read when it is asked for.

    What :func:`list_steps` leaves out is left out: where links come into it, which only all steps together show, all are read. If the root
    is itself a checkpoint, that is given, whatever its number.

    Raises:
        StorageError: the storage cannot be read.
    """
    backend = open_backend(root_url)
    itself, names = look(backend, root_url)
    if itself is not None:
        yield itself.number or 0, [itself]
        return
    by_number: dict[int, list[str]] = {}
    for name in names:
        number = step_number(name)
        if number is not None and number >= lowest and (highest is None or number <= highest):
            by_number.setdefault(number, []).append(name)
    for number in sorted(by_number, reverse=True):
        steps = list(read_steps(backend, root_url, by_number[number]).values())
        if any(s.link is not None for s in steps):
            yield from _listed(root_url, lowest, number)
            return
        if steps:
            yield number, in_order(steps)


def _listed(root_url: str, lowest: int, highest: int) -> Iterator[tuple[int, list[Step]]]:
    steps: dict[int, list[Step]] = {}
    for s in list_steps(root_url):
        if s.number is not None and lowest <= s.number <= highest:
            steps.setdefault(s.number, []).append(s)
    yield from sorted(steps.items(), reverse=True)
