"""What a rank of the source says of boxes that relays give: their digests, computed once for all receivers of the same boxes. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import xxhash

from ckpt.live.holdings import Packable
from ckpt.plan.transfers import MOST_PIECE, RequestList

VERSIONS = 2
"""Versions whose digests are remembered."""
MOST_BOXES = 1 << 20
"""Of one version; a piece that would be more is computed each time."""
AT_ONCE = 2
"""Pieces that are packed for it at a time, each in memory of its own."""


class BoxDigests:
    """The XXH3-64 of boxes by version. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[bytes, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.BoundedSemaphore(AT_ONCE)
        self._free: list[bytearray] = []

    def of_piece(self, version: str, holdings: Packable, requests: RequestList, piece: int) -> bytes:
        """The digests of the boxes of a piece, as little-endian numbers of 8 bytes."""
        rows = requests.pieces[piece]
        keys = [requests.key(row) for row in rows]
        with self._lock:
            known = self._known.setdefault(version, {})
            self._known.move_to_end(version)
            while len(self._known) > VERSIONS:
                self._known.popitem(last=False)
            digests = [known.get(key) for key in keys]
        if None in digests:
            digests = list(self._computed(holdings, requests, piece))
            with self._lock:
                if len(known) + len(keys) <= MOST_BOXES:
                    known.update(zip(keys, digests, strict=True))  # type: ignore[arg-type]
        return np.array(digests, dtype="<u8").tobytes()

    def _computed(self, holdings: Packable, requests: RequestList, piece: int) -> list[int]:
        with self._turn:
            with self._lock:
                memory = self._free.pop() if self._free else bytearray(MOST_PIECE)
            try:
                view = memoryview(memory)
                holdings.pack(requests, piece, view)
                return box_digests(requests, piece, view)
            finally:
                with self._lock:
                    self._free.append(memory)


def box_digests(requests: RequestList, piece: int, view: memoryview) -> list[int]:
    """Of each box of a packed piece."""
    rows = requests.pieces[piece]
    places, _ = requests.places(piece)
    sizes = requests.nbytes[rows.start : rows.stop].tolist()
    return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at, size in zip(places, sizes, strict=True)]
