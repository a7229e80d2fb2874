"""Removing checkpoints: a checkpoint exists as long as its commit record does, so that goes first, and its files after it. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpt.concurrency.workers import map_tasks
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError
from ckpt.formats.native.catalog import read_record
from ckpt.formats.native.clearing import clear
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord
from ckpt.formats.native.paths import id_of
from ckpt.formats.native.writer import committed_id

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

log = logging.getLogger("ckpt")

_TOGETHER = 32
"""Checkpoints that are looked at, or hidden, at once."""

# How many go together, and why nothing is lost
#
#   look     the record of each, and all of its files; who refers to them? Who is referred to stays, and so does what was replaced
#   hide     the record of each goes, if it still is the same: from here on it does not exist
#   look     who refers to their files now? A save that refers to one publishes its own record first, and looks then whether the record of
#            what it refers to is there (``clearing``): so at least one of the two sees the other. Who is referred to gets its record back,
#            and so does whatever that one refers to
#   files    all of them, many at once
#
# The two looks at the others cost a listing of the run each. They are of all that go together, so that a removal of many steps costs what
# the steps cost, and not their square. Stopped anywhere, a removal leaves whole checkpoints or orphans, and files that others refer to are
# no orphans: so it does not matter in which order records go.


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What is in the directory ``within`` (empty, or ending in a slash), which is no link. With ``id`` and ``tags``, those that it had when
    somebody decided: it stays if it has others now. ``users``: directories of those among the same removals that use its files, which come
    before it: it stays if one of them does."""

    within: str = ""
    id: str | None = None
    tags: Collection[str] = ()
    users: Collection[str] = ()


Referrers = Callable[[], Mapping[str, Collection[str]]]
"""Gives, by directory, the names of those that refer to files there, or may do so, at this moment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Going:
    """What is there. ``data``: the record; ``last``: the save that it commits."""

    removal: Removal
    data: bytes | None
    last: str | None
    may_be_referred_to: bool
    saves: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.removal.within.rstrip("/")


def remove_checkpoints(backend: Backend, removals: Sequence[Removal], referrers: Referrers = dict) -> set[str]:
    """Remove checkpoints, or what saves left there: first the commit records, then the files, of older saves too. Gives their directories.

    Stopped anywhere, it leaves whole checkpoints or orphans. Files that are not of this format stay, and so do those of a save that began
    later. An absent checkpoint is no error. What others refer to stays.
    """
    going = _without_used(removals, filter(None, map_tasks(partial(_look, backend), removals, _TOGETHER, "ckpt-remove")))
    ask = any(seen.may_be_referred_to for seen in going)
    if ask:
        with suppress(CkptError):  # what cannot be read may be its own index, which nobody reads without the record
            names = {seen.name for seen in going}
            going = _without_referred(backend, removals, going, referrers(), but=names)
    hidden: list[_Going] = []
    try:
        map_tasks(partial(_hide, backend, hidden), going, _TOGETHER, "ckpt-remove")
        referred = referrers() if ask else {}
    except BaseException:
        _restore(backend, hidden)
        raise
    gone = _without_referred(backend, removals, _without_used(removals, hidden), referred)
    _restore(backend, set(hidden).difference(gone))
    backend.delete_many([path for seen in gone for path in seen.saves.get(seen.last or "", ())])
    for seen in gone:
        for save, paths in seen.saves.items():
            if save != seen.last:
                clear(backend, save, seen.removal.within, paths, partial(committed_id, backend, seen.removal.within))
    return {seen.removal.within for seen in gone}


def remove_checkpoint(
    backend: Backend,
    within: str = "",
    *,
    id: str | None = None,
    tags: Collection[str] = (),
    referrers: Callable[[], Collection[str]] = tuple,
) -> bool:
    """``remove_checkpoints``, of one; ``referrers`` gives the names of those that refer to it. Whether it was removed."""
    return bool(remove_checkpoints(backend, [Removal(within=within, id=id, tags=tags)], lambda: {within: referrers()}))


def _look(backend: Backend, removal: Removal) -> _Going | None:
    """What is there; None if it is not what somebody decided about."""
    within = removal.within
    data = read_record(backend, within)
    last, may_be_referred_to = None, True  # files without a record that can be read may be what others refer to all the same
    if data is None and removal.id is not None:
        return None  # somebody else removes it
    if data is not None:
        with suppress(CorruptError, FormatError):  # then whoever removes it knows
            record = CommitRecord.from_bytes(data, _where(backend, within))
            last, may_be_referred_to = record.id, record.reusable
            if removal.id is not None and (record.id != removal.id or set(record.tags) != set(removal.tags)):
                return None
    saves: dict[str, list[str]] = {}
    for entry in backend.list_prefix(within):
        save = id_of(entry.path.removeprefix(within))
        if save is not None and (last is None or save <= last):
            saves.setdefault(save, []).append(entry.path)
    # Of a save that was replaced, those files stay that others refer to.
    may_be_referred_to = may_be_referred_to or any(save != last for save in saves)
    return _Going(removal=removal, data=data, last=last, may_be_referred_to=may_be_referred_to, saves=saves)


def _hide(backend: Backend, hidden: list[_Going], seen: _Going) -> None:
    """Take the record away, unless another save has replaced it while this one was looked at."""
    within = seen.removal.within
    if read_record(backend, within) == seen.data:
        hidden.append(seen)  # first: an error may come after the effect
        if seen.data is not None:
            backend.delete(within + COMMIT_PATH)


def _restore(backend: Backend, hidden: Iterable[_Going]) -> None:
    """Put their records back, each of them whatever becomes of the others."""
    failed: CkptError | None = None
    for seen in hidden:
        try:
            if seen.data is not None:
                backend.put_if(seen.removal.within + COMMIT_PATH, seen.data, expected=None)
        except ConflictError:
            continue  # another save is committed there by now, or the record never went
        except CkptError as err:
            failed = failed or err
    if failed is not None:
        raise failed


def _without_used(removals: Sequence[Removal], going: Iterable[_Going]) -> list[_Going]:
    """Those that go, in their order, without what is used by one that stays."""
    by_place = {seen.removal.within: seen for seen in going}
    stays: set[str] = set()
    for removal in removals:
        if removal.within not in by_place or not stays.isdisjoint(removal.users):
            stays.add(removal.within)
    return [by_place[r.within] for r in removals if r.within not in stays]


def _without_referred(
    backend: Backend,
    removals: Sequence[Removal],
    going: Iterable[_Going],
    referred: Mapping[str, Collection[str]],
    but: Collection[str] = (),
) -> list[_Going]:
    """The same without those that others refer to; ``but`` are no others, as long as they go themselves."""
    left: dict[str, _Going] = {}
    stays: set[str] = set()
    for seen in going:
        names = {name for name in referred.get(seen.removal.within, ()) if name not in but or name in stays}
        if names and seen.may_be_referred_to:
            log.warning("%s stays, since %s refers to its data files", _where(backend, seen.removal.within), ", ".join(sorted(names)))
            stays.add(seen.name)
        else:
            left[seen.removal.within] = seen
    return _without_used(removals, left.values())


def _where(backend: Backend, within: str) -> str:
    return f"{backend.url.rstrip('/')}/{within}{COMMIT_PATH}"
