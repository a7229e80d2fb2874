"""Streams whose bytes become known while they flow: nothing that was put in before the end is left out."""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from ckpt.net.streams import RECORD, Feed


class Hurried(deque[Any]):
    """A queue that another thread puts a last piece into, and closes the feed, just after somebody saw it empty."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.late = True

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self.late:
            self.late = False
            self.feed.put_slot(3, 4, slot=5, generation=6, digest=7, packed=list, sent=lambda: None)
            self.feed.close()
        return found


def test_a_last_piece_before_the_end_is_sent() -> None:
    feed = Feed(1)
    feed._queue = Hurried(feed)
    feed.answered(opened=True)
    here, there = socket.socketpair()
    with here, there:
        assert not feed.send(here)
        assert feed.send(here)
        assert RECORD.unpack(there.recv(4096)) == (3, 4, 5, 6, 7)
