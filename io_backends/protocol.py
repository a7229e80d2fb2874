"""The storage port: what a checkpoint needs from a file system or an object store, as tables that every backend must keep.

A table has a situation on the left and the required outcome on the right. Two rules generate all of them: an operation has its whole effect
or raises, and no operation ever gives or keeps bytes that nobody wrote. Asking for bytes that are not there is an error, never a short
answer; a name that is taken is an error, never an overwrite.

Invariants: paths are ``str``, relative to the backend's root, ``/``-separated, without empty, ``.`` or ``..`` parts; ``check_path`` refuses
others with UsageError. Offsets, lengths and sizes are in bytes. All methods may be called from several threads at once. Errors come from
``ckpt.errors`` only: whatever the storage raises besides the rows below arrives as StorageError (NoSpaceError if it is full, AccessError if
it refuses us). What happens when a path is at once a file and a parent of other files is left open, as object stores allow it and file
systems do not. ``conformance`` tests every row that shows through the port.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ckpt.concurrency import run_tasks
from ckpt.errors import UsageError

from .checks import check_prefix, too_large

_W = TypeVar("_W", bound="Writer")

DELETES = 32
"""Deletes that one call has in flight where each is a request: they wait for a server, not for this machine."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectMeta:
    """A stored object: ``path`` relative to the backend's root, ``size`` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IOHints:
    """How a storage is used best, where that differs from local files. Hints change how fast bytes move, never which bytes."""

    read_size: int = 0
    """Bytes that one call asks for of a long range that is copied into place afterwards."""
    split_read_size: int = 0
    """The same where bytes are read straight into place: the backend splits the call and reads its parts concurrently."""
    coalesce_gap: int = 0
    """Two ranges that are at most this many bytes apart are read as one: another call would take longer."""
    concurrency: int = 0
    """Reads or writes that one process should keep in flight, however few cores it has."""
    single_put_size: int = 0
    """Objects of at most this size are written by one request, so a Writer of one leaves no pending upload."""
    in_memory: bool = False
    """It is memory, and may lend some (``Backend.lend``): to delete takes no time, and the next save needs what that frees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpload:
    """An upload that was neither completed nor aborted: the storage keeps, and bills, its parts, but no listing shows the object."""

    path: str
    started: float
    """Seconds since 1970, by the storage's clock."""
    token: str
    """What the storage calls it, such as the upload id of S3."""


