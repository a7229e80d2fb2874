"""What the saves of a job go on from: the branches that their records name (``formats.branches``), and the earlier save that each of them
refers to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt import units
from ckpt.catalog import Catalog
from ckpt.engine.save.base import SaveBase
from ckpt.engine.save.options import SaveArguments, SaveOptions
from ckpt.errors import UsageError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.codecs import WITHOUT_ANCHOR, XOR_PLANES
from ckpt.formats.native.commit import Branch, Branches, begun_last, new_id
from ckpt.policies import Anchor, TrustFrozen

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
    ids = [id for s in run for id in (s.id, s.other_release, *(b.id for b in s.branches)) if id is not None]
    known = max((*ids, *(b.id for b in branches)), default=None)
    return (*(b for b in branches if b.after <= after), Branch(new_id(known), after))


class Lineage:
    """Of one job; on the leader, which writes the records. ``look`` lists the run. ``alert`` tells of a step what needs looking at.

    A job that restored nothing, or that was brought back to an earlier step past the ``Checkpointer``, is known by its numbers: a save of
    a step goes on from those below.
    """

    def __init__(self, look: Callable[[], Sequence[Step]], alert: Callable[[int, str], None]) -> None:
        self._look, self._alert = look, alert
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
                steps = f"{units.plural(len(newer), 'step')} already ({', '.join(map(str, newer[:5]))}{', …' if len(newer) > 5 else ''})"
                message = (
                    f"step {n} is saved in a run that has {steps}, and nothing was restored: a save of the same step is replaced, "
                    "later restarts leave higher ones out; call restore() before the first save, or save a new run to another directory"
                )
                self._alert(n, message)
        if n < self._last:
            self._branches = _forked(self._branches, max(n - 1, 0), self._look())
        self._last = n
        return self._branches


# Which earlier save each save of a run refers to, and whether it may store differences from it.
#
#     reuse=True          1 ◄── 2 ◄── 3 ◄── 4         each refers to the one before, for what has not changed
#     Anchor(every=3)     1 ◄── 2     4 ◄── 5         2 and 3 are differences from 1, 5 and 6 from 4; what has not changed
#                         ▲     3     │     6         since 1 is referred to, by 4 too
#                         └───────────┘
#
# All ranks count alike: they begin the same saves, and hear of each whether it went well. After one that did not, some may not have heard
# yet, so the next one refers to nothing.


@dataclass(eq=False)
class Bases:
    """The base of the next save. ``anchor``: None if saves store no differences."""

    anchor: Anchor | None = None
    base: SaveBase | None = None
    """What the next save may refer to: the newest anchor, or else the last save that went well here, or what was restored."""
    since: int = 0
    """How many saves have followed the anchor ``base``."""
    is_anchor: bool = True
    """Whether the save that was begun last is one."""

    def of(self, url: str, options: SaveOptions) -> SaveOptions:
        """The options of the save that begins at ``url``."""
        base = self.base if self.base is not None and self.base.url != url else None
        self.is_anchor = self.anchor is None or base is None or self.since >= self.anchor.every - 1
        if self.anchor is None or not self.is_anchor:
            return replace(options, base=base)
        # An anchor refers to the one before for what has not changed. All else is whole, so differences are one read away from it.
        return replace(options, base=base, codec=WITHOUT_ANCHOR.get(options.codec or "", options.codec))

    def restored(self, url: str | None, opened: Sequence[Catalog] = ()) -> None:
        """A run goes on from ``url``; None: from elsewhere, or saves refer to nothing. ``opened``: what was read of it."""
        catalog = next((c for c in opened if isinstance(c, NativeCatalog)), None)
        id = None if catalog is None else catalog.record.id
        self.base = None if url is None else SaveBase(url=url, id=id, required=False, catalog=catalog)
        self.since = self.anchor.every if self.anchor is not None else 0  # what was restored may be a difference itself

    def ended(self, saved: SaveBase | None) -> None:
        """A save ended; None: it failed."""
        if saved is None:
            self.base, self.since = None, 0
        elif self.is_anchor:
            self.base, self.since = saved, 0
        else:
            self.since += 1


def run_options(
    arguments: SaveArguments, *, reuse: bool | TrustFrozen | Anchor, staging: int | None, root: str, tiers: bool
) -> SaveOptions:
    """The options of the saves of a run; ``tiers``: they are committed somewhere else first. UsageError if these do not go together."""
    if reuse is not False or arguments.get("codec") is not None:
        arguments["codec"] = _codec(reuse, arguments.get("codec"))
    if reuse and tiers:
        raise UsageError("reuse= does not work with a local tier", where=root, hint="leave one of reuse= and local= or memory= out")
    options = SaveOptions.of(arguments, reusable=bool(reuse), staging=staging)
    return replace(options, trust=reuse if isinstance(reuse, TrustFrozen) else reuse.trust if isinstance(reuse, Anchor) else None)


def _codec(reuse: object, codec: str | None) -> str | None:
    """The codec of a run's saves."""
    if not isinstance(reuse, bool | TrustFrozen | Anchor):
        hint = "reuse=ckpt.policies.TrustFrozen(hash_every=10)"
        raise UsageError(f"reuse= is True, False, a TrustFrozen or an Anchor, not {reuse!r}", hint=hint)
    if not isinstance(reuse, Anchor):
        if codec in WITHOUT_ANCHOR:
            raise UsageError(f"codec={codec!r} needs anchors to store differences from", hint="reuse=ckpt.policies.Anchor(every=10)")
        return codec
    if codec not in (None, XOR_PLANES.name, WITHOUT_ANCHOR[XOR_PLANES.name]):
        message = f"an Anchor has a codec of its own, {XOR_PLANES.name!r}, so codec={codec!r} does not go with it"
        raise UsageError(message, hint="leave codec= out")
    return XOR_PLANES.name
