"""What nodes say to each other about the files that they have: one question, one answer. No torch.

    question   head (JSON: op, path, …), bytes
    answer     head (JSON, or the error), bytes

    read · size · list · list_dir · put_if · delete · delete_many · prepare        as the methods of a backend
    begin · write … write · commit, or abort                         one file at a time on a connection

Bytes carry their XXH3-64 in the head: TCP's own checksum misses one damaged segment in some ten thousand. Nothing that comes is unpickled,
and every length is compared with a limit before memory is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from ckpt.errors import ExchangeError
from ckpt.live import wire
from ckpt.live.wire import Channel

PURPOSE = "node"
MOST_BYTES = 256 << 20
"""Of a head, where a listing has a line for each file, and of what follows it; longer ranges are asked for in pieces."""

Head = dict[str, Any]
Data = bytes | bytearray | memoryview


def send(channel: Channel, head: Mapping[str, Any], data: Data = b"") -> None:
    """One message; raises as ``Channel.send``."""
    view = memoryview(data)
    wire.send(channel, {**head, "digest": xxhash.xxh3_64_hexdigest(view)} if len(view) else head, [view])


def receive(channel: Channel, into: memoryview | None = None) -> tuple[Head, Data]:
    """The next message, with its bytes in ``into`` if they fill it."""
    head, behind = wire.receive_head(channel, MOST_BYTES)
    data = into if into is not None and len(into) == behind else memoryview(bytearray(behind))
    channel.receive_into(data)
    if behind and xxhash.xxh3_64_hexdigest(data) != head.get("digest"):
        hint = "try again; if it comes back, look at the network and the memory of these machines"
        raise ExchangeError(f"what {channel.peer} sent was damaged on the way", hint=hint)
    return head, data
