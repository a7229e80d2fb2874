"""Files of nodes over TCP: the server of this node, for nodes of the job and those who know its secret alone, and the files of another node
as a backend. No torch."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import xxhash

from ckpt.concurrency import patience, silence_counts_from, when_dropped
from ckpt.errors import (
    AccessError,
    BusyError,
    CkptError,
    DeadlineError,
    ExchangeError,
    FormatError,
    StorageError,
    UsageError,
    error_from_json,
    error_to_json,
)
from ckpt.io_backends.checks import byte_view, check_path, check_prefix, check_read, check_size
from ckpt.io_backends.protocol import Backend, ObjectMeta, SharedObject, Writer
from ckpt.io_backends.writer_base import WriterBase
from ckpt.net import wire
from ckpt.net.connections import ConnectionServer
from ckpt.net.dialing import IdleConnections
from ckpt.net.endpoints import listen, network
from ckpt.net.wire import Address, Channel, Kind, checked, dial, is_count

# What nodes say to each other about the files that they have: one question, one answer.
#
#     question   head (JSON: op, path, …), bytes
#     answer     head (JSON, or the error), bytes
#
#     read · size · modified · version · list · list_dir · put_if · delete · delete_many · prepare      as the methods of a backend
#     hello                                                            who serves
#     begin · write … write · commit, or abort                         one file at a time on a connection
#
# Bytes carry their XXH3-64 in the head: TCP's own checksum misses one damaged segment in some ten thousand. Nothing that comes is
# unpickled, and every length is compared with a limit before memory is asked for. Only what the kernel moves straight from a file
# (``RangedFiles``) has no digest there: whoever loads a checkpoint compares it with the checkpoint's own.

PURPOSE = "node"
MOST_BYTES = 256 << 20
"""Of a head, where a listing has a line for each file, and of what follows it; longer ranges are asked for in pieces."""

Head = dict[str, Any]
Data = bytes | bytearray | memoryview


def send(channel: Channel, head: Mapping[str, Any], data: Data = b"") -> None:
    """One message; raises as ``Channel.send``."""
    view = memoryview(data)
    wire.send(channel, {**head, "digest": xxhash.xxh3_64_hexdigest(view)} if len(view) else head, [view])


def receive(channel: Channel, into: memoryview | None = None, most: int = MOST_BYTES) -> tuple[Head, Data]:
    """The next message, of at most ``most`` bytes, with its bytes in ``into`` if they fill it."""
    head, behind = wire.receive_head(channel, most)
    data = into if into is not None and len(into) == behind else memoryview(bytearray(behind))
    channel.receive_into(data)
    if behind and not head.get("unhashed") and xxhash.xxh3_64_hexdigest(data) != head.get("digest"):
        hint = "try again; if it comes back, look at the network and the memory of these machines"
        raise ExchangeError(f"what {channel.peer} sent was damaged on the way", hint=hint)
    return head, data


class OpenRange(NamedTuple):
    """Bytes of an open file, which whoever sends them closes."""

    file: int
    offset: int
    length: int


class RangedFiles(ABC):
    """Files whose bytes the kernel moves into the connection."""

    @abstractmethod
    def open_range(self, path: str, offset: int, length: int | None) -> OpenRange:
        """So many bytes of a file, or all from ``offset`` on; raises as ``Backend.read``."""


_STRETCH = 4 << 20


def _send_range(channel: Channel, span: OpenRange) -> None:
    wire.send(channel, {"unhashed": True}, (), more=span.length)
    file, offset, length = span
    end, moved = offset + length, time.monotonic()
    room = select.poll()  # select() takes no descriptor above 1,023, and each object has two
    room.register(channel.sock, select.POLLOUT)
    while offset < end:
        try:
            sent = os.sendfile(channel.sock.fileno(), file, offset, min(_STRETCH, end - offset))
        except BlockingIOError:
            channel.alive()
            if time.monotonic() - moved > channel.timeout:
                raise DeadlineError(f"{channel.peer} takes nothing for {channel.timeout:g} s") from None
            room.poll(200)
            continue
        if not sent:
            raise ConnectionError("the file ended early")
        offset, moved = offset + sent, time.monotonic()


Answer = tuple[Head, bytes | OpenRange]


class NodeServer:
    """Serves ``backend``, and nothing outside it; ``addresses`` are where it listens, the most likely first."""

    def __init__(
        self,
        backend: Backend,
        secret: bytes,
        timeout: float,
        *,
        store: str | None = None,
        port: int = 0,
        purpose: str = PURPOSE,
        about: Head | None = None,
        most: int = MOST_BYTES,
    ) -> None:
        """``store``: the host of the job's store, if it has one: the addresses that lead there come first. ``port``: by default any that
        is free. ``about``: the answer to ``hello``. ``most``: bytes of a question."""
        self._backend = backend
        self._about = about or {}
        self._most = most
        self._timeout = timeout
        self.network = network()
        ports = listen(store, port)
        if not ports:
            raise BusyError(f"port {port} is taken", where="CKPT_MEMORY_PORT", hint="look who has it: ss -lptn; or choose another one")
        self.addresses: list[tuple[str, int]] = [port.getsockname()[:2] for port in ports]
        self._connections = ConnectionServer(ports, secret, timeout, purpose=purpose, name=f"ckpt-{purpose}", serve=self._converse)

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening, and drop who is connected: what they were writing is forgotten."""
        self._connections.close()

    def _converse(self, channel: Channel) -> None:
        coming = ArrivingFile(self._backend)
        patience.set(self._timeout)  # of this thread: who asks waits no longer either
        try:
            while channel.await_next():
                try:
                    head, data = receive(channel, most=self._most)
                except ExchangeError as err:  # after any other error nobody knows where the next question begins
                    send(channel, {"error": error_to_json(err)})
                    continue
                content: bytes | OpenRange = b""
                try:
                    answer, content = self._answer(head, data, coming)
                except CkptError as err:
                    answer = {"error": error_to_json(err)}
                except (KeyError, TypeError, ValueError) as err:
                    wrong = FormatError(f"a question that cannot be read: {err!r}", hint="use the same release of ckpt on both machines")
                    answer = {"error": error_to_json(wrong)}
                # Whatever fails from here on ends the connection: an error among the bytes would count as bytes.
                if isinstance(content, bytes):
                    send(channel, answer, content)
                    continue
                try:
                    _send_range(channel, content)
                finally:
                    os.close(content.file)
        finally:
            coming.abort()

    def _answer(self, head: Head, data: Data, coming: ArrivingFile) -> Answer:
        match head["op"]:
            case "read":
                return {}, self._read(head)
            case "hello":
                return self._about, b""
            case "modified":
                return {"modified": self._backend.modified(head["path"])}, b""
            case "version":
                return {"version": self._backend.version_token(head["path"])}, b""
            case "size":
                return {"size": self._backend.size(head["path"])}, b""
            case "list":
                return {"files": [[f.path, f.size] for f in self._backend.list_prefix(head["prefix"])]}, b""
            case "list_dir":
                return {"names": self._backend.list_dir(head["prefix"])}, b""
            case "begin":
                coming.begin(head["path"], head["size"])
            case "write":
                coming.write(head["offset"], data)
            case "commit":
                coming.commit()
            case "abort":
                coming.abort()
            case "put_if":
                cut, content = head["expected"], bytes(data)
                expected, content = (None, content) if cut is None else (content[:cut], content[cut:])
                self._backend.put_if(head["path"], content, expected=expected)
            case "delete":
                self._backend.delete(head["path"])
            case "delete_many":
                self._backend.delete_many(head["paths"])
            case "prepare":
                self._backend.prepare()
            case other:
                raise UsageError(f"{other!r} is nothing that a node does", hint="use the same release of ckpt on all nodes")
        return {}, b""

    def _read(self, head: Head) -> bytes | OpenRange:
        length = head["length"]
        if (self._backend.size(head["path"]) if length is None else length) > MOST_BYTES:
            raise UsageError("too many bytes for one answer", where=head["path"], hint=f"ask for at most {MOST_BYTES} at once")
        if isinstance(self._backend, RangedFiles):
            return self._backend.open_range(head["path"], head["offset"], length)
        return self._backend.read(head["path"], head["offset"], length)


