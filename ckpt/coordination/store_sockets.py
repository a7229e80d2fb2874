"""A connection of its own to a job's store, and its socket: torch tells neither that nor when the other end is gone."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

IDLE, BETWEEN, LOST = 60, 20, 900
"""Seconds after which, and between which, the kernel asks whether the other end of a connection is there: between two saves nothing else is
sent, and firewalls forget connections that are idle for long. After ``LOST`` seconds without an answer it closes the connection."""


def cloned(store: Any, port: int | None, sockets: list[socket.socket]) -> Any:
    before = _open_sockets()
    try:
        own = store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # not every kind of store can
        return store
    for descriptor, _ in _open_sockets() - before:
        with suppress(OSError):  # another thread's, which is closed again
            sock = _socket_of(descriptor)
            if _leads_to(sock, port):
                _keep_alive(sock)
                sockets.append(sock)
            else:
                sock.close()
    return own


def _open_sockets() -> set[tuple[int, str]]:
    """Descriptor and identity of each socket of this process."""
    sockets: set[tuple[int, str]] = set()
    with suppress(OSError):  # not Linux
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed again
                sockets.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {(descriptor, link) for descriptor, link in sockets if link.startswith("socket:")}


def _socket_of(descriptor: int) -> socket.socket:
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _leads_to(sock: socket.socket, port: int | None) -> bool:
    with suppress(OSError):  # it is not connected
        return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port
    return False


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out that the other end is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST * 1000)
