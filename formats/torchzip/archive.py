"""One ``torch.save`` archive: its object graph with stand-ins for tensors, and where the bytes of each tensor are.

Layout: all records lie in one directory: ``data.pkl`` the pickle, ``data/<key>`` the bytes of a storage, ``byteorder``, ``version``.
(Source: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc`` of PyTorch.)
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckpt import settings
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external.hf_index import Range, read_ranges
from ckpt.formats.pickles.loader import load_pickle
from ckpt.formats.pickles.stand_ins import StoredStorage
from ckpt.formats.pickles.values import PickleValues

from .directory import FileRange, ZipRecord, data_offset, header_length, names_below, read_directory

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

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
        """The object that was saved, with stand-ins (``ckpt.formats.pickles``). It is not kept: a large one takes much memory."""
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
        self._starts |= self._located(wanted)
        return [self._starts[s.key] for s in storages]

    def _located(self, wanted: dict[str, ZipRecord]) -> dict[str, int]:
        window = self._window
        if len(wanted) == 1:
            headers = [window.read(r.header, header_length(r)) for r in wanted.values()]
        else:
            headers = read_ranges(self._backend, [Range(window.path, window.start + r.header, header_length(r)) for r in wanted.values()])
        located = zip(wanted.items(), headers, strict=True)
        return {key: window.start + data_offset(record, header, self.where) for (key, record), header in located}

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
