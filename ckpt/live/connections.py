"""Answers whoever connects and knows the secret: a thread waits for connections, and one serves each. No torch."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckpt.errors import CkptError, FormatError

from .wire import Channel, welcome

MOST_CONNECTIONS = 4096
_PAUSE = 0.05
"""Seconds after a connection that could not be accepted: where files have run out, the next try would come at once."""
_PATIENCE = 2.0
"""Seconds that closing waits for conversations: what they read may be freed after it."""

log = logging.getLogger("ckpt")


class ConnectionServer:
    """Listens on ``ports``. ``serve`` talks to one peer, which has proved itself and come for ``purpose``, until one of them ends it;
    ``gone`` is called with the peer's name when the connection has ended. Threads are called ``name``."""

    def __init__(
        self,
        ports: Sequence[socket.socket],
        secret: bytes,
        timeout: float,
        *,
        purpose: str,
        name: str,
        serve: Callable[[Channel], None],
        gone: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._ports = ports
        self._secret = secret
        self._timeout = timeout
        self._purpose = purpose
        self._name = name
        self._serve = serve
        self._gone = gone
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._conversations: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening, drop who is connected, and wait for a moment until nobody is served any more."""
        self._closing.set()
        self._thread.join()
        for port in self._ports:
            port.close()
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            conversations = self._conversations - {threading.current_thread()}
        end = time.monotonic() + _PATIENCE
        for conversation in conversations:
            conversation.join(max(0.0, end - time.monotonic()))

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for port in self._ports:
                port.setblocking(False)
                selector.register(port, selectors.EVENT_READ, port)
            while not self._closing.is_set():
                for key, _ in selector.select(0.1):
                    try:
                        sock, address = key.data.accept()
                    except OSError:  # of that connection alone, which tries again; or too many files, and then it waits at the port
                        self._closing.wait(_PAUSE)
                    else:
                        self._begin(sock, f"{address[0]}:{address[1]}")

    def _begin(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            full = len(self._connections) >= MOST_CONNECTIONS
            if not full:
                self._connections.add(sock)
        if full:
            log.warning("%s is not served: there are %d connections", peer, MOST_CONNECTIONS)
            sock.close()
            return
        conversation = threading.Thread(target=self._converse, args=(sock, peer), name=self._name, daemon=True)
        try:
            conversation.start()
        except RuntimeError:  # no more threads: this one is not served, and those that come later may be
            log.warning("%s is not served: this process can start no more threads", peer)
            with self._lock:
                self._connections.discard(sock)
            sock.close()
            return
        with self._lock:
            if conversation.is_alive():
                self._conversations.add(conversation)

    def _converse(self, sock: socket.socket, peer: str) -> None:
        try:
            channel = welcome(sock, self._secret, self._timeout, peer=peer, alive=self._check_going)
            if channel.purpose != self._purpose:
                raise FormatError(f"it asks for {channel.purpose!r}, and {self._purpose!r} are given here", where=peer)
            self._serve(channel)
        except (CkptError, OSError) as err:
            log.debug("live: %s is served no longer: %s", peer, err)
        finally:
            with self._lock:
                self._connections.discard(sock)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            self._gone(peer)
            with self._lock:
                self._conversations.discard(threading.current_thread())

    def _check_going(self) -> None:
        if self._closing.is_set():
            raise ConnectionAbortedError("closing")
