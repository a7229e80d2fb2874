"""Which steps a run holds: a listing of checkpoints by their commit records. No torch, and no index is opened.

A checkpoint counts as committed only if its commit record is there and can be believed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ckpt.catalog import DataFile
from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError
from ckpt.formats.native.catalog import read_index
from ckpt.formats.native.clearing import references_of, remaining_files, remaining_references
from ckpt.formats.native.commit import (
    COMMIT_PATH,
    REFERENCED,
    VIRTUAL,
    Branches,
    CommitRecord,
    KnownRecords,
    MemberCheckpoint,
    begun_last,
    is_ours,
    left_at,
    read_record,
)
from ckpt.formats.native.index import decode_files
from ckpt.formats.native.paths import FILES, SOURCES, SPANS, RunBackend, has_orphans, index_path, is_reference, step_number
from ckpt.formats.native.virtual import MARKS, decode_sources, unfinished_run, unfinished_step
from ckpt.formats.registry import CONVERTING, runs_below, some_runs
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import is_file_system, join_url, open_backend, real_url
from ckpt.text import parse_object, url_text

UNFINISHED = "the save failed, or still goes on"
UNCONVERTED = "a conversion did not finish: the same `ckpt convert` goes on"

_LISTING_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One checkpoint of a run, or what is left of a save that did not finish."""

    number: int | None
    """From the directory's name; None if that does not end in a step number."""
    url: str
    committed: bool
    damaged: bool = False
    """There is a commit record, but it is damaged or of a version that this software does not know. No orphan: never collect it."""
    other_release: str | None = None
    """Id of the save, if the record is ``damaged`` only because a release with another version or other features wrote it."""
    created: str | None = None
    """UTC, ISO 8601; like ``tensor_bytes`` and ``world_size`` it is None unless committed."""
    tensor_bytes: int | None = None
    world_size: int | None = None
    reason: str | None = None
    """Why it is not committed; None if it is."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """What `ckpt rebuild` could not recover: ``values``, ``aliases and padding``, ``metrics and tags``."""
    id: str | None = None
    """Of the save: a copy has the same. Ids of later saves sort after it. None unless committed."""
    sources: tuple[str, ...] = ()
    """Of a virtual checkpoint: where the files are that it points into, as absolute URLs or paths. Of one with references: the checkpoints
    of the run that have some of its data files."""
    shared_bytes: int = 0
    """Size of the data files of other checkpoints that it refers to."""
    references_unknown: bool = False
    """It cannot be loaded, and nobody can say which data files of others it needs: it may need any."""
    reusable: bool = False
    """Whether others of the run may refer to its data files."""
    part: str | None = None
    """What of a state it was saved with, as the arguments of the save, if that was a part; the rest is in its base."""
    branches: Branches = ()
    """Where the run had gone back to an earlier step before this one was saved."""
    abandoned: int | None = None
    """The last step that it shares with the branch that was written last, which went on without it; None if it is on that branch."""
    link: str | None = None
    """Where its directory leads, if that is a symbolic link: nothing is ever removed or replaced there."""
    members: Mapping[str, MemberCheckpoint] = field(default_factory=dict)
    """Of a step of several jobs: the checkpoint of each."""
    prepared: bool = False
    """Members have saved this step of several jobs, and it is not committed: others are awaited, or it was given up."""
    also: tuple[str, ...] = ()
    """Names of links beside it that lead to it. They are not listed by themselves."""


def step_url(root: str, number: int) -> str:
    """Where a run has the checkpoint of this step."""
    return join_url(root, step_name(number))


def step_name(number: int) -> str:
    """The directory of a step, below the root of a run."""
    return f"step-{number:08d}"


def list_steps(root_url: str | os.PathLike[str]) -> list[Step]:
    """The checkpoint at ``root_url`` itself, else those in the directories right below it; the highest step last, unnumbered ones first.

    Directories that hold neither a commit record nor the files of a save are left out. An absent root gives an empty list. A symbolic link
    is listed as a directory, with what it leads to in ``link``; but of a checkpoint of the run with several names only one is, that of the
    directory itself, or of links to elsewhere the one with the highest step. The others are in its ``also``.

    Raises:
        StorageError: the storage cannot be read. A damaged commit record raises nothing: its step has the reason.
    """
    root_url = url_text(root_url)
    backend = open_backend(root_url)
    itself, names = look(backend, root_url)
    return [itself] if itself is not None else in_order(read_steps(backend, root_url, names).values())


def latest(root_url: str | os.PathLike[str]) -> str | None:
    """URL of the newest committed checkpoint of a run, for :func:`ckpt.load` and :func:`ckpt.open`; None if there is none.

    Newest is the highest step of the branch that was written last, as for :meth:`ckpt.Checkpointer.restore`; without numbered steps, the
    save that began last. Only commit records are read: :meth:`~ckpt.Checkpointer.restore` passes over a damaged checkpoint.

    Raises:
        StorageError: the storage cannot be read.
    """
    there = [step for step in list_steps(root_url) if step.committed and step.abandoned is None]
    newest = max(there, key=lambda step: (-1 if step.number is None else step.number, step.id or ""), default=None)
    return None if newest is None else newest.url


def look(backend: Backend, root_url: str) -> tuple[Step | None, list[str]]:
    """The checkpoint that the root of ``backend`` is, if it is one, else None; and the names of the directories right below it."""
    here = backend.list_dir("")
    itself = _step(backend, "", root_url) if is_of_checkpoint(here) else None
    return itself, [name.rstrip("/") for name in here if name.endswith("/")]


def read_steps(backend: Backend, root_url: str, names: Collection[str]) -> dict[str, Step]:
    """What the directories of these names below the root are, without those that are no checkpoint and no part of one."""
    threads = max(_LISTING_THREADS, backend.io_hints.concurrency)
    steps = map_tasks(lambda name: _step(backend, f"{name}/", join_url(root_url, name)), list(names), threads, "ckpt-list")
    return {name: step for name, step in zip(names, steps, strict=True) if step is not None}


def in_order(steps: Iterable[Step]) -> list[Step]:
    """The highest step last, and each checkpoint under one name: those of equal id have equal bytes, so a link with the id of another one
    is a second name of it."""
    ordered = sorted(steps, key=lambda s: (s.number is not None, s.number or 0, s.url))
    links: dict[str, list[Step]] = {}
    for s in ordered:
        if s.link is not None and s.id is not None:
            links.setdefault(s.id, []).append(s)
    if not links:
        return with_abandoned(ordered)
    named: dict[str, Step] = {}
    for s in ordered:
        if s.id is not None and (s.link is None or named.get(s.id, s).link is not None):
            named[s.id] = s
    listed = []
    for s in ordered:
        first = named.get(s.id, s) if s.id is not None else s
        if first is s:
            others = [o for o in links.get(s.id or "", ()) if o is not s]
            listed.append(replace(s, also=tuple(directory_name(o) for o in others)) if others else s)
        elif s.link is None:
            listed.append(s)
    return with_abandoned(listed)


def with_abandoned(steps: Sequence[Step]) -> list[Step]:
    """The same steps of one run, in the same order; those that the branch which was written last has left behind say so."""
    live = begun_last(s.branches for s in steps)
    if not live:
        return list(steps)
    # Who saves without a ``Checkpointer`` knows of no branch: what was saved since the last one began is on it.
    steps = [replace(s, branches=live) if not s.branches and s.id is not None and s.id > live[-1].id else s for s in steps]
    tip = max((s.number for s in steps if s.branches == live and s.number is not None), default=live[-1].after)

    def left(s: Step) -> int | None:
        if s.number is None:
            return None
        if s.other_release is not None:  # its branches are not known: what was saved before the last one began is not of that one
            return live[-1].after if s.other_release < live[-1].id and s.number > live[-1].after else None
        return left_at(s.branches, s.number, live, tip) if s.committed else None

    return [replace(s, abandoned=left(s)) for s in steps]


def check_release(steps: Iterable[Step]) -> None:
    """Raise FormatError for the first of ``steps`` that another release wrote: whoever went back behind it would lose what it has."""
    s = next((s for s in steps if s.other_release is not None), None)
    if s is not None:
        hint = "restore with the release that wrote it; or give up what it has: move it away, or restore(state, step=…) an earlier one"
        raise FormatError(f"another release wrote the newest step: {s.reason}", where=s.url, hint=hint)


def directory_name(step: Step) -> str:
    """Its name below the root."""
    return step.url.rstrip("/").rpartition("/")[2]


def is_of_checkpoint(names: Sequence[str]) -> bool:
    """Whether one of these names is of a checkpoint, or of what is left of a save: else there is nothing to read beside them."""
    return any(name in (COMMIT_PATH, "data/", f"{MARKS}/") or name.startswith("index-") for name in names)


def vanished_bases(root_url: str, steps: Sequence[Step]) -> dict[str, tuple[str, ...]]:
    """URL of a checkpoint of the run → names of those that have data files it refers to and that are not there any more: it cannot be
    loaded whole. A checkpoint that is listed alone, or through a link, has neighbours that are not listed: nothing is said of it."""
    there = {name for s in steps for name in (directory_name(s), *s.also)}
    sharing = [s for s in steps if s.shared_bytes and s.link is None and s.url != root_url]
    owners = {s.url: tuple(url.rpartition("/")[2] for url in s.sources) for s in sharing}
    return {url: gone for url, names in owners.items() if (gone := tuple(name for name in names if name not in there))}


def none_here(url: str) -> CkptError:
    """That there is no checkpoint at ``url`` nor right below, with the runs further below."""
    if is_file_system(url) and not os.path.exists(real_url(url)) and not url.startswith("memory:"):
        return NotFoundError(
            "there is no such file or directory", where=url, hint="check the path: it is relative to the working directory"
        )
    if (joint := unfinished_run(url)) is not None:
        return joint
    names = open_backend(url).list_dir()
    if not names:
        if is_file_system(url) and os.path.isfile(real_url(url)):
            return NotFoundError("this file is not a checkpoint of a known format", where=url, hint="name a directory of checkpoints")
        return NotFoundError("nothing lies below this URL", where=url, hint="check the URL; or all checkpoints of this run were removed")
    if is_of_checkpoint(names):
        return NotFoundError("this is one checkpoint, not a run", where=url, hint="name the directory above it")
    runs = runs_below(url, names)
    hint = f"name one of the runs below: {some_runs(runs)}" if runs else "name the directory that holds the steps"
    return NotFoundError("this is neither a run nor a checkpoint", where=url, hint=hint)


def _step(backend: Backend, prefix: str, url: str) -> Step | None:
    """What lies below ``prefix`` (empty, or ending in a slash); None if it is no checkpoint and no part of one."""
    step = Step(number=step_number(url.rstrip("/").rpartition("/")[2]), url=url, committed=False, link=backend.link(prefix.rstrip("/")))
    data: bytes | None = None
    try:
        data = read_record(backend, prefix)
        record = None if data is None else CommitRecord.from_bytes(data, url)
        sources, shared_bytes = _sources(record, url) if record is not None and record.features else ((), 0)
    except (CorruptError, FormatError) as err:
        left = _remaining_sources(data, url)
        other = str(parse_object(data).get("id", "")) if data is not None and isinstance(err, FormatError) and is_ours(data) else None
        return replace(step, damaged=True, other_release=other, reason=err.message, sources=left or (), references_unknown=left is None)
    if record is None or record.given_up is not None:
        reason = unfinished_step(backend, prefix, url) if record is None else f"given up: {record.given_up}"
        if reason is not None:
            return replace(step, prepared=True, reason=reason)
        if not has_orphans(backend, prefix):
            return None
        return replace(step, reason=UNCONVERTED if CONVERTING in backend.list_dir(prefix) else UNFINISHED)
    return replace(
        step,
        committed=True,
        created=record.created,
        tensor_bytes=record.tensor_bytes,
        world_size=record.world_size,
        metrics=record.metrics,
        tags=record.tags,
        lost=record.lost,
        id=record.id,
        sources=sources,
        shared_bytes=shared_bytes,
        reusable=record.reusable,
        part=record.part,
        branches=record.branches,
        members=record.members,
    )


def _sources(record: CommitRecord, url: str) -> tuple[tuple[str, ...], int]:
    """``Step.sources`` and ``Step.shared_bytes``."""
    if VIRTUAL in record.features:
        return _roots(read_index(open_backend(url), record, SOURCES), url), 0
    if REFERENCED not in record.features:
        return (), 0
    shared = references_of(open_backend(url), record)
    return _owners(shared, url), sum(file.size for file in shared)


def _remaining_sources(record: bytes | None, url: str) -> tuple[str, ...] | None:
    """``Step.sources`` of a checkpoint whose record or index cannot be read, by what is left of it; None if nobody can say."""
    if record is None:
        return ()
    backend = open_backend(url)
    shared = remaining_references(backend, record)
    roots = list(remaining_files(backend, SOURCES))
    try:
        return None if shared is None else (*_owners(shared, url), *(root for data in roots for root in _roots(data, url)))
    except CorruptError:
        return None


def _owners(references: Sequence[DataFile], url: str) -> tuple[str, ...]:
    backend = RunBackend(open_backend(url))
    return tuple({backend.owner_url(file.path): None for file in references})


def _roots(sources: bytes, url: str) -> tuple[str, ...]:
    return tuple({source.root: None for source in decode_sources(sources, url)})


_FEW = 4000
"""Steps of a run that is looked at after each save."""


class KnownSteps:
    """What one process knows of the run at ``root``. Any thread may ask."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._records: KnownRecords[Step] = KnownRecords()
        self._count = 0
        """Directories of the run, when it was listed last."""
        self.waiting = self._most_waiting = 0
        """Saves since :meth:`due`, and how many may be."""

    def due(self) -> bool:
        """Whether to look at the run now that one more save has ended. A look costs what the run has steps, whatever has changed, so there
        is one save for each ``_FEW`` steps between two of them: what is to be removed waits, but is one step in ``_FEW`` at most."""
        if self.waiting < self._most_waiting:
            self.waiting += 1
            return False
        self.waiting, self._most_waiting = 0, self._count // _FEW
        return True

    def list(self) -> list[Step]:
        """As :func:`ckpt.list_steps`, of the present moment; only records that are new or changed are read."""
        backend = open_backend(self._root)
        itself, names = look(backend, self._root)
        self._count = len(names)
        if itself is not None:
            return [itself]
        steps = self._records.read(
            backend, names, lambda new: read_steps(backend, self._root, new), lambda s: s.committed and s.link is None
        )
        return in_order(steps.values())


