"""What holder and receiver of pieces say to each other, once they have proved who they are. No torch.

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

from ckpt.errors import CkptError, FormatError, GroupError, error_from_json, error_to_json
from ckpt.live.wire import Channel
from ckpt.settings import limits
from ckpt.transport.framing import RECORD

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
MOST_LIST = 32 * limits.MIB
"""Bytes of a list of requests, and of all that a holder remembers: half a million requests."""
FAILED = 0xFFFFFFFE
"""In place of a parcel: an error follows, as JSON."""
CHANGES = 0xFFFFFFFD
"""In place of a parcel: not the bytes of a piece follow, but what makes them of the base (``delta``)."""
DIGESTS = 0xFFFFFFFC
"""In place of a parcel: the digests of the boxes of a piece follow."""
MOST_ERROR = 64 * limits.KIB


def send_error(channel: Channel, err: BaseException) -> None:
    """Tell the other end why there are no more pieces."""
    text = json.dumps(error_to_json(err)).encode()[:MOST_ERROR]
    channel.send(RECORD.pack(FAILED, 0, 0, len(text), 0), text)


def receive_error(channel: Channel, length: int) -> CkptError:
    """What the other end raised, as the same class if it is one of ours."""
    if length > MOST_ERROR:
        raise FormatError(f"an error message of {length} bytes", where=channel.peer)
    try:
        data = json.loads(channel.receive(length))
    except (ValueError, RecursionError) as err:
        raise FormatError(f"an error message that cannot be read: {err}", where=channel.peer) from err
    error = error_from_json(data)
    if type(error) is CkptError:  # what is none of ours there is a failure of that rank
        kind = data.get("type") if isinstance(data, dict) else None
        return GroupError(f"{channel.peer} raised {kind!s:.80}: {error.message}", where=error.where, hint=error.hint)
    error.message = f"{channel.peer}: {error.message}"
    return error
