"""Which copy of which step a job goes on from: the newest that is whole, the nearest copy first. All ranks take the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from ckpt.engine.load.load import PARTLY_WRITTEN, UNCHANGED
from ckpt.errors import AccessError, CkptError, ConflictError, CorruptError, NotCommittedError, NotFoundError, StorageError, raised
from ckpt.formats.native.commit import Branch, Branches
from ckpt.net.group import Group
from ckpt.nodes.backend import is_spread

from .begin_from import BeginFrom
from .tiers import Tiers
from .uploader import MemoryStage

log = logging.getLogger("ckpt")

_NOT_THERE = (StorageError, AccessError, NotFoundError, NotCommittedError)
"""What, beside damage, sends ranks to another copy of the same step, if there is one."""
_GONE = (NotFoundError, NotCommittedError, ConflictError)
"""What a step gives that was removed or replaced after it was listed."""


class LoadedCopy(NamedTuple):
    """The copy that was loaded: its step, and where ``load`` found it. ``lasting``: the URL of a copy with the same bytes that any process
    can open, if there is one. ``branches``: of what is saved after it."""

    step: int
    url: str
    lasting: str | None
    branches: Branches = ()


def load_nearest(
    tiers: Tiers | MemoryStage, group: Group, timeout: float, load: Callable[..., object], step: int | None, id: str | None = None
) -> LoadedCopy | None:
    """Call ``load`` with the URL of the newest checkpoint, or of that of ``step``, until it finds one whole; None if there is none.
    With ``id``, of that save alone. Collective, and so is ``load``.

    A checkpoint that lost its values (``ckpt rebuild``) may lack what a job needs to go on as before. So unless ``step`` asks for it, it
    has to fit the state in full, also where ``load`` would take less; else it counts as damaged.
    """
    failed: CkptError | None = None
    tried: set[tuple[str, str]] = set()
    while True:
        # Listed anew each time: what could not be read may have been removed because something newer is there.
        call = group.call("restore", tiers.root, timeout)
        copies: list[list[Any]] = call.map_reduce(
            "list", dict, lambda rows: [c for c in tiers.copies(step, tried) if id is None or c[2] == id]
        )
        if not copies:
            break
        number, url, copy_id, lost, branches = copies[0]
        tried.add((url, copy_id))
        again = len(copies) > 1
        try:
            load(url, **({"strict": True} if lost and step is None else {}))
        except CkptError as err:
            if lost and step is None and isinstance(err, CorruptError):
                err.hint = f"restore(state, step={number}, strict=False) takes what is left of it"
            # Damage always leads to another copy. A storage error does only if there is another copy of the *same*
            # step: an older step instead of one that is merely out of reach would silently lose training.
            kinds = (CorruptError, *(_NOT_THERE if again else () if step is not None else _GONE))
            if (step is not None and not again) or not _passed_over(url, err, group, timeout, kinds):
                raise
            log.warning("%s is passed over: %s; what the run has beside it is tried next", url, _reason(err))
            tiers.damaged.add(copy_id)
            failed = err
            continue
        if tiers.local is not None:
            log.info("going on from step %d: %s", number, url)
        alike = (other for _, other, other_id, *_ in copies if other_id == copy_id and not is_spread(other))
        return LoadedCopy(number, url, next(alike, None), tuple(Branch(*row) for row in branches))
    if failed is not None:
        raise failed
    return None


def _reason(err: CkptError) -> str:
    """What was wrong with a checkpoint that is passed over."""
    # A load says what has become of the state, for callers that stop there. Here another copy or step is loaded into
    # all of it next; if that fails too, the error that is raised still says it.
    return str(err).replace(f"; {PARTLY_WRITTEN}", "").replace(f"; {UNCHANGED}", "")


def load_origin(origin: BeginFrom, group: Group, timeout: float, load: Callable[..., object]) -> LoadedCopy:
    """Load the checkpoint that a run begins from. The leader finds the step, for all ranks. Collective."""
    call = group.call("restore", origin.location, timeout)
    step: int = call.map_reduce("begin", dict, lambda rows: origin.find_step())
    load(origin.location, **origin.load_options)
    log.info("loaded step %d of %s, to begin from", step, origin.location)
    return LoadedCopy(step, origin.location, origin.location)


def _passed_over(url: str, err: CkptError, group: Group, timeout: float, kinds: tuple[type[CkptError], ...]) -> bool:
    """Whether any rank raised one of these ``kinds``; all ranks come here together, since a load fails on all."""
    # The ranks may fail in different ways: one reads damage, the others hear of it. All of them ask together and take
    # the same way.
    mine = raised(err, *kinds)
    call = group.call("restore", url, timeout)
    return bool(call.map_reduce("damaged", lambda: {"damaged": mine}, lambda rows: any(row["damaged"] for row in rows.values())))