# How many bytes checkpoints take on their storage, without opening their data files.


def stored_sizes(steps: Sequence[Step]) -> dict[str, int]:
    """URL → bytes of a step's files. A step that was removed meanwhile is left out.

    Of a committed checkpoint the index knows the sizes of all files, so a step costs two or three requests however many files it has; on an
    object store, listing them would cost a request per thousand. What did not finish or is damaged has no index to believe: its files are
    listed. The files that a virtual checkpoint points into, and data files of other checkpoints that
    one refers to, are not its own and do not count.
    """
    sizes = map_tasks(_size_of, steps, _LISTING_THREADS, "ckpt-sizes")
    return {step.url: size for step, size in zip(steps, sizes, strict=True) if size is not None}


def _size_of(step: Step) -> int | None:
    if step.members:  # whose checkpoints lie beside this one
        run = step.url.rstrip("/").rpartition("/")[0]
        return sum(_size_at(join_url(run, c.path), committed=True) or 0 for c in step.members.values())
    return _size_at(step.url, committed=step.committed)


def _size_at(url: str, *, committed: bool) -> int | None:
    backend = open_backend(url)
    try:
        return _committed_size(backend) if committed else sum(entry.size for entry in backend.list_prefix())
    except NotFoundError:
        return None
    except (CorruptError, FormatError):  # the index, not the record: the listing of the run takes only records into account
        return sum(entry.size for entry in backend.list_prefix())


def _committed_size(backend: Backend) -> int | None:
    data = read_record(backend)
    if data is None:
        return None
    record = CommitRecord.from_bytes(data, backend.url)
    index = len(data) + sum(file.size for file in record.index.values())
    with suppress(NotFoundError):  # spans lie beside the index, and nothing else says how large they are
        index += backend.size(index_path(record.id, SPANS))
    if VIRTUAL in record.features:
        return index
    rows = decode_files(read_index(backend, record, FILES), record.index[FILES].path)
    return index + sum(file.size for file in rows if not is_reference(file.path))
