"""Files and directories: ``file://`` URLs and plain paths, on local and on network file systems.

Invariants: the root is absolute from the moment of opening, so that a later ``chdir`` changes nothing. Linked files and linked directories
are read through; ``list`` alone does not enter linked directories, because they may lead in a circle.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from typing import TypeVar
from urllib.parse import unquote

from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, NotFoundError, UsageError
from ckpt.settings import direct
from ckpt.text import number_of

from . import posix_files as files
from .checks import byte_view, check_path, check_prefix, check_read, check_size, name_taken, past_end, too_large
from .posix_writer import ClonedFile, PosixSharedObject, PosixWriter
from .protocol import Backend, CopySource, IOHints, ObjectMeta, Writer

_T = TypeVar("_T")
_AT_ONCE, _THREADS = 512, 8
_COARSE = 2_000_000_000
"""Nanoseconds: the times of files are no finer on some file systems."""


class PosixBackend(Backend):
    """A directory of a file system. ``url`` is a plain path (``~`` is expanded) or ``file://`` with an absolute, percent-encoded one."""

    url: str = ""
    """The root as an absolute path."""
    io_hints: IOHints = IOHints()

    def __init__(self, url: str) -> None:
        path = url
        if url.startswith("file:"):
            host, slash, rest = url.removeprefix("file:").removeprefix("//").partition("/")
            if host not in ("", "localhost") or not slash:
                raise UsageError(f"{url!r} names a host, not an absolute path", hint="write file:///absolute/path, or a plain path")
            path = "/" + unquote(rest)
        if not path or "\0" in path:
            raise UsageError(f"{url!r} is not a path of a directory", hint="give the directory of a checkpoint or of a run")
        path = os.path.expanduser(path)
        parts = path.split("/")
        if ".." in parts:
            # ``a/link/..`` is the parent of where the link leads, not ``a``. os.path.normpath would take the text alone, and
            # with that another directory.
            after = len(parts) - parts[::-1].index("..")
            path = os.path.join(os.path.realpath("/".join(parts[:after])), *parts[after:])
        self.url = self._root = "/" + os.path.abspath(path).lstrip("/")  # POSIX lets abspath keep two leading slashes
        self._made = 0
        """How many directories ``prepare`` has made, of the root and those above it: what fails later leaves none of them empty."""

    def _file(self, path: str) -> str:
        return os.path.join(self._root, check_path(path))

    def _reading(self, path: str, read: Callable[[str, int, int], _T]) -> _T:
        """What ``read`` makes of the path, descriptor and size of a file that is opened for it."""
        file = self._file(path)

        def opened() -> _T:
            fd = files.open_regular(file)
            try:
                return read(file, fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)

        with files.storage_errors(file, "read", reading=True):
            return files.current(opened)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_read(offset, length)
        return self._reading(path, lambda file, fd, size: _read(file, fd, size, offset, length))

    def read_whole(self, path: str, limit: int) -> bytes:
        return self._reading(path, lambda file, fd, size: _read(file, fd, size, 0, None, limit))

    def read_start(self, path: str, length: int) -> tuple[bytes, int]:
        """See ``Backend.read_start``. The file is opened once."""
        check_read(0, length)
        return self._reading(path, lambda file, fd, size: (_read(file, fd, size, 0, min(length, size)), size))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        check_read(offset, None)
        view = byte_view(buffer, writable=True)

        def read(file: str, fd: int, size: int) -> None:
            if offset + view.nbytes > size or files.read_all(fd, view, offset) < view.nbytes:
                raise past_end(file, offset, view.nbytes, os.fstat(fd).st_size)

        self._reading(path, read)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        check_read(offset, None)
        view = byte_view(buffer, writable=True)
        done = 0

        def read(file: str, fd: int, size: int) -> None:
            nonlocal done  # a file that was opened again goes on where the one before ended
            if offset + view.nbytes > size:
                raise past_end(file, offset, view.nbytes, size)
            while done < view.nbytes:
                part = view[done : done + files.SLICE]
                got, wanted = os.preadv(fd, (part,), offset + done), len(part)
                if got < wanted and got + files.read_all(fd, part[got:], offset + done + got) < wanted:
                    raise past_end(file, offset, view.nbytes, os.fstat(fd).st_size)
                update(part)
                done += wanted

        self._reading(path, read)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``Backend.evict``: pages of the page cache. Those that are not on the device yet, or mapped by somebody, stay."""
        first = offset // PAGESIZE * PAGESIZE
        count = 0 if length is None else -(-(offset + length) // PAGESIZE) * PAGESIZE - first  # 0: to the end
        with suppress(OSError, CkptError):
            fd = files.open_regular(self._file(path))
            try:
                os.posix_fadvise(fd, first, count, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def size(self, path: str) -> int:
        file = self._file(path)
        with files.storage_errors(file, "get the size", reading=True):
            return files.current(lambda: files.regular_size(os.stat(file), file))

    def version_token(self, path: str) -> str:
        """See ``Backend.version_token``: when the file changed last."""
        file = self._file(path)
        with files.storage_errors(file, "get the time of", reading=True):
            return f"mtime {os.stat(file).st_mtime_ns}"

    def version_tokens(self, directories: Sequence[str], name: str, *, skip: str) -> dict[str, str]:
        """See ``Backend.version_tokens``. Files are opened: of an open file network file systems ask the server, of others their caches."""
        check_path(name)
        files_there = [os.path.join(self._root, directory, name) for directory in directories]
        tokens = map_tasks(_token, files_there, min(_THREADS, -(-len(directories) // _AT_ONCE)), "ckpt-look")
        return {directory: token for directory, token in zip(directories, tokens, strict=True) if token is not None}

    def modified(self, path: str) -> float:
        file = self._file(path)
        with files.storage_errors(file, "get the time", reading=True):
            status = os.stat(file)
            files.regular_size(status, file)
            return status.st_mtime

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        check_prefix(prefix)
        return self._walk(prefix.rpartition("/")[0], prefix)

    def _walk(self, directory: str, prefix: str) -> Iterator[ObjectMeta]:
        for name, entry in _scan(os.path.join(self._root, directory)):
            path = f"{directory}/{name}" if directory else name
            if name.endswith("/"):
                if path.startswith(prefix) and not entry.is_symlink():
                    yield from self._walk(path.removesuffix("/"), prefix)
            elif path.startswith(prefix):
                with suppress(NotFoundError), files.storage_errors(entry.path, "get the size", reading=True):  # deleted since it was listed
                    yield ObjectMeta(path, entry.stat().st_size)

    def list_dir(self, prefix: str = "") -> list[str]:
        return [name for name, _ in _scan(os.path.join(self._root, check_prefix(prefix)))]

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Two callers at once: one gets ConflictError, on every file system that has ``O_EXCL``."""
        file = self._file(path)
        check_size(size, file)
        mode = direct()
        with files.storage_errors(file, "create the file"):
            try:
                fd, made = files.create_file(file)
            except FileExistsError:
                raise name_taken(file) from None
            except OSError:
                files.prune_empty(os.path.dirname(file), self._root)
                raise
        return PosixWriter(file=file, root=self._root, size=size, fd=fd, made=made, direct=mode)

    def copy_source(self, path: str) -> CopySource | None:
        """See ``Backend.copy_source``: file systems that share extents copy by reference."""
        return ClonedFile(self._file(path))

    @property
    def shares_files(self) -> bool:
        return True

    def create_shared(self, path: str, size: int, token: str | None = None) -> PosixSharedObject:
        file = self._file(path)
        check_size(size, file)
        return PosixSharedObject(file=file, root=self._root, size=size, token=token)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        file = self._file(path)
        with files.storage_errors(file, "publish"):
            files.put_if(file, self._root, data, expected)

    def delete(self, path: str) -> None:
        file = self._file(path)
        with files.storage_errors(file, "delete"):
            files.delete_below(self._root, path)
            if self._made:
                with suppress(OSError):
                    files.prune_empty(self._root, self._above())

    def _above(self) -> str:
        """The root, or the directory above what ``prepare`` has made."""
        parts = self._root.split("/")
        return "/".join(parts[: len(parts) - self._made]) or "/"

    def abilities(self) -> str | None:
        """See ``Backend.abilities``: how many directories were made."""
        return str(self._made) if self._made else None

    def assume(self, abilities: str) -> None:
        with suppress(ValueError):
            self._made = min(number_of(abilities), self._root.count("/"))

    def link(self, path: str = "") -> str | None:
        """See ``Backend.link``: the absolute path, with all links resolved."""
        file = self._file(path) if path else self._root
        return os.path.realpath(file) if os.path.islink(file) else None

    def now(self) -> float | None:
        """See ``Backend.now``: the time that the file system gives a new file, which has no name where it can do without."""
        try:
            return files.clock(self._root)
        except OSError:
            return None  # it is only read, or not there

    def prepare(self) -> None:
        """See ``Backend.prepare``. Writes a small file and removes it: only that tells whether the file system takes one."""
        with files.storage_errors(self._root, "prepare the directory"):
            made = files.make_directories(self._root)
            self._made = self._made or len(made)
            probe = os.path.join(self._root, f".prepare-{secrets.token_hex(8)}.tmp")
            try:
                fd, _ = files.create_file(probe)
                try:
                    files.write_all(fd, [memoryview(bytes(4096))], 0)
                finally:
                    os.close(fd)
            except OSError:
                files.remove_file(probe, self._above())
                raise
            files.remove_file(probe, self._root)
            if made:
                files.sync_directories(self._root, self._root, made)


