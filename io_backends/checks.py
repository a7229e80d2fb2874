"""What every backend checks about its arguments, and in the same words: paths, ranges, buffers; and the port of shared objects. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ckpt.errors import CorruptError, UsageError


def check_path(path: str) -> str:
    """Give ``path`` back if it names an object below a root."""
    if not isinstance(path, str):
        raise UsageError(
            f"a path below a root is a str, not {type(path).__name__}", where=str(path), hint="pass a str with / between its parts"
        )
    parts = path.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in path:
        raise UsageError(
            f"{path!r} is not a path below a root", hint="give a relative path without a leading or trailing /, empty parts, '.' and '..'"
        )
    return path


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


def check_write(offset: int, length: int, size: int, where: str) -> None:
    """Check that ``[offset, offset + length)`` lies in an object of ``size`` bytes; raises UsageError if not."""
    if offset < 0 or offset + length > size:
        raise UsageError(
            f"bytes [{offset}, {offset + length}) do not lie in an object of {size} bytes",
            where=where,
            hint="create it with its final size",
        )


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


# The port of an object that several processes write together: ``Backend.create_shared`` gives one (``shared`` says how it is used).


class SharedObject(Protocol):
    """One process's side of an object of known size.

    ============================================  ==========================================================================
    situation                                     required outcome
    ============================================  ==========================================================================
    ``write``                                     as ``Writer.write``; where ``part_size`` is not 0 only whole parts:
                                                  bytes ``[n·part_size, (n+1)·part_size)`` or up to the end, each by one process, once
    ``flush``                                     all that this process wrote is durable; gives JSON for ``complete``
    ``complete``, every byte is in some receipt   the object exists, whole and durable
    ``complete``, some byte is in none            StorageError; nothing shows
    ``complete``, the name is taken               ConflictError, unless ``replace``: then readers see the old or the new
    ``abort``, in the process that began it       nothing of it is left, unless it was published
    ``abort``, in the others; ``close``           this process writes no more
    ============================================  ==========================================================================
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
