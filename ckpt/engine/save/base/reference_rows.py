"""What ranks tell the leader of chunks that they refer to, and what the leader makes of it: more rows for files.arrow.

    rank 0   "w" chunk 0 is in ../step-1/data/…-00000 ─┐     files.arrow   0, 1   own files
    rank 1   "w" chunk 1 is in ../step-1/data/…-00001 ─┴──►                2      ../step-1/data/…-00000
                                                                           3      ../step-1/data/…-00001

Chunks that are stored as differences have such rows too, for the files that have their anchors.
A rank's row is the same in every save that refers to the same chunks, so the leader asks for it once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.catalog import DataFile
from ckpt.engine.save.plan import Chunk
from ckpt.text.json_reader import parse_json


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceRows:
    """``files`` lie in other checkpoints; ``chunks``: name → number of a chunk → which of them has it."""

    files: tuple[DataFile, ...] = ()
    chunks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    anchors: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """The same of chunks' anchors."""
    coded: bool = False
    key: tuple[str, ...] = ()
    """Digests of the ranks' rows that this was made of."""


NO_REFERENCES = ReferenceRows()

References = Iterable[tuple[Chunk, DataFile]]
"""Chunks, and the file that has each, or its anchor."""


def encode_references(references: References, anchors: References, *, coded: bool) -> bytes:
    """A rank's references, as the leader reads them. ``coded``: whether one of the chunks that are referred to is."""
    files: dict[str, tuple[int, DataFile]] = {}
    rows: dict[str, dict[str, list[tuple[int, int]]]] = {"chunks": {}, "anchors": {}}
    for kind, pairs in zip(rows, (references, anchors), strict=True):
        for chunk, file in pairs:
            at = files.setdefault(file.path, (len(files), file))[0]
            rows[kind].setdefault(chunk.name, []).append((chunk.number, at))
    file_rows = [[f.path, f.size, f.header, f.digest, f.rank] for _, f in files.values()]
    return json.dumps({"files": file_rows, **rows, "coded": coded}, separators=(",", ":")).encode()


def join_references(key: tuple[str, ...], rows: Iterable[bytes]) -> ReferenceRows:
    """The references of all ranks, whose rows have the digests ``key``. Files are in the order of their paths."""
    parts = [parse_json(row) for row in rows]
    files = {row[0]: row for part in parts for row in part["files"]}
    number = {path: i for i, path in enumerate(sorted(files))}
    chunks: dict[str, dict[int, int]] = {}
    anchors: dict[str, dict[int, int]] = {}
    for part in parts:
        numbers = [number[row[0]] for row in part["files"]]
        for joined, kind in ((chunks, "chunks"), (anchors, "anchors")):
            for name, of_rank in part[kind].items():
                joined.setdefault(name, {}).update((chunk, numbers[file]) for chunk, file in of_rank)
    data_files = tuple(DataFile(path=p, size=s, header=h, digest=d, rank=r) for p, s, h, d, r in (files[path] for path in number))
    return ReferenceRows(files=data_files, chunks=chunks, anchors=anchors, coded=any(part["coded"] for part in parts), key=key)
