"""The log of a run: saves that failed and loads, the newest few (docs/format.md §1). No checkpoint needs it.

It is one small file in the directory of the run, replaced as a whole. Its bytes are bounded whatever happens: so many entries of each kind,
texts of bounded length, phases of few ranks. And the progress of a save that goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpt.errors import ConflictError, CorruptError, NotFoundError
from ckpt.telemetry.progress import SaveProgress
from ckpt.telemetry.spans import SpanTable
from ckpt.text import number_of, parse_json, parse_object, printable

from .paths import PROGRESS, id_of, index_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


PATH = "ckpt-log.json"
VERSION = 1
NEWEST = 20
"""Entries of each kind that are kept."""
SIZE_LIMIT = 4 << 20
"""Bytes that are read; 40 entries have a tenth of it."""
RANKS = 64
"""Ranks of a load whose phases are kept: the leader and the slowest."""
_TEXT = 1000
_NAMED = 64
_TRIES = 3
_HINT = "no checkpoint needs it: it says only what failed and was loaded here; remove it to begin a new one"


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """A ``save`` that failed, or a ``load``, which may have failed too. ``at`` is when it ended, in seconds since 1970; ``rank`` wrote
    this; ``failed_ranks`` are those that it has heard of; ``tables`` say what ranks were busy with. None: not known."""

    kind: Literal["save", "load"]
    at: float
    rank: int
    ranks: int
    step: int | None = None
    url: str | None = None
    seconds: float | None = None
    tensor_bytes: int | None = None
    phase: str | None = None
    error: str | None = None
    reason: str | None = None
    failed_ranks: tuple[int, ...] = ()
    tables: Mapping[int, SpanTable] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        fields = {name: getattr(self, name) for name in _FIELDS} | {
            "url": _short(self.url),
            "reason": _short(self.reason),
            "failed_ranks": list(self.failed_ranks[:_NAMED]),
            "spans": {str(rank): table.summed().to_row() for rank, table in _slowest(self.tables).items()},
        }
        return {name: value for name, value in fields.items() if value not in (None, [], {})}


_FIELDS = ("kind", "at", "rank", "ranks", "step", "url", "seconds", "tensor_bytes", "phase", "error", "reason")


def _short(text: str | None) -> str | None:
    """Paths of files whose names are no text hold lone surrogates, which nobody reads back."""
    return None if text is None else text[:_TEXT].encode(errors="backslashreplace").decode()[:_TEXT]


def _slowest(tables: Mapping[int, SpanTable]) -> dict[int, SpanTable]:
    chosen = {*sorted(tables, key=lambda rank: (-tables[rank].seconds, rank))[: RANKS - 1], *list(tables)[:1]}
    return {rank: tables[rank] for rank in sorted(chosen)}


def add_entry(backend: Backend, entry: LogEntry) -> None:
    """Add to the log of the run at the root of ``backend``. What cannot be read of it is replaced."""
    for tries_left in reversed(range(_TRIES)):
        try:
            before = backend.read_whole(PATH, SIZE_LIMIT)
        except NotFoundError:
            before = None
        except CorruptError:  # longer than any log: it cannot be read to be replaced
            backend.delete(PATH)
            before = None
        try:
            entries = [one.to_json() for one in _decode(before)] if before is not None else []
        except ValueError:
            entries = []
        entries.append(entry.to_json())
        kept = [one for kind in ("save", "load") for one in [e for e in entries if e["kind"] == kind][-NEWEST:]]
        data = json.dumps({"version": VERSION, "entries": kept}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            backend.put_if(PATH, data, expected=before)
        except ConflictError:  # another job
            if not tries_left:
                raise
        else:
            return


def read_log(backend: Backend) -> tuple[LogEntry, ...]:
    """The entries of each kind, the newest last; none if there is no log."""
    try:
        return tuple(_decode(backend.read_whole(PATH, SIZE_LIMIT)))
    except NotFoundError:
        return ()
    except ValueError as err:
        where = f"{backend.url.rstrip('/')}/{PATH}"
        raise CorruptError(f"the log of the run is damaged: {err}", where=where, hint=_HINT) from err


def _decode(data: bytes) -> list[LogEntry]:
    """Raises ValueError with what is wrong. Nothing in it is believed."""
    try:
        members = parse_object(data)
        if members.get("version") != VERSION:
            raise ValueError("it is of no version that is known")
        entries = members.get("entries")
        if not isinstance(entries, list) or len(entries) > 2 * NEWEST:
            raise ValueError("its entries are not a short array")
        return [_entry(one) for one in entries]
    except CorruptError as err:
        raise ValueError(err.message) from err


def _entry(fields: object) -> LogEntry:
    if not isinstance(fields, dict) or fields.get("kind") not in ("save", "load"):
        raise ValueError("an entry is of no kind that is known")
    spans, failed = fields.get("spans", {}), fields.get("failed_ranks", [])
    if not isinstance(spans, dict) or len(spans) > RANKS:
        raise ValueError("the spans of an entry are not by rank")
    if not isinstance(failed, list) or len(failed) > _NAMED or not all(_is_count(rank) for rank in failed):
        raise ValueError("the failed ranks of an entry are not ranks")
    counts = {name: _optional(fields, name, _is_count) for name in ("rank", "ranks", "step", "tensor_bytes")}
    texts = {name: _optional(fields, name, _is_text) for name in ("url", "phase", "error", "reason")}
    numbers = {name: _optional(fields, name, _is_number) for name in ("at", "seconds")}
    if counts["rank"] is None or counts["ranks"] is None or numbers["at"] is None:
        raise ValueError("an entry does not say when it was, or on which rank")
    tables = {number_of(rank): SpanTable.from_row(row) for rank, row in spans.items()}
    return LogEntry(kind=fields["kind"], failed_ranks=tuple(failed), tables=tables, **counts, **texts, **numbers)


def _optional(fields: Mapping[str, Any], name: str, fits: Any) -> Any:
    value = fields.get(name)
    if value is not None and not fits(value):
        raise ValueError(f"the {name} of an entry cannot be")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_number(value: object) -> bool:
    return (type(value) is int or type(value) is float) and 0 <= value < 1e11  # which no NaN is


def entry_line(entry: LogEntry) -> str:
    """What happened, in a line: ``step 7 failed in write on rank 3: StorageError: …``."""
    step = "a step" if entry.step is None else f"step {entry.step}"
    if entry.error is None:
        return f"{step} was loaded"
    where = f" on rank {', '.join(map(str, entry.failed_ranks[:4]))}" if entry.failed_ranks else ""
    what = "failed" if entry.kind == "save" else "was not loaded"
    phase = f" in {entry.phase}" if entry.phase else ""
    return printable(f"{step} {what}{phase}{where}: {entry.error}: {entry.reason or ''}", one_line=True)


# The progress of a save that goes on, beside its index (docs/format.md §1): no part of a checkpoint, and gone before one is committed.

PROGRESS_LIMIT = 16 << 10
"""Bytes that are read; a file has some 3,000 at most, however many ranks there are."""

_PROGRESS_HINT = "the save itself does not need it; it goes when the save ends, or with `ckpt gc --yes` if the save was killed"


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
        data = backend.read_whole(path, PROGRESS_LIMIT)
        try:
            progress = SaveProgress.from_json(parse_json(data))
            if progress.id != id:
                raise ValueError(f"it is of the save {progress.id!r}")
        except ValueError as err:
            raise CorruptError(f"the file of a save's progress is damaged: {err}", where=where, hint=_PROGRESS_HINT) from err
        return progress
    return None
