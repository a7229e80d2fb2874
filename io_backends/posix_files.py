"""The system calls that the POSIX backend is made of: errors mapped, directories made, synced and pruned, small files published.

Invariants: this is the one place where an OSError becomes one of ours. Paths here are absolute. A directory that another process removes
between two calls is made again, because a ``delete`` elsewhere may prune what was made a moment ago.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

from ckpt.errors import AccessError, CkptError, CorruptError, NoSpaceError, NotFoundError, StorageError, UsageError

from .checks import put_conflict

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_PLACE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NAMELESS = getattr(os, "O_TMPFILE", 0)
_NO_NAMELESS = {errno.EISDIR, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOENT}
_KEEP_DIRECTORY = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, *_NO_ACCESS}
_HINTS = {
    errno.ENOENT: "the file system does not allow new files or directories here, or another process removes them: choose another URL",
    errno.ENOTDIR: "a part of the path is a file, not a directory: choose another URL",
    errno.EFBIG: "the file system or a limit (`ulimit -f`) refuses files of this size",
    errno.ENAMETOOLONG: "the file system refuses names of this length: choose a shorter URL",
    errno.ESTALE: "the file server does not know the file any more, although it was opened again and again: check the mount",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device"}
SLICE = 1 << 20
"""Bytes that are hashed right after they were copied, while a cache has them. Shorter ones gain less there than their calls cost."""
_TRIES = 16
_T = TypeVar("_T")
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait


@contextmanager
def storage_errors(where: str, doing: str, *, reading: bool = False) -> Iterator[None]:
    """Turn any OSError of the block into one of ours that names ``where`` and what could not be done.

    Absence is NotFoundError when ``reading``. A write that meets it is no different from other failed writes: StorageError.
    """
    try:
        yield
    except CkptError:  # ours are OSErrors too
        raise
    except UnicodeEncodeError as err:
        raise UsageError(f"cannot {doing}: the name cannot be written: {err}", where=ascii(where), hint="check the URL") from err
    except OSError as err:
        # From Python 3.12 on this generator's frame leads to that of __exit__, which has err: a circle, with the states of all callers.
        err.__traceback__ = err.__traceback__ and err.__traceback__.tb_next
        raise _mapped(err, where, doing, reading=reading) from err


def _mapped(err: OSError, where: str, doing: str, *, reading: bool) -> CkptError:
    """A function of its own: who raises an error that it has a name for makes a circle of the error, its traceback and its frame."""
    code = err.errno or 0
    kind: type[NotFoundError | StorageError] = StorageError
    hint = _HINTS.get(code, "check the mount, and the system log for errors of the device or server")
    if code in _NO_SPACE:
        kind, hint = NoSpaceError, "free some space or raise the quota, or use another file system"
    elif code in _NO_ACCESS:
        kind, hint = AccessError, "check owner and mode of the directories and whether the file system is mounted read-only"
    elif reading and code in _NOT_THERE:
        kind, hint = NotFoundError, "check the URL; `ckpt ls` lists the checkpoints there"
    mapped = kind(f"cannot {doing}: {err.strerror or err}", where=where, hint=hint)
    mapped.errno = code
    return mapped


def regular_size(status: os.stat_result, file: str) -> int:
    """The size of a regular file."""
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if stat.S_ISDIR(status.st_mode):
        raise NotFoundError("cannot read: it is not a file", where=file, hint="check the URL; `ckpt ls` lists the checkpoints there")
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
    raise CorruptError(f"cannot read: it is {kind}, not a file", where=file, hint="nothing was read from it; restore the file from a copy")


def open_regular(file: str) -> int:
    """A descriptor to read a regular file. Never waits, as opening a pipe that nobody writes to would. Errors as :func:`regular_size`."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as err:
        if err.errno == errno.ENXIO:  # what opening a socket gives
            regular_size(os.stat(file), file)
        raise
    try:
        regular_size(os.fstat(fd), file)
    except BaseException:
        os.close(fd)
        raise
    return fd


