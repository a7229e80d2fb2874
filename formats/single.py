"""One file given where a directory is expected: a backend that shows that file alone, as a name of the directory it lies in."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import NotFoundError, UsageError
from ckpt.io_backends.protocol import Backend, Entry, Writer
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
        """See ``Backend.read``."""
        return self.parent.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Backend.read_into``."""
        self.parent.read_into(path, offset, buffer)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``Backend.evict``."""
        self.parent.evict(path, offset, length)

    def size(self, path: str) -> int:
        """See ``Backend.size``."""
        return self.parent.size(path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """The file alone."""
        return iter([Entry(self.name, self.size(self.name))] if self.name.startswith(prefix) else [])

    def children(self, prefix: str = "") -> builtins.list[str]:
        """The file alone."""
        return [] if prefix else [self.name]

    def create(self, path: str, size: int) -> Writer:
        """Refused."""
        self._refuse()

    def publish(self, path: str, data: bytes, *, replaces: bytes | None) -> None:
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


def candidates(backend: Backend, names: Sequence[str], suffixes: tuple[str, ...]) -> builtins.list[str]:
    """The names that may be files of a format: those that end like its files, and a single file whatever it is called."""
    return [*names] if isinstance(backend, SingleFile) else [name for name in names if name.endswith(suffixes)]
