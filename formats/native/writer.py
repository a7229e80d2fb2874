"""A checkpoint exists if and only if its commit record does: how files become durable together, or not at all; writing the index and the
record, changing tags. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from ckpt.catalog import Contents
from ckpt.concurrency import waiting_once
from ckpt.errors import CkptError, ConflictError, NotFoundError, StorageError
from ckpt.plan.values import part_in

from .clearing import BaseFiles, check_committed, check_no_link, check_there, referred_files
from .commit import COMMIT_PATH, INLINE_LIMIT, PART_LIMIT, Branches, CommitRecord, IndexFile, inlined, read_record
from .index import IndexCache, encode_index
from .paths import RANK_ROWS, data_prefix, index_path, is_reference, parity_prefix

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


log = logging.getLogger("ckpt")


# What a commit is, and why its order is safe
#
#   prepare   Nothing is in the way: the place is no link, and it holds what may be replaced, which is remembered byte for byte.
#   files     Each is written under a name that only this journal uses, and made durable. No reader looks for it yet.
#   commit    ONE atomic operation makes all files exist at once. It comes when all of them are durable, so a power loss at any moment
#             leaves either nothing that a reader sees, or everything.
#   discard   Before the commit: what this process made is removed. What turned out to be somebody else's is not.
#
#                         names of the files       the commit                              a killed process leaves
#   CheckpointJournal     bear the save's id       put checkpoint.json, if it holds        files of an id that no commit record names
#   (save, cp, import,                             what prepare found, or nothing
#    convert to native)
#   IntentJournal         are in convert.json,     delete convert.json: as long as it is   convert.json and files that it names
#   (convert, export)     which is put first       there, no reader opens the directory
#
# Two writers at one place: the put is a compare-and-swap, so one of two commits loses; convert.json is created only if it is absent, so one
# of two intents loses. A clean-up at the same time: see ``native.clearing``. What is left behind: ``ckpt.runs.orphans`` reads the
# right-hand column, and removes it when nobody can need it any more.


@dataclass(eq=False)
class WriteJournal:
    """The files that one process makes at ``backend``: only these may be removed again."""

    backend: Backend
    _made: dict[str, None] = field(default_factory=dict, init=False)  # a dict for its order; threads add to it
    began: float = field(default_factory=time.monotonic, init=False)
    """What was silent since then is not asked again when files have to go."""

    @property
    def made(self) -> tuple[str, ...]:
        """Paths that this process gave to files, or may have: an error can come after the effect."""
        return tuple(self._made)

    @contextmanager
    def making(self, path: str) -> Iterator[None]:
        """Around each call that may give a file its name: the file counts as made here, unless ConflictError says it is somebody else's."""
        self._made[path] = None
        try:
            yield
        except ConflictError:
            self._made.pop(path, None)
            raise

    def write(self, path: str, data: bytes) -> None:
        """Make a small file, durably."""
        with self.making(path), self.backend.create(path, len(data)) as writer:
            writer.write(0, [data])
            writer.commit()

    def discard(self) -> None:
        """Remove what this process made. What cannot be removed stays as an orphan: the error that led here matters more."""
        for path in self.made:
            with suppress(CkptError), waiting_once(since=self.began):
                self.backend.delete(path)


def publish(backend: Backend, path: str, data: bytes, *, replace: bool = False) -> None:
    """Make a small file that another process of the same writing may have made: it appears whole. Other content that is there is a
    ConflictError, or gives way."""
    try:
        backend.put_if(path, data, expected=None)
    except ConflictError:
        there = backend.read(path)
        if there != data and not replace:
            raise
        if there != data:  # by another version of a library
            backend.put_if(path, data, expected=there)


