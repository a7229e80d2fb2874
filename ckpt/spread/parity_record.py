"""What lies beside a parity file: the ranges of files that it is the XOR of, and digests of its own blocks (docs/node-local.md). No torch.

parity/<id>-<digest>.xor     the bytes; the digest is that of the terms
parity/<id>-<digest>.json    the record, put when the bytes are durable: without it the bytes are not there
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.native.paths import parity_prefix, path_problem
from ckpt.plan.redundancy.parity import ParityLayout, ParityTerm
from ckpt.text.json_reader import parse_json

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
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "size": self.layout.size,
                "block": BLOCK,
                "digests": [*self.digests],
                "terms": [term._asdict() for term in self.layout.terms],
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes, id: str, path: str) -> ParityRecord:
        """The record at ``path``."""
        try:
            row = parse_json(data)
            if row["format"] != FORMAT:
                raise ValueError("it is no record of a parity file")
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
