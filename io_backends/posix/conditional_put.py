"""Atomic publishing of a small file: written aside and synced, then linked (new) or renamed (replacing) to its name.

Invariants: the name never points at content that is not whole and durable. Whoever compares the old content and renames holds the lock of
the directory, so two replacing publishers cannot both find it. Links and renames are atomic by themselves, on network file systems too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckpt.errors import ConflictError, StorageError

from .files import create_file, current, open_regular, remove_file, sync_directories, write_all

_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FLOCK = {errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCK_SECONDS = 30.0
_LOCK_NAME = ".publish.lock"


def put_if(file: str, root: str, data: bytes, expected: bytes | None) -> None:
    """``Backend.put_if`` for an absolute path; raises OSError and ConflictError."""
    # How a small file appears whole or not at all. Its content is written and synced under a hidden name first:
    #
    #  new         link(hidden, name)                   fails if the name exists: the file system arbitrates
    #  replacing   lock directory, compare, rename      rename alone would replace whatever is there
    #  then        fsync(directory)                     the name itself has to be durable, too
    #
    # A crash leaves at most a hidden file, which ``ckpt gc`` knows as temporary.
    if expected is not None:
        _check_holds(file, expected)  # before anything is written; again under the lock
    directory = os.path.dirname(file)
    aside = os.path.join(directory, f".publish-{secrets.token_hex(8)}.tmp")
    try:
        made = _write_durably(aside, data)
        if expected is None:
            give_name(aside, file)
        else:
            with _locked(directory):
                _check_holds(file, expected)
                rename(aside, file)
    finally:
        remove_file(aside, root)
    sync_directories(directory, root, made)


def _write_durably(aside: str, data: bytes) -> list[str]:
    fd, made = create_file(aside)
    try:
        write_all(fd, [memoryview(data)] if data else [], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    return made


def give_name(aside: str, file: str) -> None:
    """Make ``file`` another name of ``aside``, or take the name over; ConflictError if it is taken."""
    try:
        os.link(aside, file)
    except FileExistsError:
        if os.stat(aside).st_nlink != 2:  # 2: our link was made, but the answer of the file server got lost
            raise _taken(file) from None
    except OSError as err:
        if err.errno not in _NO_LINK:
            raise
        with _locked(os.path.dirname(file)):
            if os.path.lexists(file):
                raise _taken(file) from None
            rename(aside, file)


def rename(aside: str, file: str) -> None:
    """Give the file ``aside`` the name ``file`` instead of its own."""
    ours = os.stat(aside)
    try:
        os.rename(aside, file)
    except OSError as err:
        # The file server may have done it, and its answer got lost: then the name leads to the same file.
        with suppress(OSError):
            fd = current(lambda: open_regular(file))
            try:
                if os.path.samestat(os.fstat(fd), ours):
                    return
            finally:
                os.close(fd)
        raise err


def _taken(file: str) -> ConflictError:
    return ConflictError("cannot publish: the name is taken", where=file, hint="another save was first; use another name, or replace it")


def _check_holds(file: str, expected: bytes) -> None:
    try:
        for _ in range(2):  # what differs is read again past the page cache: the bytes may have been damaged on their way
            fd = current(lambda: open_regular(file))
            with os.fdopen(fd, "rb") as f:
                if f.read(len(expected) + 1) == expected:
                    return
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        state = "it holds something else now"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        state = "it is absent now"
    raise ConflictError(f"cannot replace: {state}", where=file, hint="another save was first; read it again and decide anew")


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the one lock of a directory among all processes.

    ``flock`` leaves nothing behind even after a crash, but some file systems (NFS) refuse it on directories; there a lock file does it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock_file: str | None = None
    try:
        try:
            _wait(lambda: _try_flock(fd), directory)
        except OSError as err:
            if err.errno not in _NO_FLOCK:
                raise
            name = os.path.join(directory, _LOCK_NAME)
            _wait(lambda: _try_lock_file(name), directory)
            lock_file = name
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the descriptor, too, and with it the lock
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        if lock_file is not None:
            with suppress(FileNotFoundError):
                os.unlink(lock_file)


def _wait(attempt: Callable[[], bool], directory: str) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while not attempt():
        if time.monotonic() > deadline:
            raise StorageError(
                f"another process has kept the lock of the directory for {_LOCK_SECONDS:g} s",
                where=directory,
                hint=f"if {_LOCK_NAME} is there, it names that process: once it is gone, remove the file",
            )
        time.sleep(0.01)


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_file(file: str) -> bool:
    try:
        fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(fd, f"{socket.gethostname()} process {os.getpid()}\n".encode())
    except OSError:
        os.unlink(file)
        raise
    finally:
        os.close(fd)
    return True
