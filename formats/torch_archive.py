"""One ``torch.save`` archive: its object graph with stand-ins for tensors, and where the bytes of each tensor are.

Layout: all records lie in one directory: ``data.pkl`` the pickle, ``data/<key>`` the bytes of a storage, ``byteorder``, ``version``.
(Source: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc`` of PyTorch.)
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from zipfile import BadZipFile, ZipFile, ZipInfo

from ckpt import settings
from ckpt.concurrency import gc_paused
from ckpt.errors import CkptError, CorruptError, FormatError
from ckpt.io_backends.checks import path_problem, read_checked

from .external import Range, read_ranges
from .pickle_loader import load_pickle
from .pickle_values import PickleValues
from .stand_ins import StoredStorage

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# The records of a zip archive, out of its central directory (APPNOTE.TXT 6.3.9 of PKWARE, with zip64). Only what ``torch.save`` writes
# is read: records that are stored, one after another. Everything else is refused, so that nothing can unfold or overlap.

# A range of a file, read as if it were a file of its own: an archive that lies inside a data file is read like any other.

T = TypeVar("T")

TAIL = 16 << 10
"""Bytes at the end of an archive that are read first: they hold the directory of some 150 records."""


class FileRange:
    """``size`` bytes of ``path`` from ``start`` on. Positions count from there. Bytes that were read ahead are given by ``preload``.

    ``tail`` is how many bytes at the end are read at once.
    """

    def __init__(self, backend: Backend, path: str, start: int, size: int, tail: int = TAIL) -> None:
        self._backend = backend
        self.path = path
        self.start = start
        self.size = size
        self.tail = tail
        self._ahead: list[tuple[int, bytes]] = []

    @property
    def where(self) -> str:
        """For messages."""
        inside = f", bytes {self.start} to {self.start + self.size}" if self.start else ""
        return f"{self._backend.url.rstrip('/')}/{self.path}{inside}"

    def preload(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Keep bytes at hand: position and bytes of each part."""
        self._ahead += parts

    def checked(self, read: Callable[[], T]) -> T:
        """What ``read`` gives, which reads this window and raises CorruptError if its bytes do not fit; called again if it does."""

        def again() -> T:
            try:
                return read()
            except CorruptError:
                self._ahead.clear()  # what was read ahead may be what does not fit
                raise

        return read_checked(self._backend, self.path, again, offset=self.start, length=self.size)

    def read(self, offset: int, length: int) -> bytes:
        """These bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptError(
                f"bytes {offset:,} to {offset + length:,} were wanted of {self.size:,}", where=self.where, hint="the file was cut off"
            )
        for start, data in self._ahead:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return self._backend.read(self.path, self.start + offset, length)


# What is read, and what each record is compared with:
#
#     |header a|data a|header b|data b| ... |directory: a, b, ...|zip64 end|end|
#      ^ offset from the directory           ^ read by ``zipfile``
#
# * Sorted by place, each record must end before the next one, or the directory, begins: two entries for one place, or one that reaches
#   into another, are how a small archive unfolds to a large one.
# * A local header must have the directory's name, and its data must end exactly where the next record begins. Only that shows a changed
#   length of the padding that ``torch.save`` puts before the data.


_STORED = "`torch.save` stores records as they are; archives of TorchScript are not read"
_LOCAL = struct.Struct("<4s5H3L2H")
LOCAL_SIZE = _LOCAL.size
_ENDS = {b"PK\5\6": struct.Struct("<4x4H"), b"PK\6\6": struct.Struct("<16x2L2Q")}
"""Of a directory: number of this part and of that with the directory, and how many records are listed here and in all."""
_END_BYTES = max(end.size for end in _ENDS.values())
_DESCRIPTOR, _DESCRIPTOR64 = 16, 24
_FULL = 0xFFFFFFFF


class ZipRecord(NamedTuple):
    """One record: where its local header is, how many bytes of data it has, and where these must have ended; and their CRC-32, or 0 if
    the archive does not say (``torch.serialization.set_crc32_options(False)``)."""

    name: str
    header: int
    size: int
    limit: int
    crc: int


class _Seekable(io.RawIOBase):
    """A range as ``zipfile`` reads it: its end first."""

    def __init__(self, window: FileRange) -> None:
        self._window = window
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._window.size)[whence]
        if self._at < 0:
            raise OSError("it is too short")
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._window.size - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        if count > settings.FOREIGN_TABLE:
            raise OSError(f"a directory of {count:,} bytes")
        self._at += count
        return self._window.read(self._at - count, count)


@gc_paused()
def read_directory(window: FileRange) -> dict[str, ZipRecord]:
    """Read and check the central directory: all records by name. Positions count from the start of the window."""
    tail_at = max(window.size - window.tail, 0)
    window.preload([(tail_at, window.read(tail_at, window.size - tail_at))])
    source, records = _Seekable(window), dict[str, ZipRecord]()
    try:
        archive = ZipFile(source)
        listed = sorted(archive.infolist(), key=lambda info: info.header_offset)
        _check_end(window, source.tell(), len(listed))
        limits = [*(info.header_offset for info in listed), archive.start_dir][1:]
        for info, limit in zip(listed, limits, strict=True):
            record = _record(window, info, limit)
            if record.name in records:
                _damaged(window, f"two records called {record.name!r}")
            if record.header < 0 or record.header + header_length(record) + record.size > limit:
                _damaged(window, f"a record {record.name!r} of {record.size:,} bytes that reaches into what comes after it")
            records[record.name] = record
    except CkptError:  # some are an OSError or a ValueError, too; storage that fails is no damage
        raise
    except (BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as err:
        _damaged(window, f"no end of its directory, or one that is damaged ({err}): it was cut off, or is not a zip archive", err)
    return records


def _check_end(window: FileRange, at: int, count: int) -> None:
    """That what ends the directory, right after what ``zipfile`` has read of it, says that it has so many records: that is not compared
    there."""
    data = window.read(at, min(_END_BYTES, window.size - at))
    end = _ENDS.get(data[:4])
    if end is None or len(data) < end.size:
        _damaged(window, "no end right after its directory")
    if (says := end.unpack_from(data)) != (0, 0, count, count):
        _damaged(window, f"a directory of {count:,} records, its end lists {says[-1]:,}")


def _record(window: FileRange, info: ZipInfo, limit: int) -> ZipRecord:
    name = info.orig_filename
    if not name.isascii() and not info.flag_bits & 0x800:
        name = name.encode("cp437").decode()
    if path_problem(name) is not None:
        _damaged(window, f"a record called {name[:80]!r}")
    if info.volume:
        raise FormatError("the archive is one of several parts", where=window.where, hint="`torch.save` writes whole archives")
    if info.compress_type or info.flag_bits & 0x41 or info.file_size != info.compress_size:
        how = "encrypted" if info.flag_bits & 0x41 else "compressed"
        raise FormatError(f"the record {name!r} is {how}", where=window.where, hint=_STORED)
    return ZipRecord(name, info.header_offset, info.file_size, limit, info.CRC)


def header_length(record: ZipRecord) -> int:
    """Bytes to read for :func:`data_offset`: the local header and its name; what follows the name need not be read."""
    return LOCAL_SIZE + len(record.name.encode())


def data_offset(record: ZipRecord, header: bytes, where: str) -> int:
    """Where the data of a record begins, by its local header."""
    magic, _, flags, method, _, _, _, _, _, name_len, extra_len = _LOCAL.unpack_from(header)
    start: int = record.header + LOCAL_SIZE + name_len + extra_len
    named = header[LOCAL_SIZE : LOCAL_SIZE + name_len] == record.name.encode()
    if magic != b"PK\3\4" or not named or method or flags & 0x41 or not _ends(record, start, described=bool(flags & 8)):
        raise CorruptError(
            f"the record {record.name!r} is not at its place in the directory of the archive", where=where, hint="get the file again"
        )
    return start


def _ends(record: ZipRecord, start: int, *, described: bool) -> bool:
    """Whether data from ``start`` on end where what comes next begins."""
    # Nothing but this shows a wrong length of what stands before them.
    #
    # A local header may say that sizes follow the data: 16 bytes, or 24 where they are long.
    gap = record.limit - start - record.size
    if not record.size:
        return gap >= 0
    if not described:
        return gap == 0
    return gap == _DESCRIPTOR or (gap == _DESCRIPTOR64 and max(record.size, record.header) >= _FULL)


def _damaged(window: FileRange, what: str, cause: BaseException | None = None) -> NoReturn:
    raise CorruptError(f"the archive has {what}", where=window.where, hint="the file is damaged or was cut off: get it again") from cause


def names_below(records: Iterable[str]) -> str | None:
    """The one directory that all records lie in, as ``torch.save`` writes them; None if there is none or more."""
    heads = {name.partition("/")[0] if "/" in name else "" for name in records}
    return heads.pop() if len(heads) == 1 and "" not in heads else None


MAGIC = b"PK\3\4"
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""What files begin with that torch before 1.6 wrote: a pickle of a magic number."""
RESAVE = "load it with torch (weights_only=True) and `torch.save` it again"


