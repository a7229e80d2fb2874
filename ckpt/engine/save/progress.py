"""How far a save is, left in its storage for ``ckpt watch`` by a thread of the leader.

Invariants: nothing waits for this thread for longer than ``_JOIN`` seconds, and no save fails of it. It writes nothing before a save has
taken ``FIRST_SIGN`` seconds. The file is gone before the commit, unless the storage hangs; then it goes when the storage answers.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from ckpt.coordination.call import FIRST_SIGN, Call
from ckpt.errors import CkptError
from ckpt.formats.native.clearing import check_no_link
from ckpt.formats.native.commit import new_id
from ckpt.formats.native.progress import ProgressFile
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.tracing.progress import BEGIN, PHASES, WRITE, SaveProgress, Standing, printable_host, sign_interval

log = logging.getLogger("ckpt")

OBJECT_STORE = 5.0
"""Seconds between two notes on object stores, which take money for each."""
_JOIN = 2.0
_UNBEGUN = 5.0
"""Seconds for which ranks may come late before that is noted."""
_ARRIVES = 0.25
"""Seconds that the first signs take at most, as a rule."""
_RESTS = 4
"""Times as long as a note took it rests at least: the storage is busy with the save."""
_FAILURES = 3


class ProgressWriter:
    """The leader's thread of one save. ``id`` is set when the save has one; a save whose ranks do not all come is noted under another.
    ``interval``: see ``settings.progress``."""

    def __init__(self, call: Call, interval: float | None) -> None:
        self.id = ""
        """Empty until the save has one."""
        self._call = call
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-progress", daemon=True)

    def start(self) -> None:
        """Begin to note, unless that is turned off."""
        if self._interval != 0:
            try:
                self._thread.start()
            except RuntimeError as err:  # the system gives no more threads
                log.debug("how far the save %s is is not noted: %s", self._call.url, err)

    def stop(self) -> None:
        """Remove what was noted. Again: nothing happens."""
        if self._thread.ident is not None and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(_JOIN)

    def _run(self) -> None:
        if self._stopped.wait(FIRST_SIGN):
            return
        file: ProgressFile | None = None
        try:
            backend = open_backend(self._call.url)
            interval = self._interval or (OBJECT_STORE if backend.io_hints.coalesce_gap else 1.0)
            notes = _Notes(self._call, max(interval, sign_interval(self._call.group.size)))
            first = interval if self.id else max(interval, _UNBEGUN)
            if self._stopped.wait(max(_ARRIVES, first - FIRST_SIGN)):
                return
            failures, pause = 0, 0.0
            while failures < _FAILURES and not self._stopped.wait(pause):
                began = time.monotonic()
                try:
                    file = self._file(backend, file)
                    file.write(notes.note(file.id, pause or notes.interval))
                    failures = 0
                except CkptError as err:
                    failures += 1
                    log.debug("how far the save %s is cannot be noted: %s", self._call.url, err)
                pause = max(notes.interval, _RESTS * (time.monotonic() - began))
        except BaseException as err:  # noqa: BLE001  nobody needs it: the save goes on
            log.debug("how far the save %s is is not noted any more: %s", self._call.url, err)
        finally:
            if file is not None:
                with suppress(BaseException):
                    file.remove()

    def _file(self, backend: Backend, file: ProgressFile | None) -> ProgressFile:
        if file is None and not self.id:  # whoever has an id has looked
            check_no_link(backend)
        id = self.id or (file.id if file is not None else new_id())
        if file is not None and file.id != id:
            file.remove()
        return file if file is not None and file.id == id else ProgressFile(backend, id)


class _Notes:
    """What the leader notes of one save, again and again."""

    def __init__(self, call: Call, interval: float) -> None:
        self.interval = interval
        self._call = call
        self._began = time.time() - FIRST_SIGN
        self._standing = Standing(call.group.ranks, time.monotonic() - FIRST_SIGN)
        self._count = 0
        self._host = printable_host(socket.gethostname())

    def note(self, id: str, interval: float) -> SaveProgress:
        """How far the save is now. The next note comes after ``interval`` seconds."""
        signs = self._call.awaited()
        now = time.monotonic()
        self._standing.hear({position: sign for position, sign in signs.items() if sign is not None}, now)
        phase = BEGIN if self._call.phase_name == PHASES[BEGIN] else WRITE
        self._count += 1
        return SaveProgress(
            id=id,
            began=self._began,
            at=time.time(),
            count=self._count,
            interval=interval,
            ranks=self._call.group.size,
            phase=PHASES[phase],
            leader=self._call.group.leader,
            host=self._host,
            phases=self._standing.totals(signs, phase),
            awaited=len(signs),
            slowest=self._standing.slowest(signs, phase, now, self.interval),
        )
