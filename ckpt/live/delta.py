"""Pieces that hold only what changed since a version that the receiver has: exact, and compared with a digest of the result. No torch.

The receiver names the version that its state is. The holder compares that version of the piece with the new one, box by box, and sends the
changes; or the piece itself, where it has the base no longer, or that is no longer. The receiver packs its own memory as the base, applies
the changes and compares the result with the new version's digest. A receiver whose memory is no longer that version gets the piece itself.
"""

# digest of the result (XXH3-64 of all boxes), 8 bytes
# of each box, if any of the piece changed:    bytes of its changes (0: none), bytes of an element, changes (formats/deltas/changes.py)

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from ckpt.errors import CkptError, FormatError
from ckpt.formats.deltas.changes import apply_section, encode_run, pack, unpack
from ckpt.plan.transfers import MOST_PIECE, RequestList

from .holdings import Packable
from .piece_messages import WHOLE_NO_SHORTER, WHOLE_OTHER_BASE

RESULT = struct.Struct("<Q")
_BOX = struct.Struct("<IB")
ENCODERS = 2
"""Pieces that one server compares at a time, each in memory for two of them: comparing takes a core, and more threads would only wait."""

Place = Callable[[int, memoryview], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceBase:
    """What a receiver has of a version: ``fill`` packs its boxes of a piece as they were taken."""

    version: str
    fill: Place


class PieceComparer:
    """Compares versions of pieces on the side of a holder, a few at a time."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._turn = threading.BoundedSemaphore(ENCODERS)
        self._lock = threading.Lock()

    def changes(self, base: Packable, new: Packable, requests: RequestList, piece: int) -> bytes | int:
        """What makes the new version of a piece of the base; or the parcel of the piece itself, if that is no longer, or the base lacks
        some of it."""
        with self._turn:
            with self._lock:
                memory = self._free.pop() if self._free else bytearray(2 * MOST_PIECE)
            try:
                view = memoryview(memory)
                after, before = view[:MOST_PIECE], view[MOST_PIECE:]
                length = new.pack(requests, piece, after)
                try:
                    base.pack(requests, piece, before)
                except CkptError:  # it has other tensors, or its memory is damaged: the new version is not
                    return WHOLE_OTHER_BASE
                itemsizes = [int(requests.nbytes[row] // requests.shapes[row].prod()) for row in requests.pieces[piece]]
                changes = _encoded(before, after, _spans(requests, piece), itemsizes, length)
                return WHOLE_NO_SHORTER if changes is None else changes
            finally:
                with self._lock:
                    self._free.append(memory)


def _encoded(
    before: memoryview, after: memoryview, spans: Sequence[tuple[int, int]], itemsizes: Sequence[int], length: int
) -> bytes | None:
    parts = [RESULT.pack(_result_digest(after, spans))]
    changed, size = False, RESULT.size
    for (start, stop), itemsize in zip(spans, itemsizes, strict=True):
        packed = pack(encode_run(before[start:stop], after[start:stop], itemsize))
        changed = changed or bool(packed)
        parts += [_BOX.pack(len(packed), itemsize), packed]
        size += _BOX.size + len(packed)
    if size >= length:
        return None
    return b"".join(parts) if changed else parts[0]


def apply_changes(data: memoryview, into: memoryview, requests: RequestList, piece: int, where: str) -> bool:
    """Make the new version of a piece of the base, which ``into`` has; whether the result is what the holder has."""
    spans = _spans(requests, piece)
    if len(data) < RESULT.size:
        raise FormatError(f"{len(data)} bytes of changes of a piece", where=where)
    (result,) = RESULT.unpack(data[: RESULT.size])
    at = RESULT.size
    for start, stop in spans if len(data) > at else ():
        if len(data) < at + _BOX.size:
            raise FormatError("changes of a piece that end early", where=where)
        length, itemsize = _BOX.unpack(data[at : at + _BOX.size])
        at += _BOX.size
        if len(data) < at + length or itemsize not in (1, 2, 4, 8, 16) or (stop - start) % itemsize:
            raise FormatError("changes of a piece whose lengths do not fit", where=where)
        if length:
            apply_section(into[start:stop], unpack(data[at : at + length], where), itemsize, where)
        at += length
    if at != len(data):
        raise FormatError("changes of a piece with bytes after them", where=where)
    made: int = _result_digest(into, spans)
    return made == int(result)


def _spans(requests: RequestList, piece: int) -> list[tuple[int, int]]:
    """Where the boxes of a piece begin and end in it."""
    places, _ = requests.places(piece)
    rows = requests.pieces[piece]
    return [(at, at + size) for at, size in zip(places, requests.nbytes[rows.start : rows.stop].tolist(), strict=True)]


def _result_digest(view: memoryview, spans: Sequence[tuple[int, int]]) -> int:
    """Of the boxes alone: what lies between them is nobody's."""
    digest = xxhash.xxh3_64()
    for start, stop in spans:
        digest.update(view[start:stop])
    return digest.intdigest()
