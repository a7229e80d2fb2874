"""Who refers to the data files of a checkpoint, or points into them as a virtual one does: they have to stay, whether or not their own
checkpoint needs them. No torch.

A neighbour whose commit record cannot be believed may still need them: somebody may restore its record from a copy, and a later release
reads what this one does not know. So its references are taken from what is left of its index, and if that does not tell, it counts as
referring to every data file of the run: what is in doubt stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt.catalog import DataFile, SourceFile
from ckpt.concurrency import map_tasks
from ckpt.errors import CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.native.catalog import read_index, read_record
from ckpt.formats.native.commit import COMMIT_PATH, REFERENCED, VIRTUAL, CommitRecord, KnownRecords, is_ours
from ckpt.formats.native.index import Recent, decode_files
from ckpt.formats.native.paths import FILES, INDEX_LIMIT, SOURCES, id_of
from ckpt.formats.native.virtual import decode_sources
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend, real_url

from .references import UP, is_reference, split_url

_DATA = "data/"
_THREADS = 16
"""Checkpoints whose records are read at once."""
_RUNS = 4
"""Runs of which a process remembers who refers to what: a job saves to one, and reads a few."""


class _Uses(NamedTuple):
    """The files of others that one checkpoint needs: paths below the run that it refers to, and what it points into as a virtual one;
    None if nobody can say. ``lasts``: its record and its index say so."""

    paths: Sequence[str] | None
    sources: Sequence[SourceFile] | None
    lasts: bool


_known: Recent[str, KnownRecords[_Uses]] = Recent(_RUNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReferrers:
    """Who refers to files of one checkpoint. ``by_path``: names of checkpoints, by the path of a data file. ``unknown``: names of those of
    which nobody can say what they refer to."""

    by_path: Mapping[str, Collection[str]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def of(self, path: str) -> tuple[str, ...]:
        """Names of the checkpoints that refer to this file, or may do so."""
        return tuple(sorted({*self.by_path.get(path, ()), *(self.unknown if path.startswith(_DATA) else ())}))

    def names(self) -> tuple[str, ...]:
        """Names of all that refer to any of the files, or may do so."""
        return tuple(sorted({name for names in self.by_path.values() for name in names} | {*self.unknown}))

    def text(self, names: Iterable[str] | None = None) -> str:
        """Why files stay that ``names``, by default all, refer to."""
        mentioned = set(self.names() if names is None else names)
        sure = sorted(mentioned - {*self.unknown})
        unsure = sorted(mentioned & {*self.unknown})
        reasons = [f"{', '.join(sure)} {'refers' if len(sure) == 1 else 'refer'} to it"] if sure else []
        if unsure:
            reasons.append(f"{', '.join(unsure)} may refer to it: the record or index there cannot be read")
        return "; ".join(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReferrers:
    """All references among the checkpoints right below a run: directory → path of a data file below it → names of its referrers."""

    by_directory: Mapping[str, Mapping[str, Collection[str]]]
    unknown: tuple[str, ...]

    def to(self, directory: str) -> FileReferrers:
        """Who refers to files of the checkpoint in this directory."""
        return FileReferrers(
            by_path=self.by_directory.get(directory, {}), unknown=tuple(name for name in self.unknown if name != directory)
        )


def referrers_in(run: Backend) -> RunReferrers:
    """All references among the checkpoints right below a run."""
    referrers: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    real = real_url(run.url).rstrip("/")

    def read(name: str) -> _Uses:
        data = read_record(run, f"{name}/")
        return _Uses((), (), lasts=False) if data is None else _uses(open_backend(join_url(run.url, name)), data)

    def read_all(names: Sequence[str]) -> dict[str, _Uses]:
        return dict(zip(names, map_tasks(read, names, _THREADS, "ckpt-referrers"), strict=True))

    names = [entry.rstrip("/") for entry in run.list_dir("") if entry.endswith("/")]
    known = _known.get(real) or KnownRecords[_Uses]()
    _known.put(real, known)
    using = known.read(run, names, read_all, lambda uses: uses.lasts)
    for name in names:
        paths, sources, _ = using[name]
        if paths is None or sources is None:
            unknown.append(name)
        for path in (*(paths or ()), *_below(real, sources or ())):
            owner, _, inner = path.partition("/")
            referrers[owner][inner].append(name)
    return RunReferrers(by_directory=referrers, unknown=tuple(unknown))


def referred_files(checkpoint: Backend) -> FileReferrers:
    """Who in its run refers to data files of a checkpoint. Raises what :func:`referrers_in` does."""
    try:
        run, name = split_url(checkpoint)
    except UsageError:
        return FileReferrers()
    return referrers_in(open_backend(run)).to(name)


def _uses(checkpoint: Backend, data: bytes) -> _Uses:
    """What a checkpoint with the commit record ``data`` uses."""
    record: CommitRecord | None = None
    tables: Iterable[bytes] = ()
    try:
        record = CommitRecord.from_bytes(data, f"{checkpoint.url}/{COMMIT_PATH}")
        if VIRTUAL in record.features:
            tables = [read_index(checkpoint, record, SOURCES)]
    except FormatError:
        pass  # what nobody can read is in doubt below, if there is reason to
    except CorruptError:
        tables = remaining_files(checkpoint, SOURCES)
    files: Sequence[DataFile] | None = None
    sources: Sequence[SourceFile] | None = None
    with suppress(CorruptError):
        files = remaining_references(checkpoint, data) if record is None else references_of(checkpoint, record)
    with suppress(CorruptError):
        sources = [row for table in tables for row in decode_sources(table, "")]
    paths = None if files is None else tuple(file.path[len(UP) :] for file in files)
    return _Uses(paths, sources, lasts=None not in (record, paths, sources))


def _below(run: str, sources: Iterable[SourceFile]) -> Iterator[str]:
    """Paths below a run, which is given as ``real_url`` gives it, of those sources that lie there."""
    roots: dict[str, str] = {}
    for source in sources:
        if source.root not in roots:
            roots[source.root] = real_url(source.root).rstrip("/")
        place = f"{roots[source.root]}/{source.path}"
        if place.startswith(f"{run}/"):
            yield place[len(run) + 1 :]


def references_of(checkpoint: Backend, record: CommitRecord) -> list[DataFile]:
    """The rows of a checkpoint's index that lead to others."""
    if REFERENCED not in record.features:
        return []
    return [file for file in decode_files(read_index(checkpoint, record, FILES), checkpoint.url) if is_reference(file.path)]


def remaining_references(checkpoint: Backend, data: bytes) -> list[DataFile] | None:
    """What a checkpoint refers to whose commit record ``data`` cannot be believed, by the index files that are left; None if they do not
    tell. Where none is left, or the record is other software's, it refers to nothing: its own files do not say to what (``rebuild``)."""
    try:
        CommitRecord.from_bytes(data, checkpoint.url)
    except CorruptError:
        pass
    except FormatError:  # a later release may have other kinds of references
        return None if is_ours(data) else []
    try:
        rows = [file for left in remaining_files(checkpoint, FILES) for file in decode_files(left, checkpoint.url)]
    except CorruptError:
        return None
    return [file for file in rows if is_reference(file.path)]


def remaining_files(checkpoint: Backend, name: str) -> Iterator[bytes]:
    """The index files of this name of all saves that a checkpoint has something of. Nobody has compared them with a digest."""
    for directory in checkpoint.list_dir(""):
        path = f"{directory.rstrip('/')}/{name}"
        if id_of(path) is not None:
            with suppress(NotFoundError):
                yield checkpoint.read_whole(path, INDEX_LIMIT)