class Writer(Protocol):
    """A new object of known size while it is being written; ``Backend.create`` gives it.

    Until ``commit`` returns nobody may rely on the object: whether it can be listed or read, and with what bytes, depends on the backend.
    A Writer is open, then either committed or aborted. It is a context manager: leaving without ``commit`` aborts.
    """

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        """Write ``parts`` one after another, the first at ``offset``. Any order, any number of threads.

        the parts lie inside ``[0, size)``            all their bytes are handed to the storage before it returns
        no parts, or only empty ones                  nothing happens
        any number of parts, any sizes                one call; the backend splits what the storage limits
        a range that was written before               the new bytes hold, and count once
        two threads, ranges that do not touch         both hold
        two threads, overlapping ranges               open: the caller's mistake
        the parts reach beyond ``size``               UsageError; nothing is written
        a part is not contiguous bytes                UsageError; nothing is written
        the storage takes only some of the bytes      the rest is tried again, until all are taken or the storage raises
        the storage raises                            that error; the range does not count as written and may be written again
        committed or aborted before                   UsageError
        """
        ...

    def write_hashed(self, offset: int, data: memoryview, update: Callable[[memoryview], object]) -> None:
        """``write``, and give all of ``data`` to ``update``, part by part and in order: memory that is hashed right after it was copied
        need not be fetched a second time. What ``update`` got of a write that raises is open."""
        update(data)
        self.write(offset, [data])

    def copy_range(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        """Let the storage itself copy ``length`` bytes from ``at`` of another of its objects to ``offset``, so that nobody reads and sends
        them. Either the range is the whole object, or ``offset`` and ``length`` are multiples of ``block_size``, but for what ends where
        the object ends.

        the storage has copied the bytes              True; the range counts as written
        it cannot, or refuses                         False; the range does not count as written: write all of it, whole blocks
        ``source`` is of another storage or version   False
        the range reaches beyond ``size``             UsageError; nothing is written
        what is copied changes meanwhile              the bytes of ``source`` as it was when it was asked for, or False, or an error
        committed or aborted before                   UsageError
        """
        return False

    def commit(self) -> None:
        """Make the object exist, whole and durable.

        every byte of ``[0, size)`` was written       afterwards every reader sees the object, and a power loss keeps bytes and name
        some byte was not                             StorageError with the planned and the written bytes; it stays open
        size 0                                        an empty object
        a write is still running                      UsageError; it stays open
        somebody removed the object meanwhile         StorageError; only ``abort`` is left to do
        the storage cannot make the bytes durable     that error; only ``abort`` is left to do: a second try could succeed falsely
        committed or aborted before                   UsageError
        """
        ...

    def abort(self) -> None:
        """Forget the object.

        open, or ``commit`` failed                    nothing of it is left, not even directories made for it
        somebody removed the object meanwhile         nothing happens; what somebody else made under its name stays
        aborted before                                nothing happens
        committed before                              nothing happens: the object stays
        a write is running in another thread          that write may end with any error; its bytes reach no other object
        """
        ...

    @property
    def block_size(self) -> int:
        """Bytes that one write has best, from an offset that is a multiple of it: such a write is not copied on its way."""
        return 1 << 20

    def __enter__(self: _W) -> _W:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()  # does nothing after commit


class SharedObject(Protocol):
    """One process's side of an object of known size.

    ``write``                                     as ``Writer.write``; where ``part_size`` is not 0 only whole parts:
                                                  bytes ``[n·part_size, (n+1)·part_size)`` or up to the end, each by one process, once
    ``flush``                                     all that this process wrote is durable; gives JSON for ``complete``
    ``complete``, every byte is in some receipt   the object exists, whole and durable
    ``complete``, some byte is in none            StorageError; nothing shows
    ``complete``, the name is taken               ConflictError, unless ``replace``: then readers see the old or the new
    ``abort``, in the process that began it       nothing of it is left, unless it was published
    ``abort``, in the others; ``close``           this process writes no more
    """

    part_size: int
    """Bytes of which writes have to be made; 0: any ranges."""

    @property
    def token(self) -> str:
        """With it other processes join."""

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None: ...

    def flush(self) -> Any: ...

    def complete(self, receipts: Sequence[Any], *, replace: bool) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class CopySource:
    """An object that Writers of the same storage can copy from (``Writer.copy_range``); ``Backend.copy_source`` gives it."""


class LentMemory(Protocol):
    """Memory of a storage in which the bytes of an object are put before the object has a name; ``Backend.lend`` gives it."""

    @property
    def memory(self) -> memoryview:
        """Its bytes, of just the object's size, to be filled; what they are before is not defined. It begins at a page."""
        ...

    def open(self, start: int, length: int) -> None:
        """Make these bytes writable. Whoever fills them calls this before: a write to others may end the process."""
        ...

    def close(self) -> None:
        """Give it back. Nothing happens if it became an object, or was given back before."""
        ...


class Backend(Protocol):
    """A storage opened at a root: the directory of a checkpoint or of a run."""

    @property
    def url(self) -> str:
        """The root. ``open_backend(url)`` opens the same one, from any directory."""
        ...

    @property
    def io_hints(self) -> IOHints:
        """How the storage is used best."""
        return IOHints()

    @property
    def shares_files(self) -> bool:
        """Whether ``create_shared`` gives objects: several processes can write one, and it can take the place of another."""
        return False

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``, or all from ``offset`` to the end.

        ``[offset, offset + length)`` is inside       these bytes
        ``offset`` is the size, ``length`` 0 or None  ``b""``
        the range reaches beyond the end              CorruptError with path, wanted range and size; never fewer bytes
        ``path`` is absent or a directory             NotFoundError
        ``offset`` or ``length`` is negative          UsageError
        the object is replaced while it is read       bytes of one of the two, or CorruptError; never a mixture
        """
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``. The buffer may have any shape and item size if it is contiguous and writable.

        the range is inside                           every byte of the buffer is set
        an empty buffer, ``offset`` inside or at end  nothing happens
        the range reaches beyond the end              CorruptError with path, wanted range and size; the buffer's content is open
        ``path`` is absent or a directory             NotFoundError
        ``offset`` is negative                        UsageError
        the buffer is read-only or not contiguous     UsageError
        """
        ...

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        """``read_into`` a buffer of bytes, and give all of it to ``update``, part by part and in order: memory that is hashed right after
        it was filled need not be fetched a second time. What ``update`` got of a read that raises is open. Where the object is replaced
        meanwhile, bytes may be of both: ``update`` is there to find that out."""
        self.read_into(path, offset, buffer)
        update(buffer)

    def read_whole(self, path: str, limit: int) -> bytes:
        """All bytes of a small object: no memory is taken for one that has more than ``limit``.

        it has at most ``limit`` bytes                these bytes
        it has more                                   CorruptError with path, size and limit; its bytes are not read
        ``path`` is absent or a directory             NotFoundError
        """
        size = self.size(path)
        if size > limit:
            raise too_large(f"{self.url.rstrip('/')}/{path}", size, limit)
        return self.read(path)

    def read_start(self, path: str, length: int) -> tuple[bytes, int]:
        """The first ``length`` bytes and the size of the object, which one request of an object store tells together.

        it has at least ``length`` bytes              these bytes, and its size
        it has fewer                                  all of its bytes, and its size
        ``path`` is absent or a directory             NotFoundError
        ``length`` is negative                        UsageError
        """
        size = self.size(path)
        return self.read(path, 0, min(length, size)), size

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """Let caches of this machine forget ``length`` bytes of the object from ``offset`` on, or all from there, so that the next read
        comes from the storage. Only a hint: never fails, and where nothing is cached it does nothing."""
        return None  # noqa: RET501  a body, so that backends without caches need none

    def nearby(self, paths: Collection[str]) -> Collection[str] | None:
        """Those of the objects ``paths`` that lie on the machine of this process, as far as that can be seen without reading them; None
        where a read costs the same wherever it is made. Only a hint: never fails."""
        return None

    def size(self, path: str) -> int:
        """Size of the object in bytes.

        ``path`` is an object                         its size
        ``path`` is absent or a directory             NotFoundError
        """
        ...

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """All objects whose path starts with ``prefix``, at any depth, sorted by path (code points).

        ``prefix`` ends inside a name (``data/ab``)   objects ``data/ab``, ``data/abc``, ``data/ab/x``
        ``prefix`` ends with ``/``                    objects below that directory
        nothing matches, or the root is absent        an empty iterator
        directories, other kinds of files             are not given
        objects made or deleted meanwhile             may be given or not; the others are given once
        """
        ...

    def list_dir(self, prefix: str = "") -> list[str]:
        """Names directly below the directory ``prefix``, sorted: directories with a trailing ``/``, objects without.

        ``prefix`` is ``""``                          names directly below the root
        ``prefix`` is ``a/b`` or ``a/b/``             names directly below that directory, without the prefix
        ``prefix`` is absent or an object             ``[]``
        ``prefix`` ends inside a name                 ``[]``: unlike in ``list_prefix``, a directory is meant
        """
        directory = check_prefix(prefix).removesuffix("/")
        start = f"{directory}/" if directory else ""
        heads = (entry.path.removeprefix(start).partition("/") for entry in self.list_prefix(start))
        return sorted({name + slash for name, slash, _ in heads})

    def version_tokens(self, directories: Sequence[str], name: str, *, skip: str) -> dict[str, str] | None:
        """For each of these ``directories`` right below the root that has an object ``name``: a text that is another one after that object
        was replaced.

        None where that is not cheaper than reading them. Paths that contain ``skip``, such as ``/data/``, need not be listed.

        other bytes were published since then         another text, or the directory is left out
        nobody wrote to it                            the same text, unless the directory was left out, as it may be: it counts as new
        the directory has no such object              it is left out
        ``directories`` leaves some out               these may be given or not
        """
        return None

    def create(self, path: str, size: int) -> Writer:
        """Start a new object of ``size`` bytes. Parents are made as needed.

        ``path`` is absent                            an open Writer
        ``path`` is an object                         ConflictError, here or from ``commit``; the object stays as it is
        two callers at once                           at most one commits; a backend that cannot promise this says so
        ``size`` is negative                          UsageError
        """
        ...

    def copy_source(self, path: str) -> CopySource | None:
        """The object, for ``Writer.copy_range``; None where the storage copies nothing by itself. Raises NotFoundError if it is absent."""
        return None

    def lend(self, size: int) -> LentMemory | None:
        """Memory of the storage itself for an object of ``size`` bytes, which ``create_in`` then makes of it without a copy; None where it
        has none. NoSpaceError if it is full."""
        return None

    def create_in(self, path: str, memory: LentMemory) -> Writer:
        """``create`` an object whose bytes are put into ``memory``. Its Writer still is given all bytes; those that lie where they belong
        cost nothing. The Writer's end gives the memory back."""
        raise UsageError("this storage lends no memory", where=f"{self.url}/{path}", hint="please report this")

    def create_shared(self, path: str, size: int, token: str | None = None) -> SharedObject | None:
        """Begin an object of ``size`` bytes that several processes write together, or join the one of this ``token``; None where the
        storage cannot (``SharedObject``). Whether the name is free counts when it is published."""
        return None

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        """Atomically make ``path`` hold ``data`` if it now holds exactly ``expected``, or is absent when that is None: compare and swap,
        for small objects.

        ``expected`` is None, ``path`` is absent      ``path`` holds ``data``; parents are made as needed
        ``expected`` is None, ``path`` is an object   ConflictError, whatever it holds; it stays as it is
        ``path`` holds exactly ``expected``           ``path`` holds ``data``
        ``path`` holds anything else, or is absent    ConflictError; it stays as it is, or absent
        it returned                                   a power loss keeps bytes and name
        a reader, at any moment                       sees the old or the new whole content (or absence); never a part, never a gap
        two callers at once, same ``expected``        exactly one returns, the other gets ConflictError
        it raised                                     no temporary file and no new directory is left
        it raised a StorageError that is no conflict  ``path`` holds the old or the new whole content: read it to know which
        a ``delete`` of the same path at once         either order may win
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object, then the directories that this leaves empty.

        ``path`` is an object                         it is gone, and so are parents without any object or directory in them
        ``path`` is absent                            nothing happens, apart from the same removal of empty parents
        ``path`` is a directory                       nothing happens: only objects are deleted
        ``path`` is a symbolic link                   the link goes; what it leads to stays
        a part of ``path`` before the last is a link  StorageError that names it; nothing goes: what is beyond belongs to others
        the last object below the root                the root itself stays; one that ``prepare`` has just made goes, too
        """
        ...

    def delete_many(self, paths: Collection[str]) -> None:
        """``delete`` all of these, many at once: thousands of files take the time of a few requests, or of as many as threads send.

        each of ``paths``                             what ``delete`` does, in any order
        no paths                                      nothing happens
        any number of paths                           one call; the backend splits what the storage limits
        a path that is given twice                    the same as once
        one cannot be deleted                         that error, in the end; each of the others is gone or as it was
        """
        run_tasks([partial(self.delete, path) for path in paths], DELETES, "ckpt-delete")

    def prepare(self) -> None:
        """Make the root usable for writing, so that a save that cannot succeed fails before it costs anything. Called once before a save.

        the root is absent                            it can be written to; where directories exist it does, and durably
        the root is there                             its content stays as it is, and nothing is added
        writing is refused                            AccessError; what was made goes again
        the storage is full                           NoSpaceError; what was made goes again
        the root cannot be a directory                StorageError
        """
        ...

    def abilities(self) -> str | None:
        """What ``prepare`` found out about the storage, for ``assume`` in other processes of the job: None if there was nothing to find."""
        return None

    def assume(self, abilities: str) -> None:
        """Take what ``abilities`` of another process gave as tried, so that this one need not try. What was tried at another storage, or is
        no such text, is left aside."""
        return None  # noqa: RET501  a body, so that backends that try nothing need none

    def link(self, path: str = "") -> str | None:
        """Where ``path`` (by default the root) leads if it is a symbolic link, as a URL; None if it is none, also where there are no links.

        Links are read through. What removes or replaces asks first: nothing is removed or replaced beyond a link.
        """
        return None

    def now(self) -> float | None:
        """The present time in seconds since 1970, by the clock of the times that ``modified`` and ``pending_uploads`` give.

        None if it cannot be known, and never an error: so says a storage that is only read, or does not answer.
        """
        return None

    def modified(self, path: str) -> float | None:
        """When the object was last written, in seconds since 1970 by the storage's clock; None if the storage keeps no such times.

        Raises NotFoundError where it keeps them and ``path`` is absent or a directory.
        """
        return None

    def version_token(self, path: str) -> str | None:
        """A text that is another one after the object was replaced by one of the same size: an ETag, a version or a time of change; by
        default, when it was last written. None if the storage says nothing of the kind.

        Raises NotFoundError where ``path`` is absent or a directory.
        """
        moment = self.modified(path)
        return None if moment is None else f"modified {moment}"

    def pending_uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """Uploads that writers of dead processes left pending, for paths that start with ``prefix``. Most storages have none."""
        check_prefix(prefix)
        return iter(())

    def abort_upload(self, upload: PendingUpload) -> None:
        """Abort an upload that ``pending_uploads`` gave. If its Writer is alive after all, it then fails. One that is gone is no error."""
        return None  # noqa: RET501  a body, so that backends without uploads need none
