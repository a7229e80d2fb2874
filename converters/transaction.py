"""The files of an export at its destination: begun, joined, and made to exist together, or not at all. No torch.

On storage that processes can share files on, nothing shows before all is durable: then the files get their names, and what says that
they belong together comes last. While several names change, ``convert.json`` is there and ckpt opens nothing. Elsewhere each file has one
process that writes it, ``convert.json`` is there from the beginning, and nothing can be replaced.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from ckpt.converters.targets.hf import INDEX
from ckpt.errors import CkptError, ConflictError, NotFoundError, StorageError, UsageError
from ckpt.formats.delta_manifest import MANIFEST
from ckpt.formats.journal import IntentJournal
from ckpt.formats.native.clearing import check_no_link
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.formats.native.writer import WriteJournal, publish
from ckpt.formats.registry import ExportRecord, find_format, record_path
from ckpt.formats.safetensors import FORMAT_NAME, INDEX_SUFFIX, SUFFIX
from ckpt.io_backends.protocol import Backend, SharedObject, Writer
from ckpt.io_backends.writer_base import left_behind, remove_left

from .target import OutputFile

# Names in the order in which they appear, on storage where processes share files
#
#   all ranks    write to files aside (hidden names, or parts of an upload), and make them durable; nobody sees anything
#   leader       puts convert.json: from here on ckpt opens nothing at this place
#                deletes the index of an export that is replaced, then its shards that no new one replaces
#                gives each file its name
#                puts the small files, and the new index last: it is what transformers looks for
#                deletes convert.json: the commit
#
# Killed before convert.json, the earlier export is untouched. Killed after it, the place cannot be opened, by ckpt at least, until an
# export there begins again, which removes what this one left.

_STEM = "model"
_WEIGHTS = re.compile(rf"{_STEM}(-\d{{5}}-of-\d{{5}})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """``name`` is that of the only file, if it is one; ``replace`` whether what is there may be replaced."""

    url: str
    backend: Backend
    name: str | None
    replace: bool

    @property
    def record(self) -> str:
        return record_path(self.name)

    def clear(self) -> None:
        """Remove what exports that were killed left here, and check that nothing else is in the way."""
        if self.name is None:
            check_no_link(self.backend)
        begun, replaces = self.begun()
        self.check_free({self.record} if replaces else {self.record, *begun})
        if self.replace and self.name is None:
            # What is there has to be an export, all of which will be replaced: weights that stay would be taken for some of the new ones.
            others = [n for n in self._taken() if n.endswith((SUFFIX, INDEX_SUFFIX)) and n != INDEX and _WEIGHTS.fullmatch(n) is None]
            if others or find_format(self.url) not in (None, FORMAT_NAME):
                if MANIFEST in self._taken():
                    raise _delta_is_there(self.url)
                message = f"what is there is no export{': ' if others else ''}{', '.join(others[:5])}"
                raise ConflictError(message, where=self.url, hint="export to another URL, or remove it first")
        for left in list(left_behind(self.backend, self.name or _STEM)):
            if left.path == self.name if self.name is not None else _WEIGHTS.fullmatch(left.path):
                remove_left(self.backend, left)
        for path in (*begun, self.record):
            self.backend.delete(path)

    def check_free(self, but: Collection[str] = ()) -> None:
        """Raise ConflictError if anything is there, ``but`` for these files, that must not be replaced."""
        taken = [] if self.replace else [n for n in self._taken() if n not in but]
        if MANIFEST in taken:
            raise _delta_is_there(self.url)
        if taken:
            message = f"something is there already: {', '.join(taken[:5])}"
            raise ConflictError(message, where=self.url, hint="export to another URL, or replace it: overwrite=True")

    def _taken(self) -> list[str]:
        names = self.backend.list_dir()
        return [n for n in names if n.rstrip("/") == self.name] if self.name is not None else [n for n in names if not n.startswith(".")]

    def begun(self) -> tuple[Sequence[str], bool]:
        """Files to which an export that was killed had given their names, and whether they may be those that it was to replace."""
        try:
            begun = ExportRecord.from_bytes(self.backend.read_whole(self.record, RECORD_LIMIT))
        except NotFoundError:
            return (), False
        if begun is None:
            raise ConflictError(
                f"a conversion was begun here and did not finish ({self.record})",
                where=self.url,
                hint="export to another URL, let `ckpt convert` continue, or remove the files there",
            )
        return begun.files, begun.replaces

    def put(self, path: str, data: bytes) -> None:
        """Make a small file hold ``data``."""
        publish(self.backend, path, data, replace=self.replace)


@dataclass(eq=False)
class ExportTransaction:
    """The files of one export on the leader, who has begun them: their sizes by path, those of a delta once it is written; and the names of
    small ones that come with them, of which ``last`` is written last. ``shared`` is None where files cannot be shared."""

    destination: Destination
    sizes: Mapping[str, int | None]
    beside: Sequence[str]
    last: str | None
    shared: list[SharedObject] | None = None

    def __post_init__(self) -> None:
        self.journal = IntentJournal(self.destination.backend, self.destination.record)

    @classmethod
    def begin(cls, destination: Destination, files: Sequence[OutputFile], beside: Sequence[str]) -> ExportTransaction:
        """Begin all files; ``beside`` are the names of small ones that come with them."""
        if destination.replace:
            check_replaceable(destination.url, destination.backend)
        transaction = cls(destination, {f.path: f.size for f in files}, beside, last=INDEX if INDEX in beside else None)
        first = destination.backend.create_shared(files[0].path, files[0].size) if files else None
        if first is None:
            transaction.show()
            return transaction
        transaction.shared = [first]
        try:
            for file in files[1:]:
                transaction.shared.append(_shared(destination.backend, file))
        except BaseException:
            transaction.discard()
            raise
        return transaction

    def show(self) -> None:
        """Say that files are about to show that belong together only when the record is gone. Where none are shared, every process makes
        some of them, and this one removes what is left of all."""
        files = (*self.sizes, *self.beside)
        self.journal.begin(ExportRecord(id=secrets.token_hex(8), replaces=self.destination.replace, files=files).to_bytes())
        if self.shared is None:
            self.journal.adopt(files)

    @property
    def tokens(self) -> list[str] | None:
        return None if self.shared is None else [s.token for s in self.shared]

    @property
    def parts(self) -> list[int] | None:
        """The size of a part, for each file; None where files cannot be shared."""
        return None if self.shared is None else [s.part_size for s in self.shared]

    def commit(self, receipts: Mapping[int, Sequence[Any]], small: Mapping[str, bytes], finish: Callable[[Backend], None]) -> None:
        """Make the export exist, with ``small`` files beside; ``finish`` writes what comes last."""
        if self.shared is None:
            for path, expected in self.sizes.items():
                size = self.destination.backend.size(path)
                if size != expected:
                    message = f"{path} has {size} of {expected} bytes"
                    raise StorageError(message, where=self.destination.url, hint="the URL must be on storage that all ranks share")
        else:
            self._show(self.shared, receipts)
        self._check_alone()
        for path, data in small.items():
            with self.journal.making(path):
                self.destination.put(path, data)
        with self.journal.making(self.last) if self.last is not None else nullcontext():
            finish(self.destination.backend)
        self._check_alone()
        if self.journal.is_begun:
            self.journal.commit()

    def _check_alone(self) -> None:
        if self.journal.is_begun and not self.journal.is_alone():
            message = "another export to here has removed what this one wrote"
            raise ConflictError(message, where=self.destination.url, hint="let that one end, or export to another URL")

    def _show(self, shared: Sequence[SharedObject], receipts: Mapping[int, Sequence[Any]]) -> None:
        destination = self.destination
        if destination.name is None:
            for one in shared:
                one.flush()  # fails if another export has removed it: then nothing of what is there may go
            destination.check_free()
            self.show()
            if destination.replace:
                # Weights of the export that is replaced: the index first, for nobody shall find shards through it that are gone
                backend = self.destination.backend
                backend.delete(INDEX)
                for name in backend.list_dir():
                    if _WEIGHTS.fullmatch(name) and name not in self.sizes:
                        backend.delete(name)
        for number, (path, one) in enumerate(zip(self.sizes, shared, strict=True)):
            with self.journal.making(path):
                one.complete(receipts.get(number, []), replace=destination.replace)

    def discard(self) -> None:
        """Leave nothing of it. What was replaced already cannot be brought back; then the mark stays, and nothing can be opened."""
        for one in self.shared or ():
            with suppress(CkptError):  # what is left is found by the next export to the same place
                one.abort()
        if not self.destination.replace:
            self.journal.discard()


def check_replaceable(url: str, backend: Backend) -> None:
    """Raise UsageError where exports cannot be replaced, whether one is there or not: callers ask before a run, not at its end."""
    if not backend.shares_files:
        raise UsageError(
            "what is on this storage cannot be replaced",
            where=url,
            hint="a directory or s3:// can be replaced; elsewhere export to a new URL",
        )


def _shared(backend: Backend, file: OutputFile, token: str | None = None) -> SharedObject:
    """A file that several processes write, begun or joined, on storage that has shared another one."""
    shared = backend.create_shared(file.path, file.size, token)
    if shared is None:
        hint = "the URL must be on one storage, which all ranks share"
        raise StorageError(f"the storage shares other files, but not {file.path}", where=backend.url, hint=hint)
    return shared


class RankFiles:
    """One rank's side of the files: opened when the first byte is written. ``tokens`` are the leader's, or None where files cannot be
    shared; ``mine`` are the objects that this process began itself."""

    def __init__(
        self, destination: Destination, files: Sequence[OutputFile], tokens: Sequence[str] | None, mine: Sequence[SharedObject] | None
    ) -> None:
        self.destination = destination
        self.files = files
        self.tokens = tokens
        self.mine = mine
        self._shared: dict[int, SharedObject] = {}
        self._alone: dict[int, Writer] = {}
        self._journal = WriteJournal(destination.backend)

    def open(self, number: int) -> None:
        """Make ready to write a file; not from several threads."""
        file = self.files[number]
        if self.tokens is None:
            if number not in self._alone:
                with self._journal.making(file.path):
                    self._alone[number] = self.destination.backend.create(file.path, file.size)
        elif number not in self._shared:
            mine = None if self.mine is None else self.mine[number]
            self._shared[number] = mine or _shared(self.destination.backend, file, self.tokens[number])

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Write bytes of a file that is open."""
        (self._alone if self.tokens is None else self._shared)[number].write(offset, [data])

    def flush(self) -> dict[int, Any]:
        """Make all durable; what the leader needs to publish each file."""
        for number, writer in self._alone.items():
            with self._journal.making(self.files[number].path):
                writer.commit()
        return {number: one.flush() for number, one in self._shared.items()}

    def discard(self) -> None:
        """Remove what this process alone has written."""
        for writer in self._alone.values():
            with suppress(CkptError):  # the record stays, and the next export to the same place removes the file
                writer.abort()
        self._journal.discard()

    def close(self) -> None:
        """Write no more to files that others have begun."""
        if self.mine is None:
            for one in self._shared.values():
                one.close()


def _delta_is_there(url: str) -> ConflictError:
    hint = "export to another URL; or remove it first, if no other delta follows it"
    return ConflictError("a delta is there, and nothing replaces a delta", where=url, hint=hint)
