"""What a save does now, as its storage shows it: the leader's notes of its progress, then the commit record or what failed.

A look costs a few small reads. Nothing is compared between clocks of two machines, but for the age of a note where the storage keeps no
times and it is looked at once only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.errors import CkptError, NotFoundError, UsageError
from ckpt.formats.native.paths import data_prefix, step_number
from ckpt.formats.native.runlog import entry_line, find_progress, read_log, read_progress
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.runs.members import member_urls
from ckpt.telemetry.progress import PHASES, SaveProgress, SlowRank, patience

from .history import is_checkpoint, read_save

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
            return self._ended()
        self._gone = None
        if (progress.id, progress.count) != (self.progress.id, self.progress.count):
            self.progress, self._changed = progress, time.monotonic()
        age = time.monotonic() - self._changed
        silent = silent_ranks(progress, age)
        if committed_save(self.backend, self.within) == progress.id:  # its leader was killed, or hung, after the commit
            return self._with_seconds(committed(self.url, progress.id))
        return WatchSnapshot(state="hangs" if silent else "saving", url=self.url, id=progress.id, progress=progress, age=age, silent=silent)

    def _ended(self) -> WatchSnapshot:
        """The note is gone: the save is being committed, or was, or failed."""
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
    """A save that is committed, and how long it took, if that is known."""
    try:
        saved = read_save(url)
    except CkptError:  # replaced or removed meanwhile
        return WatchSnapshot(state="committed", url=url, id=id)
    seconds = saved.summary.seconds if saved.summary is not None else None
    return WatchSnapshot(
        state="committed", url=url, id=id, seconds=seconds, tensor_bytes=saved.record.tensor_bytes if saved.record else None
    )
