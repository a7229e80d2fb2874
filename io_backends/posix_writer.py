"""Writing one new file from any thread, past the page cache where that pays, or as a clone of ranges of another file; ``fsync`` of file and
directories on commit; and a file that several processes write together.

Invariant: a descriptor is closed only when no write uses it. A closed number is given to the next file that is opened, by anybody in the
process, and a late write would go there.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt.concurrency import when_dropped
from ckpt.errors import CkptError, StorageError
from ckpt.settings import Direct

from . import posix_files as files
from .checks import byte_views
from .posix_direct import LARGE_FILE, DirectFile
from .protocol import CopySource
from .writer_base import SharedWriter, WriterBase, aside_name, check_total

# Ranges of files that share their extents with another file (reflinks of XFS, Btrfs, bcachefs, NFS 4.2): a copy that writes nothing.

try:
    import fcntl
except ImportError:  # pragma: no cover  not on this system
    fcntl = None  # type: ignore[assignment]

_CLONE_RANGE = 0x4020940D
"""FICLONERANGE of linux/fs.h."""


@dataclass(frozen=True, slots=True)
class ClonedFile(CopySource):
    """A file that others may share extents with."""

    path: str

    def clone(self, at: int, length: int, target: int, offset: int) -> bool:
        """Let the file of the descriptor ``target`` have, from ``offset`` on, ``length`` bytes of this one from ``at``. False, and nothing
        happened, if the file system does not share extents, the files lie on two of them, or the range does not begin at a block."""
        if fcntl is None or not length:
            return False
        try:
            source = files.open_regular(self.path)
        except (OSError, CkptError):  # whoever reads it then finds out why
            return False
        try:
            fcntl.ioctl(target, _CLONE_RANGE, struct.pack("qQQQ", source, at, length, offset))
        except OSError:  # EOPNOTSUPP, EXDEV, EINVAL and others: each means that the bytes have to be written
            return False
        finally:
            os.close(source)
        return True


_PIECE = 1 << 20
"""The page cache takes large writes in pieces of about this many bytes for the least processor time. Each is then sent on its way to the
device at once."""
_BLOCK = 4 << 20
"""Bytes that are written and hashed by turns until the next thread has its turn."""
_Update = Callable[[memoryview], object]
_OTHERS = "look for another job or a clean-up that works on the same directory"


class PosixWriter(WriterBase):
    """A file below ``root`` that was just created: ``fd`` is its descriptor, ``made`` the directories that were made for it."""

    def __init__(self, *, file: str, root: str, size: int, fd: int, made: list[str], direct: Direct = "auto") -> None:
        super().__init__(where=file, size=size)
        self._file = file
        self._root = root
        self._fd = fd
        self._made = made
        self._status = os.fstat(fd)
        self._closes = [when_dropped(self, os.close, fd)]  # each closes once, also for a Writer that was dropped
        self._direct: DirectFile | None = None
        if hasattr(os, "O_DIRECT") and (direct == "on" or (direct == "auto" and size >= LARGE_FILE)):
            self._direct = DirectFile(file=file, fd=fd, size=size, mode=direct)
        self._turn = threading.Lock()
        self._reopening = threading.Lock()
        self._reopened = False
        self._lost: OSError | None = None

    def write_hashed(self, offset: int, data: memoryview, update: Callable[[memoryview], object]) -> None:
        views = byte_views([data])
        length = sum(view.nbytes for view in views)
        with self._using(offset, length):
            self._put(offset, views, update)
            self._written.add(offset, offset + length)

    @property
    def block_size(self) -> int:
        """See ``Writer.block_size``: what a write costs besides its bytes counts less for longer ones."""
        return _BLOCK

    def _put(self, offset: int, views: list[memoryview], update: _Update | None = None) -> None:
        with files.storage_errors(self._file, f"write {sum(view.nbytes for view in views)} bytes at {offset}"):
            if self._direct is None:
                if views:
                    self._write_buffered(views, offset, update)
                return
            for run in self._direct.runs(offset, views):
                if not run.direct:
                    self._write_buffered(run.views, run.offset, update)
                    continue
                view = run.views[0]
                if update is not None:
                    update(view)  # the device reads the memory itself: nothing of it comes into the cache
                done = self._direct.write(view, run.offset)
                if self._direct.refused:
                    self._reopen(self._direct)
                if done < view.nbytes:
                    self._write_buffered([view[done:]], run.offset + done, None)

    def _copy(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        """See ``Writer.copy_range``: the two files share the bytes on the device, until one of them changes."""
        if not isinstance(source, ClonedFile):
            return False
        with self._turn:
            return source.clone(at, length, self._fd, offset)

    def _write_buffered(self, views: list[memoryview], offset: int, update: _Update | None) -> None:
        for piece in _pieces(views) if update is None else [views]:
            length = sum(view.nbytes for view in piece)
            slices = deque(
                _slices(piece, offset) if update is not None else ()
            )  # what is hashed is taken from these, so that nothing is hashed twice
            for tried in (False, True):
                if self._direct is not None and self._direct.refused:
                    self._reopen(self._direct)
                try:
                    # File systems let one in at a time anyway, and burn the processor of those that wait.
                    with self._turn:
                        fd = self._fd
                        if update is None:
                            files.write_all(fd, list(piece), offset)
                        # Write first, hash second: after the copy into the page cache the slice is in this core's cache, and
                        # hashing it there reads no memory.
                        while update is not None and slices:
                            at, part = slices[0]
                            done = os.pwritev(fd, (part,), at)
                            if done < len(part):
                                files.write_all(fd, [part[done:]], at + done)
                            update(part)
                            slices.popleft()
                    break
                except OSError:  # of another thread's direct write perhaps, which was refused meanwhile
                    if tried or self._direct is None or not self._direct.refused:
                        raise
            if length >= _PIECE:
                files.start_writeback(fd, offset, length)
            offset += length

    # Direct and cached writes go through two descriptors of one file. When the file system refuses a direct write, it may report the error
    # of an earlier one at the next call on the same descriptor, whichever that is. So both are retired: what follows goes through a third,
    # opened anew, whose fsync then tells about this file alone.
    def _reopen(self, refused: DirectFile) -> None:
        """Go on through the page cache alone, after a direct write was refused. The error may belong to an earlier write, and file systems
        keep it for what comes next through the same descriptors: so these are not written to any more."""
        with self._reopening:
            if not self._reopened:
                self._reopened = True
                failed = refused.retire()
                fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
                self._closes.append(when_dropped(self, os.close, fd))
                if not os.path.samestat(os.fstat(fd), self._status):
                    raise StorageError("the file was removed while it was written", where=self._file, hint=_OTHERS)
                with self._turn:
                    self._fd = fd  # the other one stays open until the end: somebody may be using it
                try:
                    os.fsync(fd)
                except OSError as err:
                    failed = err
                self._lost = failed
            if self._lost is not None:
                raise StorageError(
                    f"the file system refused a direct write after it had taken others, which may be lost: {self._lost.strerror}",
                    where=self._file,
                    hint="save again: this process writes through the page cache from now on; CKPT_DIRECT=off does so from the start",
                )

    def _make_durable(self) -> None:
        # After an fsync that failed the pages count as clean: a second one would succeed, and the bytes be lost.
        with files.storage_errors(self._file, "make the file durable"):
            if self._direct is not None:
                self._direct.close()  # tells of direct writes that failed late
            os.fsync(self._fd)
            self._check_linked()
            files.sync_directories(os.path.dirname(self._file), self._root, self._made)

    def _close(self) -> None:
        """Close everything. What fails is no news: either all is durable, or the file is removed."""
        closes: list[Callable[[], object]] = [*self._closes]
        if self._direct is not None:
            closes.insert(0, self._direct.close)
        for close in closes:
            with suppress(OSError):
                close()

    def _check_linked(self) -> None:
        status = os.fstat(self._fd)
        if status.st_nlink == 0 or status.st_size != self._size:
            raise StorageError(
                f"the file was removed or cut while it was written: {status.st_nlink} names, {status.st_size} of {self._size} bytes",
                where=self._file,
                hint=_OTHERS,
            )

    def _discard(self, *, tried: bool) -> None:
        with files.storage_errors(self._file, "remove the unfinished file"):
            if self._is_ours():
                files.remove_file(self._file, self._root)

    def _is_ours(self) -> bool:
        """Whether the name is still that of the file that was created: after somebody removed it, another process may have made its own."""
        try:
            return os.path.samestat(self._status, os.stat(self._file, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return True  # there are only directories to remove


def _pieces(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Cut views that go one after another into groups of at least ``_PIECE`` and less than twice as many bytes; the last may be smaller."""
    if sum(view.nbytes for view in views) < 2 * _PIECE:
        yield views
        return
    group: list[memoryview] = []
    size = 0
    for view in views:
        for at in range(0, view.nbytes, _PIECE):
            group.append(view[at : at + _PIECE])
            size += group[-1].nbytes
            if size >= _PIECE:
                yield group
                group, size = [], 0
    if group:
        yield group


