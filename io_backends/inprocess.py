"""Objects in the memory of this process: ``inprocess://name/...``. For tests, and for checkpoints that need not outlive the process.

Invariant: one lock guards the one store; the bytes of an object that is being written belong to its Writer, and only its Writer changes
them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar

from ckpt.errors import NotFoundError, StorageError, UsageError

from .checks import byte_view, check_path, check_prefix, check_read, check_size, name_taken, past_end, put_conflict
from .protocol import Backend, IOHints, ObjectMeta, Writer
from .writer_base import WriterBase, fill


class _Store:
    """Objects by full key, shared by all backends of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, bytes | bytearray] = {}

    def remove(self, key: str, content: bytearray) -> None:
        """Remove an object if it still has this very content."""
        with self.lock:
            if self.objects.get(key) is content:
                del self.objects[key]


class InProcessBackend(Backend):
    """Objects below a prefix of the process-wide store. ``inprocess://a`` and ``inprocess://a/b`` see the same objects by different paths.

    As on a file system, an object shows from ``create`` on, at its full size. There are no directories: they exist as long as an object
    lies in them.
    """

    _store: ClassVar[_Store] = _Store()

    def __init__(self, url: str) -> None:
        root = url.removeprefix("inprocess://").rstrip("/")
        if not url.startswith("inprocess://") or not root:
            raise UsageError(f"{url!r} is not an inprocess URL", hint="write inprocess://name or inprocess://name/path")
        self._root = check_path(root)

    @classmethod
    def reset(cls) -> None:
        """Forget all objects of the process; Writers that are still open then fail to commit."""
        with cls._store.lock:
            cls._store.objects.clear()

    @property
    def url(self) -> str:
        """The root, without a trailing slash."""
        return f"inprocess://{self._root}"

    @property
    def io_hints(self) -> IOHints:
        return IOHints(in_memory=True)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _get(self, key: str) -> bytes | bytearray:
        content = self._store.objects.get(key)
        if content is None:
            raise NotFoundError(
                "no such object",
                where=f"inprocess://{key}",
                hint="check the URL; inprocess:// does not outlive the process, memory:// does",
            )
        return content

    def _range(self, path: str, offset: int, length: int | None) -> memoryview:
        check_read(offset, length)
        key = self._key(path)
        with self._store.lock:
            content = self._get(key)
        wanted = max(len(content) - offset, 0) if length is None else length
        if offset + wanted > len(content):
            raise past_end(f"inprocess://{key}", offset, wanted, len(content))
        return memoryview(content)[offset : offset + wanted]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return bytes(self._range(path, offset, length))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        view = byte_view(buffer, writable=True)
        view[:] = self._range(path, offset, view.nbytes)

    def size(self, path: str) -> int:
        key = self._key(path)
        with self._store.lock:
            return len(self._get(key))

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. The objects are those of the moment of the call."""
        start = f"{self._root}/{check_prefix(prefix)}"
        with self._store.lock:
            entries = [
                ObjectMeta(key.removeprefix(f"{self._root}/"), len(content))
                for key, content in self._store.objects.items()
                if key.startswith(start)
            ]
        return iter(sorted(entries))

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. Two callers at once: one gets ConflictError."""
        key = self._key(path)
        check_size(size, f"inprocess://{key}")
        content = bytearray(size)
        with self._store.lock:
            if key in self._store.objects:
                raise name_taken(f"inprocess://{key}")
            self._store.objects[key] = content
        return InProcessWriter(store=self._store, key=key, content=content)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        key = self._key(path)
        with self._store.lock:
            if self._store.objects.get(key) != expected:
                raise put_conflict(f"inprocess://{key}", expected)
            self._store.objects[key] = bytes(data)

    def delete(self, path: str) -> None:
        key = self._key(path)
        with self._store.lock:
            self._store.objects.pop(key, None)

    def now(self) -> float:
        return time.time()

    def prepare(self) -> None:
        """Does nothing: memory is always ready."""


class InProcessWriter(WriterBase):
    """An object of the store while it is being written."""

    def __init__(self, *, store: _Store, key: str, content: bytearray) -> None:
        super().__init__(where=f"inprocess://{key}", size=len(content))
        self._store = store
        self._key = key
        self._content = content

    def _put(self, offset: int, views: list[memoryview]) -> None:
        fill(memoryview(self._content), offset, views)

    def _make_durable(self) -> None:
        with self._store.lock:
            if self._store.objects.get(self._key) is not self._content:
                raise StorageError("the object was removed while it was written", where=self._where, hint="look for who deletes it")

    def _discard(self, *, tried: bool) -> None:
        self._store.remove(self._key, self._content)