def current(read: Callable[[], _T]) -> _T:
    """What ``read`` gives, which opens a file by its name. Network file systems answer ESTALE for a file that was replaced after its name
    was looked up: looking it up again finds the new one."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return read()
        except OSError as err:
            if isinstance(err, CkptError) or err.errno != errno.ESTALE or not tries_left:
                raise
    raise AssertionError("unreachable")


def make_directories(directory: str) -> list[str]:
    """Make a directory and its missing parents; gives those that this call made, outermost first."""
    if os.path.isdir(directory):
        return []
    made = []
    parent = os.path.dirname(directory)
    if parent != directory:
        made = make_directories(parent)
    try:
        os.mkdir(directory)
    except FileExistsError:
        if os.path.isdir(directory):
            return made
        code = errno.ENOTDIR if os.path.lexists(directory) else errno.ENOENT  # ENOENT: another process made it and pruned it since
        raise OSError(code, os.strerror(code), directory) from None
    return [*made, directory]


def create_file(file: str) -> tuple[int, list[str]]:
    """Make a file that must not exist, with its parents. Gives its descriptor and the directories that were made."""
    # mkdir and open are two steps, and a ``delete`` of another process may prune the new, still empty directory in
    # between. Then both are done again; the number of tries only guards against a loop without end.
    made: list[str] = []
    for tries_left in reversed(range(_TRIES)):
        try:
            made += make_directories(os.path.dirname(file))
            return os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), made
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def write_all(fd: int, views: list[memoryview], offset: int) -> None:
    """``pwritev`` all bytes of views that are not empty, in as few calls as the system allows."""
    batch = os.sysconf("SC_IOV_MAX")
    first = 0
    while first < len(views):
        done = os.pwritev(fd, views[first : first + batch], offset)
        if done == 0:
            raise OSError(errno.EIO, "the system wrote no byte and gave no reason")
        offset += done
        while first < len(views) and done >= views[first].nbytes:
            done -= views[first].nbytes
            first += 1
        if done:
            views[first] = views[first][done:]


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of this name: Linux has it, Python does not offer it."""
    import ctypes

    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the system begin to move written bytes to the device, so that a later ``fsync`` finds little left to do. Only a hint.

    It does not wait for the device, and leaves its errors for ``fsync`` to report.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, length, _WRITE)


