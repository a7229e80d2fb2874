"""Clearing away a save that was never committed, while it may be committed after all; who refers to the files of others;
and the links that nothing reaches through."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from ckpt.catalog import DataFile, SourceFile
from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError, NoSpaceError, NotFoundError, StorageError, UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import join_url, open_backend, real_url

from .catalog import read_index
from .commit import COMMIT_PATH, REFERENCED, VIRTUAL, CommitRecord, KnownRecords, is_ours, read_record
from .index import decode_files
from .paths import (
    CLEARING,
    FILES,
    INDEX_LIMIT,
    SOURCES,
    UP,
    data_prefix,
    has_orphans,
    id_of,
    index_path,
    is_reference,
    is_there,
    others_files,
    owner_of,
    split_url,
    step_number,
)
from .virtual import GENERATION_PATH, decode_sources

log = logging.getLogger("ckpt")

# Why clearing and committing cannot both go wrong
#
# A clean-up cannot know whether a save is dead, and looking and removing are two steps. So are looking and committing. Each side first
# writes what the other will look for, and looks then:
#
#        who clears                                     who commits
#     1  put the mark index-<id>/clearing               put checkpoint.json
#     2  read checkpoint.json: committed? then stop     list files and marks: all there, no mark? then it is committed
#     3  remove files, the mark as long as it is there  else take the record back, and raise
#
# Whatever the order in time, the later of the two puts comes before its own look, so at least one side sees the other. Both may: then
# the commit is taken back though the clearing stops, and the save raises; nobody has relied on it yet. A copy or a conversion that is
# resumed under the same id takes the mark away first (``resume``), and a clearing that still runs stops before its next files.

_TRIES = 4
BATCH = 256
"""Files that go at once."""
_HINT = "the URL must be on storage that all ranks share; if it is, `ckpt gc` or somebody else removes files there: try again"


class BaseFiles(NamedTuple):
    """The checkpoint that has all files which a save refers to, itself or by references: its name in the run and its id; and the sizes of
    these files, by path."""

    name: str
    id: str
    sizes: Mapping[str, int]


def check_no_link(backend: Backend) -> None:
    """That the root of ``backend`` is where a checkpoint may be written, replaced or tagged."""
    target = backend.link()
    if target is not None:
        raise ConflictError(
            f"this is a symbolic link to {target}; nothing is written or replaced through a link",
            where=backend.url,
            hint=f"name {target} itself, or remove the link first",
        )


def check_free(backend: Backend, what: str) -> None:
    """That nothing but what is left of saves and copies is at the root of ``backend``, where no checkpoint is; ``what`` comes there."""
    others = others_files(backend)
    if others:
        hint = f"{what} to another URL, such as a new directory in this one"
        raise ConflictError(f"something is there already: {', '.join(others[:5])}", where=backend.url, hint=hint)


def check_no_run(backend: Backend, hint: str | None = None) -> None:
    """That no steps lie right below the root of ``backend``, where no checkpoint is: one there would hide them. A step that is being saved
    counts, too."""
    names = backend.list_dir()
    steps = [name for name in names if name.endswith("/") and step_number(name) is not None]
    if GENERATION_PATH in names or any(is_there(backend, f"{step}{COMMIT_PATH}") or has_orphans(backend, step) for step in steps):
        url = backend.url
        hint = hint or f"name another directory, such as {url}/final, or save with ckpt.Checkpointer({url!r})"
        raise UsageError("this is a run, not a place for one checkpoint", where=backend.url, hint=hint)


def check_there(backend: Backend, id: str, sizes: Mapping[str, int], base: BaseFiles | None = None) -> CommitRecord | None:
    """That a save has all of its files, by path and size in bytes, and that nobody is clearing it away; and that the checkpoint is there
    whose files it refers to, with these files. Gives the record of that one."""
    _, problem = _looked_for(backend, id, sizes)
    record = None
    if problem is None and base is not None:
        record, problem = _base_record(backend, base)
        problem = problem or _reference_problem(backend, base)
    if problem is not None:
        raise problem
    return record


def check_committed(
    backend: Backend,
    id: str,
    sizes: Mapping[str, int],
    previous: bytes | None,
    base: BaseFiles | None = None,
    based: CommitRecord | None = None,
) -> list[str] | None:
    """That what was just committed has all of its files, or was replaced by another save since. If it has not, ``previous`` is committed
    again, or nothing is. ``based`` is what ``check_there`` gave. Gives the paths of everything that is there, if it took a look at
    everything."""
    try:
        everything, problem = _looked_for(backend, id, sizes)
        if problem is None and base is not None:
            problem = _base_record(backend, base, based)[1]
        if problem is None:
            return everything
        record = read_record(backend)
    except (StorageError, CorruptError) as err:  # no sign that anything is missing
        log.warning("%s is committed, but nobody could look whether its files are all there: %s", backend.url, err)
        return None
    while record is not None:
        if CommitRecord.from_bytes(record, backend.url).id != id:
            return None
        try:
            if previous is not None:
                backend.put_if(COMMIT_PATH, previous, expected=record)
            else:
                backend.delete(COMMIT_PATH)
            break
        except ConflictError:  # another save is committed by now, or this one was tagged
            record = read_record(backend)
        except CkptError as err:
            log.error("%s lacks files, and its commit record could not be taken back: %s", backend.url, err)
            break
    raise problem


def _looked_for(backend: Backend, id: str, sizes: Mapping[str, int]) -> tuple[list[str] | None, StorageError | None]:
    """The paths of everything that is there, if all of that was listed: where every listing is a request, one does. And why the save is
    not all there, or not for long."""
    starts = (data_prefix(id), index_path(id, ""))
    everything = bool(backend.io_hints.coalesce_gap) or not all(path.startswith(starts) for path in sizes)
    there = {e.path: e.size for prefix in ([""] if everything else starts) for e in backend.list_prefix(prefix)}
    lost = sorted(path for path, size in sizes.items() if there.get(path) != size)
    if lost:
        message = (
            f"{len(lost)} of {len(sizes)} files are not there, or not whole, as the process that commits sees it; the first is {lost[0]}: "
            f"{there.get(lost[0], 'no')} of {sizes[lost[0]]} bytes"
        )
        return None, StorageError(message, where=backend.url, hint=_HINT)
    if index_path(id, CLEARING) in there:
        hint = "look for a `ckpt gc`, or another copy of it, that runs there, and try again"
        return None, StorageError("another process is removing this save", where=backend.url, hint=hint)
    return list(there) if everything else None, None


def _base_record(backend: Backend, base: BaseFiles, before: CommitRecord | None = None) -> tuple[CommitRecord | None, ConflictError | None]:
    """The record of a base, and why its files cannot be referred to. ``before`` is the record with which they were all there."""
    # Who removes a checkpoint takes its record away first, and looks then who refers to its files. Who commits a
    # reference publishes the record first, and looks here then: so at least one of the two sees the other. A copy has the
    # same id and may have the bytes in files of its own; its index is another one then, and the listed files may be gone.
    run = open_backend(split_url(backend)[0])
    data = read_record(run, f"{base.name}/")
    what = "removed"
    if data is not None:
        record = CommitRecord.from_bytes(data, f"{run.url}/{base.name}")
        if record.id == base.id and (before is None or record.index == before.index):
            return record, None
        what = "replaced by another save" if record.id != base.id else "replaced by a copy of it, which has other files,"
    message = f"the earlier checkpoint {base.name}, which has tensors of this save, was {what} meanwhile"
    return None, ConflictError(message, where=backend.url, hint="save again, without reuse=")


def _reference_problem(backend: Backend, base: BaseFiles) -> StorageError | None:
    """Which of these files are not there, whatever the record of the base says: somebody has deleted a directory by hand, or the base was
    copied away and back, and has files of its own by now. A process that remembers the base has read nothing of it."""
    run = open_backend(split_url(backend)[0])
    # ../step-1/data/<id>-00000.safetensors: one listing for each checkpoint that has some.
    prefixes = sorted({f"{owner_of(path)}/data/" for path in base.sizes})
    there = {f"{UP}{e.path}": e.size for prefix in prefixes for e in run.list_prefix(prefix)}
    lost = sorted(path for path, size in base.sizes.items() if there.get(path) != size)
    if not lost:
        return None
    message = (
        f"{len(lost)} of {len(base.sizes)} files that have tensors of this save, by way of the earlier checkpoint {base.name}, are not "
        f"there any more, or not whole; the first is {lost[0]}: {there.get(lost[0], 'no')} of {base.sizes[lost[0]]} bytes"
    )
    hint = "save again, without reuse=; `ckpt verify` shows which other checkpoints lack files"
    return ConflictError(message, where=backend.url, hint=hint)


def claim(backend: Backend, id: str) -> None:
    """Mark save ``id``, whose files are about to be removed and copied again: another copy of it cannot be committed before ``resume``."""
    mark = index_path(id, CLEARING)
    mine = True
    try:
        backend.put_if(mark, b"", expected=None)
    except ConflictError:
        mine = False
    data = read_record(backend)
    if data is None or CommitRecord.from_bytes(data, backend.url).id != id:
        return
    if mine:
        backend.delete(mark)
    message = "another copy of this checkpoint was committed here meanwhile"
    raise ConflictError(message, where=backend.url, hint="copy again: that compares the files that are there, and copies what is missing")


def resume(backend: Backend, id: str) -> None:
    """Take away the mark that a clearing of save ``id`` left when it was killed: a copy or a conversion of this id goes on now. A clearing
    that still goes on stops before its next files."""
    backend.delete(index_path(id, CLEARING))


def clear(backend: Backend, id: str, within: str, paths: Sequence[str], committed: Callable[[], str | None]) -> bool:
    """Remove files of save ``id`` below ``within`` (empty or ending in a slash), unless ``committed`` or going on; whether all went."""
    mark = f"{within}{index_path(id, CLEARING)}"
    # ``marked``: the mark is there, whoever put it. ``mine``: this process put it, and so removes it in any case.
    marked = mine = True
    for tries_left in reversed(range(_TRIES)):
        try:
            backend.put_if(mark, b"", expected=None)
        except ConflictError:
            mine = False  # somebody else's does as well
        except NoSpaceError:
            marked = False  # a save can hardly publish a record either; but others may have a quota of their own
        except StorageError:
            # Another clearing ends at this moment, and removes the directory in which the mark is put.
            if not any(is_there(backend, path) for path in paths):
                return True
            if not tries_left:
                raise
            continue
        break
    went = committed() != id
    going = [path for path in paths if path != mark]
    for at in range(0, len(going), BATCH):
        # The mark is looked for before each batch, since ``resume`` may have taken it away: then the save goes on, and
        # what is left of it is needed.
        went = went and (is_there(backend, mark) if marked else committed() != id)
        if not went:
            break
        backend.delete_many(going[at : at + BATCH])
    if mine or went:  # while the save is there, somebody else's mark says that they may be about to remove a file
        backend.delete(mark)
    return went


# Who refers to the data files of a checkpoint, or points into them as a virtual one does: they have to stay, whether or not their own
# checkpoint needs them. No torch.
#
# A neighbour whose commit record cannot be believed may still need them: somebody may restore its record from a copy, and a later release
# reads what this one does not know. So its references are taken from what is left of its index, and if that does not tell, it counts as
# referring to every data file of the run: what is in doubt stays.

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


@lru_cache(_RUNS)
def _known(run: str) -> KnownRecords[_Uses]:
    """What this process knows of a run, which is given as ``real_url`` gives it."""
    return KnownRecords()


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


def referrers_in(run: Backend, but: str = "") -> RunReferrers:
    """All references among the checkpoints right below a run, without those of ``but``."""
    referrers: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown = []
    real = real_url(run.url).rstrip("/")

    def read(names: Sequence[str]) -> dict[str, _Uses]:
        return dict(zip(names, map_tasks(partial(_uses, run), names, _THREADS, "ckpt-referrers"), strict=True))

    names = [entry.rstrip("/") for entry in run.list_dir("") if entry.endswith("/") and entry != f"{but}/"]
    using = _known(real).read(run, names, read, lambda uses: uses.lasts)
    for name in names:
        paths, sources, _ = using[name]
        if paths is None or sources is None:
            unknown.append(name)
        for path in (*(paths or ()), *(_below(real, sources) if sources else ())):
            owner, _, inner = path.partition("/")
            referrers[owner][inner].append(name)
    return RunReferrers(by_directory=referrers, unknown=tuple(unknown))


def referred_files(checkpoint: Backend) -> FileReferrers:
    """Who in its run refers to data files of a checkpoint. Raises what :func:`referrers_in` does."""
    try:
        run, name = split_url(checkpoint)
    except UsageError:
        return FileReferrers()
    referrers = referrers_in(open_backend(run), but=name)
    return FileReferrers(by_path=referrers.by_directory.get(name, {}), unknown=referrers.unknown)


def _uses(run: Backend, name: str) -> _Uses:
    """What a checkpoint of a run uses."""
    data = read_record(run, f"{name}/")
    if data is None:
        return _Uses((), (), lasts=False)
    checkpoint = open_backend(join_url(run.url, name))
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
