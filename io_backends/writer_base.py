"""The state of a new object that is being written, for all backends: what ``Writer`` promises about second calls, holes and threads;
and objects that several processes write together."""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from ckpt.errors import AccessError, StorageError, UsageError

from .checks import byte_views
from .posix_files import storage_errors, write_all
from .protocol import Backend, CopySource, PendingUpload, Writer

# Which bytes of an object have been written: exact, so that a hole cannot hide behind bytes that were written twice.


class WrittenRanges:
    """The ranges of ``[0, size)`` that were written so far. Thread-safe.

    The ranges are kept sorted, disjoint and not touching, so that neighbouring writes cost one entry.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        """Note that ``[start, stop)`` was written."""
        if start == stop:
            return
        with self._lock:
            # All ranges that touch or overlap [start, stop) are neighbours in the sorted lists:
            #
            #  ranges    [--a--]   [--b--]  [--c--]      [--d--]
            #  new            [---------------]
            #  result    [-----------------------]       [--d--]
            #
            # ``first`` is the first one that ends at or after ``start``, ``last`` is behind the last one that begins
            # at or before ``stop``.
            first = bisect_left(self._stops, start)
            last = bisect_right(self._starts, stop)
            if first < last:
                start = min(start, self._starts[first])
                stop = max(stop, self._stops[last - 1])
            self._starts[first:last] = [start]
            self._stops[first:last] = [stop]

    @property
    def count(self) -> int:
        """Number of distinct bytes written."""
        with self._lock:
            return sum(self._stops) - sum(self._starts)


# A Writer's life
#
#              commit: all written, no write running           made durable
#       open ─────────────────────────────────────────► failed ────────────► committed
#         │                                               │
#         └───────────────── abort ───────────────────────┴────────────────► aborted
#
# * ``failed`` is the state *while* the object is made durable, and after that did not work: what an fsync or a request that failed has
#   left is unknown, and trying it a second time could succeed falsely. Only ``abort`` is left to do.
# * ``_state`` changes under ``_lock``, and so does ``_busy``, the number of writes that are running. ``commit`` holds the lock until it has
#   ended: no write begins meanwhile, and ``abort`` waits. ``abort`` says first that it waits, so that a commit that tries again and again
#   can give up.
# * ``abort`` does not wait for writes. It takes the name away at once (``_discard``). What the writes use (a descriptor, memory, an upload)
#   is let go of by whoever is last: abort, if no write is running, else the last write (``_close``). So a descriptor is never closed under
#   a write, which would then go to another file of the same number.


class WriterBase(Writer):
    """A Writer whose backend says how bytes are put (``_put``), made durable (``_make_durable``) and forgotten (``_discard``, ``_close``).

    ``where`` names the object in errors; it has ``size`` bytes in the end.
    """

    def __init__(self, *, where: str, size: int) -> None:
        self._where = where
        self._size = size
        self._written = WrittenRanges(size)
        self._lock = threading.Lock()
        self._busy = 0
        self._state: Literal["open", "failed", "committed", "aborted"] = "open"
        self._giving_up = False

    # ---- what a backend implements

    @abstractmethod
    def _put(self, offset: int, views: list[memoryview]) -> None:
        """Hand bytes to the storage, one view after another from ``offset`` on. The range counts as written unless this raises."""

    def _copy(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        """Copy bytes of another object, without reading them; see ``Writer.copy_range``."""
        return False

    @abstractmethod
    def _make_durable(self) -> None:
        """Make the object exist, whole and durable. All bytes were put, and none is being put."""

    @abstractmethod
    def _discard(self, *, tried: bool) -> None:
        """After an abort, at once: take the object's name away. ``tried`` if a commit failed. Writes may still be running."""

    def _close(self) -> None:
        """Let go of descriptors, memory and uploads."""
        # It is the last call, after commit or abort; no write is running or will begin.
        return

    # ---- the port

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        views = byte_views(parts)
        length = sum(view.nbytes for view in views)
        with self._using(offset, length):
            self._put(offset, views)
            self._written.add(offset, offset + length)

    def copy_range(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        with self._using(offset, length):
            copied = self._copy(offset, source, at, length)
            if copied:
                self._written.add(offset, offset + length)
        return copied

    def commit(self) -> None:
        with self._lock:
            self._check_open()
            if self._busy:
                raise UsageError(f"{self._busy} writes are still running", where=self._where, hint="wait for all writes before commit")
            count = self._written.count
            if count != self._size:
                raise StorageError(
                    f"{self._size} bytes were planned, but {count} were written",
                    where=self._where,
                    hint="a write failed or is missing: save again; if no error came before this one, please report it",
                )
            # Set before the attempt: if making it durable raises, the state is right already, and no second commit
            # can succeed on what the first one left.
            self._state = "failed"  # until it did not
            self._make_durable()
            self._state = "committed"
        self._close()

    def abort(self) -> None:
        self._giving_up = True
        with self._lock:
            if self._state in ("committed", "aborted"):
                return
            tried = self._state == "failed"
            self._state = "aborted"
            idle = not self._busy
        if idle:
            self._close()
        self._discard(tried=tried)

    # ---- for backends

    @contextmanager
    def _using(self, offset: int = 0, length: int = 0) -> Iterator[None]:
        """Around everything that uses what ``_close`` lets go of; checks the range that is about to be written."""
        if offset < 0 or offset + length > self._size:
            what = f"bytes [{offset}, {offset + length}) do not lie in an object of {self._size} bytes"
            raise UsageError(what, where=self._where, hint="create it with its final size")
        with self._lock:
            self._check_open()
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                last = self._state == "aborted" and not self._busy
            if last:
                self._close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise UsageError(f"the writer is not open any more: {self._state}", where=self._where, hint="create a new object")


def fill(target: memoryview, offset: int, views: list[memoryview]) -> None:
    """Copy views that go one after another, the first to ``offset``."""
    for view in views:
        target[offset : offset + view.nbytes] = view
        offset += view.nbytes


class GatheringWriter(WriterBase):
    """A new object for storage that takes objects only whole: gathered in memory, or in a ``file`` that is closed in the end, and on commit
    given to ``send``, as bytes or as the path of the file. ``remove`` takes back what a commit that failed has left.

    Before ``commit`` the storage has nothing of the object.
    """

    def __init__(
        self, *, where: str, size: int, send: Callable[[bytes | Path], object], remove: Callable[[], object], file: IO[bytes] | None = None
    ) -> None:
        super().__init__(where=where, size=size)
        self._send, self._remove = send, remove
        self._file = file
        self._memory = bytearray(size if file is None else 0)

    def _put(self, offset: int, views: list[memoryview]) -> None:
        if self._file is None:
            fill(memoryview(self._memory), offset, views)
            return
        with storage_errors(self._file.name, "write a temporary file"):
            write_all(self._file.fileno(), views, offset)

    def _make_durable(self) -> None:
        self._send(bytes(self._memory) if self._file is None else Path(self._file.name))

    def _discard(self, *, tried: bool) -> None:
        if tried:
            self._remove()

    def _close(self) -> None:
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()


# Objects that several processes write together, each its own bytes at their final place, and that one of them makes exist.
#
# A storage that can do it has ``Backend.create_shared``. One process begins the object and tells the others its token; all write and
# ``flush``; the first one completes it with what the flushes gave.
#
# Invariants: nothing shows under the object's name before ``complete``, and then all of it does. Who began an object and dies leaves what
# :func:`left_behind` finds.


class SharedWriter(WriterBase):
    """One process's side of an object that several write."""

    _owned: bool
    """Whether an abort in this process removes the object."""

    def close(self) -> None:
        with self._lock:
            if self._state != "aborted":  # else the last write that is running removes what is left
                self._owned = False
        self.abort()


ASIDE = ".shared"
"""What the name of a shared file ends with until it is published, on file systems."""
_ASIDE_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.shared")


def check_total(written: int, size: int, where: str) -> None:
    """Raise StorageError unless the processes have written every byte."""
    if written != size:
        raise StorageError(f"{size} bytes were planned, but all processes together wrote {written}", where=where, hint="please report this")


def aside_name(path: str, token: str) -> str:
    """The path of a shared file until it is published."""
    head, slash, name = path.rpartition("/")
    return f"{head}{slash}.{name}.{token}{ASIDE}"


def left_behind(backend: Backend, prefix: str = "") -> Iterator[PendingUpload]:
    """What processes that died left of objects directly below the root whose names start with ``prefix``: files aside, and uploads as far
    as we may list them."""
    for name in backend.list_dir():
        match = _ASIDE_NAME.fullmatch(name)
        if match is not None and match["name"].startswith(prefix):
            yield PendingUpload(path=match["name"], started=0.0, token=name)
    with suppress(AccessError):  # a right of its own, which few jobs have been given
        yield from (u for u in backend.pending_uploads(prefix) if "/" not in u.path)


def remove_left(backend: Backend, left: PendingUpload) -> None:
    """Remove what :func:`left_behind` gave."""
    if left.token.endswith(ASIDE):
        backend.delete(left.token)
    else:
        backend.abort_upload(left)