@dataclass(eq=False, kw_only=True)
class CheckpointJournal(WriteJournal):
    """One writing of save ``id``, which ends with a commit record.

    ``previous`` is the record that it replaces, as ``read_record`` gave it before; None: none was there. ``resumable``: files that are
    durable stay when the commit fails, for another attempt or another process that writes the same ones; nothing is discarded.
    ``base``: see ``BaseFiles``.
    """

    id: str
    previous: bytes | None
    resumable: bool = False
    base: BaseFiles | None = None

    def commit(self, record: bytes, sizes: Mapping[str, int]) -> list[str] | None:
        """Make the checkpoint exist: the last act, when all files are durable. ``sizes`` are theirs, by path.

        The record is published if all files are there, and stays if they still are right after (``native.clearing``). Gives the paths of
        everything that was there then, if that was looked at.

        If this raises, the checkpoint does not exist, and what was made is discarded. One case is left open: the storage failed while it
        published the record, and may have it or not. Then the files stay, and a caller MUST NOT remove files of the save before
        ``committed_id`` has shown that it is not the committed one.
        """
        try:
            check_no_link(self.backend)
            based = check_there(self.backend, self.id, sizes, self.base)
        except BaseException:
            self.discard()
            raise
        try:
            # That what ``previous`` says is removed meanwhile, by the retention of this very job, is no conflict: it is not there to be
            # committed again then.
            expected = self.previous
            while True:
                try:
                    self.backend.put_if(COMMIT_PATH, record, expected=expected)
                    break
                except ConflictError as err:
                    there = read_record(self.backend)
                    if there == expected or there not in (None, self.previous):
                        hint = "let one job save here; the ranks of one job call torch.distributed.init_process_group() before they save"
                        raise ConflictError(f"another save was first here: {err.message}", where=err.where, hint=hint) from err
                    expected = there  # gone, or put back by whoever removed it, as others refer to it
            self.previous = expected
        except BaseException as err:
            # Three cases after an error of the put, since an error may come after the effect:
            #
            #  the record is not there      the commit has failed; what was made can go
            #  it is there                  the answer was lost, or a sync failed: put it once more, to have it durable
            #  the storage cannot say       leave everything; the caller must look before it removes anything
            is_there = self._holds(record)
            if not (is_there and isinstance(err, StorageError) and self._published_again(record)):
                if is_there is False:
                    self.discard()
                raise
        try:
            return check_committed(self.backend, self.id, sizes, self.previous, self.base, based)
        except StorageError:
            if self._holds(record) is False:
                self.discard()
            raise

    def _holds(self, record: bytes) -> bool | None:
        """Whether the commit record is this one; None if the storage cannot say."""
        try:
            with waiting_once(since=self.began):
                return read_record(self.backend) == record
        except CkptError:
            return None

    def _published_again(self, record: bytes) -> bool:
        """Make a record durable that is there, but perhaps not for good: an answer was lost, or a sync failed. Whether that worked."""
        try:
            self.backend.put_if(COMMIT_PATH, record, expected=record)
        except StorageError:
            return False
        return True

    def replaced_files(self) -> tuple[str, ...]:
        """Paths of the files of the checkpoint that this one replaces which nothing reaches after the commit."""
        return () if self.previous is None else without_referred(self.backend, files_of(self.backend, self.previous))

    def remove_replaced(self) -> None:
        """After the commit: remove these. A failure harms nothing, since the checkpoint exists, and is only logged."""
        try:
            self.backend.delete_many(self.replaced_files())
        except CkptError as err:
            log.warning("files of the checkpoint that was replaced stay behind in %s as orphans: %s", self.backend.url, err)

    def discard(self) -> None:
        """See ``WriteJournal.discard``. What is resumable stays."""
        if not self.resumable:
            super().discard()

    def withdraw(self) -> None:
        """Remove what this process made of a resumable writing, if another checkpoint was committed here: nobody can need it."""
        present = read_record(self.backend)
        if present is not None and CommitRecord.from_bytes(present, self.backend.url).id != self.id:
            super().discard()


def without_referred(backend: Backend, paths: Sequence[str]) -> tuple[str, ...]:
    """Paths of files of a checkpoint, without those that others of its run refer to, or point into as virtual checkpoints. These may point
    into any, and nothing tells the ones that they point into: so ``reusable`` in a record does not matter here."""
    referrers = referred_files(backend)
    return tuple(path for path in paths if not referrers.of(path))


def files_of(backend: Backend, data: bytes | None) -> tuple[str, ...]:
    """Paths of all files that are there of the save that the commit record ``data`` names; the record itself is not among them, nor are
    data files of other checkpoints. No record: no files."""
    if data is None:
        return ()
    id = CommitRecord.from_bytes(data, f"{backend.url.rstrip('/')}/{COMMIT_PATH}").id
    return tuple(e.path for prefix in (index_path(id, ""), data_prefix(id), parity_prefix(id)) for e in backend.list_prefix(prefix))


