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
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import xxhash

from ckpt import settings
from ckpt.errors import CkptError, FormatError, GroupError, error_from_json, error_to_json
from ckpt.net.framing import RECORD
from ckpt.net.wire import Channel
from ckpt.plan.transfers import MOST_PIECE, RequestList
from ckpt.text import parse_json

from .holdings import Packable

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
"""In place of a parcel: not the bytes of a piece follow, but what makes them of the base (``delta``)."""
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
