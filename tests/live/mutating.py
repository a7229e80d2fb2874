"""A proxy that changes messages: in what one end says to the other, a member is missing, or of another kind."""

from __future__ import annotations

import copy
import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckpt.net.wire import Address
from tests.memory.flipping import FlippingProxy, _shut

_HANDSHAKE = {True: (38, 48), False: (70, 1)}
"""Bytes that go up and down before the first message."""
_HEAD = struct.Struct("<II")
OTHER_KINDS: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x", "é" * 5000, [], [[]], {}, {"a": {}})


class MutatingProxy(FlippingProxy):
    """Forwards to ``target``; ``change`` gives what takes the place of each message that goes ``up``, or down."""

    def __init__(self, target: Address, *, up: bool) -> None:
        self.change: Callable[[Any], Any] = lambda message: message
        super().__init__(target, 0, up=up)

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError, EOFError):
            for size in _HANDSHAKE[up]:
                sink.sendall(_exactly(source, size))
            while True:
                length, behind = _HEAD.unpack(_exactly(source, _HEAD.size))
                text, data = _exactly(source, length), _exactly(source, behind)
                if up == self._up:
                    text = json.dumps(self.change(json.loads(text))).encode()
                sink.sendall(_HEAD.pack(len(text), behind) + text + data)
        _shut(source, sink)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def mutations(message: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What may be wrong with any member of a message like this one, at any depth."""
    for path in _paths(message, ()):
        yield f"{path}: missing", lambda m, path=path: _with(m, path, None, missing=True)
        for value in OTHER_KINDS:
            yield f"{path}: {value!r:.20}", lambda m, path=path, value=value: _with(m, path, value, missing=False)


def _paths(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for key, member in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from _paths(member, (*at, key))


def _with(message: Any, path: tuple[Any, ...], value: Any, *, missing: bool) -> Any:
    changed = copy.deepcopy(message)
    at = changed
    try:
        for key in path[:-1]:
            at = at[key]
        at[path[-1]]
    except (KeyError, IndexError, TypeError):
        return message  # a message of another kind, as for an error
    if missing:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


@contextmanager
def mutating(target: Address, *, up: bool) -> Iterator[MutatingProxy]:
    """A proxy for the block."""
    proxy = MutatingProxy(target, up=up)
    try:
        yield proxy
    finally:
        proxy.close()
