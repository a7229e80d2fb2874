"""Where the checkpoints of a run are: at its root, and before that on a local disk, if there is such a tier. No torch.

Invariants: a checkpoint has the same id in both tiers, and of two checkpoints of one step that with the higher id was saved later: a save
takes an id above those that were seen at the root, whatever the clock of this machine says. Nothing notes what is published: the commit
records at the root say so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from ckpt.concurrency import Pending, Rounds
from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.registry import is_file_system, open_backend, real_url
from ckpt.policies import All, KeepPolicy, Latest, retention
from ckpt.policies.keep import without_metric

from .lineage import branches_after
from .members import check_no_member
from .node_tier import SpreadTier
from .removal import infos, remove_steps
from .step_listing import KnownSteps, Step, check_release, step_url, with_abandoned

log = logging.getLogger("ckpt")

T = TypeVar("T")

LOOK = 5.0
"""Seconds after which a file that one rank has written shows to the others, if ever: network file systems remember what was not there."""
_NAMED = 5


class Tiers:
    """The steps of a run in one tier, or in two with ``local``; each has its own policy of what stays."""

    def __init__(
        self,
        root: str,
        keep: KeepPolicy = All(),  # noqa: B008
        local: str | None = None,
        local_keep: KeepPolicy = Latest(1),  # noqa: B008
        spread: SpreadTier | None = None,
        *,
        newest_only: bool = False,
    ) -> None:
        """``spread``: the local tier, if it is one of a directory on each node; ``local`` is its URL then. ``newest_only``: a round
        of publishing takes the newest of what is there, and no other."""
        self.newest_only = newest_only
        self.nearer: Tiers | None = None
        """Those in front of these: what is committed there goes to the local tier of these."""
        self.root, self.keep = root, keep
        self.spread = spread
        self.local, self.local_keep = local, local_keep
        self.busy: str | None = None
        """Id of the local checkpoint that is being published, and must stay meanwhile; under ``lock``."""
        self.removed: Callable[[int, str, str | None], object] = lambda step, url, id: None
        """Told of each checkpoint that was removed."""
        self.base: Callable[[], str | None] = lambda: None
        """Gives the URL of what the next save may refer to: it stays, since removals in the background run beside saves."""
        self.lock = threading.Lock()
        self.damaged: set[str] = set()
        """Ids of local checkpoints that cannot be published, since they are damaged."""
        self._known_root, self._known_local = KnownSteps(root), KnownSteps(local or root)
        self._removable = local if spread is None else spread.own_url
        """Where steps of the local tier are removed: a spread one is also read from places that it does not write to."""
        self._known_first = KnownSteps(self._removable) if self._removable is not None else self._known_root
        self._retaining = Rounds(self.retain, "ckpt-retain")
        self._retaining_root = Rounds(self.retain_root, "ckpt-retain-root")
        self._no_member = False
        """Whether it was looked at that the root is not the directory of a member."""
        self._swept = False
        """Whether what earlier lives of the job have left in memory is freed."""
        self._published: set[str | None] = set()
        self._warned: set[str] = set()
        """Ids of checkpoints of which was said that others were saved later, and URLs of those whose records are damaged."""
        self._last_seen: str | None = None
        """The highest id that was seen at the root."""
        self._answers = True
        """Whether the root answered when it was asked last."""
        self._behind: list[int] = []
        """Abandoned steps of which was said that they are passed over."""
        if local is not None and spread is None and not is_file_system(local):
            raise UsageError(f"local is a directory, not {local!r}", hint="give root= the URL of the object store")
        if local is not None and real_url(local) == real_url(root):
            raise UsageError("local is the same place as the root", where=root, hint="leave local= out to save straight to the root")
        for path in (Path(real_url(place)) for place in (root, local) if place is not None and is_file_system(place)):
            if (file := next(filter(os.path.isfile, (path, *path.parents)), None)) is not None:
                raise UsageError("a run is a directory, and this is a file", where=str(file), hint="name a directory")

    def place(self, n: int) -> str:
        """Where step ``n`` is committed first."""
        return step_url(self.root if self.local is None else self.local, n)

    # ---- what is there

    def earlier(self, n: int) -> str | None:
        """The id of a save at the root that a local save of step ``n`` comes after; None if none is known. Takes a few seconds at most."""
        id = self._asked(lambda: _id_at(step_url(self.root, n)), f"whether step {n} is at {self.root}")
        self._last_seen = max((id for id in (self._last_seen, id) if id is not None), default=None)
        ids = self._last_seen, self.nearer.earlier(n) if self.nearer is not None else None
        return max((id for id in ids if id is not None), default=None)

    def check_no_member(self, *, asked: bool = False) -> None:
        """Until the root has answered: it is no directory of a member of a run of several jobs. Asked before a job that saves by itself
        saves, where a root that does not answer is passed over; and with ``asked`` before it publishes what it has saved meanwhile."""

        def ask() -> bool:
            check_no_member(self.root)
            return True

        if not self._no_member:
            there = self.local is None or asked
            self._no_member = bool(ask() if there else self._asked(ask, f"whether {self.root} is of a run of several jobs"))

    def look(self) -> list[Step]:
        """As :meth:`run`, for a save: with a local tier it takes a few seconds at most, and is without what the root has if that does not
        answer."""
        if self.local is None:
            return self.run()
        far = self._asked(self._at_root, f"what is at {self.root}")
        return with_abandoned([*(self.nearer.near() if self.nearer is not None else ()), *self.near(), *(far or ())])

    def _asked(self, ask: Callable[[], T], what: str) -> T | None:
        """What the root answers; None if it does not. Then it is not asked again before it has answered somebody else."""
        if not self._answers:
            return None
        asked, why = Pending(ask, "ckpt-look", daemon=True), f"no answer within {LOOK:g} s"
        try:
            if asked.wait(LOOK):
                return asked.result()
        except StorageError as err:
            why = str(err)
        self._answers = False
        log.warning("%s cannot be seen, so this save counts as later than what was seen there before: %s", what, why)
        return None

    def _at_root(self) -> list[Step]:
        steps = [s for s in _list(self._known_root, self.root) if s.number is not None]
        self._answers = True
        self._last_seen = max((id for id in (self._last_seen, *(s.id for s in steps)) if id is not None), default=None)
        return steps

    def _say_passed(self, near: Iterable[Step], far: Iterable[Step]) -> None:
        """Warn of local checkpoints that give way to others at the root, once of each."""
        later = {s.number: s for s in far if s.committed}
        for s in near:
            other = later.get(s.number)
            if s.committed and s.id is not None and other is not None and str(other.id) > s.id and s.id not in self._warned:
                self._warned.add(s.id)
                log.warning(
                    "%s (save %s of %s) is passed over: by its id %s (save %s of %s) was saved later",
                    *(s.url, s.id, s.created, other.url, other.id, other.created),
                )

    def run(self) -> list[Step]:
        """All that there is, also in front of these."""
        nearest = self.nearer._judged(self.nearer.near()) if self.nearer is not None else ()
        return with_abandoned([*nearest, *self.near(), *self._at_root()])

    def steps(self) -> list[Step]:
        """The committed checkpoints, the lowest step first; of each step the nearest copy of what was saved last."""
        by_number: dict[int | None, Step] = {}
        for step in reversed(_ordered(self.run())):
            by_number[step.number] = step
        return list(by_number.values())

    def latest(self) -> int | None:
        """The highest committed step of the branch that was written last."""
        return max((s.number for s in self.run() if s.committed and s.abandoned is None and s.number is not None), default=None)

    def near(self) -> list[Step]:
        """What the local tier has."""
        return [s for s in _list(self._known_local, self.local) if s.number is not None] if self.local is not None else []

    def copies(self, step: int | None, tried: Collection[tuple[str, str]] = ()) -> list[list[Any]]:
        """Step, URL, id, losses, and the branches of what is saved after it, of the copies of the newest step that has some beside those
        ``tried``, by URL and id, on the branch that was written last; or of ``step``, on whatever branch. What was saved last comes first,
        the nearest copy before others. All records are read: a low step may be of the last branch."""
        places = [(tier, tier.near()) for tier in (self.nearer, self) if tier is not None and tier.local is not None]
        at_root = self._far(step, [s for _, steps in places for s in steps]) if places else self._at_root()
        run = with_abandoned([s for _, steps in (*places, (None, at_root or ())) for s in steps])
        owners = [tier for tier, steps in places for _ in steps]
        levels: dict[int, list[tuple[Tiers | None, Step]]] = {}
        for s, owner in zip_longest(run, owners):
            if s.number is not None and (step == s.number or (step is None and s.abandoned is None)):
                levels.setdefault(s.number, []).append((owner, s))
        there = False
        damaged: Step | None = None
        for _, level in sorted(levels.items(), reverse=True):
            near = [s for tier, _ in places for s in tier._judged(s for owner, s in level if owner is tier)]
            far = [s for owner, s in level if owner is None]
            if near:
                self._say_passed(near, far)
            committed = _ordered([*near, *far])
            copies = [s for s in committed if (s.url, s.id) not in tried]
            if not copies:
                check_release((*near, *far))
            for s in (*near, *far):
                if not s.committed and (s.damaged or not committed):
                    log.warning("%s is passed over: %s", s.url, s.reason)
                if s.damaged:
                    damaged = damaged or s
            there = there or bool(committed)
            if copies:
                if step is None and any(s.damaged or s.abandoned is not None for s in run):
                    self._say_abandoned(run, copies[0])
                if step is None and places:
                    self._say_saved_later(at_root or (), copies[0])
                return [[s.number, s.url, s.id, s.lost, branches_after(s, run, complete=at_root is not None)] for s in copies]
        if damaged is not None and not there:  # a run that has checkpoints does not begin anew
            hint = "`ckpt rebuild` repairs a damaged record; to begin the run anew, move its checkpoints away or name another root"
            raise CorruptError(f"no checkpoint here can be read: {damaged.reason}", where=damaged.url, hint=hint)
        if step is not None and not there:
            raise NotFoundError(f"there is no checkpoint of step {step}", where=self.root, hint="`ckpt ls` lists the checkpoints there")
        return []

    def _say_saved_later(self, at_root: Iterable[Step], chosen: Step) -> None:
        """Warn if the root has a lower step of the same branch that was saved after the one that is gone on from: jobs that did not see
        each other's memory or disks have both gone on, and no record says so."""
        later = [
            s
            for s in at_root
            if s.committed and s.abandoned is None and str(s.id) > str(chosen.id) and (s.number or 0) < (chosen.number or 0)
        ]
        newest = max(later, key=lambda s: str(s.id), default=None)
        if newest is not None and newest.id not in self._warned:
            self._warned.add(str(newest.id))
            log.warning(
                "%s (save %s of %s) is gone on from, though %s (save %s of %s) was saved after it: a job that did not see these files "
                "seems to have gone on from an earlier step, and what it did is undone; restore(state, step=%s) takes that up instead",
                *(chosen.url, chosen.id, chosen.created, newest.url, newest.id, newest.created, newest.number),
            )

    def _say_abandoned(self, run: Iterable[Step], chosen: Step) -> None:
        """Say which steps are not gone on from since the run went back, and which may be of a branch that nobody can see; once."""
        for s in run:
            if s.damaged and s.url not in self._warned and (s.number or 0) < (chosen.number or 0):
                self._warned.add(s.url)
                log.warning("%s cannot be read, nor whether the run had gone back before it: %s", s.url, s.reason)
        behind = sorted({s.number for s in run if s.abandoned is not None and s.number is not None})
        if not behind or behind == self._behind:
            return
        self._behind = behind
        numbers = ", ".join(map(str, behind)) if len(behind) <= _NAMED else f"{behind[0]} to {behind[-1]}"
        log.warning(
            "%s: the run went back, and went on without %s; restore(state, step=…) takes it, `ckpt gc --abandoned --yes` removes it",
            *(self.root, f"step {numbers}" if len(behind) == 1 else f"steps {numbers}"),
        )

    def _judged(self, near: Iterable[Step]) -> list[Step]:
        """Local checkpoints; those of which the nodes that are left have too little count as damaged."""
        judged = [s if self.spread is None else self.spread.judged(s) for s in near]
        self.damaged |= {s.id for s in judged if s.damaged and s.id is not None}
        return judged

    def _far(self, step: int | None, near: list[Step]) -> list[Step] | None:
        """What the root has; None if that is not known, but need not be, since ``step`` is among those that are ``near``."""
        try:
            return self._at_root()
        except StorageError as err:
            alive = (s.number for s in reversed(_ordered(with_abandoned(near))) if s.abandoned is None)
            mine = next((number for number in alive if step in (None, number)), None)
            if mine is None:
                raise
            if step is not None:
                log.warning("only the local copy of step %d is looked at: %s", step, err)
                return None
            hint = f"try again when the storage answers; restore(state, step={mine}) takes the newest local checkpoint as it is"
            message = f"whether the root has newer checkpoints than step {mine}, the newest local one, cannot be seen: {err.message}"
            raise StorageError(message, where=self.root, hint=hint) from err

    def unconfirmed(self) -> list[Step]:
        """Local checkpoints that are not known to be published, the lowest step first."""
        near = self.near()
        self._published &= {s.id for s in near}  # a job saves millions of steps, and few stay
        return [s for s in near if s.committed and s.id not in self._published | self.damaged]

    def behind(self) -> list[Step]:
        """Local checkpoints that are to be published, the newest first: all that ``keep`` would keep at the root."""
        near = self.unconfirmed()
        if not near:
            return []
        there = self._at_root()
        self._say_passed(near, there)
        far = {s.number: s for s in there if s.committed}
        self._published |= {s.id for s in far.values() if s.id is not None}
        # A local copy is uploaded if the root has no copy of that step, or an older one. Ids sort by time, and the
        # leader has made local ids later than those at the root, so comparing them needs no clock.
        near = [s for s in near if s.number not in far or str(s.id) > str(far[s.number].id)]
        united = with_abandoned(list({**far, **{s.number: s for s in near}}.values()))
        kept = retention(self.keep, infos(united), datetime.now(timezone.utc)).kept
        mine = {s.url for s in near}
        behind = [s for s in _ordered(united) if s.number in kept and s.url in mine]
        behind.sort(key=lambda s: s.abandoned is not None)  # the branch that was written last comes first
        if self.newest_only:
            behind = [s for s in behind[:1] if s.abandoned is None]
        return [s for s in self._judged(behind) if s.committed]

    # ---- what stays

    def retain(self) -> bool:
        """Remove what need not stay where saves are committed first. Whether that worked: a failure harms no checkpoint."""
        if self._removable is None:
            return self.retain_root()
        with self.lock, self.spread.removing() if self.spread is not None else nullcontext():
            return _remove(self._removable, self._known_first, self.local_keep, self.busy, self.removed, bases=False)  # the root has them

    def retain_after_save(self) -> None:
        """As :meth:`retain_in_background`, when a save has ended and none is going on. Once it also frees what earlier lives of the job
        have left in memory when they were killed in the middle of a save or of a removal: nobody else ever would, and the budget is small.
        """
        retained = self.retain_in_background()
        self._swept = self._swept and retained  # else some nodes may have files of what the others have removed
        if not retained or self._swept or self.spread is None or not self.spread.in_memory or self._removable is None:
            return
        try:
            with self.spread.removing():
                for step in self._known_first.list():
                    if not step.committed and not step.damaged and step.number is not None and step.link is None:
                        log.info("%s is freed: %s", step.url, step.reason)
                        remove_steps(self._removable, [step], {}, relist=self._known_first.list)
            self._swept = True
        except CkptError as err:
            log.warning("what earlier saves have left in memory stays there until the next save: %s", err)

    def retain_root(self) -> bool:
        """Remove what ``keep`` does not keep; as :meth:`retain`."""
        return _remove(self.root, self._known_root, self.keep, self.base(), self.removed)

    def retain_in_background(self, *, root: bool = False) -> bool:
        """As :meth:`retain`, and with ``root`` as :meth:`retain_root`: no save, and no step of training, waits for thousands of deletes.
        But memory is freed now, since the next save needs it. In a run of very many steps it comes after some saves together."""
        if root and self._removable is not None and self._known_root.due():
            self._retaining_root.ask()
        if self.spread.in_memory if self.spread is not None else open_backend(self._removable or self.root).io_hints.in_memory:
            return self.retain()
        if self._known_first.due():
            self._retaining.ask()
        return True

    def settle(self, seconds: float, *, rest: bool = False) -> None:
        """Wait until what was begun in the background is done, if that takes no longer. ``rest``: also what waits for further saves."""
        if rest and self._known_first.waiting:
            self._retaining.ask()
        if rest and self._removable is not None and self._known_root.waiting:
            self._retaining_root.ask()
        end = time.monotonic() + seconds
        if not all(rounds.wait(max(0.0, end - time.monotonic())) for rounds in (self._retaining, self._retaining_root)):
            log.warning("old checkpoints of %s are still being removed after %g s; that goes on in the background", self.root, seconds)


