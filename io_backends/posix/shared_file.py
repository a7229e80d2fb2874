"""A file that several processes write together: aside under a hidden name, linked or renamed to its own when all of it is durable.

Writes go through the page cache: at a boundary inside of a page two processes write the same page. Kernels that share no cache (clients of
NFS) may then write old bytes back over a neighbour's, so on network file systems every process writes whole parts.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress

from ckpt.errors import StorageError
from ckpt.io_backends.shared import aside_name, check_total

from .conditional_put import give_name, rename
from .files import create_file, storage_errors, sync_directories
from .writer import PosixWriter

PART = 16 << 20
MOUNTS = "/proc/self/mountinfo"
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay")
_CLUSTER = ("lustre", "gpfs", "beegfs", "ocfs2", "gfs2")
COHERENT = frozenset((*_LOCAL, *_CLUSTER))
"""File systems of one kernel, and those of several that keep their caches coherent."""


class PosixSharedObject(PosixWriter):
    """See ``SharedObject``. ``token`` is None in the process that begins it."""

    def __init__(self, *, file: str, root: str, size: int, token: str | None) -> None:
        self._began = token is None
        self._token = token or secrets.token_hex(8)
        self._final = file
        head, name = os.path.split(file)
        aside = os.path.join(head, aside_name(name, self._token))
        with storage_errors(aside, "open the file"):
            fd, made = create_file(aside) if self._began else (_joined(aside), [])
            try:
                if self._began:
                    os.ftruncate(fd, size)
                self.part_size = 0 if _is_coherent(aside) else PART
            except OSError:
                os.close(fd)
                raise
        super().__init__(file=aside, root=root, size=size, fd=fd, made=made, direct="off")

    @property
    def token(self) -> str:
        """With it other processes join."""
        return self._token

    def flush(self) -> int:
        """See ``SharedObject.flush``: the bytes that this process wrote."""
        with self._using(), storage_errors(self._file, "make the file durable"):
            os.fsync(self._fd)
            self._check_linked()
        return self._written.count

    def complete(self, receipts: Sequence[int], *, replace: bool) -> None:
        """See ``SharedObject.complete``."""
        check_total(sum(receipts), self._size, self._final)
        with self._lock, storage_errors(self._final, "publish"):
            self._check_open()
            os.fsync(self._fd)  # its size is this process's
            self._check_linked()
            if replace:
                rename(self._file, self._final)
            else:
                give_name(self._file, self._final)
                with suppress(FileNotFoundError):  # where links are refused it was renamed
                    os.unlink(self._file)
            self._state = "committed"
            sync_directories(os.path.dirname(self._final), self._root, self._made)
        self._close()

    def abort(self) -> None:
        """See ``SharedObject.abort``."""
        if self._began:
            super().abort()
        else:
            self.close()

    def close(self) -> None:
        """See ``SharedObject.close``."""
        with self._lock:
            if self._state in ("committed", "aborted"):
                return
            self._state = "aborted"
            idle = not self._busy
        if idle:
            self._close()


def _joined(aside: str) -> int:
    try:
        return os.open(aside, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StorageError(
            "the file that another process has begun is not there", where=aside, hint="the URL must be on storage that all ranks share"
        ) from None


def _is_coherent(file: str) -> bool:
    """Whether processes that write different bytes of one page both keep theirs."""
    # What is not known counts as no.
    # The file system of a path is that of the mount with the longest matching mount point. What is not in the list is
    # treated as incoherent: whole parts are slower, and never wrong.
    path = os.path.realpath(file)
    kinds: dict[str, str] = {}
    with suppress(OSError), open(MOUNTS) as mounts:
        for line in mounts:
            place, _, kind = line.partition(" - ")
            kinds[_unescaped(place.split()[4])] = kind.split()[0]  # of two mounted at one place the later one is seen
    mount = max((m for m in kinds if path == m or path.startswith(m.rstrip("/") + "/")), key=len, default=None)
    return mount is not None and kinds[mount] in COHERENT


def _unescaped(place: str) -> str:
    """A mount point as the kernel writes it: blanks and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place)
