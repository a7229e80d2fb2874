"""What is asked of a ``torch.distributed.Store``, in the fewest messages.

A TCPStore does not answer ``set`` and ``append`` at all, ``check`` and ``add`` take one round trip, and ``get`` takes two: it waits for the
key first. So a value is *peeked* at with ``compare_set`` of a value that nobody writes to itself: one round trip, which gives the value or
says that there is none. Bytes that many ranks append to one key come back as one value, joined by the server; a store that cannot append
(a FileStore) keeps each under a key of its own. Values are sent in parts: a server on libuv closes the connection of a client that sends
more than 8 MiB at once.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from ckpt import settings
from ckpt.concurrency import when_dropped
from ckpt.errors import DeadlineError

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

    def appended(self, keys: Sequence[str], *, there: bool) -> list[bytes]:
        """What was appended to each key, in any order; faster if something was to each (``there``)."""
        if self._extended:
            return self.get_all(keys) if there and len(keys) > 1 else [self.peek(key) or b"" for key in keys]
        return [b"".join(self.peek(name) or b"" for name in self._pieces(key)) for key in keys]

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
                # Have the kernel find out that the other end is gone.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST * 1000)
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


# The key-value store of a job (``torch.distributed.Store``), on a connection whose calls all have a deadline; a part of it for each group.
#
# A store's call blocks for as long as the network says nothing, which may be for ever. So one thread of each connection makes the calls, in
# order, and whoever asked waits for it no longer than the deadline. Invariant: a connection on which a call did not come back is not used
# any more; all later calls fail at once. It is shut, where its socket is known, so that the thread ends: one that comes back from a call of
# torch while the interpreter ends would abort the process. The thread is a daemon, so it does not keep the process from ending in any case.

R = TypeVar("R")

GRACE = 0.25
"""Seconds that a call is given beyond its deadline."""
QUIET = 0.02
"""Seconds without a request, at least, after which a connection does what is not urgent; and as many as four requests take, so that where
the store is far away the next request seldom waits behind that."""
PUT_OFF = 256
"""So many things are put off at most; then one is done before each request."""


class Store:
    """A part of a job's store. A call waits until ``timeout`` seconds after the last answer of the store, or after ``within`` was called if
    that was later; never less than a quarter of ``timeout``."""

    def __init__(self, connection: Connection, prefix: str = "", timeout: float | None = None) -> None:
        self._connection = connection
        self._prefix = prefix
        self._timeout = settings.timeout(timeout)
        self._began = time.monotonic()

    def part(self, name: str) -> Store:
        """A part of this part, on the same connection."""
        return Store(self._connection, f"{self._prefix}{name}/", self._timeout)

    def within(self, timeout: float) -> Store:
        """The same part for calls that have this timeout."""
        return Store(self._connection, self._prefix, timeout)

    @property
    def host(self) -> str | None:
        """The machine that serves it, as the job calls it."""
        return self._connection.host

    @property
    def silent(self) -> bool:
        """Whether the connection is given up, since a call did not come back."""
        return self._connection.silent_since is not None

    def set(self, key: str, value: bytes) -> None:
        """Not answered: it is sent, and nothing comes back."""
        self._ask(lambda store: store.set(self._prefix + key, value), answered=False)

    def append(self, key: str, data: bytes) -> None:
        """Add to what ranks have appended to a key. Not answered."""
        self._ask(lambda store: store.append(self._prefix + key, data), answered=False)

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda store: store.add(self._prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._ask(lambda store: store.check([self._prefix + key for key in keys]))

    def peek(self, key: str) -> bytes | None:
        """The value, or None where there is none. One round trip."""
        return self._ask(lambda store: store.peek(self._prefix + key))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask(lambda store: store.get_all([self._prefix + key for key in keys]))

    def appended(self, keys: Sequence[str], *, there: bool = False) -> list[bytes]:
        """What was appended to each key. ``there``: something was to each."""
        return self._ask(lambda store: store.appended([self._prefix + key for key in keys], there=there))

    def delete_later(self, keys: Iterable[str]) -> None:
        """Delete keys when nothing else is asked, without waiting for it. What cannot be deleted stays."""
        for key in keys:
            self._connection.put_off(lambda store, name=self._prefix + key: store.delete(name))  # type: ignore[misc]

    def _ask(self, call: Callable[[KeyValues], R], *, answered: bool = True) -> R:
        return self._connection.ask(call, self._began, self._timeout, answered=answered)


Connect = Callable[[list[socket.socket]], KeyValues]
"""Makes a connection to a store; what it knows of its socket, it appends, for others to close."""

_connections: WeakSet[Connection] = WeakSet()


class Connection:
    """A connection to a store and the thread that makes its calls. ``connect`` is run in that thread."""

    def __init__(self, connect: Connect, address: str, host: str | None) -> None:
        self.address, self.host = address, host
        self._sockets: list[socket.socket] = []
        self.silent_since: float | None = None
        self._answered = time.monotonic()
        self._waiting: set[SimpleQueue[Any]] = set()
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._put_off: deque[Callable[[KeyValues], object]] = deque()
        arguments = self._requests, self._put_off, connect, self._sockets
        self._thread = threading.Thread(target=_serve, args=arguments, name="ckpt-store", daemon=True)
        self._thread.start()
        when_dropped(self, _end, self._requests, self._put_off, self._thread)  # programs may save when they end
        _connections.add(self)

    def put_off(self, call: Callable[[KeyValues], object]) -> None:
        """Have a call made when nothing else is asked; nobody hears what comes of it."""
        self._put_off.append(call)
        if len(self._put_off) == 1:
            self._requests.put(_NOTHING)  # the thread may sleep

    def ask(self, call: Callable[[KeyValues], R], began: float, timeout: float, *, answered: bool) -> R:
        """``answered``: whether the store has answered once ``call`` comes back."""
        reply: SimpleQueue[Any] = SimpleQueue()
        self._waiting.add(reply)  # before looking: who gives up wakes all that wait
        try:
            if self.silent_since is None:
                self._requests.put((reply, call))
                result, error = self._await(reply, began, timeout)
                if error is None:
                    if answered:
                        self._answered = time.monotonic()
                    return result  # type: ignore[no-any-return]
                if not isinstance(error, _SilentError):
                    raise self._gone(error) if isinstance(error, RuntimeError) else error
        finally:
            self._waiting.discard(reply)
        raise self._unreachable()

    def _await(self, reply: SimpleQueue[Any], began: float, timeout: float) -> Any:
        asked = time.monotonic()
        # Two clocks: the deadline restarts with every answer of the store, since one that answers others is alive;
        # and each request has a quarter of the timeout of its own, even if the store was quiet before it.
        while (left := max(max(self._answered, began) + timeout, asked + timeout / 4) - time.monotonic()) > 0:
            with suppress(Empty):
                return reply.get(timeout=min(left, threading.TIMEOUT_MAX))
        with suppress(Empty):  # this process may have been held up itself, and the answer be there
            return reply.get(timeout=min(GRACE, timeout / 4))
        # Giving up is final: the thread may stay in that call for ever, and each later call would wait for a whole
        # timeout behind it. Everybody who waits is woken, and the socket is shut so that the thread can end.
        self.silent_since = max(self._answered, began)
        for other in list(self._waiting):
            other.put((None, _SilentError()))
        for sock in self._sockets:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)
        return reply.get()

    def rest(self, seconds: float) -> None:
        """Wait for a moment until the thread is in no call, and give up what was put off."""
        self._put_off.clear()
        reply: SimpleQueue[Any] = SimpleQueue()
        if self._thread.is_alive():
            self._requests.put((reply, lambda store: None))
            with suppress(Empty):
                reply.get(timeout=seconds)

    # ---- errors

    def _unreachable(self) -> DeadlineError:
        since = self._answered if self.silent_since is None else self.silent_since
        return DeadlineError(
            f"the job's store at {self.address} cannot be reached: it has not answered for {time.monotonic() - since:.0f} s",
            hint="look at the network of this host, and whether the host of the store is up; then start the job again; "
            "`ckpt ls` shows what is committed",
        )

    def _gone(self, why: RuntimeError) -> DeadlineError:
        error = DeadlineError(
            f"the job's store is gone, so the process that serves it (rank 0 or the launcher, at {self.address}) probably died",
            hint="look at the log of rank 0; `ckpt ls` shows what is committed",
        )
        error.__cause__ = why
        return error


class _SilentError(Exception):
    """What those get that wait for a connection when it is given up."""


_ending: WeakSet[threading.Thread] = WeakSet()
"""Threads of connections that are not used any more."""


def _end(requests: SimpleQueue[Any], put_off: deque[Callable[[KeyValues], object]], thread: threading.Thread) -> None:
    put_off.clear()
    requests.put(None)
    _ending.add(thread)


@atexit.register
def _rest() -> None:
    for connection in list(_connections):
        connection.rest(1.0)
    for thread in list(_ending):
        thread.join(1.0)


_NOTHING = None, lambda store: None
"""A request of nobody, for nothing."""


def _next(requests: SimpleQueue[Any], put_off: deque[Callable[[KeyValues], object]], took: float) -> Any:
    """The next request, or something that was put off. ``took``: seconds that the last request did, or 0 if that was put off."""
    if len(put_off) <= PUT_OFF or not took:
        with suppress(Empty):
            return requests.get(timeout=(max(QUIET, 4 * took) if took else 0.0) if put_off else None)
    with suppress(IndexError):  # given up meanwhile
        return None, put_off.popleft()
    return _NOTHING


def _serve(
    requests: SimpleQueue[Any], put_off: deque[Callable[[KeyValues], object]], connect: Connect, sockets: list[socket.socket]
) -> None:
    """The thread. It refers to no :class:`Connection`, so that one that is not used any more goes away, and the thread with it."""
    store: Any = None
    failed: BaseException | None = None
    try:
        store = connect(sockets)
    except BaseException as err:  # noqa: BLE001  every call raises it
        failed = err
    del connect
    took = QUIET
    while (request := _next(requests, put_off, took)) is not None:
        reply, call = request
        began = time.monotonic()
        try:
            if failed is not None:
                raise failed
            answer: tuple[Any, BaseException | None] = call(store), None
        except BaseException as err:  # noqa: BLE001  who asked raises it
            answer = None, err
        took = 0.0
        if reply is not None:
            took = max(time.monotonic() - began, 1e-6)
            reply.put(answer)
        del request, reply, call, answer
    for sock in sockets:
        sock.close()


# ---------------------------------------------------------------------------------------------------- a part for a group

_connected = threading.Event()
"""That the connection which was made last is there, or failed: lives are counted in the order in which groups are made."""
_connected.set()
_groups_in_order = threading.Lock()
"""Held while a group takes its place behind the one before it."""


def group_store(base: Any, name: str, rank: int) -> Store:
    """A part of the job's store for a group of this name, on a connection of its own: whoever waits for a key in the job's store does not
    hold up a save in the background. Does not wait until the connection is there.

    The name is the same on all ranks; several groups may have the same ranks. A store may outlive its group (torchrun's does), and the
    next group may have the same name: it must not read what the last one left. So each life of a name has its own part.
    """
    global _connected
    # Each group of a process waits for the connection of the group before it. The number of a life is a counter in
    # the store: all ranks have to count their groups in the same order, or one would read what another life wrote.
    mine = threading.Event()
    with _groups_in_order:  # two threads behind one group: one of them would wait for a group that nobody makes
        before, _connected = _connected, mine
    host, port = _served_at(base)

    def connect(sockets: list[socket.socket]) -> KeyValues:
        from torch.distributed.distributed_c10d import PrefixStore

        before.wait()
        try:
            own = cloned(base, port, sockets)
            life = own.add(f"ckpt/{name}/life/{rank}", 1)
            return KeyValues(PrefixStore(f"ckpt/{name}/{life}", own))
        finally:
            mine.set()

    return Store(Connection(connect, f"{host}:{port}" if host is not None else type(base).__name__, host))


def _served_at(store: Any) -> tuple[str | None, int | None]:
    """Host and port of the process that serves a store; stores are wrapped in others that add a prefix, and a store of files has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) else (None, None)


def _forget_parent() -> None:
    """A forked child has none of the threads."""
    global _connected, _groups_in_order
    _groups_in_order = threading.Lock()
    _connected = threading.Event()
    _connected.set()
    _connections.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_forget_parent)
