"""What every TCP connection of ours has set, and how bytes come without waiting."""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()


def close_when_forked(sock: socket.socket) -> None:
    """Close a socket in processes that this one forks, as data loaders do. A connection that a child has, too, does not end with the
    process that talks on it: whoever waits at the other end would wait until the child has ended."""
    _sockets.add(sock)


def _close() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close)


def prepare(sock: socket.socket, timeout: float) -> None:
    """A connection that neither waits with small messages nor waits for a silent machine for much longer than ``timeout`` seconds: the
    kernel asks whether the other end is still there, and gives up what is not acknowledged. It ends with this process."""
    close_when_forked(sock)
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


def receive_exactly(sock: socket.socket, size: int, have: bytes = b"") -> bytes:
    """What came of a message of ``size`` bytes, of which ``have`` came before."""
    try:
        data = sock.recv(size - len(have))
    except BlockingIOError:
        return have
    if not data:
        raise ConnectionError("the stream ended early")
    return have + data
