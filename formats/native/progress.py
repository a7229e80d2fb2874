"""The progress of a save that goes on, beside its index (docs/format.md §1): no part of a checkpoint, and gone before one is committed."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import CorruptError, NotFoundError
from ckpt.telemetry.progress import SaveProgress
from ckpt.text import parse_json

from .paths import PROGRESS, id_of, index_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

SIZE_LIMIT = 16 << 10
"""Bytes that are read; a file has some 3,000 at most, however many ranks there are."""

_HINT = "the save itself does not need it; it goes when the save ends, or with `ckpt gc` if the save was killed"


class ProgressFile:
    """The file of one save while its leader writes it. One thread at a time."""

    def __init__(self, backend: Backend, id: str) -> None:
        self.id = id
        self._backend = backend
        self._path = index_path(id, PROGRESS)
        self._last: bytes | None = None

    def write(self, progress: SaveProgress) -> None:
        """Take the place of what was written before."""
        data = json.dumps(progress.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._backend.put_if(self._path, data, expected=self._last)
        self._last = data

    def remove(self) -> None:
        """Raises StorageError if the storage failed. That nothing is there is no error."""
        self._backend.delete(self._path)


def find_progress(backend: Backend, within: str = "") -> str | None:
    """The path of the progress of the newest save that goes on, or was killed, in the directory ``within`` (empty or ending in a slash)."""
    names = [name for name in backend.list_dir(within.rstrip("/")) if name.endswith("/") and id_of(f"{name}{PROGRESS}")]
    for name in sorted(names, reverse=True):
        if PROGRESS in backend.list_dir(f"{within}{name}".rstrip("/")):
            return f"{within}{name}{PROGRESS}"
    return None


def read_progress(backend: Backend, path: str) -> SaveProgress | None:
    """What ``find_progress`` has found; None if it is gone."""
    where = f"{backend.url.rstrip('/')}/{path}"
    id = path.rpartition("/index-")[2].partition("/")[0] if "/index-" in path else path.removeprefix("index-").partition("/")[0]
    with suppress(NotFoundError):
        data = backend.read_whole(path, SIZE_LIMIT)
        try:
            progress = SaveProgress.from_json(parse_json(data))
            if progress.id != id:
                raise ValueError(f"it is of the save {progress.id!r}")
        except ValueError as err:
            raise CorruptError(f"the file of a save's progress is damaged: {err}", where=where, hint=_HINT) from err
        return progress
    return None