def write_index(
    journal: CheckpointJournal,
    contents: Contents,
    *,
    world_size: int,
    features: tuple[str, ...] = (),
    cache: IndexCache | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    listed: list[str] | None = None,
    reusable: bool = False,
    branches: Branches = (),
) -> CommitRecord:
    """Write the index of the journal's save and commit it: the last act of a save, done by one rank, when all data files are durable.

    ``features`` are the extensions that it takes to read the checkpoint: ``commit.CODED`` if any of its chunks is coded, ``commit.APART``
    if the contents have ``rows``.
    ``kept``: see ``encode_index``. ``metrics``, ``tags``: what the job says of this checkpoint. ``lost``: what is not in
    it any more (``CommitRecord.lost``). ``reusable``, ``branches``: see there. ``listed`` takes what
    ``CheckpointJournal.commit`` gives. If this raises, the save is not committed, and its index files are removed unless the
    journal is resumable; the case that ``CheckpointJournal.commit`` leaves open is open here, too.
    """
    check_no_link(journal.backend)
    cache = IndexCache() if cache is None else cache
    if cache.state is None or contents.state is not None:  # else the contents leave the state to the cache
        cache.part = part_in(contents.state)
    files = encode_index(contents, cache)
    small = {name: data for name, data in files.items() if name != RANK_ROWS}  # of which readers take single rows
    record = CommitRecord(
        id=journal.id,
        world_size=world_size,
        features=features,
        index={n: IndexFile(path=index_path(journal.id, n), size=len(d), digest=xxhash.xxh3_128_hexdigest(d)) for n, d in files.items()},
        tensor_bytes=cache.tensor_bytes + contents.rows_bytes,
        metrics=dict(metrics or {}),
        tags=tags,
        lost=lost,
        reusable=reusable,
        branches=branches,
        inline=inlined(small, most) if (most := min(INLINE_LIMIT, journal.backend.io_hints.coalesce_gap)) else {},
        part=None if cache.part is None else cache.part.text()[:PART_LIMIT],
    )
    try:
        for name, data in files.items():
            if journal.resumable:  # other processes may make it too
                publish(journal.backend, record.index[name].path, data, replace=True)
            else:
                journal.write(record.index[name].path, data)
    except BaseException:
        journal.discard()
        raise
    sizes = {f.path: f.size for f in contents.files if not is_reference(f.path)} | {f.path: f.size for f in record.index.values()}
    there = journal.commit(record.to_bytes(), sizes)
    if listed is not None:
        listed += there or ()
    return record


def set_tags(backend: Backend, tags: Collection[str], *, id: str | None = None, instead_of: Collection[str] = ()) -> CommitRecord:
    """Give a committed checkpoint these tags in place of those that it has. With ``id`` and ``instead_of``, those that it had when somebody
    decided, nothing is changed if it has others now: a tag of somebody else would be lost."""
    check_no_link(backend)
    data = read_record(backend)
    if data is None:
        raise NotFoundError("there is no checkpoint", where=backend.url, hint="`ckpt ls` lists the checkpoints there")
    record = CommitRecord.from_bytes(data, _where(backend))
    if id is not None and (record.id != id or set(record.tags) != set(instead_of)):
        raise ConflictError("the checkpoint was replaced or tagged meanwhile", where=backend.url, hint="look at its tags, and try again")
    tagged = replace(record, tags=tuple(sorted(set(tags))))
    backend.put_if(COMMIT_PATH, tagged.to_bytes(), expected=data)
    return tagged


def committed_id(backend: Backend, within: str = "") -> str | None:
    """The id of the save that is committed here, or in the directory ``within`` (empty, or ending in a slash); None if none is."""
    data = read_record(backend, within)
    return None if data is None else CommitRecord.from_bytes(data, _where(backend, within)).id


def _where(backend: Backend, within: str = "") -> str:
    return f"{backend.url.rstrip('/')}/{within}{COMMIT_PATH}"
