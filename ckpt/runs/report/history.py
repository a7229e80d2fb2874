"""Reading the spans of one save, or of the saves of a run. No index is opened.

A run may hold very many checkpoints, and a save the spans of very many ranks. So steps are read in an order in which each beginning is
spread evenly (ends, middle, quarters …), until enough are read; how many were left out is said. What is read depends on names and sizes
alone, never on the clock: the same run gives the same report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt.errors import CkptError, CorruptError, FormatError, NotCommittedError, NotFoundError, UsageError
from ckpt.formats.native.catalog import joint_step
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, read_record
from ckpt.formats.native.paths import SPANS, data_prefix, index_path, step_number
from ckpt.formats.native.runlog import LogEntry, entry_line, find_progress, read_log, read_progress
from ckpt.formats.native.spans import read_spans
from ckpt.formats.native.writer import committed_id
from ckpt.formats.registry import find_format, open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.runs.members import member_urls
from ckpt.runs.step_listing import is_of_checkpoint
from ckpt.telemetry.progress import PHASES, SaveProgress, SlowRank, patience
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


# What a save does now, as its storage shows it: the leader's notes of its progress, then the commit record or what failed.
#
# A look costs a few small reads. Nothing is compared between clocks of two machines, but for the age of a note where the storage keeps no
# times and it is looked at once only.

NEWEST = 8
"""Steps of a run that are looked at: those with the highest numbers, and all that have come since the first look."""
_SPANS = 5.0
"""Seconds after a commit for which its spans are waited for."""

State = Literal["idle", "saving", "hangs", "committing", "committed", "failed"]


@dataclass(frozen=True, kw_only=True)
class WatchSnapshot:
    """What was seen. ``state``: ``idle``, nothing goes on; ``committing``, all ranks have done their part. ``age``: seconds since the
    leader's last note. ``silent``: ranks without a sign of life, the leader alone if that is one. ``reason``: why a save failed, or what is
    there if nothing goes on."""

    state: State
    url: str
    id: str | None = None
    progress: SaveProgress | None = None
    age: float = 0.0
    silent: tuple[SlowRank, ...] = ()
    tensor_bytes: int | None = None
    seconds: float | None = None
    reason: str | None = None


class SaveWatcher:
    """Looks at the checkpoint or the run at ``url`` again and again, until a save that goes on, or the next one, has ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.backend = open_backend(url)
        if not self.backend.list_dir(""):
            hint = "name the directory of the run; the first save of a job creates it"
            raise NotFoundError("nothing exists here, so no save is in progress", where=url, hint=hint)
        self._single = is_checkpoint(url) or step_number(url.rstrip("/").rpartition("/")[2]) is not None
        newest = max(self._directories(), key=lambda name: step_number(name) or 0, default=None)
        members: dict[str, str] = {}
        if not self._single and newest is not None:
            with suppress(CkptError):  # a damaged record is none of a joint step
                members = member_urls(self._url(newest))
        if members:
            runs = ", ".join(url.rpartition("/")[0] for url in members.values())
            raise UsageError(f"this is a run of several jobs: {', '.join(members)}", where=url, hint=f"name the run of one: {runs}")
        self._known: set[str] | None = None
        """Directories that were there at the first look."""
        self._ids: dict[str, str] = {}
        """Directory → the id of what is committed there."""
        self._first: str | None = None
        """The newest id that was committed at the first look."""
        self._following: _Following | None = None

    def look(self) -> WatchSnapshot:
        """What goes on now."""
        if self._following is not None:
            return self._following.look()
        names = [""] if self._single else list(self._steps())
        for name in names:
            if (name not in self._ids or not name) and (id := committed_save(self.backend, _within(name))) is not None:
                self._ids[name] = id
        newest = max(self._ids, key=lambda name: self._ids[name], default=None)
        notes = ((name, find_progress(self.backend, _within(name))) for name in names)
        paths = {path: name for name, path in notes if path is not None}
        # The newest first, not that of the highest step: a job that was killed left one, and began again at a lower step.
        for path in sorted(paths, key=lambda path: path.split("/")[-2], reverse=True):
            progress, name = read_progress(self.backend, path), paths[path]
            if progress is None or (newest is not None and progress.id < self._ids[newest]):
                continue
            self._following = _Following(self.backend, self._url(name), _within(name), path, progress)
            return self._following.look()
        seen, self._first = self._first, self._ids[newest] if newest is not None else ""
        if newest is not None and seen is not None and self._ids[newest] != seen:
            return committed(self._url(newest), self._ids[newest])
        reason = None if newest is None else f"{newest or 'this checkpoint'} is committed"
        return WatchSnapshot(state="idle", url=self.url, reason=reason)

    def newest(self) -> WatchSnapshot | None:
        """What is committed, as far as the last look has seen; None if nothing is."""
        name = max(self._ids, key=lambda name: self._ids[name], default=None)
        return None if name is None else committed(self._url(name), self._ids[name])

    def _url(self, name: str) -> str:
        return join_url(self.url, name) if name else self.url

    def _directories(self) -> set[str]:
        return {name.rstrip("/") for name in self.backend.list_dir("") if name.endswith("/") and step_number(name) is not None}

    def _steps(self) -> Iterator[str]:
        names = self._directories()
        if self._known is None:
            self._known = names
        ordered = sorted(names, key=lambda name: (step_number(name) or 0, name), reverse=True)
        yield from dict.fromkeys([*ordered[:NEWEST], *sorted(names - self._known)])


