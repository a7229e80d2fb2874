"""Copies a checkpoint from one storage to another: in parallel, in bounded memory, every byte against its digest, the commit record last.

Invariants: nothing of a committed checkpoint is ever deleted or overwritten. A file is committed at the target only when all of its bytes
have been read and found to be what the digests say, and the record only when all files are there. No torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from ckpt import settings, units
from ckpt.concurrency import imap_unordered
from ckpt.errors import ConflictError, CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.native.catalog import NativeCatalog, read_index_file, replacement_noticed
from ckpt.formats.native.clearing import check_free, check_no_link, check_no_run, check_there, claim, resume
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord, read_record
from ckpt.formats.native.paths import CLEARING, FILES, SPANS, index_path
from ckpt.formats.native.writer import CheckpointJournal
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.net.channel import Row
from ckpt.net.divided_work import DividedWork
from ckpt.plan.machines import balanced, bytes_of
from ckpt.settings import check_flags
from ckpt.telemetry.progress import ProgressCallback, check_progress
from ckpt.text import url_text

from .copied_files import CopyTask, FileCheck, FileCopy, GatheredFile, SelfContained, StorageCopies
from .digest_reader import DigestReader

THREADS = 8
"""How many read and write at once, unless the caller says. Each holds at most ``transfer_files.BUFFER`` bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What a copy did, or with ``dry_run`` would do. ``files`` and ``bytes`` are the whole checkpoint's, the commit record left out."""

    source: str
    target: str
    id: str
    files: int
    bytes: int
    copied_files: int
    """The others were at the target already, with the right bytes; with ``dry_run``, with the right size."""
    copied_bytes: int
    committed: bool
    """Whether this call committed the target; False if it was committed before, and with ``dry_run``."""
    seconds: float
    uncompared_bytes: int = 0
    """Of ``copied_bytes``: what an object store copied by itself. Nobody has compared it with a digest: ``ckpt verify`` does."""

    def __str__(self) -> str:
        copied = f"{units.plural(self.copied_files, 'file')}, {units.size(self.copied_bytes)}"
        return f"copied {copied} of {units.size(self.bytes)} to {self.target} in {units.duration(self.seconds)}"


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
    dry_run: bool = False,
    compare: bool = False,
    work: DividedWork | None = None,
) -> CopyReport:
    """Copy the checkpoint at ``source`` to ``target``, two URLs of any storage. Metrics and tags go with it. What it refers to in other
    checkpoints is copied too: the copy needs none of them.

    A copy that was interrupted continues: files that are at the target already are read and compared with their digests, and only the
    others are copied. If the same checkpoint is committed there, its files are compared and missing ones are copied; its record stays.

    Within one object store, the store copies the bytes of larger files by itself: only headers, indexes and small files come here and are
    compared (``CopyReport.uncompared_bytes``). ``compare=True`` reads and compares every byte. On a file system every byte is
    compared; where files can share extents, as on XFS and Btrfs, none of a larger file is written.

    ``progress`` is called from this thread with the bytes done so far and the bytes in all. The latter grow if files that an interrupted
    copy left turn out to be damaged.

    ``work``, of several processes: each copies a part of the files, the first one commits, and all report what all have done.

    Raises:
        NotFoundError, NotCommittedError: there is no checkpoint at ``source``.
        FormatError: it is of another format, whose files are unknown.
        CorruptError: it is damaged, or the same checkpoint at ``target`` is. Nothing is committed.
        ConflictError: another checkpoint is, or meanwhile was, committed at ``target``, or files are there that do not belong to an
            unfinished copy, or ``target`` is a symbolic link. What is there stays as it is.
        UsageError: ``target`` is ``source``, or a run.
        StorageError: the storage failed. What is whole at the target stays there for the next attempt.
    """
    source, target, began = url_text(source), url_text(target), time.monotonic()
    check_flags(dry_run=dry_run, compare=compare)
    check_progress(progress)
    workers = THREADS if threads is None else settings.threads(threads)
    run = Transfer(source, target, compare=compare)
    if dry_run:
        missing = run.sizes.keys() - run.complete()
    elif work is not None:
        missing = _copy_part(run, workers, progress, work)
    else:
        run.target.prepare()
        with replacement_noticed(run.catalog):
            missing = run.copy(run.sizes.keys(), workers, progress)
        run.commit()
    return CopyReport(
        source=source,
        target=target,
        id=run.record.id,
        files=len(run.sizes),
        bytes=sum(run.sizes.values()),
        copied_files=len(missing),
        copied_bytes=sum(run.sizes[path] for path in missing),
        committed=not dry_run and not run.committed_before,
        seconds=time.monotonic() - began,
        uncompared_bytes=run.uncompared_bytes,
    )


