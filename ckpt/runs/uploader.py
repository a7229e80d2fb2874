"""Publishing: checkpoints of the local tier are copied to the root in the background, each rank its own files, the commit record last.

Every save, every restore and every wait gives each rank one *round*, in the same order. In a round the leader chooses a checkpoint, all
ranks copy, the leader commits, and so on until nothing is left. Ranks talk through the job's store, under keys of their own.
Invariant: a round that fails on one rank ends there; the next one begins anew on all, since calls are numbered by round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from ckpt.engine.copy import Transfer
from ckpt.errors import CkptError, CorruptError, DeadlineError, StorageError, raised
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Group

from .tiers import Tiers

log = logging.getLogger("ckpt")

REST = 0.5
"""Seconds before a publish that failed is tried again, doubled each time."""
LONGEST_REST = 10.0
_CALLS = 1 << 20
"""Calls that one round may have."""


@dataclass(eq=False)
class UploadRound:
    """``after`` ends before it begins; it tries again what fails until the clock says ``until``. ``failed``: step → why it is not
    published; None stands for choosing one."""

    number: int
    after: Future[Any] | None
    until: float
    failed: dict[int | None, BaseException] = field(default_factory=dict)
    tries: int = 0
    over: Future[None] = field(default_factory=Future)


class Uploader:
    """One rank's end."""

    def __init__(self, tiers: Tiers, group: Group, *, timeout: float, threads: int) -> None:
        self.unpublished: tuple[int, ...] = ()
        self.published: Callable[[int, str, str | None], object] = lambda step, url, id: None
        self.failed: Callable[[int | None, BaseException], object] = lambda step, error: None
        """Told on the leader of what was published, and of tries that failed."""
        self.check: Callable[[], None] = lambda: None
        """Raises, on the leader, before files are copied and again right before a commit, if this job may not publish: another process has
        taken its place, or the root is not its own."""
        self._tiers = tiers
        self._group = group.apart()
        self._timeout = timeout
        self._threads = threads
        self._lost: dict[int | None, BaseException] = {}
        """Steps that can never be published, since they are damaged, until somebody is told."""
        self._rounds: deque[UploadRound] = deque()
        self._last: UploadRound | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._transfer: Transfer | None = None

    @property
    def _leads(self) -> bool:
        return self._group.rank == self._group.leader

    # ---- for the Checkpointer

    def add(self, after: Future[Any] | None = None, *, patience: float = 0.0) -> UploadRound:
        """Begin a round when ``after`` has ended, well or not. Every rank does, in the same order. What fails is tried again for
        ``patience`` seconds."""
        with self._lock:
            number = self._last.number + 1 if self._last is not None else 1
            self._last = UploadRound(number, after, time.monotonic() + patience)
            self._rounds.append(self._last)
            if self._thread is None:  # a daemon: a program that ends without close() does not wait, and the next start takes it up
                self._thread = threading.Thread(target=self._work, name="ckpt-publish", daemon=True)
                self._thread.start()
            return self._last

    def finish(self, patience: float) -> StorageError | None:
        """Wait until all is published that is to be; the error if that failed for ``patience`` seconds. Every rank calls it."""
        # Nothing was ever begun on this rank, and so on no rank: rounds are begun by calls that all of them make. Saves
        # into memory begin none, and the end publishes the newest of them.
        if self._last is None and not self._tiers.newest_only:
            return None
        upload_round = self.add(patience=patience)
        upload_round.over.result()
        failed = {**upload_round.failed, **self._lost}
        self._lost.clear()
        if not failed:
            return None
        step, cause = next(iter(failed.items()))
        what = f"step {step} is" if step is not None else "checkpoints are"
        hint = "the next start with the same local= goes on from there and publishes it; or copy it with `ckpt cp`"
        message = f"{what} committed in {self._tiers.local}, but could not be published: {_text(cause)}"
        error = StorageError(message, where=self._tiers.root, hint=hint)
        error.__cause__ = cause
        return error

    def idle(self, seconds: float) -> bool:
        """Whether nothing is going on any more within so many seconds."""
        return self._last is None or bool(wait([self._last.over], seconds).done)

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._rounds:
                    self._thread = None
                    return
                upload_round = self._rounds.popleft()
            if upload_round.after is not None:
                wait([upload_round.after])
            self._group.calls = upload_round.number * _CALLS
            try:
                while self._attempt(upload_round):
                    pass
            finally:
                with self._tiers.lock:
                    self._tiers.busy = None
                upload_round.over.set_result(None)

    def _attempt(self, upload_round: UploadRound) -> bool:
        """Publish one checkpoint; whether to go on."""
        # All ranks go on alike: whether there is something to do, the leader says. Where only the newest counts, a round
        # ends with it: saves at every step would otherwise keep one round going for ever.
        call = self._group.call("publish", self._tiers.root, self._timeout)
        step, id = None, None
        try:
            seen = call.map_reduce("choose", dict, lambda rows: self._unconfirmed(upload_round))
            if seen["gave_up"]:
                call.drain()
                return False
            self.unpublished, step = tuple(seen["steps"]), max(seen["steps"], default=None)
            choice = call.map_reduce("look", dict, lambda rows: self._choose())
            self.unpublished, step, id = tuple(choice["behind"]), choice["step"], choice["id"]
            # what failed and need not be published any more counts no longer
            upload_round.failed = {n: e for n, e in upload_round.failed.items() if n in self.unpublished}
            if step is None:
                call.drain()
                return False
            call.map_reduce("copy", lambda: self._copy(call, choice["name"]), self._commit)
            upload_round.failed.pop(step, None)
            self.unpublished = tuple(n for n in self.unpublished if n != step)
            if self._leads:
                log.info("step %d is published: %s", step, join_url(self._tiers.root, choice["name"]))
                self.published(step, join_url(self._tiers.root, choice["name"]), id)
                self._tiers.retain_in_background(root=True)
        except Exception as err:  # noqa: BLE001  finish() raises it
            if raised(err, CorruptError) and id is not None:
                self._tiers.damaged.add(id)
                self._lost[step] = err
            else:
                upload_round.failed[step] = err
            if self._leads:
                log.warning("%s not published: %s", "checkpoints are" if step is None else f"step {step} is", _text(err))
                self.failed(step, err)
            return not isinstance(err, DeadlineError)
        return not self._tiers.newest_only

    # ---- on the leader

    def _unconfirmed(self, upload_round: UploadRound) -> Row:
        """Local steps that may have to be published; whether to give up after a failure."""
        if upload_round.failed:
            left = upload_round.until - time.monotonic()
            if left <= 0:
                return {"steps": [], "gave_up": True}
            time.sleep(min(REST * 2**upload_round.tries, LONGEST_REST, left))
            upload_round.tries += 1
        return {"steps": [s.number for s in self._tiers.unconfirmed()], "gave_up": False}

    def _choose(self) -> Row:
        """All steps that are to be published, and the one to publish now; it stays where it is meanwhile."""
        behind = self._tiers.behind()  # may take long: no save waits for it
        with self._tiers.lock:
            there = {s.id for s in self._tiers.unconfirmed()}
            behind = [s for s in behind if s.id in there]
            self._tiers.busy = behind[0].id if behind else None
        if not behind:
            return {"behind": [], "step": None, "id": None}
        self.check()
        name = behind[0].url.rstrip("/").rpartition("/")[2]
        open_backend(join_url(self._tiers.root, name)).prepare()
        return {"behind": [s.number for s in reversed(behind)], "step": behind[0].number, "id": behind[0].id, "name": name}

    def _commit(self, rows: dict[int, Row]) -> None:
        assert self._transfer is not None
        self._transfer.made_room = any(row["made_room"] for row in rows.values())
        self.check()
        self._transfer.commit()

    # ---- on every rank

    def _copy(self, call: Call, name: str) -> Row:
        """This rank's share: the data files that it wrote, if as many ranks did as there are now; the leader copies the index, too."""
        assert self._tiers.local is not None
        self._transfer = Transfer(join_url(self._tiers.local, name), join_url(self._tiers.root, name), replace=True)
        size, position = self._group.size, self._group.position
        mine = {f.path for f in self._transfer.files if f.rank % size == position}
        if self._leads:
            mine |= self._transfer.index.keys()
        beat: Callable[[int, int], None] = lambda done, total: call.heartbeat()  # noqa: E731
        self._transfer.copy(mine, self._threads, beat)
        return {"made_room": self._transfer.made_room}


def _text(err: BaseException) -> str:
    return err.message if isinstance(err, CkptError) else f"{type(err).__name__}: {err}"
