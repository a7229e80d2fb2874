"""Direct writes: large parts of a new file go past the page cache, straight from the caller's memory to the device.

Invariant: a direct range begins and ends at a page, and every page with a byte outside of it is written through the cache. So no page is
written both ways at once, as long as callers do not write overlapping ranges at once.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from ckpt.concurrency import map_tasks, when_dropped
from ckpt.settings import Direct

from .posix_files import kind_of_file_system, start_writeback, write_all

# Does a file system take direct writes, which go past the page cache, and do they pay there? Found out by trying, once per process.
#
# Invariants: a probe that cannot be made, for whatever reason, says no: buffered writes work everywhere. Its files lose their name as soon
# as they are open, so that not even a killed process leaves them.

PAGE = max(4096, mmap.PAGESIZE)
"""Direct writes begin and end at multiples of this many bytes in the file, so that no page of the cache is shared with buffered ones."""
_ADDRESSES = (4, 64, 512, PAGE)
"""What memory addresses may have to be multiples of: NVMe takes 4, many other devices want a sector."""
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_BLOCK = 1 << 20
_BLOCKS = 16
_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds on the clock and of the processor, to write the same bytes and make them durable."""

    wall: float
    cpu: float


def pays(direct: Cost, buffered: Cost) -> bool:
    """Direct writes are worth it if they take no more than 1.25 times as long, or at most twice as long for half the processor time."""
    return direct.wall <= 1.25 * buffered.wall or (direct.wall <= 2 * buffered.wall and direct.cpu <= 0.5 * buffered.cpu)


class FileSystem:
    """What one mounted file system makes of direct writes. Each question is answered by trying when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: list[int | None] = []  # the one answer, once there is one
        self._pays: list[bool] = []

    def addresses(self, directory: str) -> int | None:
        """What addresses of memory must be multiples of to be written directly; None if nothing can be. Tried in ``directory``."""
        with self._lock:
            if not self._addresses:
                self._addresses.append(_or_no(lambda: next((multiple for multiple in _ADDRESSES if _takes(directory, multiple)), None)))
            return self._addresses[0]

    def pays(self, directory: str) -> bool:
        """Whether direct writes pay. Writes 32 MiB into files without a name in ``directory``, or 64 if the first answer is no."""
        with self._lock:
            if not self._pays:
                self._pays.append(
                    kind_of_file_system(directory) not in _IN_MEMORY and bool(_or_no(lambda: any(_compare(directory) for _ in range(2))))
                )
            return self._pays[0]

    def refuse(self, where: str, reason: str) -> None:
        """Answer no from now on; says so in the log, once."""
        with self._lock:
            is_reported = self._addresses == [None] and self._pays == [False]
            self._addresses, self._pays = [None], [False]
        if not is_reported:
            log.warning("%s: the file system takes no direct writes (%s); writing through the page cache instead", where, reason)


_known: dict[int, FileSystem] = {}
_known_lock = threading.Lock()
"""What is known about file systems already, by their ``st_dev``."""


def _or_no(probe: Callable[[], int | None]) -> int | None:
    try:
        return probe()
    except OSError as err:
        log.debug("no direct writes: the probe failed: %s", err)
        return None


@contextmanager
def _nameless_file(directory: str) -> Iterator[tuple[int, int]]:
    """A new file without a name: a usual descriptor and one for direct writes."""
    path = os.path.join(directory, f".direct-{secrets.token_hex(8)}.tmp")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
        try:
            yield fd, direct
        finally:
            os.close(direct)
    finally:
        os.close(fd)


def _takes(directory: str, multiple: int) -> bool:
    """Whether a page and blocks, several at once, are written from memory that begins ``multiple`` bytes after a page; with their bytes."""
    # A block is longer than a page on purpose: FUSE cuts one that does not begin at a page into parts that a disk may refuse, and some file
    # systems tell of that only when the file is synced or closed. Each try has a file of its own, as one that was refused is spoilt.
    try:
        with _nameless_file(directory) as (fd, direct), mmap.mmap(-1, _BLOCK + PAGE) as memory:
            memory[multiple : multiple + _BLOCK] = os.urandom(_BLOCK)
            with (
                memoryview(memory) as memory_view,
                memory_view[multiple : multiple + _BLOCK] as block,
                memory_view[multiple : multiple + PAGE] as page,
            ):
                os.ftruncate(fd, (_AT_ONCE + 1) * _BLOCK)
                places = range(_BLOCK, (_AT_ONCE + 1) * _BLOCK, _BLOCK)
                complete = os.pwrite(direct, page, 0) == PAGE
                complete = all(map_tasks(lambda at: os.pwrite(direct, block, at) == _BLOCK, places, _AT_ONCE, "ckpt-probe")) and complete
                os.fdatasync(direct)
                return complete and os.pread(fd, PAGE, 0) == page and all(os.pread(fd, _BLOCK, at) == block for at in places)
    except OSError as err:
        log.debug("no direct writes from addresses that are multiples of %d: %s", multiple, err)
        return False


def _compare(directory: str) -> bool:
    with mmap.mmap(-1, _BLOCK) as memory:
        memory[:] = os.urandom(_BLOCK)
        with memoryview(memory) as block:
            buffered, direct = _cost(directory, block, direct=False), _cost(directory, block, direct=True)
    pay = pays(direct, buffered)
    log.debug("direct writes in %s %s: %s, buffered %s", directory, "pay" if pay else "do not pay", direct, buffered)
    return pay


def _cost(directory: str, block: memoryview, *, direct: bool) -> Cost:
    with _nameless_file(directory) as (buffered_fd, direct_fd):
        wall, cpu = time.perf_counter(), time.thread_time()
        for offset in range(0, _BLOCKS * _BLOCK, _BLOCK):
            write_all(direct_fd if direct else buffered_fd, [block], offset)
            if not direct:
                start_writeback(buffered_fd, offset, _BLOCK)
        os.fdatasync(buffered_fd)
        return Cost(wall=time.perf_counter() - wall, cpu=time.thread_time() - cpu)


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
    file are at addresses that are multiples of ``multiple``."""
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
        self._usable = True
        device = os.fstat(fd).st_dev
        with _known_lock:
            self._system = _known.setdefault(device, FileSystem())
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
        self._close = when_dropped(self, os.close, direct)  # closes once, also when the file was dropped
        try:
            if not os.path.samestat(os.fstat(direct), os.fstat(self._fd)):  # somebody removed the file and made another one
                return False
            os.ftruncate(self._fd, self._size)  # direct writes that make a file longer wait for each other
        except OSError as err:
            log.debug("%s: cannot be prepared for direct writes: %s", self._file, err)
            return False
        self._direct = direct
        return True
