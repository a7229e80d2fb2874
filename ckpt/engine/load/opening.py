"""Opens one checkpoint on all ranks of a load: one rank reads the index, and ranks hand it on to each other. No torch.

On storage that every rank reaches over the network, opening on each rank would be five requests and a copy of the same bytes for each. So
the ranks are a tree: the first reads, and each hands on to ``FAN`` others what it got, over connections of its own. Whoever gets nothing,
whatever the reason, reads the storage as if it were alone; so a checkpoint that is missing or damaged gives every rank the error that it
would have given without. What is handed on is compared with digests: that of the stream, the commit record's own, and those in it of the
files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from ckpt.catalog import Catalog
from ckpt.coordination.call import Call
from ckpt.errors import CkptError
from ckpt.formats.native.catalog import open_native, read_index, read_index_file
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.paths import INDEX_LIMIT
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.text.json_reader import parse_json
from ckpt.transport.framing import Feed, Inlet
from ckpt.transport.peers import MoveSlices, Peers

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

FAN = 8
"""Ranks that one rank hands on to."""
PATIENCE = 30.0
"""Most seconds without a byte after which a rank reads the storage itself."""

log = logging.getLogger("ckpt")


def open_together(call: Call, sources: Sequence[str] | None, name: str) -> Catalog:
    """The checkpoint of a call, which all its ranks open; ``name`` tells this time from others in the same call. File systems are read by
    each rank: the ranks of a machine share what its memory has of them.

    Raises:
        as ``open_catalog``.
    """
    if call.group.size == 1 or is_file_system(call.url):
        return open_catalog(call.url, sources=sources)
    node = _Node.of(call)
    peers: Peers | None = None
    try:
        peers = Peers(call.group, min(call.timeout / 2, PATIENCE), name)
        node.run(peers, sources)
    except (CkptError, OSError) as err:
        if err is node.own_error:
            raise
        log.info("rank %d: the index of %s was not handed on (%s)", call.group.rank, call.url, err)
    finally:
        if peers is not None:
            peers.close()
    return node.catalog if node.catalog is not None else node.opened(sources)


@dataclass(eq=False)
class _Node:
    """One rank of the tree."""

    call: Call
    parent: int | None
    children: Sequence[int]
    catalog: Catalog | None = None
    own_error: BaseException | None = None
    """Of opening the checkpoint here."""
    bundle: bytearray | bytes = b""
    coming: bytearray = field(default_factory=bytearray)
    """The bundle, while parts of it may be lacking."""
    feeds: dict[int, Feed] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call) -> _Node:
        ranks = call.group.ranks
        place = ranks.index(call.group.rank)
        return cls(call, ranks[(place - 1) // FAN] if place else None, ranks[FAN * place + 1 : FAN * place + FAN + 1])

    def run(self, peers: Peers, sources: Sequence[str] | None) -> None:
        """Get what the parent has, or read, and hand it on. Raises what opening or the exchange does."""
        self.feeds = {rank: Feed(1) for rank in self.children}
        inlets = {} if self.parent is None else {self.parent: Inlet(self.parent, 1, self)}

        def work(move: MoveSlices) -> None:
            if self.parent is None:
                try:
                    self.read(sources)
                except BaseException as err:  # whatever it is, Ctrl-C too: the ranks that wait for the index are told of it
                    self.own_error = err
                    raise
                self.hand_on()

        peers.relay(self.feeds, inlets, work, alive=self.call.check_failures)

    def read(self, sources: Sequence[str] | None) -> None:
        """Open the checkpoint, and keep the bytes of its index."""
        files: dict[str, bytes] = {}

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            files[name] = read_index(backend, record, name)
            return files[name]

        self.catalog = open_catalog(self.call.url, sources=sources, read=read)
        if isinstance(self.catalog.record, CommitRecord):
            self.bundle = pack(self.call.url, self.catalog.record, files)  # but rows of single ranks, of which each reads its own

    def opened(self, sources: Sequence[str] | None) -> Catalog:
        """With what was handed on, as far as it is right."""
        handed = unpack(bytes(self.bundle), self.call.url)
        if handed is None:
            return open_catalog(self.call.url, sources=sources)
        record, files = handed

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            data, file = files.get(name, b""), record.index[name]
            right = len(data) == file.size and xxhash.xxh3_128_hexdigest(data) == file.digest
            return data if right else read_index_file(backend, record, name)

        try:
            return open_native(open_backend(self.call.url), record, sources, read)
        except CkptError as err:
            log.warning(
                "rank %d: the index of %s is read again, as what was handed on is wrong: %s", self.call.group.rank, self.call.url, err
            )
            return open_catalog(self.call.url, sources=sources)

    def hand_on(self) -> None:
        for feed in self.feeds.values():
            feed.put_bytes(0, 0, [memoryview(self.bundle or NOTHING)], _sent)
            feed.close()

    # ---- relay.Taker: what comes from the parent

    def open(self, announcement: bytes) -> bool:
        """See ``relay.Taker``."""
        return False

    def slot(self, shared_read: int, piece: int, slot: int, generation: int, digest: int) -> bool:
        """See ``relay.Taker``: nobody announces slots here."""
        raise CkptError("a slot of memory where the index comes as bytes", where=self.call.url, hint="please report this")

    def room(self, shared_read: int, piece: int, length: int) -> Sequence[memoryview]:
        """See ``relay.Taker``."""
        if length > 8 * INDEX_LIMIT:
            raise CkptError(f"an index of {length} bytes", where=self.call.url, hint="please report this")
        self.coming = bytearray(length)
        return [memoryview(self.coming)]

    def filled(self, shared_read: int, piece: int) -> bool:
        """See ``relay.Taker``."""
        self.bundle = self.coming
        self.hand_on()
        return True


NOTHING = b"-"
"""In place of the index of a checkpoint that is not ours: it has none."""


def pack(url: str, record: CommitRecord, files: Mapping[str, bytes]) -> bytes:
    """All that opening reads, as one message."""
    parts = {"": record.to_bytes(), **files}
    head = json.dumps({"url": url, "sizes": {name: len(data) for name, data in parts.items()}}).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *parts.values()])


def unpack(bundle: bytes, url: str) -> tuple[bytes, dict[str, bytes]] | None:
    """Record and files; None if there are none, or it cannot be seen where they are, or they are those of another URL: then the ranks do
    not make the same call."""
    if bundle in (b"", NOTHING):
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


def _sent() -> None:
    """Nothing waits for the bytes to be gone."""