def _within(name: str) -> str:
    """What paths in a directory of the run begin with; empty for the root itself."""
    return f"{name}/" if name else ""


class _Following:
    """One save that was seen to go on."""

    def __init__(self, backend: Backend, url: str, within: str, path: str, progress: SaveProgress) -> None:
        self.backend, self.url, self.within, self.path = backend, url, within, path
        self.progress = progress
        try:  # how old the first note is: by the storage's clock, if it has one
            now, modified = backend.now(), backend.modified(path)
            age = max(0.0, now - modified if now is not None and modified is not None else time.time() - progress.at)
        except CkptError:  # it is gone
            age = 0.0
        self._changed = time.monotonic() - age
        self._gone: float | None = None

    def look(self) -> WatchSnapshot:
        progress = read_progress(self.backend, self.path)
        if progress is None:
            path = find_progress(self.backend, self.within)  # ranks came late, and the save has its id now
            if path is not None and path > self.path and (progress := read_progress(self.backend, path)) is not None:
                self.path = path
        if progress is None:
            # The note is gone: the save is being committed, or was, or failed
            progress, now = self.progress, time.monotonic()
            self._gone = self._gone if self._gone is not None else now
            id = committed_save(self.backend, self.within)
            if id is not None and id >= progress.id:
                look = committed(self.url, id)
                if look.seconds is None and now - self._gone < _SPANS:
                    return WatchSnapshot(state="committing", url=self.url, id=id, progress=progress)
                return self._with_seconds(look)
            # What failed, another rank or the commit itself, removes its files.
            if progress.phase == PHASES[0] or next(self.backend.list_prefix(f"{self.within}{data_prefix(progress.id)}"), None) is None:
                return WatchSnapshot(state="failed", url=self.url, id=progress.id, progress=progress, reason=self._reason())
            return WatchSnapshot(state="committing", url=self.url, id=progress.id, progress=progress, age=now - self._gone)
        self._gone = None
        if (progress.id, progress.count) != (self.progress.id, self.progress.count):
            self.progress, self._changed = progress, time.monotonic()
        age = time.monotonic() - self._changed
        silent = silent_ranks(progress, age)
        if committed_save(self.backend, self.within) == progress.id:  # its leader was killed, or hung, after the commit
            return self._with_seconds(committed(self.url, progress.id))
        return WatchSnapshot(state="hangs" if silent else "saving", url=self.url, id=progress.id, progress=progress, age=age, silent=silent)

    def _reason(self) -> str | None:
        """What the log of the run says, if the run has one."""
        run, _, name = self.url.rstrip("/").rpartition("/")
        try:
            entries = read_log(self.backend if self.within else open_backend(run or "/"))
        except CkptError:
            return None
        mine = [e for e in entries if e.kind == "save" and e.error and (e.url or "").rstrip("/").rpartition("/")[2] == name]
        last = mine[-1] if mine else None
        # At most a second earlier, by clocks of two machines that differ less: an older entry is of an earlier try.
        return None if last is None or last.at < self.progress.began - 1 else entry_line(last)

    def _with_seconds(self, look: WatchSnapshot) -> WatchSnapshot:
        return look if look.seconds is not None else replace(look, seconds=max(0.0, self.progress.at - self.progress.began))


def silent_ranks(progress: SaveProgress, age: float) -> tuple[SlowRank, ...]:
    """The ranks of which nothing was heard for too long, in a note of this age."""
    least = patience(progress.interval)
    if age >= least:
        leader = SlowRank(rank=progress.leader, host=progress.host, phase=progress.phase, done=0, total=0, quiet=age, still=age)
        return (leader,)
    return tuple(replace(one, quiet=one.quiet + age, still=one.still + age) for one in progress.slowest if one.quiet >= least)


def committed_save(backend: Backend, within: str) -> str | None:
    """The id of what is committed; None if nothing is, or nobody can read what."""
    try:
        return committed_id(backend, within)
    except CkptError:
        return None


def committed(url: str, id: str) -> WatchSnapshot:
    """A save that is committed, and how long it took, if that is known; or that its step was given up."""
    try:
        saved = read_save(url)
    except NotCommittedError as err:  # a step of several jobs that was given up
        return WatchSnapshot(state="failed", url=url, id=id, reason=err.message)
    except CkptError:  # replaced or removed meanwhile
        return WatchSnapshot(state="committed", url=url, id=id)
    seconds = saved.summary.seconds if saved.summary is not None else None
    return WatchSnapshot(
        state="committed", url=url, id=id, seconds=seconds, tensor_bytes=saved.record.tensor_bytes if saved.record else None
    )
