"""What every TCP connection of ours has set."""

from __future__ import annotations

import socket


def prepare(sock: socket.socket, timeout: float) -> None:
    """A connection that neither waits with small messages nor waits for a silent machine for much longer than ``timeout`` seconds: the
    kernel asks whether the other end is still there, and gives up what is not acknowledged."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(timeout, 86400.0)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(seconds / 4))),
        ("TCP_KEEPINTVL", max(1, int(seconds / 8))),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
