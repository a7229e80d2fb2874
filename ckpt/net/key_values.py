"""What is asked of a ``torch.distributed.Store``, in the fewest messages.

A TCPStore does not answer ``set`` and ``append`` at all, ``check`` and ``add`` take one round trip, and ``get`` takes two: it waits for the
key first. So a value is *peeked* at with ``compare_set`` of a value that nobody writes to itself: one round trip, which gives the value or
says that there is none. Bytes that many ranks append to one key come back as one value, joined by the server; a store that cannot append
(a FileStore) keeps each under a key of its own. Values are sent in parts: a server on libuv closes the connection of a client that sends
more than 8 MiB at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

MOST = 4 << 20
"""Bytes of one value, or appended at once."""
KEYS = 256
"""Keys that are asked for at once."""
_NONE = "ckpt: there is no such key"
_IN_PARTS = b"ckpt: in so many parts: "
_COMPARE = ("TCPStore", "FileStore", "HashStore")
"""Kinds of stores that have ``compare_set``; those that programs write often do not."""


def names_of(key: str, nbytes: int) -> list[str]:
    """The keys that a value of this size takes."""
    return [key, *(f"{key}/{i}" for i in range(-(-nbytes // MOST)))] if nbytes > MOST else [key]


class KeyValues:
    """A store. Raises what the store does."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._extended = bool(store.has_extended_api())
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._compares = type(store).__name__ in _COMPARE

    def set(self, key: str, value: bytes) -> None:
        first, *parts = names_of(key, len(value))
        for i, part in enumerate(parts):
            self._store.set(part, value[i * MOST : (i + 1) * MOST])
        self._store.set(first, _IN_PARTS + b"%d" % len(parts) if parts else value)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def peek(self, key: str) -> bytes | None:
        """The value, or None where there is none."""
        if self._compares:
            value = bytes(self._store.compare_set(key, _NONE, _NONE))
            return None if value == _NONE.encode() else self._joined(key, value)
        return self._joined(key, bytes(self._store.get(key))) if self._store.check([key]) else None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(self._store.check(list(some)) for some in _some(keys))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        if not self._extended:
            return [self._joined(key, bytes(self._store.get(key))) for key in keys]
        values = [bytes(value) for some in _some(keys) for value in self._store.multi_get(list(some))]
        return [self._joined(key, value) for key, value in zip(keys, values, strict=True)]

    def append(self, key: str, data: bytes) -> None:
        """Add at most ``MOST`` bytes to what ranks have appended to a key."""
        if self._extended:
            self._store.append(key, data)
        else:
            self._store.set(f"{key}/{self._store.add(f'{key}/count', 1)}", data)

    def appended(self, keys: Sequence[str]) -> list[bytes]:
        """What was appended to each key, nothing at all to some. Pieces of different ranks are in any order."""
        if self._extended:
            return [self.peek(key) or b"" for key in keys]
        return [b"".join(self.peek(name) or b"" for name in self._pieces(key)) for key in keys]

    def appended_all(self, keys: Sequence[str]) -> list[bytes]:
        """The same, faster, of keys to which something was."""
        return self.get_all(keys) if self._extended and len(keys) > 1 else self.appended(keys)

    def delete(self, key: str) -> None:
        if not self._extended:
            for piece in self._pieces(key):
                self._store.delete_key(piece)
            self._store.delete_key(f"{key}/count")
        self._store.delete_key(key)

    def _joined(self, key: str, value: bytes) -> bytes:
        if not value.startswith(_IN_PARTS):
            return value
        return b"".join(self.get_all([f"{key}/{i}" for i in range(int(value[len(_IN_PARTS) :]))]))

    def _pieces(self, key: str) -> Iterable[str]:
        return (f"{key}/{i + 1}" for i in range(int(self.peek(f"{key}/count") or 0)))


def _some(keys: Sequence[str]) -> Iterable[Sequence[str]]:
    return (keys[i : i + KEYS] for i in range(0, len(keys), KEYS))


# A connection of its own to a job's store, and its socket: torch tells neither that nor when the other end is gone.

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
