"""One rank of a sink that passes on what it takes, and how receivers hear of it. No torch."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import xxhash

from ckpt import settings
from ckpt.errors import CorruptError, NotFoundError
from ckpt.net.channel import Row
from ckpt.net.shared_memory import machine
from ckpt.net.wire import Kind, is_host, is_port, kind_of
from ckpt.plan.transfers import RequestList

from .pull import Holder
from .server import PieceServer

# The boxes of one version that one rank of a sink takes, given to others from when each is here.


class RelayedVersion:
    """Boxes by what is asked for (``RequestList.key``), in memory that nobody writes before :meth:`close`. Thread-safe.

    ``name`` is new each time: who has heard of an earlier try at the same version finds nothing here, so two sinks that try again never
    wait for each other.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._boxes: dict[bytes, tuple[memoryview, int]] = {}
        self._memory: list[memoryview] = []
        self._readers = 0
        self._closed = False
        self._condition = threading.Condition()

    def add(self, requests: RequestList, piece: int, data: memoryview) -> None:
        """A piece is here; its bytes have just been verified. ``data`` is this version's from now on."""
        boxes = {
            requests.key(row): (data[start:stop], xxhash.xxh3_64_intdigest(data[start:stop])) for row, start, stop in requests.spans(piece)
        }
        with self._condition:
            self._boxes.update(boxes)
            self._memory.append(data)
            self._condition.notify_all()

    def ready(self, requests: RequestList, piece: int, seconds: float) -> bool:
        """Whether all boxes of a piece are here within some seconds."""
        keys = [requests.key(row) for row in requests.pieces[piece]]
        with self._condition:
            here = self._condition.wait_for(lambda: self._closed or all(key in self._boxes for key in keys), seconds)
            self._check_open()
            return here

    def pack(self, requests: RequestList, piece: int, out: memoryview) -> int:
        """Pack a piece that is ready; as ``Holdings.pack``."""
        with self._reading():
            for row, start, stop in requests.spans(piece):
                box, digest = self._boxes.get(requests.key(row), (None, 0))
                if box is None or len(box) != stop - start:
                    raise NotFoundError("this relay has other boxes", hint="take again")
                out[start:stop] = box
                if xxhash.xxh3_64_intdigest(out[start:stop]) != digest:
                    raise CorruptError("a box that this relay has taken has changed since", hint="look at that machine's memory")
        return requests.places(piece)[1]

    def views(self, requests: RequestList, piece: int, out: memoryview) -> list[memoryview]:
        """A piece that is ready, in ``out``: its own memory may be another version's before it is sent."""
        return [out[: self.pack(requests, piece, out)]]

    def close(self) -> list[memoryview]:
        """Give nothing any more, and wait until nobody reads; the memory, which is free now."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._readers)  # each copies one piece
            memory, self._memory = self._memory, []
            self._boxes.clear()
        return memory

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._condition:
            self._check_open()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise NotFoundError("this relay has moved to another version", hint="take it from another rank")


class Relay:
    """Serves what this rank takes: one version at a time, from memory that the engine does not see."""

    def __init__(self, secret: bytes, timeout: float) -> None:
        self.secret = secret
        self._current: RelayedVersion | None = None
        self._server = PieceServer(self._version, secret, timeout)

    @property
    def bytes_sent(self) -> int:
        """Bytes of boxes that receivers were given."""
        return self._server.bytes_sent

    def begin(self) -> RelayedVersion:
        """A take begins, and nothing of the version before is given any more."""
        self.end()
        self._current = RelayedVersion()
        return self._current

    def end(self) -> list[memoryview]:
        """Give nothing; the memory that is free now."""
        current, self._current = self._current, None
        return [] if current is None else current.close()

    def row(self, relayed: RelayedVersion, wanted: str) -> Row:
        """What receivers need to know; ``wanted`` is the digest of what this rank wants (``TransferPlan.wanted``)."""
        server = self._server
        place = {"machine": machine(), "domain": settings.domain(), "network": server.network, "addresses": server.addresses}
        return {"at": relayed.name, "wanted": wanted, **place}

    def close(self) -> None:
        self.end()
        self._server.close()

    def _version(self, name: str) -> RelayedVersion:
        current = self._current
        if current is None or current.name != name:
            raise NotFoundError("this relay has moved to another version", hint="take it from another rank")
        return current


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayOffer:
    """One rank of a sink that gives the version that is offered: ``at`` is what it calls it, ``wanted`` the digest of its boxes."""

    sink: str
    at: str
    wanted: str
    machine: str
    domain: str | None
    network: str
    addresses: tuple[tuple[Annotated[str, is_host], Annotated[int, is_port]], ...]


RELAY: Kind = {name: kind for name, kind in kind_of(RelayOffer).items() if name != "sink"}
"""Where a rank of a sink gives what it takes (``Relay.row``)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RelayHolders:
    """Relays as further holders beside the ``ranks`` of the source: relay k is ``first(k) + rank`` for what that rank has."""

    ranks: Collection[int]
    offers: Sequence[RelayOffer]

    @property
    def _stride(self) -> int:
        return max(self.ranks) + 1

    def with_boxes(self, wanted: str) -> list[int]:
        """The numbers of those that take the same boxes, as ``plan_transfers`` wants them."""
        return [(k + 1) * self._stride for k, offer in enumerate(self.offers) if offer.wanted == wanted]

    def within(self, *, machine: str | None = None, domain: str | None = None) -> set[int]:
        """The numbers of all holders that relays on a machine, or in a domain, are."""
        here = [k for k, offer in enumerate(self.offers) if (offer.machine if domain is None else offer.domain) == (domain or machine)]
        return {(k + 1) * self._stride + rank for k in here for rank in self.ranks}

    def offer_of(self, holder: int) -> RelayOffer | None:
        """None for a rank of the source."""
        return self.offers[holder // self._stride - 1] if holder >= self._stride else None

    def holders(self, source: Mapping[int, Holder]) -> dict[int, Holder]:
        """All holders: those of the source, and relays, each with the rank that tells its digests."""
        made = dict(source)
        for k, offer in enumerate(self.offers):
            for rank in self.ranks:
                number = (k + 1) * self._stride + rank
                made[number] = Holder(
                    rank=number, addresses=offer.addresses, network=offer.network, relay=offer.sink, version=offer.at, witness=source[rank]
                )
        return made
