"""The objects of a daemon as files that another machine reads, through the one file server, with the secret of the daemon. No torch."""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckpt import settings
from ckpt.errors import AccessError, CkptError, DeadlineError, StorageError, UsageError
from ckpt.io_backends.checks import byte_view, check_path, check_prefix, check_read, past_end
from ckpt.io_backends.posix_files import read_all
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta, Writer
from ckpt.net.wire import Channel, Either, dial, is_seconds

from .file_server import NodeConnections, NodeServer, OpenRange, RangedFiles, RemoteNode
from .memory_connection import MemoryObject, OpenObject
from .memory_store import MemoryStore

PURPOSE = "memory"
SILENT_SECONDS = 60.0
"""A peer that takes nothing for so long is dropped."""
TIMEOUT = 30.0
"""Seconds in which nothing moves, after which a peer counts as dead."""


class ReadOnlyFiles(Backend):
    """What cannot be changed from another machine."""

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
            hint="save to memory:// on that machine, or copy with `ckpt cp` there",
        )


class ObjectsBackend(Backend):
    """Objects of a daemon of this machine below ``root``."""

    def __init__(self, root: str) -> None:
        self._root = check_path(root) if root else ""

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"memory://{self._root}"

    @property
    def io_hints(self) -> IOHints:
        return IOHints(in_memory=True)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}" if self._root else check_path(path)

    @abstractmethod
    def _stat(self, path: str) -> MemoryObject:
        """What the daemon says of an object. Raises NotFoundError if there is none."""

    @abstractmethod
    def _opened(self, path: str) -> OpenObject:
        """An object, open to be read. Raises NotFoundError if there is none."""

    @abstractmethod
    def _list(self, prefix: str) -> Sequence[MemoryObject]:
        """Objects of the daemon whose path starts with ``prefix``, sorted."""

    def _opened_for(self, path: str, offset: int, length: int | None) -> tuple[OpenObject, int]:
        """An object that has these bytes, and how many they are."""
        check_read(offset, length)
        opened = self._opened(path)
        size = opened.known.size
        wanted = max(size - offset, 0) if length is None else length
        if offset + wanted > size:
            raise past_end(f"memory://{opened.known.path}", offset, wanted, size)
        return opened, wanted

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        opened, wanted = self._opened_for(path, offset, length)
        data = os.pread(opened.file, wanted, offset)
        while len(data) < wanted:  # the system reads 2 GiB at once at most
            data += os.pread(opened.file, wanted - len(data), offset + len(data))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        view = byte_view(buffer, writable=True)
        opened, _ = self._opened_for(path, offset, view.nbytes)
        read_all(opened.file, view, offset)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        opened, length = self._opened_for(path, offset, buffer.nbytes)
        for at in range(0, length, settings.CACHE_BLOCK):
            block = buffer[at : at + settings.CACHE_BLOCK]
            read_all(opened.file, block, offset + at)
            update(block)

    def read_start(self, path: str, length: int) -> tuple[bytes, int]:
        check_read(0, length)
        size = self._opened(path).known.size
        return self.read(path, 0, min(length, size)), size

    def size(self, path: str) -> int:
        return self._stat(path).size

    def modified(self, path: str) -> float:
        """See ``Backend.modified``; by the clock of the daemon's machine."""
        return self._stat(path).modified

    def version_token(self, path: str) -> str:
        return self._stat(path).version

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. The objects are those of the moment of the call."""
        below = f"{self._root}/" if self._root else ""
        return iter([ObjectMeta(known.path.removeprefix(below), known.size) for known in self._list(below + check_prefix(prefix))])


class StoredObjects(ReadOnlyFiles, ObjectsBackend, RangedFiles):
    """What a daemon shows to other machines."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("")
        self._store = store

    def _stat(self, path: str) -> MemoryObject:
        return self._store.stat(self._key(path))

    def _list(self, prefix: str) -> Sequence[MemoryObject]:
        return self._store.list(prefix)

    def _opened(self, path: str) -> OpenObject:
        return OpenObject(*self._store.open(self._key(path)))

    def open_range(self, path: str, offset: int, length: int | None) -> OpenRange:
        opened, wanted = self._opened_for(path, offset, length)
        return OpenRange(os.dup(opened.file), offset, wanted)