def _list(known: KnownSteps, root: str) -> list[Step]:
    """The checkpoints of the run at ``root``, and what is left of saves."""
    steps = known.list()
    if any(s.url == root and (s.committed or s.damaged) for s in steps):
        parent = root.rstrip("/").rpartition("/")[0]
        hint = f"give the directory that holds the steps: {parent}" if parent else "give the directory that holds the steps"
        by_mistake = "if it was saved onto a run by mistake, move its checkpoint.json, data and index-* out: the steps are still there"
        raise UsageError("this is a checkpoint, not a run", where=root, hint=f"{hint}; {by_mistake}")
    return steps


def _id_at(url: str) -> str | None:
    try:
        return committed_id(open_backend(url))
    except (CorruptError, FormatError):
        return None  # what publishes it says so


def _remove(
    root: str,
    known: KnownSteps,
    keep: KeepPolicy,
    busy: str | None,
    removed: Callable[[int, str, str | None], object],
    *,
    bases: bool = True,
) -> bool:
    if keep == All():
        return True
    try:
        committed = [s for s in _list(known, root) if s.committed and not s.members]  # a step of several jobs is not this one's to remove
        steps = {s.number: s for s in committed if s.number is not None}
        # What is not judged, having no number or that of another, stays: and so has to what it uses.
        facts = infos([s if s.number is not None and steps[s.number] is s else replace(s, number=None) for s in committed], bases=bases)
        going = [steps[number] for number in retention(keep, facts, datetime.now(timezone.utc)).removed]
        referrers = {info.step: info.users for info in facts}
        for rule in without_metric(keep, facts) if going else ():
            log.warning("steps are removed from %s, and %r keeps none: no step has this metric", root, rule)
        for step in remove_steps(root, going, referrers, busy, known.list):
            if step.link is None and step.number is not None:
                log.info("step %d is removed from %s", step.number, root)
                removed(step.number, step.url, step.id)
    except CkptError as err:
        log.warning("old checkpoints stay in %s until a later save can remove them: %s", root, err)
        return False
    return True


def _ordered(steps: Iterable[Step]) -> list[Step]:
    """Those that are committed in the order in which to try them."""
    # Of steps alike the first stays first, and local ones come first.
    return sorted((s for s in steps if s.committed), key=lambda s: (s.number, s.id), reverse=True)
