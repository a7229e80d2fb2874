"""What nodes say to each other about the files that they have: one question, one answer. No torch.

    question   head (JSON: op, path, …), bytes
    answer     head (JSON, or the error), bytes

    read · size · list · list_dir · put_if · delete · prepare        as the methods of a backend
    begin · write … write · commit, or abort                         one file at a time on a connection

Bytes carry their XXH3-64 in the head: TCP's own checksum misses one damaged segment in some ten thousand. Nothing that comes is unpickled,
and every length is compared with a limit before memory is asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from ckpt.errors import ExchangeError, FormatError
from ckpt.live.wire import Channel

PURPOSE = "node"
_FRAME = struct.Struct("<IQ")
"""Bytes of the head, and of what follows it."""
_MOST_HEAD = 256 << 20
"""A listing has a line for each file."""
MOST_BYTES = 256 << 20
"""Of one question or answer; longer ranges are asked for in pieces."""

Head = dict[str, Any]
Data = bytes | bytearray | memoryview


def send(channel: Channel, head: Mapping[str, Any], data: Data = b"") -> None:
    """One message; raises as ``Channel.send``."""
    text = json.dumps({**head, "digest": xxhash.xxh3_64_hexdigest(data)} if len(data) else head).encode()
    channel.send(_FRAME.pack(len(text), len(data)), text, data)


def receive(channel: Channel, into: memoryview | None = None) -> tuple[Head, Data]:
    """The next message, with its bytes in ``into`` if they fill it.

    Raises:
        FormatError: it is too long, or no message of ours.
        ExchangeError: its bytes were damaged on the way.
        ConnectionError, DeadlineError: as ``Channel.receive``.
    """
    length, behind = _FRAME.unpack(channel.receive(_FRAME.size))
    if length > _MOST_HEAD or behind > MOST_BYTES:
        raise FormatError(f"a message of {length + behind} bytes", where=channel.peer)
    try:
        head = json.loads(channel.receive(length))
    except (ValueError, RecursionError) as err:
        raise FormatError(f"a message that cannot be read: {err}", where=channel.peer) from err
    if not isinstance(head, dict):
        raise FormatError("a message that is no mapping", where=channel.peer)
    data = into if into is not None and len(into) == behind else memoryview(bytearray(behind))
    channel.receive_into(data)
    if behind and xxhash.xxh3_64_hexdigest(data) != head.get("digest"):
        hint = "try again; if it comes back, look at the network and the memory of these machines"
        raise ExchangeError(f"what {channel.peer} sent was damaged on the way", hint=hint)
    return head, data
