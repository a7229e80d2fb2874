"""Objects in the memory of another machine, ``mem://host:port/path``: to read, over TCP, with the secret of its daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpt.errors import AccessError, CorruptError, UsageError
from ckpt.io_backends.checks import byte_view, check_path, check_prefix, check_read, past_end
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta, Writer
from ckpt.memory.client import secret_for
from ckpt.memory.objects import MemoryObject
from ckpt.memory.remote import RemoteMemory, split_host
from ckpt.settings import limits


def is_remote(url: str) -> bool:
    """Whether a URL names the memory of another machine: its first part ends with a port."""
    host, colon, port = url.removeprefix("mem://").partition("/")[0].rpartition(":")
    return bool(host and colon and port.isdigit())


class RemoteMemBackend(Backend):
    """Objects below a prefix, which the daemon of another machine has. They cannot be changed from here."""

    def __init__(self, url: str) -> None:
        if not is_remote(url):
            raise UsageError(f"{url!r} does not name the memory of another machine", hint="write mem://host:port/path")
        self._address, _, root = url.removeprefix("mem://").rstrip("/").partition("/")
        split_host(self._address)
        self._root = check_path(root) if root else ""
        self._memory = RemoteMemory(self._address, secret_for(self._address))

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"mem://{self._address}/{self._root}".rstrip("/")

    @property
    def io_hints(self) -> IOHints:
        """Each call waits for the network once."""
        return IOHints(read_size=4 * limits.MIB, coalesce_gap=256 * limits.KIB, concurrency=4)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}" if self._root else check_path(path)

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

    def size(self, path: str) -> int:
        """See ``Backend.size``."""
        return self._stat(path).size

    def _stat(self, path: str) -> MemoryObject:
        return self._memory.stat(self._key(path))

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``."""
        below = f"{self._root}/" if self._root else ""
        return iter([ObjectMeta(k.path.removeprefix(below), k.size) for k in self._memory.list(below + check_prefix(prefix))])

    def list_dir(self, prefix: str = "") -> list[str]:
        """See ``Backend.list_dir``."""
        directory = check_prefix(prefix).removesuffix("/")
        start = f"{directory}/" if directory else ""
        heads = (entry.path.removeprefix(start).partition("/") for entry in self.list_prefix(start))
        return sorted({name + slash for name, slash, _ in heads})

    def modified(self, path: str) -> float:
        """See ``Backend.modified``; by the clock of that machine."""
        return self._stat(path).modified

    def version_token(self, path: str) -> str:
        """See ``Backend.version_token``."""
        return self._stat(path).version

    def create(self, path: str, size: int) -> Writer:
        """
        Raises:
            AccessError: always.
        """
        raise self._read_only()

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """
        Raises:
            AccessError: always.
        """
        raise self._read_only()

    def delete(self, path: str) -> None:
        """
        Raises:
            AccessError: always.
        """
        raise self._read_only()

    def prepare(self) -> None:
        """
        Raises:
            AccessError: always.
        """
        raise self._read_only()

    def _read_only(self) -> AccessError:
        return AccessError(
            "the memory of another machine is only read",
            where=self.url,
            hint="save to mem:// on that machine, or copy with `ckpt cp` there",
        )
