"""Opens one checkpoint on all ranks of a call: one rank reads the index, and ranks hand it on to each other. No torch.

On storage that every rank reaches over the network, opening on each rank would be five requests and a copy of the same bytes for each. So
one rank reads, and the others get what it read (``Call.broadcast``). Whoever gets nothing, whatever the reason, reads the storage as if it
were alone; so a checkpoint that is missing or damaged gives every rank the error that it would have given without. What is handed on is
compared with digests: the leader's of all of it, the commit record's own, and those in it of the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ckpt.catalog import Catalog
from ckpt.errors import CkptError
from ckpt.formats.native.catalog import open_native, read_index, read_index_file
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.net.call import Call
from ckpt.text import parse_json

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

log = logging.getLogger("ckpt")


def open_together(call: Call, url: str, sources: Sequence[str] | None, name: str) -> Catalog:
    """The checkpoint at ``url``, which all ranks of a call open; ``name`` tells this time from others in the same call. File systems are
    read by each rank: the ranks of a machine share what its memory has of them."""
    if call.group.size == 1 or is_file_system(url):
        return open_catalog(url, sources=sources)
    opening = Opening(url, sources)
    bundle = call.broadcast(name, opening.read)
    return opening.catalog or opening.of(bundle)


@dataclass(eq=False)
class Opening:
    """One rank's opening of a checkpoint. ``catalog``: as it was read here."""

    url: str
    sources: Sequence[str] | None
    catalog: Catalog | None = None

    def read(self) -> bytes:
        """Open the checkpoint; the bytes of its index."""
        files: dict[str, bytes] = {}

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            files[name] = read_index(backend, record, name)
            return files[name]

        self.catalog = open_catalog(self.url, sources=self.sources, read=read)
        if not isinstance(self.catalog.record, CommitRecord):
            return b""  # of another format: it has none
        return pack(self.url, self.catalog.record, files)  # but rows of single ranks, of which each reads its own

    def of(self, bundle: bytes) -> Catalog:
        """With what was handed on, as far as it is right."""
        handed = unpack(bundle, self.url)
        if handed is None:
            return open_catalog(self.url, sources=self.sources)
        record, files = handed

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            data, file = files.get(name, b""), record.index[name]
            right = len(data) == file.size and xxhash.xxh3_128_hexdigest(data) == file.digest
            return data if right else read_index_file(backend, record, name)

        try:
            return open_native(open_backend(self.url), record, self.sources, read)
        except CkptError as err:
            log.warning("the index of %s is read again, as what was handed on is wrong: %s", self.url, err)
            return open_catalog(self.url, sources=self.sources)


def pack(url: str, record: CommitRecord, files: Mapping[str, bytes]) -> bytes:
    """All that opening reads, as one message."""
    parts = {"": record.to_bytes(), **files}
    head = json.dumps({"url": url, "sizes": {name: len(data) for name, data in parts.items()}}).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *parts.values()])


def unpack(bundle: bytes, url: str) -> tuple[bytes, dict[str, bytes]] | None:
    """Record and files; None if there are none, or it cannot be seen where they are, or they are those of another URL: then the ranks do
    not make the same call."""
    if not bundle:
        return None
    at = 8 + int.from_bytes(bundle[:8], "little")
    files: dict[str, bytes] = {}
    try:
        head = parse_json(bundle[8:at])
        if head["url"] != url:
            return None
        for name, size in head["sizes"].items():
            files[name] = bundle[at : at + size]
            at += size
        return files.pop(""), files
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
