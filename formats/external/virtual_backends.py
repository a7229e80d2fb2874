"""Backends that other ones are seen through, all of them only read: one file of a directory, one file more that is in memory. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import AccessError, CorruptError, NotFoundError, UsageError
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta, Writer
from ckpt.io_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Sequence


class SingleFile(Backend):
    """Read-only: the file ``name`` in the directory that ``parent`` is. ``file_url`` is what the user gave.

    Other files of the directory are not listed, but can be read: an index names them.
    """

    def __init__(self, parent: Backend, name: str, file_url: str) -> None:
        self.parent = parent
        self.name = name
        self.file_url = file_url

    @property
    def url(self) -> str:
        """The directory's: paths count from there."""
        return self.parent.url

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.parent.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.parent.read_into(path, offset, buffer)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        self.parent.evict(path, offset, length)

    def size(self, path: str) -> int:
        return self.parent.size(path)

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """The file alone."""
        return iter([ObjectMeta(self.name, self.size(self.name))] if self.name.startswith(prefix) else [])

    def list_dir(self, prefix: str = "") -> list[str]:
        """The file alone."""
        return [] if prefix else [self.name]

    def create(self, path: str, size: int) -> Writer:
        """Refused."""
        self._refuse()

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """Refused."""
        self._refuse()

    def delete(self, path: str) -> None:
        """Refused."""
        self._refuse()

    def prepare(self) -> None:
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError("a file of another format is only read", where=self.file_url, hint="save to a directory")


def open_single(url: str) -> SingleFile | None:
    """The file at ``url``; None if no file is there."""
    head, slash, name = url.rpartition("/")
    if not name or name in (".", "..") or url.endswith("://" + name):
        return None
    parent = open_backend((head or "/") if slash else ".")
    try:
        parent.size(name)
    except NotFoundError:
        return None
    return SingleFile(parent, name, url)


def candidates(backend: Backend, names: Sequence[str], suffixes: tuple[str, ...]) -> list[str]:
    """The names that may be files of a format: those that end like its files, and a single file whatever it is called."""
    return [*names] if isinstance(backend, SingleFile) else [name for name in names if name.endswith(suffixes)]


class ReadOnly(Backend):
    """A storage that refuses every change; ``why`` says what it is."""

    why: str

    def create(self, path: str, size: int) -> Writer:
        """Refused."""
        self._refuse(path)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """Refused."""
        self._refuse(path)

    def delete(self, path: str) -> None:
        """Refused."""
        self._refuse(path)

    def prepare(self) -> None:
        """Refused."""
        self._refuse("")

    def _refuse(self, path: str) -> NoReturn:
        raise AccessError(f"{self.why}: {path}", where=self.url, hint="write to a URL of its own")


class WithFile(ReadOnly):
    """A storage with one file more: what ``inner`` has, and at ``path`` these bytes, which are not listed."""

    why = "a checkpoint that is repaired while it is read is not written to"

    def __init__(self, inner: Backend, path: str, data: bytes) -> None:
        self.inner = inner
        self._path = path
        self._data = data

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def io_hints(self) -> IOHints:
        return self.inner.io_hints

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path != self._path:
            return self.inner.read(path, offset, length)
        stop = len(self._data) if length is None else offset + length
        if not 0 <= offset <= stop <= len(self._data):
            raise CorruptError(f"bytes {offset} to {stop} of {len(self._data)}", where=f"{self.url}/{path}")
        return self._data[offset:stop]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path != self._path:
            self.inner.read_into(path, offset, buffer)
            return
        out = buffer.cast("B")
        out[:] = self.read(path, offset, len(out))

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        if path != self._path:
            self.inner.evict(path, offset, length)

    def size(self, path: str) -> int:
        return len(self._data) if path == self._path else self.inner.size(path)

    def version_token(self, path: str) -> str | None:
        """What tells versions of a file apart: see ``Backend.version_token``."""
        return "in memory" if path == self._path else self.inner.version_token(path)

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return self.inner.list_prefix(prefix)

    def list_dir(self, prefix: str = "") -> list[str]:
        return self.inner.list_dir(prefix)
