"""What every backend checks about its arguments, and in the same words: paths, ranges, buffers; and bytes that are read
again because they do not fit their digest. No I/O."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ckpt.errors import CkptError, ConflictError, CorruptError, UsageError

_NO_PART = {"", ".", ".."}


def check_path(path: str) -> str:
    """Give ``path`` back if it names an object below a root."""
    if not isinstance(path, str):
        raise UsageError(
            f"a path below a root is a str, not {type(path).__name__}", where=str(path), hint="pass a str with / between its parts"
        )
    parts = path.split("/")
    if not _NO_PART.isdisjoint(parts) or "\0" in path:
        raise UsageError(
            f"{path!r} is not a path below a root", hint="give a relative path without a leading or trailing /, empty parts, '.' and '..'"
        )
    return path


def path_problem(path: str) -> str | None:
    """Why a path of an index cannot be followed, or None. A damaged or hostile index must not lead out of the checkpoint."""
    if "\0" in path or "\\" in path or not _NO_PART.isdisjoint(path.split("/")):
        return f"path {path!r:.200} is not a plain path below the checkpoint"
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError:
            return f"path {path!r:.200} has a lone surrogate and names no file"
    return None


def check_prefix(prefix: str) -> str:
    """Give ``prefix`` back if it is empty or the beginning of a path; a trailing ``/`` is allowed."""
    if prefix != "":
        check_path(prefix.removesuffix("/") if isinstance(prefix, str) else prefix)
    return prefix


def check_read(offset: int, length: int | None) -> None:
    """Check the arguments of a read; raises UsageError for negative ones."""
    if offset < 0 or (length is not None and length < 0):
        raise UsageError(f"cannot read {length} bytes from offset {offset}", hint="offset and length are not negative")


def check_size(size: int, where: str) -> None:
    """Check the planned size of a new object; raises UsageError for a negative one."""
    if size < 0:
        raise UsageError(f"cannot create an object of {size} bytes", where=where, hint="a size is not negative")


def past_end(where: str, offset: int, length: int, size: int) -> CorruptError:
    """The error for a read beyond the end of an object of ``size`` bytes."""
    return CorruptError(
        f"bytes [{offset}, {offset + length}) were wanted, but the file has {size}",
        where=where,
        hint="it was cut off or belongs to another save; `ckpt verify` lists everything that is damaged",
    )


def too_large(where: str, size: int, limit: int) -> CorruptError:
    """The error for an object of more bytes than any that is whole can have."""
    return CorruptError(
        f"the file has {size:,} bytes; at most {limit:,} are read",
        where=where,
        hint="it is damaged, or no file of a checkpoint; `ckpt verify` lists everything that is damaged",
    )


def name_taken(where: str) -> ConflictError:
    """The error of ``create`` where an object has the name."""
    return ConflictError("cannot create: the name is taken", where=where, hint="use a fresh name, or delete the object")


def put_conflict(where: str, expected: bytes | None, state: str = "it is absent or holds something else now") -> ConflictError:
    """The error of ``put_if`` where not ``expected`` is there, but what ``state`` says."""
    if expected is None:
        message, hint = "cannot publish: the name is taken", "another save was first; use another name, or replace it"
    else:
        message, hint = f"cannot replace: {state}", "another save was first; read it again and decide anew"
    return ConflictError(message, where=where, hint=hint)


def byte_view(data: memoryview | bytes, *, writable: bool = False) -> memoryview:
    """A one-dimensional view of the bytes of ``data``, whatever its shape and item size; no copy."""
    try:
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    except TypeError as err:
        raise UsageError(f"not contiguous bytes: {err}", hint="pass bytes or a C-contiguous memoryview of bytes or native numbers") from err
    if writable and view.readonly:
        raise UsageError("cannot read into a read-only buffer", hint="pass a memoryview of a bytearray or of a writable array")
    return flat


def byte_views(parts: Sequence[memoryview | bytes]) -> list[memoryview]:
    """``byte_view`` of every part that is not empty."""
    return [view for view in map(byte_view, parts) if view.nbytes]


# Storage that is asked again: how often, counted for all of the process (what one save has seen is a difference, and what else goes on
# beside it counts too), and the second reading of bytes that do not fit their digest.


class Retries(NamedTuple):
    """Requests that were made again, and those of them where the storage had asked to slow down."""

    again: int = 0
    throttled: int = 0


_lock = threading.Lock()
_NONE = _total = Retries()


def total(before: Retries = _NONE) -> Retries:
    """Since the process began, or since ``before``."""
    return Retries(_total.again - before.again, _total.throttled - before.throttled)


def count(*, throttled: bool) -> None:
    """A request is made again."""
    global _total
    with _lock:
        _total = Retries(_total.again + 1, _total.throttled + throttled)


# Bytes that do not fit their digest, or cannot be parsed, are read again, past caches, before they count as damaged.
#
# A network without checksums of its own, or a failing host, may flip a bit on the way: then the stored bytes are right, and nothing must be
# given up. Every comparison with a digest goes through :func:`read_checked`; its first read is the only one if the bytes are right.

T = TypeVar("T")
log = logging.getLogger("ckpt")

READS = 3
"""How often bytes are read at most. What is the same twice is what is stored."""


class Storage(Protocol):
    """The part of a storage backend that is needed here."""

    @property
    def url(self) -> str: ...

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None: ...


def read_checked(
    storage: Storage,
    path: str,
    read: Callable[[], T],
    *,
    offset: int = 0,
    length: int | None = None,
    faults: tuple[type[CkptError], ...] = (CorruptError,),
) -> T:
    """What ``read`` gives. It reads the bytes from ``offset`` on (``length`` of them, or all) of ``path`` and raises one of ``faults`` if
    they do not fit; then caches of this machine forget these bytes, and it is called again. It may be called ``READS`` times, so it sets
    anew whatever it sets."""
    seen: set[str] = set()
    while True:
        try:
            result = read()
        except faults as err:
            # Damage has a message that names the digest of what was read. The same message twice means that two
            # reads, the second past the caches, gave the same wrong bytes: that is what is stored.
            if err.message in seen or len(seen) == READS - 1:
                raise
            seen.add(err.message)
            storage.evict(path, offset, length)
            continue
        if seen:
            span = "" if length is None else f", bytes {offset} to {offset + length}"
            log.warning(
                "%s/%s%s: read again, and right: %s the first time. The network, a cache or the memory of a machine flips bits",
                storage.url.rstrip("/"),
                path,
                span,
                "; ".join(sorted(seen)),
            )
        return result


def read_alike(storage: Storage, path: str, read: Callable[[], bytes]) -> bytes:
    """Bytes that no digest is known of yet, because one is made of them: what two reads agree about."""
    seen = [read()]
    while len(seen) < READS:
        storage.evict(path)
        data = read()
        if data in seen:
            return data
        seen.append(data)
    raise CorruptError(
        f"{READS} reads gave different bytes each time",
        where=f"{storage.url.rstrip('/')}/{path}",
        hint="the network, a cache or the memory of a machine flips bits: read on another machine",
    )