class ArrivingFile:
    """The file that one connection writes. It shows when all of it is there and durable, never before: half a file is no copy."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._shared: SharedObject | None = None
        self._writer: Writer | None = None

    def begin(self, path: str, size: int) -> None:
        self.abort()
        self._shared = self._backend.create_shared(path, size)
        if self._shared is None:
            self._writer = self._backend.create(path, size)

    def write(self, offset: int, data: Data) -> None:
        (self._shared if self._shared is not None else self._open_writer()).write(offset, [memoryview(data)])

    def commit(self) -> None:
        if self._shared is not None:
            self._shared.complete([self._shared.flush()], replace=False)
        else:
            self._open_writer().commit()
        self._shared = self._writer = None

    def abort(self) -> None:
        with suppress(CkptError):
            if self._shared is not None:
                self._shared.abort()
            if self._writer is not None:
                self._writer.abort()
        self._shared = self._writer = None

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise UsageError("no file was begun on this connection", hint="begin comes first")
        return self._writer


# The files of another node, through its server: a backend like any other.
#
# Each thread that asks takes a connection from those that are idle, or makes one; a writer has one of its own. A node that does not
# answer is a StorageError that names it; whoever knows another holder of the bytes goes there.

PIECE = 8 << 20
"""Bytes that one question reads or writes."""
_IDLE = 16
"""Connections that are kept."""
_DELETES = 1000
"""Files that one question deletes: the answer must come before the deadline."""


class NodeConnections:
    """The connections of this process to the node that is called ``name``."""

    answer_of = "answer of a node"

    def __init__(self, name: str, addresses: Sequence[Address], secret: bytes, timeout: float, *, same_network: bool) -> None:
        self.name = name
        self._addresses = addresses
        self._secret = secret
        self._timeout = timeout
        self._same_network = same_network
        self._idle = IdleConnections[Channel](_IDLE)
        self._silent: tuple[float, str] = -math.inf, ""
        """When it was waited for in vain the last time, and what was said of it."""

    @property
    def who(self) -> str:
        """What messages call it."""
        return f"node {self.name}"

    def close(self) -> None:
        self._idle.clear()

    def ask(self, head: Head, data: Data = b"", into: memoryview | None = None) -> tuple[Head, Data]:
        """What the node answers."""
        with self.translated():
            channel = self._idle.take(self.dial)
            channel.timeout = min(self._timeout, patience.get())
            try:
                send(channel, head, data)
                answer, answered = receive(channel, into)
            except BaseException:
                channel.close()
                raise
            self._idle.keep(channel)
        _raise_error(answer)
        return answer, answered

    def answer(self, head: Head, kind: Kind) -> Head:
        """An answer without bytes, of this kind; raises as :meth:`ask`."""
        with self.translated():
            answer: Head = checked(self.ask(head)[0], kind, self.answer_of, self.who)
        return answer

    def dial(self) -> Channel:
        """A new connection; raises as ``wire.dial``."""
        seconds = min(self._timeout, patience.get())
        return dial(self._addresses, self._secret, seconds, peer=self.who, purpose=PURPOSE, same_network=self._same_network)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Errors of the connection become those of a storage. See ``waiting_once``."""
        if self._silent[0] >= silence_counts_from.get():
            raise StorageError(self._silent[1], hint="look whether the machine and the job on it still run")
        try:
            yield
        except (DeadlineError, FormatError, AccessError, ExchangeError) as err:
            message = f"node {self.name} is lost: {err.message}"
            if isinstance(err, DeadlineError):
                self._silent = time.monotonic(), message
            raise StorageError(message, where=err.where, hint=err.hint) from err
        except CkptError:
            raise
        except OSError as err:
            raise StorageError(f"node {self.name} is lost: {err}", hint="look whether the machine and the job on it still run") from err


