"""Gives and takes files of this node for other nodes of the job, and for those who know its secret alone. No torch."""

from __future__ import annotations

from contextlib import suppress

from ckpt.errors import CkptError, ExchangeError, FormatError, UsageError, error_to_json
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.io_backends.shared_object import SharedObject
from ckpt.live.connections import ConnectionServer
from ckpt.live.wire import Channel
from ckpt.transport.endpoints import listen, network

from .messages import MOST_BYTES, PURPOSE, Data, Head, receive, send

Answer = tuple[Head, bytes]


class NodeServer:
    """Serves ``backend``, and nothing outside it; ``addresses`` are where it listens."""

    def __init__(self, backend: Backend, secret: bytes, timeout: float, *, store: str | None = None) -> None:
        """``store``: the host of the job's store, if it has one: the addresses that lead there come first."""
        self._backend = backend
        self.network = network()
        ports = listen(store)
        self.addresses: list[tuple[str, int]] = [port.getsockname()[:2] for port in ports]
        self._connections = ConnectionServer(ports, secret, timeout, purpose=PURPOSE, name="ckpt-node", serve=self._converse)

    def close(self) -> None:
        """Stop listening, and drop who is connected: what they were writing is forgotten."""
        self._connections.close()

    def _converse(self, channel: Channel) -> None:
        coming = ArrivingFile(self._backend)
        try:
            while channel.await_next():
                try:
                    head, data = receive(channel)
                except ExchangeError as err:  # after any other error nobody knows where the next question begins
                    send(channel, {"error": error_to_json(err)})
                    continue
                try:
                    answer = self._answer(head, data, coming)
                except (KeyError, TypeError) as err:
                    raise FormatError(f"a question that makes no sense: {err!r}", where=channel.peer) from err
                except CkptError as err:
                    answer = {"error": error_to_json(err)}, b""
                send(channel, *answer)
        finally:
            coming.abort()

    def _answer(self, head: Head, data: Data, coming: ArrivingFile) -> Answer:
        match head["op"]:
            case "read":
                return {}, self._read(head)
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

    def _read(self, head: Head) -> bytes:
        length = head["length"]
        if (self._backend.size(head["path"]) if length is None else length) > MOST_BYTES:
            raise UsageError("too many bytes for one answer", where=head["path"], hint=f"ask for at most {MOST_BYTES} at once")
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
        self._open().write(offset, [memoryview(data)])

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

    def _open(self) -> SharedObject | Writer:
        return self._shared if self._shared is not None else self._open_writer()

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise UsageError("no file was begun on this connection", hint="begin comes first")
        return self._writer