def serve_objects(store: MemoryStore, secret: str, port: int = 0) -> NodeServer:
    """Serve the objects of a store. ``port``: where to listen; by default any that is free."""
    about = {"id": store.id, "host": socket.gethostname()}
    most = settings.MIB
    return NodeServer(StoredObjects(store), secret.encode(), SILENT_SECONDS, port=port, purpose=PURPOSE, about=about, most=most)


def split_host(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{address!r} is not the address of a memory daemon", hint="write host:port, as `ckpt memory status --listen` shows it"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


class MemoryConnections(NodeConnections):
    """Connections to the daemon at ``address``; any number of threads may ask at once. They are made when they are needed."""

    answer_of = "answer of a memory daemon"

    def __init__(self, address: str, secret: str, timeout: float = TIMEOUT) -> None:
        super().__init__(f"memory://{address}", [], secret.encode(), timeout, same_network=True)
        self._host, self._port = split_host(address)

    @property
    def who(self) -> str:
        return self.name

    def hello(self) -> tuple[str, str]:
        """The id of the daemon, and the name of its machine."""
        answer = self.answer({"op": "hello"}, {"id": str, "host": str})
        return answer["id"], answer["host"]

    def dial(self) -> Channel:
        try:
            known = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as err:
            raise StorageError(f"the name of the machine is not known here: {err.strerror}", where=self.name, hint="check it") from err
        addresses = list(dict.fromkeys((str(where[0]), self._port) for *_, where in known))
        try:
            return dial(addresses, self._secret, self._timeout, peer="the daemon", purpose=PURPOSE)
        except AccessError as err:
            raise AccessError(
                "the memory daemon of that machine has another secret",
                where=self.name,
                hint="set CKPT_MEMORY_SECRET, the same on all machines, before their daemons start",
            ) from err

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as err:
            raise StorageError(f"the memory daemon does not answer: {err.message}", where=self.name, hint=err.hint) from err
        except CkptError:
            raise
        except (OSError, UnicodeError) as err:  # the latter of a host that no name can be
            hint = "look whether that machine is up; its memory is lost with it"
            raise StorageError(f"the memory daemon is gone: {err}", where=self.name, hint=hint) from err


def is_remote(url: str) -> bool:
    """Whether a URL names the memory of another machine: its first part ends with a port."""
    host, colon, port = url.removeprefix("memory://").partition("/")[0].rpartition(":")
    return bool(host and colon and port.isdecimal())


class RemoteMemoryBackend(ReadOnlyFiles, RemoteNode):
    """Objects below a prefix, which the daemon of another machine has, ``memory://host:port/path``. They cannot be changed from here."""

    def __init__(self, url: str, secret: str) -> None:
        if not is_remote(url):
            raise UsageError(f"{url!r} does not name the memory of another machine", hint="write memory://host:port/path")
        address, _, root = url.removeprefix("memory://").rstrip("/").partition("/")
        super().__init__(MemoryConnections(address, secret), f"{check_path(root)}/" if root else "")

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"{self._connections.name}/{self._prefix}".rstrip("/")

    @property
    def io_hints(self) -> IOHints:
        """Each call waits for the network once."""
        return IOHints(read_size=4 * settings.MIB, coalesce_gap=256 * settings.KIB, concurrency=4)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return super().read(path, offset, max(0, self.size(path) - offset) if length is None else length)

    def modified(self, path: str) -> float | None:
        """See ``Backend.modified``; by the clock of the daemon's machine."""
        answer = self._connections.answer({"op": "modified", "path": self._key(path)}, {"modified": Either(is_seconds, None)})
        moment: float | None = answer["modified"]
        return moment

    def version_token(self, path: str) -> str | None:
        token: str | None = self._connections.answer({"op": "version", "path": self._key(path)}, {"version": Either(str, None)})["version"]
        return token
