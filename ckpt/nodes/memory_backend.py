"""Objects in the memory of this machine, ``memory://path``, as the memory daemon holds them: they outlive the process. And those of another
machine, ``memory://host:port/path``, to read.

Reads copy from the object's own pages. The daemon is asked once for each object, and again only when some object was deleted or replaced
since: it counts these in a page that every client maps.

Invariant: as long as a backend has an object open, the daemon does not use its memory again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import numpy as np

from ckpt.errors import NotFoundError, UsageError
from ckpt.io_backends.checks import check_size, name_taken
from ckpt.io_backends.protocol import Backend, LentMemory, Writer
from ckpt.io_backends.writer_base import WriterBase

from . import memory_client
from .memory_client import Loan, MemoryClient, secret_for
from .memory_connection import MemoryObject, OpenObject
from .memory_remote import ObjectsBackend, RemoteMemoryBackend, is_remote

# A new object in the memory of this machine. Its bytes are put where they stay; those that lie there already are only counted.


class MemoryWriter(WriterBase):
    """An object of the daemon while it is filled."""

    def __init__(self, loan: Loan, path: str) -> None:
        super().__init__(where=f"memory://{path}", size=loan.size)
        self._loan = loan
        self._path = path
        self._data = loan.data
        self._address = int(self._data.ctypes.data)

    def _put(self, offset: int, views: list[memoryview]) -> None:
        for view in views:
            source = np.frombuffer(view, dtype=np.uint8)
            if source.ctypes.data != self._address + offset:  # else whoever writes has put it here himself
                self._loan.open(offset, view.nbytes)
                self._data[offset : offset + view.nbytes] = source
            offset += view.nbytes

    def _make_durable(self) -> None:
        self._loan.put(self._path)

    def _discard(self, *, tried: bool) -> None:
        """Nothing has its name."""

    def _close(self) -> None:
        self._loan.close()


SCHEME = "memory://"


class MemoryBackend(ObjectsBackend):
    """Objects below a prefix, which the daemon of this machine has. It is started by what writes; without it nothing is there to read."""

    def __init__(self, url: str) -> None:
        root = url.removeprefix(SCHEME).rstrip("/")
        if not url.startswith(SCHEME):
            raise UsageError(
                f"{url!r} is not a memory:// URL",
                hint="write memory://runs/a for this machine's memory, memory://host:port/runs/a for another's",
            )
        if root.startswith("/"):
            raise UsageError(
                f"{url!r} has a slash too many", hint=f"write {SCHEME}{root.lstrip('/')}: there is no host, and no root directory"
            )
        super().__init__(root)
        self._lock = threading.Lock()
        self._open: dict[str, OpenObject] = {}
        self._seen: tuple[str, int] = ("", 0)

    # ---- reading

    def _opened(self, path: str) -> OpenObject:
        key = self._key(path)
        daemon = _reached(key)
        changes = daemon.changes()
        with self._lock:
            if self._seen != changes:
                self._open, self._seen = {}, changes
            known = self._open.get(key)
        if known is None:
            known = daemon.get(key)
            with self._lock:
                if self._seen == changes:
                    self._open[key] = known
        return known

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """Ask the daemon again for the object."""
        with self._lock:
            self._open.pop(f"{self._root}/{path}" if self._root else path, None)

    def _stat(self, path: str) -> MemoryObject:
        key = self._key(path)
        return _reached(key).stat(key)

    def _list(self, prefix: str) -> Sequence[MemoryObject]:
        try:
            return memory_client.connect(start=False).list(prefix)
        except NotFoundError:  # no daemon, so nothing
            return ()

    def now(self) -> float:
        return time.time()

    # ---- writing

    def prepare(self) -> None:
        """Start the daemon, if none runs."""
        if not self._root:
            raise UsageError("this URL is all memory of the machine, not a place in it", where=SCHEME, hint="memory://runs/a/step-00000100")
        memory_client.connect()

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Two callers at once: both get a Writer, and the second to commit a ConflictError."""
        key = self._key(path)
        check_size(size, f"{SCHEME}{key}")
        daemon = memory_client.connect()
        _check_free(daemon, key)
        return MemoryWriter(daemon.lend(size), key)

    def lend(self, size: int) -> Loan:
        return memory_client.connect().lend(size)

    def create_in(self, path: str, memory: LentMemory) -> Writer:
        key = self._key(path)
        if not isinstance(memory, Loan):
            raise UsageError("this memory was lent by another storage", where=f"{SCHEME}{key}", hint="please report this")
        _check_free(memory_client.connect(), key)
        return MemoryWriter(memory, key)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        memory_client.connect().put(self._key(path), data, expected=expected)

    def delete(self, path: str) -> None:
        key = self._key(path)
        try:
            memory_client.connect(start=False).delete(key)
        except NotFoundError:  # no daemon, so nothing to delete
            return

    def delete_many(self, paths: Collection[str]) -> None:
        """See ``Backend.delete_many``: no answer of the daemon is worth a thread."""
        for path in paths:
            self.delete(path)


def _reached(key: str) -> MemoryClient:
    try:
        return memory_client.connect(start=False)
    except NotFoundError as err:
        raise NotFoundError(
            f"no such object: {err.message} for {err.where}",
            where=f"{SCHEME}{key}",
            hint="the memory of a machine is lost with its daemon; CKPT_MEMORY_DIR selects the daemon",
        ) from err


def _check_free(daemon: MemoryClient, key: str) -> None:
    try:
        daemon.stat(key)
    except NotFoundError:
        return
    raise name_taken(f"{SCHEME}{key}")


def open_memory(url: str) -> Backend:
    """The backend for a ``memory://`` URL: the memory of this machine, or of the one that it names."""
    if is_remote(url):
        return RemoteMemoryBackend(url, secret_for(url.removeprefix(SCHEME).partition("/")[0]))
    return MemoryBackend(url)
