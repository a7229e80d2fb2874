"""What holder and receiver of pieces say to each other, once they have proved who they are; and the digests of boxes that a source answers
with. No torch.

receiver                                           holder
machine ─────────────────────────────────────────►
        ◄───────── where its shared memory is, if both are on one machine
opened or not ───────────────────────────────────►
pull: version, digest of the list, base ─────────►
        ◄───────── known, or unknown
the list, if it is unknown ──────────────────────►
        ◄───────── a record for each piece in order, with its digest; its bytes, or what changed in it since the base, follow,
                   or its bytes lie in a slot
pull: …

With "digests" in the place of "pull", each record is followed by the digests of the piece's boxes, and not by their bytes.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from ckpt import settings
from ckpt.errors import CkptError, FormatError, GroupError, error_from_json, error_to_json
from ckpt.formats.delta_changes import apply_section, encode_run, pack, unpack
from ckpt.net.streams import RECORD
from ckpt.net.wire import Channel
from ckpt.plan.transfers import MOST_PIECE, RequestList
from ckpt.text import parse_json

from .holdings import Holdings, Packable

PURPOSE = "pieces"
MACHINE = struct.Struct("<H")
"""Bytes of the machine's name, which follows."""
MOST_MACHINE = 4096
OPENED, UNOPENED = b"o", b"n"
PULL = struct.Struct("<BHI16s")
"""Kind of message, bytes of the version's name, bytes of the name of the base (0: none), digest of the list. Both names follow."""
PULL_KIND, DIGESTS_KIND = 1, 2
MOST_VERSION = 512
KNOWN, UNKNOWN = b"k", b"u"
LENGTH = struct.Struct("<Q")
MOST_LIST = 32 * settings.MIB
"""Bytes of a list of requests, and of all that a holder remembers: half a million requests."""
FAILED = 0xFFFFFFFE
"""In place of a parcel: an error follows, as JSON."""
CHANGES = 0xFFFFFFFD
"""In place of a parcel: not the bytes of a piece follow, but what makes them of the base (:class:`PieceComparer`)."""
DIGESTS = 0xFFFFFFFC
"""In place of a parcel: the digests of the boxes of a piece follow."""
MOST_ERROR = 64 * settings.KIB


def send_error(channel: Channel, err: BaseException) -> None:
    """Tell the other end why there are no more pieces."""
    text = json.dumps(error_to_json(err)).encode()[:MOST_ERROR]
    channel.send(RECORD.pack(FAILED, 0, 0, len(text), 0), text)


def receive_error(channel: Channel, length: int) -> CkptError:
    """What the other end raised, as the same class if it is one of ours."""
    if length > MOST_ERROR:
        raise FormatError(f"an error message of {length} bytes", where=channel.peer)
    try:
        data = parse_json(channel.receive(length))
    except ValueError as err:
        raise FormatError(f"an error message that cannot be read: {err}", where=channel.peer) from err
    error = error_from_json(data)
    if type(error) is CkptError:  # what is none of ours there is a failure of that rank
        kind = data.get("type") if isinstance(data, dict) else None
        return GroupError(f"{channel.peer} raised {kind!s:.80}: {error.message}", where=error.where, hint=error.hint)
    error.message = f"{channel.peer}: {error.message}"
    return error


# What a rank of the source says of boxes that relays give: their digests, computed once for all receivers of the same boxes.

VERSIONS = 2
"""Versions whose digests are remembered."""
MOST_BOXES = 1 << 20
"""Of one version; a piece that would be more is computed each time."""
AT_ONCE = 2
"""Pieces that a server hashes, or compares, at a time, each in memory of its own: it takes a core, and more threads would only wait."""


class _PieceMemory:
    """Memory for so many pieces, lent to ``AT_ONCE`` threads at a time."""

    def __init__(self, pieces: int) -> None:
        self._size = pieces * MOST_PIECE
        self._turn = threading.BoundedSemaphore(AT_ONCE)
        self._free: deque[bytearray] = deque()

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        with self._turn:
            try:
                memory = self._free.pop()
            except IndexError:  # not asked for before: another thread may take the last one
                memory = bytearray(self._size)
            try:
                yield memoryview(memory)
            finally:
                self._free.append(memory)


