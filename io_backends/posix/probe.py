"""Does a file system take direct writes, which go past the page cache, and do they pay there? Found out by trying, once per process.

Invariants: a probe that cannot be made, for whatever reason, says no: buffered writes work everywhere. Its files lose their name as soon
as they are open, so that not even a killed process leaves them.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckpt.concurrency.workers import map_tasks

from .files import start_writeback, write_all

log = logging.getLogger("ckpt")

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

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._addresses: list[int | None] = []  # the one answer, once there is one
        self._pays: list[bool] = []

    def addresses(self, directory: str) -> int | None:
        """What addresses of memory must be multiples of to be written directly; None if nothing can be. Tried in ``directory``."""
        with self._lock:
            if not self._addresses:
                self._addresses.append(_or_no(lambda: _try_addresses(directory)))
            return self._addresses[0]

    def pays(self, directory: str) -> bool:
        """Whether direct writes pay. Writes 32 MiB into files without a name in ``directory``, or 64 if the first answer is no."""
        with self._lock:
            if not self._pays:
                self._pays.append(not _in_memory(self._device) and bool(_or_no(lambda: any(_compare(directory) for _ in range(2)))))
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


def file_system(device: int) -> FileSystem:
    """The file system with this ``st_dev``, and what is known about it already."""
    with _known_lock:
        return _known.setdefault(device, FileSystem(device))


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


def _try_addresses(directory: str) -> int | None:
    return next((multiple for multiple in _ADDRESSES if _takes(directory, multiple)), None)


def _takes(directory: str, multiple: int) -> bool:
    """Whether a page and blocks, several at once, are written from memory that begins ``multiple`` bytes after a page; with their bytes."""
    # A block is longer than a page on purpose: FUSE cuts one that does not begin at a page into parts that a disk may
    # refuse, and some file systems tell of that only when the file is synced or closed. Each try has a file of its
    # own, as one that was refused is spoilt.
    try:
        with _nameless_file(directory) as (fd, direct), mmap.mmap(-1, _BLOCK + PAGE) as memory:
            memory[multiple : multiple + _BLOCK] = os.urandom(_BLOCK)
            with (
                memoryview(memory) as memory_view,
                memory_view[multiple : multiple + _BLOCK] as block,
                memory_view[multiple : multiple + PAGE] as page,
            ):
                return _write_several(fd, direct, page, block)
    except OSError as err:
        log.debug("no direct writes from addresses that are multiples of %d: %s", multiple, err)
        return False


def _write_several(fd: int, direct: int, page: memoryview, block: memoryview) -> bool:
    os.ftruncate(fd, (_AT_ONCE + 1) * _BLOCK)
    places = range(_BLOCK, (_AT_ONCE + 1) * _BLOCK, _BLOCK)
    complete = os.pwrite(direct, page, 0) == PAGE
    complete = all(map_tasks(lambda at: os.pwrite(direct, block, at) == _BLOCK, places, _AT_ONCE, "ckpt-probe")) and complete
    os.fdatasync(direct)
    return complete and os.pread(fd, PAGE, 0) == page and all(os.pread(fd, _BLOCK, at) == block for at in places)


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


def _in_memory(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            place, _, kind = line.partition(" - ")
            if place.split()[2] == number and kind.split()[0] in _IN_MEMORY:
                return True
    return False
