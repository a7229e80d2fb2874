"""Whoever replaces a checkpoint removes the old files: a reader that still needs them finds them missing, and nothing is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt.catalog import identity
from ckpt.errors import CkptError, ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.io_backends.registry import open_backend

from .catalog import read_record
from .commit import COMMIT_PATH, CommitRecord

if TYPE_CHECKING:
    from ckpt.catalog import Catalog


@contextmanager
def replacement_noticed(catalog: Catalog) -> Iterator[None]:
    """What the block raises because files of the checkpoint are not there, or not what they were, becomes ConflictError if another save has
    replaced the checkpoint since it was opened, or somebody has removed it."""
    try:
        yield
    except (CorruptError, NotFoundError, StorageError) as err:
        replaced = replacement(catalog)
        if replaced is None:
            raise
        raise replaced from err


def replacement(catalog: Catalog) -> ConflictError | None:
    """That a checkpoint was replaced or removed since it was opened; None if it is still there, or nobody can tell."""
    opened = identity(catalog)
    if not opened:
        return None
    backend = open_backend(catalog.url)
    try:
        # Past the caches of this machine: a network file system may show the old record for seconds after it was
        # replaced.
        backend.evict(COMMIT_PATH)
        data = read_record(backend)
        if data is not None and CommitRecord.from_bytes(data, catalog.url).id == opened:
            return None
    except CkptError:  # then the first error says more
        return None
    what = "removed" if data is None else "replaced by another save"
    return ConflictError(f"the checkpoint was {what} while it was read", where=catalog.url, hint="open it again; nothing is damaged")
