"""How files become durable together, or not at all: what saves, copies, conversions, imports and exports have in common. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.formats.native.catalog import read_index, read_record
from ckpt.formats.native.clearing import BaseFiles, check_committed, check_no_link, check_there, referred_files
from ckpt.formats.native.commit import COMMIT_PATH, RECORD_LIMIT, CommitRecord
from ckpt.formats.native.index import decode_files
from ckpt.formats.native.paths import FILES, SPANS, data_prefix, index_path, is_reference
from ckpt.text import parse_json

from .registry import CLAIM, ConversionRecord, mark_name, marks_prefix, record_path

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


class WriteJournal:
    """The files that one process makes at ``backend``: only these may be removed again."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._made: dict[str, None] = {}  # a dict for its order; threads add to it

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
            with suppress(CkptError):
                self.backend.delete(path)


class CheckpointJournal(WriteJournal):
    """One writing of save ``id``, which ends with a commit record.

    ``previous`` is the record that it replaces, as ``read_record`` gave it before; None: none was there. ``resumable``: files that are
    durable stay when the commit fails, for another attempt or another process that writes the same ones; nothing is discarded.
    ``base``: see ``BaseFiles``.
    """

    def __init__(
        self, backend: Backend, *, id: str, previous: bytes | None, resumable: bool = False, base: BaseFiles | None = None
    ) -> None:
        super().__init__(backend)
        self.base = base
        self.id = id
        self.previous = previous
        self.resumable = resumable

    def put(self, path: str, data: bytes) -> None:
        """Make a small file that other processes of a resumable writing may make too: it appears whole, and is replaced if it differs."""
        try:
            self.backend.put_if(path, data, expected=None)
        except ConflictError:
            # Another process of the same resumable writing was first. Equal content is what it should be; other
            # content comes from another version of a library, and the later one wins.
            there = self.backend.read(path)
            if there != data:  # by another version of a library
                self.backend.put_if(path, data, expected=there)

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
            self._publish(record)
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

    def _publish(self, record: bytes) -> None:
        """Put the record where ``previous`` is, or was: that it is removed meanwhile, by the retention of this very job, is no conflict. It
        is not there to be committed again then."""
        expected = self.previous
        while True:
            try:
                self.backend.put_if(COMMIT_PATH, record, expected=expected)
                self.previous = expected
                return
            except ConflictError:
                there = read_record(self.backend)
                if there == expected or there not in (None, self.previous):
                    raise
                expected = there  # gone, or put back by whoever removed it, as others refer to it

    def _holds(self, record: bytes) -> bool | None:
        """Whether the commit record is this one; None if the storage cannot say."""
        try:
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


class IntentJournal(WriteJournal):
    """Files of a format without commit record. ``record`` is the path of what says so while they are written; without it, they exist."""

    def __init__(self, backend: Backend, record: str) -> None:
        super().__init__(backend)
        self.record = record
        self._begun: bytes | None = None

    def begin(self, data: bytes) -> None:
        """Say that files will show here that belong together only when the record is gone again. ``data`` is no other journal's."""
        self.backend.put_if(self.record, data, expected=None)
        self._begun = data

    def adopt(self, paths: Iterable[str]) -> None:
        """Count these files as made here: other processes of the same job make them, and may die before they can remove them."""
        self._made |= dict.fromkeys(paths)

    @property
    def is_begun(self) -> bool:
        """Whether ``begin`` was called, here and with success."""
        return self._begun is not None

    def is_alone(self) -> bool:
        """Whether the record is still the one of ``begin``: it is not if another process took it for a dead one's, and removed it."""
        try:
            return self._begun is not None and self.backend.read(self.record) == self._begun
        except NotFoundError:
            return False

    def commit(self) -> None:
        """Make the files exist: the last act, when all are durable."""
        self.backend.delete(self.record)

    def discard(self) -> None:
        """See ``WriteJournal.discard``. The record goes last. If it is another one's by now, so are the files."""
        with suppress(CkptError):
            if self.is_alone():
                super().discard()
                self.backend.delete(self.record)


# A conversion in the storage, from its begin to its end
#
#   convert.json put             the record: which files, and a digest of everything that they depend on. Other options: another digest,
#                                which is refused; the same command finds its own record and resumes
#   convert-<id>/00000, 00001 …  one mark for each file, put when it is durable. A file without mark may be cut off, so it is written anew
#   convert-<id>/finish          the claim: of all processes that see all marks, the one that puts it writes what comes last
#   convert.json deleted         the commit: readers refuse the directory as long as it is there
#   marks deleted, claim last    whoever comes late finds no record but the claim, and knows that all has ended (``ended``)
#
# Killed between two lines, the same command continues at the line where it was.


