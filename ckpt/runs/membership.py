"""A Checkpointer that is one member of a run of several jobs (``joint``): what its ranks do together. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ckpt.errors import AccessError, CkptError, ConflictError, CorruptError, NotCommittedError, NotFoundError, UsageError, raised
from ckpt.io_backends.registry import join_url
from ckpt.net.group import Group
from ckpt.policies import KeepPolicy

from .joint import JointRun
from .members import JointOutcome, Member, MemberChanges
from .reporter import Reporter
from .step_listing import Step

log = logging.getLogger("ckpt")

_UNUSABLE = (CorruptError, NotFoundError, NotCommittedError, AccessError)
"""What a member raises where its part of a step cannot be loaded, whoever tries again."""
_POLL = 1.0
"""Seconds between two looks at what the leader asks for."""


class Membership:
    """One rank's end. ``root``: of the whole run; the member's own is ``own_root``."""

    def __init__(self, root: str, member: object, group: Group, timeout: float, keep: KeepPolicy) -> None:
        if not isinstance(member, Member):
            hint = 'member=ckpt.Member("trainer", of=("trainer", "buffer"))'
            raise UsageError(f"member= is a ckpt.Member, not {member!r}", hint=hint)
        self.member, self.members = member.name, tuple(member.of)
        self.root, self.own_root = root, join_url(root, self.member)
        self.reporter: Reporter | None = None
        self._group, self._timeout, self._keep = group, timeout, keep
        self._run = JointRun(root, self.member, self.members, timeout)
        self._asked_at = 0.0
        self._asked: int | None = None
        self._saved = -1
        self._given_up: dict[str, int] = {}
        """Ids of this member's checkpoints that are of no use → their steps."""
        self._tidying = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether this member decides when all save, and what stays."""
        return self.member == self.members[0]

    @property
    def _on_leader(self) -> bool:
        return self._group.rank == self._group.leader

    def steps(self) -> list[Step]:
        """The committed joint steps, the lowest first."""
        return [s for s in self._run.steps() if s.committed and s.members]

    # ---- restoring

    def restore(
        self, load: Callable[[int | None, str | None, str | None], int | None], step: int | None, changes: MemberChanges | None
    ) -> int | None:
        """Load what all members go on from. ``load`` gets the step, and the URL and the id of this member's checkpoint of it: None of a
        step that this member has no part in, and of a run without steps. Collective, and so is ``load``."""
        self._run.start_over()
        self._saved, self._asked, self._given_up = -1, None, {}
        loaded: tuple[int | None, str | None] | None = None
        result: int | None = None
        while True:
            decided: dict[str, Any] = self._call("join", partial(self._join, step, changes))
            number, path, id = decided["step"], decided["path"], decided["id"]
            if loaded != (number, id):
                try:
                    result = load(number, None if path is None else join_url(self.root, path), id)
                except CkptError as err:
                    unusable = raised(err, *_UNUSABLE)
                    if step is not None or number is None or not self._agree(unusable):
                        raise
                    self._call("refuse", partial(self._run.refuse, err.message))
                    loaded = None
                    continue
                loaded = number, id
            if self._call("loaded", self._run.loaded):
                if self._on_leader:
                    self._tidy(None)
                return result if path is not None or number is None else number

    def _join(self, step: int | None, changes: MemberChanges | None) -> dict[str, Any]:
        generation = self._run.join(step, changes)
        checkpoint = generation.checkpoints.get(self.member)
        return {"step": generation.step, "path": checkpoint and checkpoint.path, "id": checkpoint and checkpoint.id}

    # ---- saving

    def begin(self, n: int) -> None:
        self._saved = max(self._saved, n)
        if not self._on_leader:
            return
        self._run.begin(n)

        def ask() -> None:
            try:
                self._run.request(n)
            except CkptError as err:
                log.warning("the other members of %s are not asked to save step %d: %s", self.root, n, err)

        if self.leads:  # training does not wait for it
            threading.Thread(target=ask, name="ckpt-joint", daemon=True).start()

    def check_not_restarted(self) -> None:
        """That this process may replace or publish a checkpoint. If a later process of this member does so after this look, their commits
        conflict."""
        self._run.check_not_restarted()

    def failed(self) -> None:
        if self._on_leader:
            self._run.failed()

    def saved(self, n: int, id: str, nbytes: int) -> None:
        """This member's checkpoint of step ``n`` is committed at its root."""
        if self._on_leader:
            self._run.prepared(n, id, self._group.size, nbytes, partial(self._ended, n, id))

    def wait(self) -> ConflictError | None:
        """Wait for what becomes of the joint steps that this member has saved; gives why the last one does not exist. Collective."""
        outcomes: list[Any] = self._call("joint", lambda: [[o.step, o.given_up] for o in self._run.wait(self._timeout * 1.5)])
        n, given_up = outcomes[-1] if outcomes else (0, None)
        if given_up is None:
            return None
        return ConflictError(f"step {n} was given up: {given_up}", where=self.root, hint="the joint step before it stays")

    def requested(self) -> int | None:
        """The step that the leading member asks this one to save, if it has not saved it yet. Looks at most once a second. Collective."""

        def look() -> int | None:
            if time.monotonic() - self._asked_at >= _POLL:
                self._asked, self._asked_at = self._run.requested(), time.monotonic()
            return self._asked if self._asked is not None and self._asked > self._saved else None

        n: int | None = self._call("requested", look)
        return n

    def _ended(self, n: int, id: str, end: JointOutcome | BaseException) -> None:
        given_up = f"nobody knows whether it exists: {end}" if isinstance(end, BaseException) else end.given_up
        if given_up is not None:
            log.warning("step %d of %s cannot be relied on: %s", n, self.root, given_up)
        if self.reporter is not None:
            self.reporter.tell("save.joint" if given_up is None else "save.given_up", n, None, reason=given_up)
        if isinstance(end, BaseException):
            return  # what it has saved stays: the step may exist
        if given_up is not None:
            self._given_up[id] = n
        else:
            self._tidy(set(self._given_up))
            self._given_up = {id: other for id, other in self._given_up.items() if other > n}

    def _tidy(self, given_up: Collection[str] | None) -> None:
        """Remove what ``keep`` does not keep, and what belongs to no joint step. A failure harms no checkpoint."""
        try:
            with self._tidying:
                if self.leads:
                    self._run.retain(self._keep)
                self._run.sweep(given_up)
        except CkptError as err:
            log.warning("old checkpoints of %s stay for now: %s", self.root, err)

    # ---- ranks

    def _call(self, phase: str, on_leader: Callable[[], Any]) -> Any:
        """What the leading rank does, and what it gives to all."""
        call = self._group.call("joint", self.root, self._timeout)
        return call.map_reduce(phase, dict, lambda rows: call.alive_while(on_leader, 3 * self._timeout))

    def _agree(self, mine: bool) -> bool:  # noqa: FBT001
        call = self._group.call("joint", self.root, self._timeout)
        return bool(call.map_reduce("damaged", lambda: {"mine": mine}, lambda rows: any(row["mine"] for row in rows.values())))
