"""Objects that several processes write together, each its own bytes at their final place, and that one of them makes exist.

A storage that can do it has ``Backend.create_shared``. One process begins the object and tells the others its token; all write and
``flush``; the first one completes it with what the flushes gave.

Invariants: nothing shows under the object's name before ``complete``, and then all of it does. Who began an object and dies leaves what
:func:`left_behind` finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from ckpt.errors import AccessError, StorageError

from .protocol import Backend, PendingUpload

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
