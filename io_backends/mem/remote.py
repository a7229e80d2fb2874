"""Objects in the memory of another machine, ``mem://host:port/path``: to read, over TCP, with the secret of its daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt.errors import AccessError, CorruptError, UsageError
from ckpt.io_backends.checks import byte_view, check_read, past_end
from ckpt.io_backends.protocol import IOHints, Writer
from ckpt.memory.client import secret_for
from ckpt.memory.objects import MemoryObject
from ckpt.memory.remote import RemoteMemory, split_host
from ckpt.settings import limits

from .backend import MemBackend
from .objects import ObjectsBackend


def open_memory(url: str) -> ObjectsBackend:
    """The backend for a ``mem://`` URL: the memory of this machine, or of the one that it names."""
    return RemoteMemBackend(url) if is_remote(url) else MemBackend(url)


def is_remote(url: str) -> bool:
    """Whether a URL names the memory of another machine: its first part ends with a port."""
    host, colon, port = url.removeprefix("mem://").partition("/")[0].rpartition(":")
    return bool(host and colon and port.isdecimal())


class RemoteMemBackend(ObjectsBackend):
    """Objects below a prefix, which the daemon of another machine has. They cannot be changed from here."""

    def __init__(self, url: str) -> None:
        if not is_remote(url):
            raise UsageError(f"{url!r} does not name the memory of another machine", hint="write mem://host:port/path")
        self._address, _, root = url.removeprefix("mem://").rstrip("/").partition("/")
        split_host(self._address)
        super().__init__(root)
        self._memory = RemoteMemory(self._address, secret_for(self._address))

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"mem://{self._address}/{self._root}".rstrip("/")

    @property
    def io_hints(self) -> IOHints:
        """Each call waits for the network once."""
        return IOHints(read_size=4 * limits.MIB, coalesce_gap=256 * limits.KIB, concurrency=4)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """See ``Backend.read``."""
        check_read(offset, length)
        if length is None:
            known = self._stat(path)
            length = max(known.size - offset, 0)
            if offset > known.size:
                raise past_end(f"{self.url}/{path}", offset, length, known.size)
        data = bytearray(length)
        self._fill(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Backend.read_into``."""
        check_read(offset, None)
        self._fill(path, offset, byte_view(buffer, writable=True))

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        """See ``Backend.read_hashed``."""
        check_read(offset, None)
        self._fill(path, offset, buffer, update)

    def _fill(self, path: str, offset: int, view: memoryview, update: Callable[[memoryview], object] = lambda view: None) -> None:
        try:
            self._memory.read_into(self._key(path), offset, view, update)
        except CorruptError:
            raise past_end(f"{self.url}/{path}", offset, len(view), self._stat(path).size) from None

    def _stat(self, path: str) -> MemoryObject:
        return self._memory.stat(self._key(path))

    def _list(self, prefix: str) -> Sequence[MemoryObject]:
        return self._memory.list(prefix)

    def create(self, path: str, size: int) -> Writer:
        raise self._read_only()

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        raise self._read_only()

    def delete(self, path: str) -> None:
        raise self._read_only()

    def prepare(self) -> None:
        raise self._read_only()

    def _read_only(self) -> AccessError:
        return AccessError(
            "the memory of another machine is only read",
            where=self.url,
            hint="save to mem:// on that machine, or copy with `ckpt cp` there",
        )
