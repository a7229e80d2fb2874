"""A proxy on the wire between two machines, which flips one bit of what one end sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckpt.net.wire import Address

_BLOCK = 1 << 16


class FlippingProxy:
    """Forwards to ``target``. One bit flips in the ``nth`` byte (from 1 on) that goes ``up`` to the target, or down, on one connection, if
    :attr:`armed`; ``flipped`` counts."""

    def __init__(self, target: Address, nth: int, *, up: bool) -> None:
        self._target, self._nth, self._up = target, nth, up
        self._lock = threading.Lock()
        self.armed = True
        self.flipped = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def address(self) -> Address:
        host, port = self._listening.getsockname()
        return host, port

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                self._start(self._forward, near, far, True)
                self._start(self._forward, far, near, False)

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(_BLOCK):
                if up == self._up and passed < self._nth <= passed + len(data) and self._take():
                    changed = bytearray(data)
                    changed[self._nth - passed - 1] ^= 1
                    data = bytes(changed)
                passed += len(data)
                sink.sendall(data)
        _shut(source, sink)

    def _take(self) -> bool:
        with self._lock:
            armed, self.armed = self.armed, False
            self.flipped += armed
            return armed

    def close(self) -> None:
        """End all connections."""
        _shut(*self._ends)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()


def _shut(*ends: socket.socket) -> None:
    """Wake who waits for them, too."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def flipping(target: Address, nth: int, *, up: bool) -> Iterator[FlippingProxy]:
    """A proxy for the block."""
    proxy = FlippingProxy(target, nth, up=up)
    try:
        yield proxy
    finally:
        proxy.close()
