"""Files that no node has any more, computed from parity and from files of the other nodes: a range of one is the XOR of the same ranges of
all others of its group. Only what is asked for is read. No torch.

Nothing here knows whether the bytes are right: whoever reads compares them with the digests of the checkpoint, and calls ``evict`` if they
are wrong, as for a node. Then the parity is compared with its own digests, so that the log can say which file is damaged.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt import settings
from ckpt.concurrency import run_tasks
from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError
from ckpt.formats.native.paths import id_of, parity_prefix
from ckpt.io_backends.checks import byte_view, path_problem
from ckpt.io_backends.protocol import Backend
from ckpt.plan.parity import ParityLayout, ParityPiece, ParityTable, ParityTerm
from ckpt.text import parse_json

# What lies beside a parity file: the ranges of files that it is the XOR of, and digests of its own blocks (docs/storage.md).
#
# parity/<id>-<digest>.xor     the bytes; the digest is that of the terms
# parity/<id>-<digest>.json    the record, put when the bytes are durable: without it the bytes are not there

BLOCK = 8 << 20
"""Bytes of a parity file that are computed at once, and have a digest."""
RECORD_LIMIT = 64 << 20
FORMAT = "ckpt-parity"
VERSION = 1


@dataclass(frozen=True)
class ParityRecord:
    """A parity file of save ``id``; ``digests`` are the XXH3-64 of its blocks of ``BLOCK`` bytes."""

    id: str
    layout: ParityLayout
    digests: Sequence[str]

    @property
    def path(self) -> str:
        """Of the bytes."""
        return parity_path(self.id, self.layout)

    @property
    def record_path(self) -> str:
        return record_path(self.path)

    def encode(self) -> bytes:
        terms = [term._asdict() for term in self.layout.terms]
        about = {"format": FORMAT, "version": VERSION, "size": self.layout.size, "block": BLOCK}
        return json.dumps({**about, "digests": [*self.digests], "terms": terms}).encode()

    @classmethod
    def decode(cls, data: bytes, id: str, path: str) -> ParityRecord:
        """The record at ``path``."""
        try:
            row = parse_json(data)
            if row["format"] != FORMAT:
                raise ValueError("it is not a record of a parity file")
            if row["version"] != VERSION:
                raise FormatError(
                    f"parity of version {row['version']!r}", where=path, hint="use the release of ckpt that made it, or a later one"
                )
            record = cls(id, ParityLayout(tuple(_term(term) for term in row["terms"])), tuple(map(str, row["digests"])))
            blocks = -(-record.layout.size // BLOCK)
            if row["block"] != BLOCK or row["size"] != record.layout.size or len(record.digests) != blocks or record.record_path != path:
                raise ValueError("its parts do not fit together")
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            message = f"the record of a parity file cannot be read: {err}"
            raise CorruptError(message, where=path, hint="what it protects has no second place") from err
        return record


def _term(row: dict[str, object]) -> ParityTerm:
    numbers = [row[name] for name in ("size", "offset", "length", "at")]
    size, offset, length, at = (n for n in numbers if isinstance(n, int) and n >= 0)
    path = str(row["path"])
    if (problem := path_problem(path)) is not None or not length or offset + length > size:
        raise ValueError(problem or f"bytes of {path} that it does not have")
    return ParityTerm(path, size, offset, length, at, str(row["domain"]))


def parity_path(id: str, layout: ParityLayout) -> str:
    """Where the bytes are, below a checkpoint."""
    return f"{parity_prefix(id)}{layout.name}.xor"


def record_path(path: str) -> str:
    """Where the record of the bytes at ``path`` is."""
    return f"{path.removesuffix('.xor')}.json"


def block_digest(block: memoryview) -> str:
    """Of one block."""
    return xxhash.xxh3_64_hexdigest(block)


# The XOR of ranges of files, which are read from several nodes at once.

READERS = 8
"""Ranges that are read at once."""
PIECE = 2 * settings.MIB
"""Bytes of a range that is read by itself: for each reader there is so much memory beside the result."""


def add_xor(result: memoryview, terms: Sequence[ParityTerm], read: Callable[[str, int, memoryview], None]) -> int:
    """XOR the bytes of ``terms`` into their places in ``result``; how many bytes were read.

    ``read`` fills memory with the bytes of a file from an offset on; any number of threads call it. The first piece of every term is read
    before the second one of any, so that all nodes are asked from the beginning on. What ``read`` raises is raised when no thread reads any
    more, and then ``result`` has anything in it.
    """
    all_bytes = np.frombuffer(result, dtype=np.uint8)
    lock = threading.Lock()
    buffers: list[npt.NDArray[np.uint8]] = []

    def add(term: ParityTerm) -> None:
        try:
            buffer = buffers.pop()
        except IndexError:
            buffer = np.empty(PIECE, dtype=np.uint8)
        part = buffer[: term.length]
        read(term.path, term.offset, part.data)
        there = all_bytes[term.at : term.at + term.length]
        with lock:  # of two terms of one place
            np.bitwise_xor(there, part, out=there)
        buffers.append(buffer)

    pieces = sorted((piece for term in terms for piece in _pieces(term)), key=lambda piece: piece.at)
    run_tasks([partial(add, piece) for piece in pieces], READERS, "ckpt-parity")
    return sum(piece.length for piece in pieces)


def _pieces(term: ParityTerm) -> Iterator[ParityTerm]:
    for start in range(0, term.length, PIECE):
        yield term._replace(offset=term.offset + start, length=min(PIECE, term.length - start), at=term.at + start)


log = logging.getLogger("ckpt")


class NodeFiles(Protocol):
    """The files of the nodes that answer: what is read of ``NodeReader``."""

    @property
    def url(self) -> str: ...

    def holders(self, prefix: str) -> Mapping[str, Mapping[int, int]]: ...

    def node(self, node: int) -> Backend: ...

    def read_from_any(self, path: str, offset: int, view: memoryview) -> None: ...

    def name(self, node: int) -> str: ...


class ParitySource:
    """Reads lost files below the prefix of ``files``. Thread-safe."""

    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._tables: dict[str, _SaveParity] = {}
        """By id of the save: as of the first read of a file that no node has."""
        self._reported: set[str] = set()

    def size(self, path: str) -> int:
        """Bytes of a file."""
        save, size = self._of_file(path)
        if save is None or save.table.pieces(path, 0, size) is None:
            raise self._not_there(path, save)
        return size

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        size = self.size(path) - offset if length is None else length
        buffer = bytearray(max(0, size))
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        self.read_into(path, offset, buffer)
        update(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        view = byte_view(buffer, writable=True)
        save, size = self._of_file(path)
        if save is not None and offset + len(view) > size:
            message = f"bytes [{offset}, {offset + len(view)}) were wanted, but it has {size}"
            raise CorruptError(message, where=f"{self._files.url}/{path}", hint="the index and the file do not fit together")
        pieces = None if save is None else save.table.pieces(path, offset, offset + len(view))
        if save is None or pieces is None:
            raise self._not_there(path, save)
        for piece in pieces:
            self._compute(save.paths[piece.layout.name], piece, view[piece.at : piece.at + piece.length])

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """What was computed is wrong: say which parity file is damaged, if one is."""
        with suppress(CkptError):
            save, size = self._of_file(path)
            end = size if length is None else min(size, offset + length)
            if save is not None:
                for piece in save.table.pieces(path, offset, end) or ():
                    self._check(save, piece)

    def missing(self, path: str) -> str | None:
        """What it would take to compute a file, and nobody has; None if no parity has anything of it."""
        save, _ = self._of_file(path)
        if save is None:
            return None
        terms = save.table.missing(path)
        return ", ".join(f"{term.path} of {term.domain}" for term in terms) or "another parity file"

    # ---- one save

    def _of_file(self, path: str) -> tuple[_SaveParity | None, int]:
        """The parity that has something of a file, if there is some, and the bytes of the file."""
        id = id_of(path)
        if id is None or not path.startswith("data/"):
            return None, 0
        with self._lock:
            if id not in self._tables:
                self._tables[id] = _SaveParity.read(self._files, id)
            save = self._tables[id]
        size = save.table.size(path)
        return (None, 0) if size is None else (save, size)

    def _not_there(self, path: str, save: _SaveParity | None) -> NotFoundError:
        missing = self.missing(path)
        if missing is None:
            return NotFoundError("no parity has this file", where=f"{self._files.url}/{path}", hint="`ckpt ls` lists the checkpoints there")
        message = f"no node that answers has this file, and computing it from parity would take {missing}"
        with self._lock:
            first = path not in self._reported
            self._reported.add(path)
        if first:
            log.warning("%s/%s: %s", self._files.url, path, message)
        return NotFoundError(message, where=f"{self._files.url}/{path}", hint="parity survives the loss of one member of each group")

    # ---- bytes

    def _compute(self, parity: str, piece: ParityPiece, view: memoryview) -> None:
        np.frombuffer(view, dtype=np.uint8)[:] = 0
        stored = ParityTerm(parity, piece.layout.size, piece.offset, piece.length, 0, domain="")
        add_xor(view, [stored, *piece.terms], self._files.read_from_any)

    def _check(self, save: _SaveParity, piece: ParityPiece) -> None:
        path = save.paths[piece.layout.name]
        record = save.records[path]
        for number in range(piece.offset // BLOCK, -(-(piece.offset + piece.length) // BLOCK)):
            block = memoryview(bytearray(min(BLOCK, piece.layout.size - number * BLOCK)))
            self._files.read_from_any(path, number * BLOCK, block)
            if block_digest(block) != record.digests[number]:
                nodes = ", ".join(self._files.name(node) for node in save.nodes[path])
                log.warning("%s/%s on node %s is damaged: it has other bytes than its record says", self._files.url, path, nodes)


class _SaveParity:
    """The parity files of one save that are there, and the files that they can be used with."""

    def __init__(
        self, records: Mapping[str, ParityRecord], nodes: Mapping[str, list[int]], sizes_by_node: Mapping[str, Mapping[int, int]]
    ) -> None:
        self.records = records
        self.nodes = nodes
        self.paths = {record.layout.name: path for path, record in records.items()}
        self.table = ParityTable([r.layout for r in records.values()], lambda path, size: size in sizes_by_node.get(path, {}).values())

    @classmethod
    def read(cls, files: NodeFiles, id: str) -> _SaveParity:
        there = files.holders(parity_prefix(id))
        records = read_records(files, id, there)
        nodes = {path: [*there[path]] for path in records}
        return cls(records, nodes, files.holders("data/") if records else {})


def read_records(files: NodeFiles, id: str, there: Mapping[str, Mapping[int, int]]) -> dict[str, ParityRecord]:
    """The records of the parity files that are ``there`` whole, by the paths of the files. What cannot be read is passed over, with a
    warning."""
    records = {}
    for path in sorted(path for path in there if path.endswith(".xor")):
        beside = record_path(path)
        for node in there.get(beside, ()):
            try:
                record = ParityRecord.decode(files.node(node).read_whole(beside, RECORD_LIMIT), id, beside)
            except CkptError as err:
                log.warning("parity on node %s is passed over: %s", files.name(node), err)
                continue
            if record.layout.size in there[path].values():
                records[path] = record
                break
    return records
