"""Direct writes: large parts of a new file go past the page cache, straight from the caller's memory to the device.

Invariant: a direct range begins and ends at a page, and every page with a byte outside of it is written through the cache. So no page is
written both ways at once, as long as callers do not write overlapping ranges at once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ckpt.settings import Direct

from .probe import PAGE, file_system

log = logging.getLogger("ckpt")

LARGE = 1 << 20
"""Parts of at least this many bytes are written directly."""
LARGE_FILE = 64 << 20
"""With ``auto`` smaller files are not worth asking the file system."""
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Run:
    """Views that go one after another to ``offset``, all one way; a direct run has one view."""

    offset: int
    views: list[memoryview]
    direct: bool


def split(offset: int, views: Sequence[memoryview], multiple: int, *, large: int) -> list[Run]:
    """Cut views that go to ``offset`` into direct and buffered runs. Views of ``large`` bytes and more go directly if their pages in the
    file are at addresses that are multiples of ``multiple``.
    """
    runs: list[Run] = []
    pending: list[memoryview] = []
    begin = at = offset
    for view in views:
        stop = at + view.nbytes
        # Only whole pages of the file can go directly. The bytes before and after them are buffered, so every page is
        # written in exactly one way.
        first, last = -(-at // PAGE) * PAGE, stop // PAGE * PAGE
        if view.nbytes >= large and first < last and (_address(view) + first - at) % multiple == 0:
            if first > at:
                pending.append(view[: first - at])
            if pending:
                runs.append(Run(begin, pending, direct=False))
            runs.append(Run(first, [view[first - at : last - at]], direct=True))
            begin, pending = last, [view[last - at :]] if last < stop else []
        else:
            pending.append(view)
        at = stop
    if pending:
        runs.append(Run(begin, pending, direct=False))
    return runs


def _address(view: memoryview) -> int:
    import numpy as np  # late: commands that write nothing start without it

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class DirectFile:
    """The direct way into a new file of ``size`` bytes that is being written through ``fd``; opened by the first part that can take it."""

    def __init__(self, *, file: str, fd: int, size: int, mode: Direct) -> None:
        self._file = file
        self._fd = fd
        self._size = size
        self._mode = mode
        self._lock = threading.Condition()
        self._trial = threading.Lock()
        self._running = 0
        self.refused = False
        self._usable = hasattr(os, "O_DIRECT") and (mode == "on" or (mode == "auto" and size >= LARGE_FILE))
        device = os.fstat(fd).st_dev
        self._system = file_system(device)
        self._late = os.major(device) == 0
        """Whether the file system may tell of a refusal only after the write. That of a disk does not; with others (FUSE, NFS) the first
        run is made durable before the next."""
        self._direct: int | None = None
        self._close: Callable[[], object] | None = None

    def runs(self, offset: int, views: list[memoryview]) -> list[Run]:
        """How to write ``views``, one after another, at ``offset``."""
        buffered = [Run(offset, views, direct=False)] if views else []
        if not self._usable or all(view.nbytes < LARGE for view in views):
            return buffered
        multiple = self._system.addresses(os.path.dirname(self._file))
        if multiple is None:
            if self._mode == "on":
                self._system.refuse(self._file, "tried with a page and larger blocks")
            self._usable = False
            return buffered
        runs = split(offset, views, multiple, large=LARGE)
        return runs if any(run.direct for run in runs) and self._opened() else buffered

    def write(self, view: memoryview, offset: int) -> int:
        """Write a direct run; gives how many bytes were taken: fewer than all if the rest must go through the page cache. After a refusal,
        which ``refused`` tells, nothing may be written to the file before :meth:`retire`."""
        with self._lock:
            if self.refused or self._direct is None:
                return 0
            self._running += 1
        try:
            with self._trial if self._late else nullcontext():
                return 0 if self.refused else self._write(self._direct, view, offset)
        except OSError as err:
            if err.errno not in _REFUSED:
                raise
            self._usable, self.refused = False, True
            self._system.refuse(self._file, f"{view.nbytes} bytes at {offset}: {err.strerror}")
            return 0
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()

    def _write(self, direct: int, view: memoryview, offset: int) -> int:
        done = 0
        while done < view.nbytes and done % PAGE == 0:
            taken = os.pwrite(direct, view[done:], offset + done)
            if taken == 0:
                break
            done += taken
        # Some file systems accept a direct write and refuse it later, when it reaches the server. So the first one is
        # made durable before others follow: a refusal then comes while little is lost.
        if self._late:  # the first run, while the others wait
            os.fdatasync(direct)
            self._late = False
        return done

    def retire(self) -> OSError | None:
        """After a refusal: wait for writes that are running, and close the direct way. Gives the error that this tells of, if any: then
        runs that seemed to be written may be lost."""
        with self._lock:
            self._lock.wait_for(lambda: not self._running)
        try:
            self.close()
        except OSError as err:
            return err
        return None

    def close(self) -> None:
        """Close the direct way. No write may be running. Raises OSError if the file system tells now that an earlier write failed."""
        if self._close is not None:
            self._close()

    def _opened(self) -> bool:
        with self._lock:
            if self._usable and self._direct is None:
                pays = self._mode == "on" or self._system.pays(os.path.dirname(self._file))
                self._usable = pays and self._open()
            return self._usable

    def _open(self) -> bool:
        try:
            direct = os.open(self._file, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as err:
            log.debug("%s: cannot be opened for direct writes: %s", self._file, err)
            return False
        self._close = weakref.finalize(self, os.close, direct)  # closes once, also when the file was dropped
        try:
            if not os.path.samestat(os.fstat(direct), os.fstat(self._fd)):  # somebody removed the file and made another one
                return False
            os.ftruncate(self._fd, self._size)  # direct writes that make a file longer wait for each other
        except OSError as err:
            log.debug("%s: cannot be prepared for direct writes: %s", self._file, err)
            return False
        self._direct = direct
        return True