class ConversionJournal(IntentJournal):
    """The conversion at ``backend``; ``name`` is that of the only file, if the destination is one. ``id`` is for names of files.

    Several processes may take part, and a later attempt may resume it. So besides the record there is a mark for each file that is durable,
    and one for the process that finishes.
    """

    def __init__(self, backend: Backend, name: str | None, id: str, digest: str) -> None:
        super().__init__(backend, record_path(name))
        self.id = id
        self.digest = digest
        self._marks = marks_prefix(name, id)

    def marks(self) -> set[str]:
        """Paths of those that are there, and of the claim."""
        return {e.path for e in self.backend.list_prefix(self._marks)}

    def durable(self, count: int) -> set[int]:
        """Numbers of those of the first ``count`` files that were said to be durable."""
        marks = self.marks()
        return {number for number in range(count) if self._marks + mark_name(number) in marks}

    def done(self, number: int) -> None:
        """Say that file ``number`` is durable."""
        try:
            self.backend.put_if(self._marks + mark_name(number), b"{}\n", expected=None)
        except ConflictError:
            if number not in self.durable(number + 1):
                raise

    def forget(self, number: int) -> None:
        """Take back that file ``number`` is durable."""
        self.backend.delete(self._marks + mark_name(number))

    def claim(self) -> bool:
        """Whether it is for this process to finish: of all that ask, the first one."""
        try:
            self.backend.put_if(self._marks + CLAIM, json.dumps({"digest": self.digest}).encode() + b"\n", expected=None)
        except ConflictError:
            return False
        return True

    def remove(self, *, but_claim: bool = False) -> None:
        """Take it away: the conversion is over. The marks go last, for who looks for them finds no record then. A claim that stays says to
        ``ended`` which conversion this was."""
        self.commit()
        for path in sorted(self.marks()):
            if not (but_claim and path.endswith(f"/{CLAIM}")):
                self.backend.delete(path)


def ended(backend: Backend, name: str | None, digest: str) -> str | None:
    """The id of the conversion of this digest, if it took its record away and not its claim: see ``remove``, or it was killed."""
    for folder, id in _folders(backend, name):
        try:
            claim = parse_json(backend.read_whole(folder + CLAIM, RECORD_LIMIT))
        except (NotFoundError, CorruptError, ValueError):  # another one's, or of an older version
            continue
        if isinstance(claim, dict) and claim.get("digest") == digest:
            return id
    return None


def _folders(backend: Backend, name: str | None) -> Iterator[tuple[str, str]]:
    """Those with the marks of conversions, and their ids."""
    starts = marks_prefix(name, "").removesuffix("/")
    return ((f, f.removeprefix(starts).removesuffix("/")) for f in backend.list_dir() if f.startswith(starts) and f.endswith("/"))


def find(backend: Backend, name: str | None, digest: str) -> ConversionJournal | None:
    """The conversion that was begun here; None if there is none."""
    try:
        data = backend.read_whole(record_path(name), RECORD_LIMIT)
    except NotFoundError:
        return None
    begun = ConversionRecord.from_bytes(data)
    if begun is None or begun.digest != digest:
        raise ConflictError(
            f"another conversion was begun here and did not finish ({record_path(name)}): of another source, with other options, "
            "or by another version",
            where=backend.url,
            hint="convert to another URL, or remove what is there",
        )
    return ConversionJournal(backend, name, begun.id, digest)


def begin(backend: Backend, name: str | None, begun: ConversionRecord) -> ConversionJournal:
    """Begin a conversion, or join the same one that another process has begun meanwhile. Claims of those that have ended go: what they
    wrote is not there any more."""
    for folder, _ in _folders(backend, name):
        backend.delete(folder + CLAIM)
    record = ConversionJournal(backend, name, begun.id, begun.digest)
    try:
        record.begin(begun.to_bytes())
    except ConflictError:
        other = find(backend, name, begun.digest)
        if other is None:
            raise
        return other
    return record


def without_referred(backend: Backend, paths: Sequence[str]) -> tuple[str, ...]:
    """Paths of files of a checkpoint, without those that others of its run refer to, or point into as virtual checkpoints. These may point
    into any, and nothing tells the ones that they point into: so ``reusable`` in a record does not matter here."""
    referrers = referred_files(backend)
    return tuple(path for path in paths if not referrers.of(path))


def files_of(backend: Backend, data: bytes | None) -> tuple[str, ...]:
    """Paths of all index and data files that the commit record ``data`` reaches, and of its spans; it is not among them itself, nor are
    data files of other checkpoints. No record: no files. If its index is damaged, the data files that bear its id are listed instead."""
    if data is None:
        return ()
    record = CommitRecord.from_bytes(data, f"{backend.url.rstrip('/')}/{COMMIT_PATH}")
    index = [f.path for f in record.index.values()]
    with suppress(NotFoundError):  # not every save keeps them
        spans = index_path(record.id, SPANS)
        backend.size(spans)
        index.append(spans)
    try:
        rows = decode_files(read_index(backend, record, FILES), record.index[FILES].path)
        files = [f.path for f in rows if not is_reference(f.path)]
    except CorruptError:
        files = [e.path for e in backend.list_prefix(data_prefix(record.id))]
    return (*index, *files)