class Archive:
    """An archive in a window of a file. Its directory is read at once, the pickle by ``load``."""

    def __init__(self, backend: Backend, window: FileRange) -> None:
        self._backend = backend
        self._window = window
        self.where = window.where
        records = read_directory(window)
        top = names_below(records)
        if top is None or f"{top}/data.pkl" not in records:
            raise FormatError("a zip archive, but not one that `torch.save` writes", where=self.where, hint="it has no data.pkl")
        if f"{top}/constants.pkl" in records:
            raise FormatError("an archive of TorchScript, which holds code", where=self.where, hint="save a state_dict() instead")
        self._records = {name.removeprefix(f"{top}/"): record for name, record in records.items()}
        self._starts: dict[str, int] = {}
        order = self._read("byteorder", 16) if "byteorder" in self._records else b"little"
        if order != b"little":
            raise FormatError("the numbers are not little-endian", where=self.where, hint=RESAVE)

    @cached_property
    def values(self) -> PickleValues:
        """Gives meaning to the stand-ins of ``load``."""
        return PickleValues(self.where)

    @property
    def records(self) -> Collection[ZipRecord]:
        """What the directory lists; positions count from the start of the archive."""
        return self._records.values()

    @property
    def pickle_bytes(self) -> int:
        """Size of the pickle."""
        return self._records["data.pkl"].size

    def load(self) -> Any:
        """The object that was saved, with stand-ins (``ckpt.formats.pickle_loader``). It is not kept: a large one takes much memory."""
        return load_pickle(self._read("data.pkl", settings.FOREIGN_PICKLE), self.where)

    def _read(self, name: str, limit: int) -> bytes:
        """All bytes of a record of at most ``limit`` bytes."""
        record = self._records[name]
        if record.size > limit:
            hint = f"at most {limit:,} are read; keep arrays as tensors, which lie in records of their own"
            raise FormatError(f"the record {name!r} has {record.size:,} bytes", where=self.where, hint=hint)

        def read() -> bytes:
            header = self._window.read(record.header, header_length(record))
            data = self._window.read(data_offset(record, header, self.where), record.size)
            if record.crc and zlib.crc32(data) != record.crc:
                message = f"the record {name!r} is damaged: its CRC-32 is {zlib.crc32(data):08x}, should be {record.crc:08x}"
                raise CorruptError(message, where=self.where, hint="get the file again")
            return data

        return self._window.checked(read)

    def starts(self, storages: Sequence[StoredStorage]) -> list[int]:
        """Where in the file the bytes of these storages begin. Reads their local headers, near ones together; each once."""
        wanted = {s.key: self._record(s) for s in storages if s.key not in self._starts}
        window = self._window
        if len(wanted) == 1:
            headers = [window.read(r.header, header_length(r)) for r in wanted.values()]
        else:
            headers = read_ranges(self._backend, [Range(window.path, window.start + r.header, header_length(r)) for r in wanted.values()])
        located = zip(wanted.items(), headers, strict=True)
        self._starts |= {key: window.start + data_offset(record, header, self.where) for (key, record), header in located}
        return [self._starts[s.key] for s in storages]

    def _record(self, storage: StoredStorage) -> ZipRecord:
        record = self._records.get(f"data/{storage.key}")
        if record is None or record.size < storage.nbytes:
            has = "no record" if record is None else f"a record of {record.size:,} bytes"
            raise CorruptError(
                f"the storage {storage.key!r} of {storage.nbytes:,} bytes has {has}", where=self.where, hint="get the file again"
            )
        return record

    def crc32(self, storage: StoredStorage, offset: int, length: int) -> int | None:
        """What the archive says of these bytes of a storage, if they are a whole record."""
        record = self._record(storage)
        return record.crc if record.crc and (offset, length) == (0, record.size) else None

    def record_size(self, storage: StoredStorage) -> int:
        """Bytes of the record that a storage lies in."""
        return self._record(storage).size

    def check(self, storage: StoredStorage) -> None:
        """Raise CorruptError if the archive has not all bytes of a storage. Nothing is read."""
        self._record(storage)


def open_archive(backend: Backend, path: str) -> Archive:
    """The archive that a whole file is."""
    size = backend.size(path)
    where = f"{backend.url.rstrip('/')}/{path}"
    head = backend.read(path, 0, min(size, 512))
    if is_legacy(head):
        raise FormatError("a file of the format that torch before 1.6 wrote: one pickle after another", where=where, hint=RESAVE)
    if not head.startswith(MAGIC):
        raise FormatError("no archive of `torch.save`", where=where, hint="check what wrote the file")
    return Archive(backend, FileRange(backend, path, 0, size))


def is_legacy(head: bytes) -> bool:
    """Whether a file begins like one of ``torch.save`` before torch 1.6, or before 0.1.10, which wrote tar archives."""
    return head.startswith(LEGACY) or (head[257:262] == b"ustar" and head.startswith((b"sys_info", b"./sys_info", b"pickle", b"storages")))
