"""Answers whoever connects and knows the secret: a thread waits for connections, and one serves each peer that has proved itself. No torch.

Strangers cost no threads and few files (``ckpt.net.listener``); all peers together leave half of this process's files to the program.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ckpt.errors import CkptError, FormatError

from .listener import Listener, Listening, part_of_files
from .wire import Channel, Proving

_PART = 2
"""Peers of all servers have at most this part of the files that this process may open; others wait at the ports."""
_PATIENCE = 2.0
"""Seconds that closing waits for conversations: what they read may be freed after it."""

_conversing = set[socket.socket]()
"""The connections of all servers of this process."""
os.register_at_fork(after_in_child=_conversing.clear)

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
        self._timeout = timeout
        self._purpose = purpose
        self._name = name
        self._serve = serve
        self._gone = gone
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._conversations: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._warned = False
        door = Listener(ports, partial(Proving, secret=secret), timeout)
        self._thread = threading.Thread(target=self._accept, args=(door,), name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening, drop who is connected, and wait for a moment until nobody is served any more."""
        self._closing.set()
        self._thread.join()  # which closes the ports
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            conversations = self._conversations - {threading.current_thread()}
        end = time.monotonic() + _PATIENCE
        for conversation in conversations:
            conversation.join(max(0.0, end - time.monotonic()))

    def _accept(self, door: Listener[str]) -> None:
        with selectors.DefaultSelector() as selector:
            door.attach(selector)
            while not self._closing.is_set():
                for key, _ in selector.select(0.1):
                    if not isinstance(key.data, Listening):
                        purpose = door.greet(key.data)
                        if purpose is not None:
                            self._begin(key.data.sock, purpose)
                    elif len(_conversing) < part_of_files(_PART):
                        for purpose, sock in door.accept(key.data):
                            self._begin(sock, purpose)
                    else:
                        self._warn_full()
                        door.pause()
                door.tick()
        door.close()

    def _warn_full(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("others wait to be served: there are %d connections; `ulimit -n` raises the limit", len(_conversing))

    def _begin(self, sock: socket.socket, purpose: str) -> None:
        """Serve a peer that has proved itself."""
        try:
            address = sock.getpeername()
        except OSError:  # it is gone
            sock.close()
            return
        channel = Channel(sock, f"{address[0]}:{address[1]}", self._timeout, self._check_going, purpose)
        conversation = threading.Thread(target=self._converse, args=(channel,), name=self._name, daemon=True)
        with self._lock:
            self._connections.add(sock)
            _conversing.add(sock)
        try:
            conversation.start()
        except RuntimeError:  # no more threads: this one is not served, and those that come later may be
            log.warning("%s is not served: this process can start no more threads", channel.peer)
            self._end(channel)
            return
        with self._lock:
            if conversation.is_alive():
                self._conversations.add(conversation)

    def _converse(self, channel: Channel) -> None:
        try:
            if channel.purpose != self._purpose:
                raise FormatError(f"it asks for {channel.purpose!r}, and {self._purpose!r} are given here", where=channel.peer)
            self._serve(channel)
        except (CkptError, OSError) as err:
            log.debug("live: %s is served no longer: %s", channel.peer, err)
        finally:
            self._end(channel)
            self._gone(channel.peer)
            with self._lock:
                self._conversations.discard(threading.current_thread())

    def _end(self, channel: Channel) -> None:
        with self._lock:
            self._connections.discard(channel.sock)
            _conversing.discard(channel.sock)
        channel.close()

    def _check_going(self) -> None:
        if self._closing.is_set():
            raise ConnectionAbortedError("closing")