def read_all(fd: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset``; gives the bytes read, fewer only at the end of the file."""
    filled = 0
    while filled < view.nbytes:
        got = os.preadv(fd, [view[filled:]], offset + filled)
        if got == 0:
            break
        filled += got
    return filled


def sync_directories(directory: str, root: str, made: list[str]) -> None:
    """Make the names on the way to a file durable: those in ``directory`` and its parents up to ``root``, and those of all directories
    ``made``.

    Directories below the root are synced even if they were there before: the process that made them may not have come to it.
    """
    chain = [directory]
    while chain[-1] != root:
        chain.append(os.path.dirname(chain[-1]))
    chain += [parent for parent in map(os.path.dirname, reversed(made)) if parent not in chain]
    for name in chain:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as err:
            if err.errno not in _NO_DIRECTORY_SYNC:  # file systems without this call keep names durable by themselves, or cannot at all
                raise
        finally:
            os.close(fd)


def remove_file(file: str, root: str) -> None:
    """Unlink a file if it is there, then the parents that this leaves empty."""
    with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        os.unlink(file)
    prune_empty(os.path.dirname(file), root)


def delete_below(root: str, path: str) -> None:
    """Unlink ``path`` below ``root`` if it is there, then the directories that this leaves empty. No link is followed but ``root`` itself,
    whatever anybody puts in its way meanwhile."""
    *parents, name = path.split("/")
    opened: list[int] = []
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            opened.append(os.open(root, _PLACE))
            for depth, part in enumerate(parents):
                try:
                    opened.append(os.open(part, _PLACE | os.O_NOFOLLOW, dir_fd=opened[-1]))
                except OSError as err:
                    if err.errno not in (errno.ELOOP, errno.ENOTDIR) or not stat.S_ISLNK(os.lstat(part, dir_fd=opened[-1]).st_mode):
                        raise
                    where = os.path.join(root, *parents[: depth + 1])
                    what = f"nothing is removed beyond a symbolic link, and this is one to {os.path.realpath(where)}"
                    hint = "remove the link itself, or what is behind it by its own path"
                    raise StorageError(what, where=where, hint=hint) from None
            with suppress(IsADirectoryError):
                os.unlink(name, dir_fd=opened[-1])
        for depth in reversed(range(1, len(opened))):
            if not _remove_empty(parents[depth - 1], opened[depth - 1]):
                break
    finally:
        for fd in opened:
            os.close(fd)


def _remove_empty(name: str, directory: int | None = None) -> bool:
    """Remove an empty directory; whether to go on with the one above: another process may have removed this one."""
    try:
        os.rmdir(name, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as err:
        if err.errno in _KEEP_DIRECTORY:
            return False
        raise
    return True


MOUNTS = "/proc/self/mountinfo"


def kind_of_file_system(path: str) -> str | None:
    """What the kernel calls it, such as ``ext4``: that of the mount with the longest matching mount point. None if it does not say."""
    path = os.path.realpath(path)
    kinds: dict[str, str] = {}
    with suppress(OSError), open(MOUNTS) as mounts:
        for line in mounts:
            place, _, kind = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place.split()[4])  # blanks and the like in octal
            kinds[point] = kind.split()[0]  # of two mounted at one place the later one is seen
    mount = max((m for m in kinds if path == m or path.startswith(m.rstrip("/") + "/")), key=len, default=None)
    return None if mount is None else kinds[mount]


def clock(directory: str) -> float:
    """The present time as the file system of a directory tells it, in seconds since 1970: that of a file made there for a moment."""
    try:
        fd = os.open(directory, _NAMELESS | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as err:
        if err.errno not in _NO_NAMELESS:
            raise
        name = os.path.join(directory, f".prepare-{secrets.token_hex(8)}.tmp")
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(name)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def prune_empty(directory: str, root: str) -> None:
    """Remove ``directory`` and its parents below ``root`` as far as they are empty; absent ones are skipped."""
    while directory != root and _remove_empty(directory):
        directory = os.path.dirname(directory)


# Atomic publishing of a small file: written aside and synced, then linked (new) or renamed (replacing) to its name.
#
# Invariants: the name never points at content that is not whole and durable. Whoever compares the old content and renames holds the lock of
# the directory, so two replacing publishers cannot both find it. Links and renames are atomic by themselves, on network file systems too.

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
        fd, made = create_file(aside)
        try:
            write_all(fd, [memoryview(data)] if data else [], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        if expected is None:
            give_name(aside, file)
        else:
            with _locked(directory):
                _check_holds(file, expected)
                rename(aside, file)
    finally:
        remove_file(aside, root)
    sync_directories(directory, root, made)


def give_name(aside: str, file: str) -> None:
    """Make ``file`` another name of ``aside``, or take the name over; ConflictError if it is taken."""
    try:
        os.link(aside, file)
    except FileExistsError:
        if os.stat(aside).st_nlink != 2:  # 2: our link was made, but the answer of the file server got lost
            raise put_conflict(file, None) from None
    except OSError as err:
        if err.errno not in _NO_LINK:
            raise
        with _locked(os.path.dirname(file)):
            if os.path.lexists(file):
                raise put_conflict(file, None) from None
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
    raise put_conflict(file, expected, state)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the one lock of a directory among all processes.

    ``flock`` leaves nothing behind even after a crash, but some file systems (NFS) refuse it on directories; there a lock file does it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock_file: str | None = None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
