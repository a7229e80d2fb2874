"""Takes connections, and keeps strangers out: whoever does not say within seconds who he is, and prove it, is dropped.

Anybody who reaches the ports can connect. However many do, few wait to be heard at a time, the oldest of them make room for new ones, and
a process that has no file descriptor left goes on as soon as one is free. Whoever was dropped among them connects again.
Of a server, one thread waits for connections, and one serves each peer that has proved itself; all peers together leave half of this
process's files to the program. No torch.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckpt.errors import CkptError

from .endpoints import EXHAUSTED, close_when_forked, exhausted, prepare
from .wire import Channel, Proving

MOST_GREETINGS = 64
"""Connections that have not said who they are, at one listener; with more, the oldest is dropped."""
_GREETINGS_PART = 16
"""At most this part of the files that this process may open."""
GREETING_SECONDS = 5.0
"""After this long such a connection is dropped."""
_ACCEPTS = 64
"""Connections that are taken before others get their turn."""
_PAUSE = 0.1
"""Seconds without new connections after there was no file descriptor for one."""

log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Listening:
    """A socket that connections come to."""

    sock: socket.socket


class Listener:
    """The ports of one rank or server. While an exchange goes on, its selector has them. Clients come for ``purpose``, and say ``behind``
    bytes right after their proof."""

    def __init__(self, sockets: Sequence[socket.socket], secret: bytes, timeout: float, purpose: str, behind: int = 0) -> None:
        self.addresses = [sock.getsockname()[:2] for sock in sockets]
        self._ports = [Listening(sock) for sock in sockets]
        self._proving = partial(Proving, secret=secret, purpose=purpose, behind=behind)
        self._timeout = timeout
        self._greetings: deque[Proving] = deque()
        self._selector: selectors.BaseSelector | None = None
        self._paused_until: float | None = None
        self._warned = False
        for sock in sockets:
            sock.setblocking(False)

    def attach(self, selector: selectors.BaseSelector) -> None:
        self._selector, self._paused_until = selector, None
        for port in self._ports:
            selector.register(port.sock, selectors.EVENT_READ, port)
        for greeting in self._greetings:
            selector.register(greeting.sock, selectors.EVENT_READ, greeting)

    def detach(self) -> None:
        """Before the selector is closed. Connections that have not been heard stay."""
        for port in self._ports:
            self._unregister(port.sock)
        for greeting in self._greetings:
            self._unregister(greeting.sock)
        self._selector = None

    def close(self) -> None:
        self.detach()
        for port in self._ports:
            port.sock.close()
        while self._greetings:
            self._greetings.popleft().sock.close()

    def accept(self, port: Listening) -> list[Proving]:
        """Take connections that have come to a port, and give those that have proved themselves already."""
        heard = []
        for _ in range(_ACCEPTS):
            try:
                sock, _ = port.sock.accept()
            except BlockingIOError:
                break
            except OSError as err:
                if err.errno not in EXHAUSTED:
                    continue  # of that connection alone: whoever it was is gone already (accept(2))
                self._make_room(err)
                break
            with suppress(OSError):  # gone already: the greeting finds out
                prepare(sock, self._timeout)
            greeting = self._proving(sock)
            self._greetings.append(greeting)
            if self._selector is not None:
                self._selector.register(sock, selectors.EVENT_READ, greeting)
            if self.greet(greeting):
                heard.append(greeting)
            elif len(self._greetings) > min(MOST_GREETINGS, part_of_files(_GREETINGS_PART)):
                # Who speaks needs a moment to prove himself; of those who do not, or of all, the one that came first.
                self._drop(next((g for g in self._greetings if not g.speaks), self._greetings[0]), "others came")
        return heard

    def greet(self, greeting: Proving) -> bool:
        """Go on with a connection; whether it has proved itself, and then it is the caller's."""
        if greeting.sock.fileno() < 0:  # dropped in this turn
            return False
        try:
            proved = greeting.step()
        except OSError as err:
            self._drop(greeting, str(err))
            return False
        if proved:
            self._unregister(greeting.sock)
            self._greetings.remove(greeting)
        return proved

    def wait(self) -> float | None:
        """Seconds until ``tick`` has something to do; None if nothing is due."""
        due = [self._greetings[0].began + GREETING_SECONDS] if self._greetings else []
        due += [] if self._paused_until is None else [self._paused_until]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def tick(self) -> None:
        """Then, or often: drop who says nothing; listen again after a pause."""
        now = time.monotonic()
        while self._greetings and now - self._greetings[0].began >= GREETING_SECONDS:
            self._drop(self._greetings[0], f"silent for {GREETING_SECONDS:g} s")
        if self._paused_until is not None and now >= self._paused_until and self._selector is not None:
            self._paused_until = None
            for port in self._ports:
                self._selector.register(port.sock, selectors.EVENT_READ, port)

    def _make_room(self, err: OSError) -> None:
        """There is no file descriptor for a connection that has come: take those of the older half of who has said nothing; without any,
        look again later."""
        if not self._warned:
            self._warned = True
            log.warning("connections wait: %s; `ulimit -n` raises the limit", err)
        # The older half of the connections that have not greeted is closed. A rank greets within milliseconds of
        # connecting, so these are strangers, or ranks that connect again.
        for greeting in list(self._greetings)[: (len(self._greetings) + 1) // 2]:
            self._drop(greeting, str(err))
        self.pause()

    def pause(self) -> None:
        """Take no connections for a moment; they wait at the ports."""
        if self._paused_until is None:
            self._paused_until = time.monotonic() + _PAUSE
            for port in self._ports:
                self._unregister(port.sock)

    def _drop(self, greeting: Proving, why: str) -> None:
        log.debug("a connection was closed before it said who it is: %s", why)
        self._unregister(greeting.sock)
        greeting.sock.close()
        self._greetings.remove(greeting)

    def _unregister(self, sock: socket.socket) -> None:
        if self._selector is not None:
            with suppress(KeyError, ValueError):  # not there while it pauses
                self._selector.unregister(sock)


def part_of_files(part: int) -> int:
    """One of so many parts of the files that this process may open, at least 1: connections leave the others to the program."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(1, soft // part)


_PART = 2
"""Peers of all servers have at most this part of the files that this process may open; others wait at the ports."""
PATIENCE = 2.0
"""Seconds that closing waits for conversations: what they read may be freed after it."""

_conversing = set[socket.socket]()
"""The connections of all servers of this process."""
os.register_at_fork(after_in_child=_conversing.clear)


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
        self._name = name
        self._serve = serve
        self._gone = gone
        self._lock = threading.RLock()  # whoever collects garbage may close this at any moment, in any thread
        self._connections: set[socket.socket] = set()
        self._conversations: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._warned = False
        try:
            self._woken, self._waker = socket.socketpair()
        except OSError as err:
            raise exhausted("no connections can be taken", err) from err
        for sock in (self._woken, self._waker):
            close_when_forked(sock)  # a child that closes its copy of this server must not wake this one
        door = Listener(ports, secret, timeout, purpose)
        self._thread = threading.Thread(target=self._accept, args=(door,), name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._connections)

    def is_alive(self) -> bool:
        """Whether it listens: not when it is closed, nor in a process that was forked."""
        return self._thread.is_alive() and not self._closing.is_set()

    def close(self) -> None:
        """Stop listening, drop who is connected, and wait for a moment until nobody is served any more."""
        self._closing.set()
        with suppress(OSError):  # it is closed already
            self._waker.send(b"x")
        self._waker.close()
        if self._thread is not threading.current_thread():
            self._thread.join()  # which closes the ports
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            conversations = self._conversations - {threading.current_thread()}
        end = time.monotonic() + PATIENCE
        for conversation in conversations:
            conversation.join(max(0.0, end - time.monotonic()))

    def _accept(self, door: Listener) -> None:
        with selectors.DefaultSelector() as selector:
            door.attach(selector)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(door.wait()):
                    if key.data is None:
                        break
                    if not isinstance(key.data, Listening):
                        if door.greet(key.data):
                            self._begin(key.data.sock)
                    elif len(_conversing) < part_of_files(_PART):
                        for client in door.accept(key.data):
                            self._begin(client.sock)
                    else:
                        if not self._warned:
                            self._warned = True
                            log.warning(
                                "others wait to be served: there are %d connections; `ulimit -n` raises the limit", len(_conversing)
                            )
                        door.pause()
                door.tick()
        door.close()
        self._woken.close()

    def _begin(self, sock: socket.socket) -> None:
        """Serve a peer that has proved itself."""
        try:
            address = sock.getpeername()
        except OSError:  # it is gone
            sock.close()
            return
        channel = Channel(sock, f"{address[0]}:{address[1]}", self._timeout, self._check_going)
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
