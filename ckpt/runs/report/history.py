"""Reading the spans of one save, or of the saves of a run. No index is opened.

A run may hold very many checkpoints, and a save the spans of very many ranks. So steps are read in an order in which each beginning is
spread evenly (ends, middle, quarters …), until enough are read; how many were left out is said. What is read depends on names and sizes
alone, never on the clock: the same run gives the same report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.native.catalog import joint_step
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, read_record
from ckpt.formats.native.paths import SPANS, index_path, step_number
from ckpt.formats.native.runlog import LogEntry, read_log
from ckpt.formats.native.spans import read_spans
from ckpt.formats.registry import find_format, open_catalog
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.runs.members import member_urls
from ckpt.runs.step_listing import is_of_checkpoint
from ckpt.telemetry.spans import SpanTable

from .summary import SaveSummary, summarize

STEPS = 200
"""Checkpoints of a run that are read by default, at most."""
SPAN_BYTES = 6 << 20
"""Bytes of spans after which no more checkpoints of a run are read: some seconds of work."""
_TOGETHER = 16
_NEWEST = 8
"""Steps looked at from the end for one whose spans can be read: the newest save may still go on."""


@dataclass(frozen=True, kw_only=True)
class SavedSpans:
    """What is known of one save. ``record`` is None if it is not committed or damaged, ``summary`` if no spans were kept; ``error`` then
    says why. ``tables``, the spans themselves, take some 20 bytes of memory for each byte: a history has them only if asked for."""

    url: str
    step: int | None = None
    label: str = ""
    """What tells it from others of the same step; of a checkpoint that is not of a step its name."""
    member: str | None = None
    """Of a step of several jobs: whose checkpoint this is."""
    record: CommitRecord | None = None
    tables: Mapping[int, SpanTable] = field(default_factory=dict)
    summary: SaveSummary | None = None
    error: CkptError | None = None
    span_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long the save took; 0 if that is not known."""
        return 0.0 if self.summary is None else self.summary.seconds

    @property
    def problem(self) -> str | None:
        """What is wrong, in a line."""
        return None if self.error is None else self.error.message


@dataclass(frozen=True, kw_only=True)
class History:
    """The saves of a run that were read, the highest step last. ``candidates`` are the directories that looked like steps, ``left_out``
    those that were not read."""

    url: str
    saves: tuple[SavedSpans, ...]
    candidates: int
    left_out: int = 0
    log: tuple[LogEntry, ...] = ()
    """Saves that failed and loads, the newest last."""
    log_problem: str | None = None


def is_checkpoint(url: str) -> bool:
    """Whether a checkpoint, or what is left of a save, is at ``url`` itself."""
    return is_of_checkpoint(open_backend(url).list_dir(""))


def read_save(url: str) -> SavedSpans:
    """The commit record is enough: a checkpoint with a damaged index still says how it was saved."""
    backend = open_backend(url)
    data = read_record(backend)
    if data is None:
        format = open_catalog(url).format  # raises what is wrong, if no checkpoint is there
        raise FormatError(f"a checkpoint of the format {format} has no spans", where=url, hint="only saves of ckpt keep them")
    record = CommitRecord.from_bytes(data, join_url(backend.url, COMMIT_PATH))
    if record.generation is not None:  # each member's checkpoint has its spans
        raise joint_step(url, record)
    name = url.rstrip("/").rpartition("/")[2]
    step = step_number(name)
    saved = SavedSpans(url=url, step=step, label=name if step is None else "", record=record)
    try:
        tables = read_spans(backend, record)
    except (NotFoundError, CorruptError) as err:
        return replace(saved, error=err)
    nbytes = backend.size(index_path(record.id, SPANS))
    return replace(saved, tables=tables, summary=summarize(tables, record.world_size), span_bytes=nbytes)


def read_history(url: str, *, limit: int = STEPS, most_bytes: int = SPAN_BYTES, tables: bool = False) -> History:
    """The saves below ``url``. What is wrong with one of them is in its ``problem``; directories that hold none are left out."""
    backend = open_backend(url)
    numbers = {name.rstrip("/"): step_number(name) for name in backend.list_dir("") if name.endswith("/")}
    names = sorted((name for name, number in numbers.items() if number is not None), key=lambda name: (numbers[name] or 0, name))
    read: dict[int, tuple[SavedSpans, ...]] = {}
    for place in range(len(names) - 1, max(len(names) - 1 - _NEWEST, -1), -1):
        newest = read[place] = _saves_at(url, names[place], tables=tables)
        if any(saved.summary is not None for saved in newest):
            break
    total = largest = sum(saved.span_bytes for saves in read.values() for saved in saves)
    rest = [place for place in spread_evenly(len(names)) if place not in read]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        while rest and len(read) < limit and total < most_bytes:
            together = min(_TOGETHER, limit - len(read), -(-(most_bytes - total) // largest) if largest else _TOGETHER)
            some, rest = rest[:together], rest[together:]
            read |= zip(some, pool.map(lambda place: _saves_at(url, names[place], tables=tables), some), strict=True)
            sizes = [saved.span_bytes for place in some for saved in read[place]]
            total, largest = total + sum(sizes), max(largest, *sizes, 0)
    saves = tuple(saved for place in sorted(read) for saved in read[place])
    absent = sum(not found for found in read.values())
    log: tuple[LogEntry, ...] = ()
    problem = None
    try:
        log = read_log(backend)
    except CorruptError as err:
        problem = err.message
    return History(url=url, saves=saves, candidates=len(names) - absent, left_out=len(rest), log=log, log_problem=problem)


def spread_evenly(count: int) -> Iterator[int]:
    """All numbers below ``count``, the ends first, then what halves the widest gaps."""
    if count:
        yield count - 1
    if count > 1:
        yield 0
    gaps: Sequence[tuple[int, int]] = [(0, count - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                yield middle
                halves += [(low, middle), (middle, high)]
        gaps = halves


def _saves_at(run: str, name: str, *, tables: bool) -> tuple[SavedSpans, ...]:
    """Of a step of several jobs one for each member; none if nothing is there."""
    url, step = join_url(run, name), step_number(name)
    try:
        saved = read_save(url)
        return (saved if tables else replace(saved, tables={}),)
    except NotFoundError:
        return ()
    except UsageError:  # a step of several jobs
        members = ((member, one.rpartition("/")) for member, one in member_urls(url).items())
        return tuple(replace(saved, member=member) for member, (own, _, its) in members for saved in _saves_at(own, its, tables=tables))
    except CkptError as err:
        if isinstance(err, FormatError) and find_format(url) is None:  # other files
            return ()
        return (SavedSpans(url=url, step=step, error=err),)
