"""A new object for storage that takes objects only whole: gathered here, in memory or a temporary file, and sent on commit.

Invariant: before ``commit`` the storage has nothing of the object. A killed process may leave a file ``ckpt-*`` where temporary files are.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from ckpt.errors import UsageError
from ckpt.io_backends.checks import byte_views, check_write
from ckpt.io_backends.posix.files import storage_errors, write_all
from ckpt.io_backends.protocol import Writer
from ckpt.io_backends.written import Written

IN_MEMORY = 8 << 20
"""Bytes. Smaller objects are gathered in memory."""


class _InMemory:
    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size)

    def write(self, offset: int, views: list[memoryview]) -> None:
        target = memoryview(self._bytes)
        for view in views:
            target[offset : offset + view.nbytes] = view
            offset += view.nbytes

    @property
    def content(self) -> bytes:
        return bytes(self._bytes)

    def close(self) -> None:
        self._bytes = bytearray()


class _InFile:
    def __init__(self) -> None:
        with storage_errors(tempfile.gettempdir(), "make a temporary file"):
            self._file: IO[bytes] = tempfile.NamedTemporaryFile(prefix="ckpt-")  # noqa: SIM115  close() removes it

    def write(self, offset: int, views: list[memoryview]) -> None:
        with storage_errors(self._file.name, "write a temporary file"):
            write_all(self._file.fileno(), views, offset)

    @property
    def content(self) -> Path:
        return Path(self._file.name)

    def close(self) -> None:
        self._file.close()


class GatheringWriter(Writer):
    """An object of ``size`` bytes. ``send`` stores it, given as bytes or as a file; ``remove`` takes back what a failed one left."""

    def __init__(self, *, where: str, size: int, send: Callable[[bytes | Path], None], remove: Callable[[], None]) -> None:
        self._where = where
        self._size = size
        self._send = send
        self._remove = remove
        self._kept = _InMemory(size) if size <= IN_MEMORY else _InFile()
        self._written = Written(size)
        self._lock = threading.Lock()
        self._busy = 0
        self._state: Literal["open", "failed", "committed", "aborted"] = "open"

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        """See ``Writer.write``."""
        views = byte_views(parts)
        length = sum(view.nbytes for view in views)
        check_write(offset, length, self._size, self._where)
        with self._using():
            self._kept.write(offset, views)
        self._written.add(offset, offset + length)

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if self._state == "aborted" and not self._busy:
                    self._kept.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"the writer is not open any more: {self._state}", where=self._where, hint="create a new object")

    def commit(self) -> None:
        """See ``Writer.commit``."""
        with self._lock:
            self._check_open()
            if self._busy:
                raise UsageError(f"{self._busy} writes are still running", where=self._where, hint="wait for all writes before commit")
            self._written.check(self._where)
            self._state = "failed"  # until it did not
            self._send(self._kept.content)
            self._state = "committed"
            self._kept.close()

    def abort(self) -> None:
        """See ``Writer.abort``."""
        with self._lock:
            sent = self._state == "failed"
            if self._state in ("committed", "aborted"):
                return
            self._state = "aborted"
            if not self._busy:
                self._kept.close()
        if sent:
            self._remove()
