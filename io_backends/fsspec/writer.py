"""A new object for storage that takes objects only whole: gathered here, in memory or a temporary file, and sent on commit.

Invariant: before ``commit`` the storage has nothing of the object. A killed process may leave a file ``ckpt-*`` where temporary files are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ckpt.io_backends.posix.files import storage_errors, write_all
from ckpt.io_backends.writer_base import WriterBase

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


class GatheringWriter(WriterBase):
    """An object of ``size`` bytes. ``send`` stores it, given as bytes or as a file; ``remove`` takes back what a failed one left."""

    def __init__(self, *, where: str, size: int, send: Callable[[bytes | Path], None], remove: Callable[[], None]) -> None:
        super().__init__(where=where, size=size)
        self._send = send
        self._remove = remove
        self._gathered = _InMemory(size) if size <= IN_MEMORY else _InFile()

    def _put(self, offset: int, views: list[memoryview]) -> None:
        self._gathered.write(offset, views)

    def _make_durable(self) -> None:
        self._send(self._gathered.content)

    def _discard(self, *, tried: bool) -> None:
        if tried:
            self._remove()

    def _close(self) -> None:
        self._gathered.close()
