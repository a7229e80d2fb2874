"""How the files of conversions and exports become durable together, or not at all. ``native.writer`` has the picture. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, ConflictError, CorruptError, NotFoundError
from ckpt.formats.native.commit import RECORD_LIMIT
from ckpt.formats.native.writer import WriteJournal
from ckpt.text import parse_json

from .registry import CLAIM, ConversionRecord, mark_name, marks_prefix, record_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


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

    def claim(self, part: int = 0, *, again: bool = False) -> bool:
        """Whether it is for this process to finish: of all that ask, the first one. ``again``, when that may have died: it, and part 0."""
        data = json.dumps({"digest": self.digest, "part": part}).encode() + b"\n"
        try:
            self.backend.put_if(self._marks + CLAIM, data, expected=None)
        except ConflictError:
            with suppress(NotFoundError):
                return again and (part == 0 or self.backend.read_whole(self._marks + CLAIM, RECORD_LIMIT) == data)
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