def _slices(views: list[memoryview], offset: int) -> Iterator[tuple[int, memoryview]]:
    """Views that go one after another to ``offset``, in parts of at most ``SLICE`` bytes and where each goes."""
    for view in views:
        for at in range(0, len(view), files.SLICE):
            yield offset + at, view[at : at + files.SLICE]
        offset += len(view)


# A file that several processes write together: aside under a hidden name, linked or renamed to its own when all of it is durable.
#
# Writes go through the page cache: at a boundary inside of a page two processes write the same page. Kernels that share no cache (clients
# of NFS) may then write old bytes back over a neighbour's, so on network file systems every process writes whole parts.

PART = 16 << 20
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay")
_CLUSTER = ("lustre", "gpfs", "beegfs", "ocfs2", "gfs2")
COHERENT = frozenset((*_LOCAL, *_CLUSTER))
"""File systems of one kernel, and those of several that keep their caches coherent: processes that write different bytes of one page both
keep theirs. What is not in the list is taken for one that is not: whole parts are slower, and never wrong."""


class PosixSharedObject(SharedWriter, PosixWriter):
    """See ``SharedObject``. ``token`` is None in the process that begins it."""

    def __init__(self, *, file: str, root: str, size: int, token: str | None) -> None:
        self._owned = token is None
        self._token = token or secrets.token_hex(8)
        self._final = file
        head, name = os.path.split(file)
        aside = os.path.join(head, aside_name(name, self._token))
        with files.storage_errors(aside, "open the file"):
            fd, made = files.create_file(aside) if self._owned else (_joined(aside), [])
            try:
                if self._owned:
                    os.ftruncate(fd, size)
                self.part_size = 0 if files.kind_of_file_system(aside) in COHERENT else PART
            except OSError:
                os.close(fd)
                raise
        super().__init__(file=aside, root=root, size=size, fd=fd, made=made, direct="off")

    @property
    def token(self) -> str:
        return self._token

    def flush(self) -> int:
        """See ``SharedObject.flush``: the bytes that this process wrote."""
        with self._using(), files.storage_errors(self._file, "make the file durable"):
            os.fsync(self._fd)
            self._check_linked()
        return self._written.count

    def complete(self, receipts: Sequence[int], *, replace: bool) -> None:
        check_total(sum(receipts), self._size, self._final)
        with self._lock, files.storage_errors(self._final, "publish"):
            self._check_open()
            os.fsync(self._fd)  # its size is this process's
            self._check_linked()
            if replace:
                files.rename(self._file, self._final)
            else:
                files.give_name(self._file, self._final)
                with suppress(FileNotFoundError):  # where links are refused it was renamed
                    os.unlink(self._file)
            self._state = "committed"
            files.sync_directories(os.path.dirname(self._final), self._root, self._made)
        self._close()

    def _discard(self, *, tried: bool) -> None:
        if self._owned:
            super()._discard(tried=tried)


def _joined(aside: str) -> int:
    try:
        return os.open(aside, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StorageError(
            "the file that another process has begun is not there", where=aside, hint="the URL must be on storage that all ranks share"
        ) from None