class BoxDigests:
    """The XXH3-64 of boxes by version. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[bytes, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._memory = _PieceMemory(1)

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
            with self._memory.lent() as view:
                holdings.pack(requests, piece, view)
                digests = list(box_digests(requests, piece, view))
            with self._lock:
                if len(known) + len(keys) <= MOST_BOXES:
                    known.update(zip(keys, digests, strict=True))  # type: ignore[arg-type]
        return np.array(digests, dtype="<u8").tobytes()


def box_digests(requests: RequestList, piece: int, view: memoryview) -> list[int]:
    """Of each box of a packed piece."""
    return [xxhash.xxh3_64_intdigest(view[start:stop]) for _, start, stop in requests.spans(piece)]


# Why pieces come whole from a source that could have sent what changed in them.

FIRST = "first version"
"""The receiver has none yet."""
TORN = "state was torn"
"""A take in place broke off, so what the receiver has is no version."""
DTYPES = "other dtypes"
"""The receiver's state has other dtypes than the source: its memory does not tell what the source has sent."""
NOT_KEPT = "base not kept"
"""The source keeps the version no more that the receiver has."""
NOT_THE_BASE = "state was changed"
"""Somebody has changed what the receiver took."""
NO_SHORTER = "changes no shorter"
OTHER_BASE = "base has other tensors"
"""Or the memory of the base is damaged on the side of the holder."""
SLOTS = "shared memory"
"""Holder and receiver are on one machine, where comparing costs more than copying."""

WHOLE = 0
"""In place of a parcel: the bytes of a piece follow, or lie in a slot. So for these, which say why they are not changes:"""
WHOLE_NOT_KEPT, WHOLE_NO_SHORTER, WHOLE_OTHER_BASE = 1, 2, 3
REASONS: Mapping[int, str] = {WHOLE_NOT_KEPT: NOT_KEPT, WHOLE_NO_SHORTER: NO_SHORTER, WHOLE_OTHER_BASE: OTHER_BASE}


# Pieces that hold only what changed since a version that the receiver has: exact, and compared with a digest of the result.
#
# The receiver names the version that its state is. The holder compares that version of the piece with the new one, box by box, and sends
# the changes; or the piece itself, where it has the base no longer, or that is no longer. The receiver packs its own memory as the base,
# applies the changes and compares the result with the new version's digest. A receiver whose memory is no longer that version gets the
# piece itself.

# digest of the result (XXH3-64 of all boxes), 8 bytes
# of each box, if any of the piece changed:    bytes of its changes (0: none), bytes of an element, changes (formats/delta_changes.py)


RESULT = struct.Struct("<Q")
_BOX = struct.Struct("<IB")

Place = Callable[[int, memoryview], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceBase:
    """What a receiver has of a version: ``fill`` packs its boxes of a piece as they were taken."""

    version: str
    fill: Place


class PieceComparer:
    """Compares versions of pieces on the side of a holder, a few at a time."""

    def __init__(self) -> None:
        self._memory = _PieceMemory(2)

    def changes(self, base: Holdings, new: Holdings, requests: RequestList, piece: int) -> bytes | int:
        """What makes the new version of a piece of the base; or the parcel of the piece itself, if that is no longer, or the base lacks
        some of it."""
        with self._memory.lent() as view:
            after = new.boxes(requests, piece, view[:MOST_PIECE])
            try:
                before = base.boxes(requests, piece, view[MOST_PIECE:])
            except CkptError:  # it has other tensors, or its memory is damaged: the new version is not
                return WHOLE_OTHER_BASE
            itemsizes = [len(box) // int(requests.shapes[row].prod()) for row, box in zip(requests.pieces[piece], after, strict=True)]
            changes = _encoded(before, after, itemsizes, requests.places(piece)[1])
            return WHOLE_NO_SHORTER if changes is None else changes


def _encoded(before: Sequence[memoryview], after: Sequence[memoryview], itemsizes: Sequence[int], length: int) -> bytes | None:
    parts = [RESULT.pack(_result_digest(after))]
    changed, size = False, RESULT.size
    for old, new, itemsize in zip(before, after, itemsizes, strict=True):
        packed = pack(encode_run(old, new, itemsize))
        changed = changed or bool(packed)
        parts += [_BOX.pack(len(packed), itemsize), packed]
        size += _BOX.size + len(packed)
    if size >= length:
        return None
    return b"".join(parts) if changed else parts[0]


def apply_changes(data: memoryview, into: memoryview, requests: RequestList, piece: int, where: str) -> bool:
    """Make the new version of a piece of the base, which ``into`` has; whether the result is what the holder has."""
    spans = requests.spans(piece)
    if len(data) < RESULT.size:
        raise FormatError(f"{len(data)} bytes of changes of a piece", where=where)
    (result,) = RESULT.unpack(data[: RESULT.size])
    at = RESULT.size
    for _, start, stop in spans if len(data) > at else ():
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
    made: int = _result_digest([into[start:stop] for _, start, stop in spans])
    return made == int(result)


def _result_digest(boxes: Iterable[memoryview]) -> int:
    """Of the boxes alone: what lies between them is nobody's."""
    digest = xxhash.xxh3_64()
    for box in boxes:
        digest.update(box)
    return digest.intdigest()