class RemoteNode(Backend):
    """What a node has below ``prefix`` (empty, or ending in a slash)."""

    def __init__(self, connections: NodeConnections, prefix: str = "") -> None:
        self._connections = connections
        self._prefix = prefix

    @property
    def url(self) -> str:
        """For messages alone: the job's own connections lead there."""
        return f"node {self._connections.name}:{self._prefix.rstrip('/')}"

    def below(self, prefix: str) -> RemoteNode:
        """The same node's files below ``prefix``, which ends in a slash unless it is empty."""
        return RemoteNode(self._connections, prefix)

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_read(offset, length)
        key = self._key(path)
        if length is None:  # one question, so that what comes is of one moment
            return bytes(self._connections.ask({"op": "read", "path": key, "offset": offset, "length": None})[1])
        pieces = [(at, min(PIECE, length - at)) for at in range(0, length, PIECE)] or [(0, 0)]
        return b"".join(self._connections.ask({"op": "read", "path": key, "offset": offset + at, "length": n})[1] for at, n in pieces)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        check_read(offset, None)
        view, key = byte_view(buffer, writable=True), self._key(path)
        for at in range(0, max(view.nbytes, 1), PIECE):
            part = view[at : at + PIECE]
            _, data = self._connections.ask({"op": "read", "path": key, "offset": offset + at, "length": len(part)}, into=part)
            if len(data) != len(part):
                raise StorageError(f"{self._connections.who} gave {len(data)} bytes for {len(part)}", where=key, hint="read again")

    def size(self, path: str) -> int:
        size: int = self._connections.answer({"op": "size", "path": self._key(path)}, {"size": is_count})["size"]
        return size

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. The files are those of the moment of the call."""
        question = {"op": "list", "prefix": self._prefix + check_prefix(prefix)}
        files = self._connections.answer(question, {"files": [(str, is_count)]})["files"]
        return iter([ObjectMeta(path.removeprefix(self._prefix), size) for path, size in files])

    def list_dir(self, prefix: str = "") -> list[str]:
        question = {"op": "list_dir", "prefix": self._prefix + check_prefix(prefix)}
        names: list[str] = self._connections.answer(question, {"names": [str]})["names"]
        return names

    def create(self, path: str, size: int) -> Writer:
        """See ``Backend.create``. The object shows when it is committed."""
        key = self._key(path)
        check_size(size, key)
        return RemoteWriter(self._connections, key, size)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        head = {"op": "put_if", "path": self._key(path), "expected": None if expected is None else len(expected)}
        self._connections.ask(head, (expected or b"") + data)

    def delete(self, path: str) -> None:
        self._connections.ask({"op": "delete", "path": self._key(path)})

    def delete_many(self, paths: Collection[str]) -> None:
        """See ``Backend.delete_many``. The node deletes many for one question."""
        keys = [self._key(path) for path in paths]
        for at in range(0, len(keys), _DELETES):
            self._connections.ask({"op": "delete_many", "paths": keys[at : at + _DELETES]})

    def prepare(self) -> None:
        self._connections.ask({"op": "prepare"})


class RemoteWriter(WriterBase):
    """A file that is written to another node, over a connection of its own: if that ends early, nothing of the file is left there."""

    def __init__(self, connections: NodeConnections, key: str, size: int) -> None:
        super().__init__(where=f"node {connections.name}:{key}", size=size)
        self._connections = connections
        self._turn = threading.Lock()
        with connections.translated():
            self._channel = connections.dial()
        self._closes = when_dropped(self, self._channel.close)  # also for a Writer that was dropped
        try:
            self._ask({"op": "begin", "path": key, "size": size})
        except BaseException:
            self._closes()
            raise

    def _ask(self, head: Head, data: Data = b"") -> None:
        with self._turn, self._connections.translated():
            send(self._channel, head, data)
            answer, _ = receive(self._channel)
        _raise_error(answer)

    def _put(self, offset: int, views: list[memoryview]) -> None:
        for view in views:
            for at in range(0, view.nbytes, PIECE):
                self._ask({"op": "write", "offset": offset + at}, view[at : at + PIECE])
            offset += view.nbytes

    def _make_durable(self) -> None:
        self._ask({"op": "commit"})

    def _discard(self, *, tried: bool) -> None:
        """The node has forgotten it by now."""

    def _close(self) -> None:
        if self._state != "committed":
            with suppress(CkptError):  # else it does when it sees that the connection has ended
                self._ask({"op": "abort"})
        self._closes()


def _raise_error(answer: Head) -> None:
    if "error" in answer:
        raise error_from_json(answer["error"])