def _token(file: str) -> str | None:
    """What tells this file from one that takes its name later; None if nobody can read it, or it is too young, since times are coarse."""
    try:
        fd = files.open_regular(file)
    except (OSError, CkptError):
        return None
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    # A file that changed within the granularity of its times could change once more and keep them. Its token would
    # then say that nothing has changed, so a young file has none, and is read.
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _COARSE:
        return None
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read(file: str, fd: int, size: int, offset: int, length: int | None, limit: int | None = None) -> bytes:
    if limit is not None and size > limit:
        raise too_large(file, size, limit)
    wanted = max(size - offset, 0) if length is None else length
    if offset + wanted > size:
        raise past_end(file, offset, wanted, size)
    data = os.pread(fd, wanted, offset)
    if len(data) == wanted:
        return data
    rest = bytearray(wanted - len(data))  # one call gives at most 2 GiB
    got = len(data) + files.read_all(fd, memoryview(rest), offset + len(data))
    if got < wanted:
        raise past_end(file, offset, wanted, offset + got)
    return data + rest


def _scan(directory: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Directories (with a trailing ``/``) and regular files in a directory, sorted by name; nothing if it is no directory."""
    # With the slash counted, a walk in this order gives paths in order: ``a.txt`` comes before ``a/b``.
    named = []
    try:
        with files.storage_errors(directory, "list the directory", reading=True), os.scandir(directory) as entries:
            for entry in entries:
                try:
                    if entry.is_dir():
                        named.append((entry.name + "/", entry))
                    elif entry.is_file():
                        named.append((entry.name, entry))
                except OSError as err:
                    if err.errno != errno.ELOOP:  # links that lead to each other have nothing behind them, like those that lead nowhere
                        raise
    except NotFoundError:
        return []
    return sorted(named, key=lambda item: item[0])