def _copy_part(run: Transfer, threads: int, progress: ProgressCallback | None, work: DividedWork) -> set[str]:
    """Copy this process's part, and commit when all have. Gives the paths of what all have copied."""
    paths = sorted(run.sizes)
    sizes = [run.sizes[path] for path in paths]
    shares = balanced(sizes, work.count)

    def begin(rows: dict[int, Row]) -> Row:
        if len({row["record"] for row in rows.values()}) > 1:
            hint = "give all of them a source on storage that they share, and copy again"
            raise ConflictError("the processes do not see the same checkpoint, or it was replaced", where=run.source.url, hint=hint)
        run.target.prepare()
        return {}

    def copy() -> Row:
        with replacement_noticed(run.catalog):
            missing = run.copy([paths[n] for n in shares[work.number]], threads, report)
        return {"missing": sorted(missing), "made_room": run.made_room, "uncompared": run.uncompared_bytes}

    def commit(rows: dict[int, Row]) -> Row:
        run.made_room = any(row["made_room"] for row in rows.values())
        run.commit()
        uncompared = sum(row["uncompared"] for row in rows.values())
        return {"missing": [path for row in rows.values() for path in row["missing"]], "uncompared": uncompared}

    work.agree("begin", lambda: {"record": xxhash.xxh3_128_hexdigest(run.record_bytes)}, begin)
    with work.shown(bytes_of(sizes, shares), progress) as report:
        ended = work.agree("copy", copy, commit)
        run.uncompared_bytes = int(ended["uncompared"])
        return set(ended["missing"])


class _Meter:
    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self.done, self.total = 0, total
        self._progress = progress

    def add(self, count: int) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(self.done, self.total)


