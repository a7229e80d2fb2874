"""Where exceptions of fsspec file systems become ours.

Invariant: nothing else leaves the generic backend. Implementations raise what their client libraries raise, most of which are no OSErrors,
so everything that is not known by its type or its HTTP status arrives as a StorageError that names the original.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import AccessError, CkptError, NoSpaceError, NotFoundError, StorageError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ACCESS_HINT = "check the credentials and rights; fsspec takes them from where the storage's own tools do"
_STATUS_NAMES = ("status", "status_code", "code")


@contextmanager
def fsspec_errors(where: str, doing: str, *, reading: bool = False) -> Iterator[None]:
    """Turn any exception of the block into one of ours that names ``where`` and what could not be done.

    Absence is NotFoundError when ``reading``, and StorageError when writing.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as err:
        raise mapped(err, where, doing, reading=reading) from err


def mapped(err: Exception, where: str, doing: str, *, reading: bool) -> CkptError:
    """Our error for ``err``."""
    message = f"cannot {doing}: {_text(err)}"
    status = _status(err)
    if reading and (isinstance(err, _ABSENT) or status == 404):
        return NotFoundError(message, where=where, hint="check the URL; `ckpt ls` shows what is there")
    if isinstance(err, PermissionError) or status in (401, 403):
        return AccessError(message, where=where, hint=_ACCESS_HINT)
    if isinstance(err, OSError) and err.errno in _NO_SPACE:
        return NoSpaceError(message, where=where, hint="free some space or raise the quota, or use another storage")
    if isinstance(err, NotImplementedError):
        hint = "this kind of storage can perhaps only be read: copy the checkpoint elsewhere with `ckpt cp`"
        return StorageError(f"cannot {doing}: the fsspec file system does not offer it", where=where, hint=hint)
    return StorageError(message, where=where, hint="try again; if it lasts, look whether the storage's own tools can do it")


def _text(err: Exception) -> str:
    text = str(err)
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def _status(err: Exception) -> int | None:
    """The HTTP status that an exception of a client library carries, if any."""
    for holder in (err, getattr(err, "response", None)):
        for name in _STATUS_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
    return None
