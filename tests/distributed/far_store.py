"""A job's store that is far away: what is sent to it and what it answers takes half a round trip each way."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue


class FarStore:
    """A port that leads to another one of this machine, late. A context manager."""

    def __init__(self, port: int, round_trip: float) -> None:
        self._target = port
        self._late = round_trip / 2
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]

    def __enter__(self) -> FarStore:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    threading.Thread(target=self._take, args=(source, queue), daemon=True).start()
                    threading.Thread(target=self._pass_on, args=(queue, sink), daemon=True).start()

    def _take(self, source: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(1 << 20)
            except OSError:
                data = b""
            queue.put((time.monotonic() + self._late, data))

    def _pass_on(self, queue: SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                due, data = queue.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