class Transfer:
    """One copy, which several processes may share: each copies some of the files, and one of them commits when all have. ``sizes`` has
    every file of the checkpoint but the record. ``replace``: a checkpoint of an earlier save at the target gives way. ``compare``: whether
    bytes that the storage could copy by itself are read and compared all the same. They are on a file system, where that is cheap."""

    def __init__(self, source: str, target: str, *, replace: bool = False, compare: bool = False) -> None:
        catalog = open_catalog(source)
        if not isinstance(catalog, NativeCatalog):
            raise FormatError(
                f"only checkpoints in the format of ckpt that have all of their files can be copied; this is {catalog.format}",
                where=source,
                hint="convert it: `ckpt convert --to native`, or copy it with the tools of the storage",
            )
        self.source = catalog.backend
        self.target = open_backend(target)
        self.reader, self.checker = DigestReader(catalog.backend), DigestReader(self.target)
        if self.source.url == self.target.url:
            raise UsageError("source and target are the same place", where=target)
        self.catalog = catalog
        self.record = catalog.record
        data = read_record(self.source)  # as it is stored: this software may not know all of its members
        if data is None or CommitRecord.from_bytes(data, self.source.url).id != self.record.id:
            raise ConflictError("the checkpoint was replaced or removed while it was opened", where=self.source.url, hint="copy again")
        self.record_bytes = data
        own = SelfContained.of(catalog)
        self.files = catalog.files
        self._gathered: Mapping[str, GatheredFile] = {}
        if own is not None:
            self.record, self.record_bytes = own.record, own.record.to_bytes()
            self.files, self._gathered = own.files, own.gathered
        self.replaced: bytes | None = None
        """The commit record that gives way."""
        self.committed_before = self._check_target(replace)
        # The small files, whole; those whose digests the record has are compared with them
        record = self.catalog.record
        index = {file.path: read_index_file(self.source, record, name) for name, file in record.index.items()}
        spans = index_path(self.record.id, SPANS)
        with suppress(NotFoundError):  # not every save keeps them
            index[spans] = self.source.read(spans)
        self.index = index
        if own is not None:
            self.index[own.record.index[FILES].path] = own.rows
        self.sizes = {f.path: f.size for f in self.files} | {path: len(data) for path, data in self.index.items()}
        self.journal = CheckpointJournal(self.target, id=self.record.id, previous=self.replaced, resumable=True)
        self._copies = StorageCopies(self.source, self.target, compare=compare or is_file_system(self.source.url))
        self.uncompared_bytes = 0
        self.made_room = False
        """Files were deleted, to be copied again; no other copy can commit before this one does."""

    def _check_target(self, replace: bool) -> bool:  # noqa: FBT001
        """Whether this very checkpoint is committed at the target."""
        check_no_link(self.target)
        data = read_record(self.target)
        if data is None:
            hint = (
                f"`ckpt cp SRC {self.target.url}/` keeps the name of the step; or name the copy's own URL, such as {self.target.url}/copy"
            )
            check_no_run(self.target, hint)
            if not replace:  # a job publishes beside what its user keeps there
                check_free(self.target, "copy")
            return False
        committed = CommitRecord.from_bytes(data, f"{self.target.url}/{COMMIT_PATH}")
        if replace and committed.id < self.record.id:
            self.replaced = data
            return False
        if (committed.id, dict(committed.index)) != (self.record.id, dict(self.record.index)):
            raise ConflictError(
                f"another checkpoint is there: save {committed.id} of {committed.created}",
                where=self.target.url,
                hint="copy to another URL, or remove that checkpoint first",
            )
        return True

    # ---- what is there

    def there(self) -> dict[str, int]:
        """Sizes of the files of this checkpoint that are at the target, whole or not."""
        return {e.path: e.size for e in self.target.list_prefix() if e.path in self.sizes}

    def complete(self) -> set[str]:
        """Paths of those that have the right size."""
        return {path for path, size in self.there().items() if size == self.sizes[path]}

    # ---- copying

    def copy(self, paths: Collection[str], threads: int, progress: ProgressCallback | None) -> set[str]:
        """Of these files, compare what is there and copy the rest; gives the paths of what was copied."""
        sizes = {path: self.sizes[path] for path in paths}
        meter = _Meter(sum(sizes.values()), progress)
        listed = {e.path: e.size for e in self.target.list_prefix()}
        if index_path(self.record.id, CLEARING) in listed:
            resume(self.target, self.record.id)
        there = {path: size for path, size in listed.items() if path in sizes}
        # What a copy that was interrupted left is taken over only if its bytes are right: same size first, which is
        # cheap, then the digests, which reads them. Everything else is deleted and copied again.
        complete = {path for path, size in there.items() if size == self.sizes[path]}
        damaged = self._damaged(complete, threads, meter)
        meter.total += sum(self.sizes[path] for path in damaged)
        self._make_room((there.keys() - complete) | damaged)
        missing = (sizes.keys() - complete) | damaged
        for path, data in self.index.items():
            if path in missing:
                self.journal.write(path, data)
                meter.add(len(data))
        copies: list[FileCopy] = []

        def jobs() -> Iterator[CopyTask]:
            for file in self.files:
                if file.path in missing:
                    copies.append(FileCopy(self.reader, self.journal, file, self._gathered.get(file.path), self._copies))
                    yield from copies[-1].jobs()

        try:
            for count in imap_unordered(jobs(), threads, "ckpt-cp"):
                meter.add(count)
        finally:
            for copy in copies:
                copy.abort()  # does nothing to those that are committed
            self.uncompared_bytes = self._copies.bytes
        return missing

    def _damaged(self, paths: set[str], threads: int, meter: _Meter) -> set[str]:
        """Those of the files at the target that have the right size but not the right bytes."""
        checks = [FileCheck(self.checker, f) for f in self.files if f.path in paths]
        for count in imap_unordered((job for check in checks for job in check.jobs()), threads, "ckpt-cp"):
            meter.add(count)
        damaged = {check.file.path for check in checks if check.damaged}
        for path in self.index.keys() & paths:
            meter.add(self.sizes[path])
            damaged |= set() if self._same(path) else {path}
        return damaged

    def _same(self, path: str) -> bool:
        """Whether an index file at the target has the right bytes."""

        def read() -> bool:
            if self.target.read(path) != self.index[path]:
                raise CorruptError("it has other bytes", where=f"{self.target.url}/{path}")
            return True

        try:
            return read_checked(self.target, path, read)
        except CorruptError:
            return False

    def _make_room(self, bad: set[str]) -> None:
        """Delete what an interrupted copy left half."""
        # If that copy goes on after all, it sees this, or this sees that it is committed.
        if bad and self.committed_before:
            raise CorruptError(
                f"the same checkpoint is there already, but {len(bad)} of its files are damaged; the first is {min(bad)}",
                where=self.target.url,
                hint="remove it there and copy again, or copy to another URL",
            )
        if bad:
            self.made_room = True
            claim(self.target, self.record.id)
        self.target.delete_many(sorted(bad))

    # ---- the end

    def commit(self) -> None:
        """Publish the record, if all files are there, and remove the files of the checkpoint that it replaces."""
        if self.committed_before:
            check_there(self.target, self.record.id, self.sizes)
            return
        # The mark of ``claim`` said that files were about to go; now they are all there again, so it is taken away,
        # and the journal's own check that everything is there follows.
        if self.made_room:
            resume(self.target, self.record.id)
        try:
            self.journal.commit(self.record_bytes, self.sizes)
        except ConflictError:
            self.journal.withdraw()
            raise
        self.journal.remove_replaced()
