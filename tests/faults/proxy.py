"""A proxy on loopback between an HTTP client and its server, which makes requests go wrong on purpose, as networks and servers do.

One request is one draw: a ``Schedule`` says which of them fail and how, the same for the same seed as long as requests come in the same
order. What was done is counted in ``FaultProxy.injected``; a test that needs faults should assert that it had some.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = {
    "refuse": "the connection is reset; the server never sees the request",
    "cut_request": "half of the request's body reaches the server, then both connections are reset",
    "lose_answer": "the server does what it is asked, but the connection is reset before its answer",
    "hide_answer": "the server does what it is asked, but the client is told 500",
    "fail": "the client is told 500; the server never sees the request",
    "busy": "the client is told 503 SlowDown, and so are those that come next, a burst of them",
    "stall": "nothing happens for a while, then the connection is reset; the server never sees the request",
    "truncate": "the answer's body ends half-way, in good order or by a reset",
    "slow": "the answer's body comes in trickles, but whole",
    "flip": "one bit of the request's body is another one when it reaches the server",
    "repeat": "the server gets the request twice, and the client the second answer",
}
"""Fault → what it does."""

_BLOCK = 64 << 10
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>On purpose.</Message></Error>'
_SLOW_DOWN, _INTERNAL = (_ERROR.format(code).encode() for code in ("SlowDown", "InternalError"))


@dataclass(kw_only=True)
class Schedule:
    """Which requests go wrong. ``rates`` gives the chance of each kind per request; ``methods`` limits them to some HTTP methods."""

    rates: Mapping[str, float]
    seed: int = 0
    burst: int = 3
    """So many requests in a row are told 503 by one ``busy``."""
    stall: float = 0.5
    """Seconds."""
    trickle: float = 0.002
    """Seconds between two pieces of a slow answer; it has at most 50."""
    methods: frozenset[str] | None = None
    paths: str = ""
    """A regular expression that is searched for in the path; other requests are left alone."""
    most: int | None = None
    """So many faults, then none."""
    _random: random.Random = field(init=False, repr=False)
    _burst_left: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        unknown = self.rates.keys() - KINDS.keys()
        assert not unknown, f"no such faults: {unknown}"
        assert sum(self.rates.values()) <= 1
        self._random = random.Random(self.seed)

    def draw(self, method: str, path: str = "") -> str | None:
        """The fault of the next request, if any. One caller at a time."""
        kind = None if self.most == 0 else self._drawn(method, path)
        if kind is not None and self.most is not None:
            self.most -= 1
        return kind

    def _drawn(self, method: str, path: str) -> str | None:
        at = self._random.random()
        if (self.methods is not None and method not in self.methods) or not re.search(self.paths, path):
            return None
        if self._burst_left:
            self._burst_left -= 1
            return "busy"
        for kind, rate in self.rates.items():
            at -= rate
            if at < 0:
                if kind == "busy":
                    self._burst_left = self.burst - 1
                return kind
        return None


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and passes requests on to ``upstream`` (``host:port``). A context manager.

    The ``Host`` header is passed on as it is, so that signatures over it stay right.
    """

    def __init__(self, upstream: str, schedule: Schedule | None = None, drops: frozenset[str] = frozenset()) -> None:
        self.drops = drops
        """Headers of requests, in lower case, that the server never sees."""
        self.upstream = upstream.removeprefix("http://").rstrip("/")
        self.schedule = schedule
        self.injected: Counter[str] = Counter()
        self.requests = 0
        self.flip: str | None = None
        """One bit flips in the middle of the next answer to a GET of an object whose path ends so."""
        self.errors: list[BaseException] = []
        """What went wrong in the proxy itself: empty, or the test says nothing."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True)

    @property
    def url(self) -> str:
        """Where clients connect to: ``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def draw(self, method: str, path: str) -> str | None:
        """Count a request and decide its fate."""
        with self._lock:
            self.requests += 1
            kind = self.schedule.draw(method, path) if self.schedule is not None else None
            if kind is not None:
                self.injected[kind] += 1
            return kind

    def flipped(self, method: str, path: str, body: bytes) -> bytes:
        """The body, or with one bit flipped."""
        with self._lock:
            if self.flip is None or method != "GET" or not body or not path.partition("?")[0].endswith(self.flip):
                return body
            self.flip = None
            self.injected["flip"] += 1
        spoilt = bytearray(body)
        spoilt[len(body) // 2] ^= 8
        return bytes(spoilt)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Inside the block nothing goes wrong."""
        with self._lock:
            kept, self.schedule = self.schedule, None
        try:
            yield
        finally:
            with self._lock:
                self.schedule = kept

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        assert self.errors == []


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultProxy) -> None:
        super().__init__(address, _Handler)
        self.proxy = proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        import sys

        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):  # clients come and go
            self.proxy.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        proxy = self.server.proxy
        kind = proxy.draw(self.command, self.path)
        schedule = proxy.schedule
        if kind in ("refuse", "stall"):
            if kind == "stall":
                proxy.closing.wait(schedule.stall if schedule else 0)
            self._reset()
            return
        body = self._body()
        if kind in ("fail", "busy"):
            self._error(kind)
            return
        if kind == "flip":
            body = _flipped(body)
        if kind == "repeat":
            self._ask(body, cut=False)
        answer = self._ask(body, cut=kind == "cut_request")
        if answer is not None:
            answer = answer[0], proxy.flipped(self.command, self.path, answer[1])
        if answer is None or kind in ("lose_answer", "cut_request"):
            self._reset()
        elif kind == "hide_answer":
            self._error("fail")
        else:
            self._answer(*answer, kind=kind, trickle=schedule.trickle if schedule else 0)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = do_PATCH = _handle

    def _body(self) -> bytes:
        """The request's body, as it came: with its chunks if it has any."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self.rfile.readline()
            yield line
            size = int(line.partition(b";")[0], 16)
            if size == 0:
                break
            yield self.rfile.read(size + 2)
        while True:  # trailers
            line = self.rfile.readline()
            yield line
            if line in (b"\r\n", b"\n", b""):
                return

    def _ask(self, body: bytes, *, cut: bool) -> tuple[http.client.HTTPResponse, bytes] | None:
        """The server's answer; None if it got only half of the request."""
        connection = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() in self.server.proxy.drops:
                    continue
                if name.lower() not in _HOP_BY_HOP or name.lower() == "transfer-encoding":
                    connection.putheader(name, value)
            connection.putheader("Connection", "close")
            connection.endheaders(body[: len(body) // 2] if cut else body)
            if cut and body:
                assert connection.sock is not None
                _abandon(connection.sock)
                return None
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _answer(self, answer: http.client.HTTPResponse, body: bytes, *, kind: str | None, trickle: float) -> None:
        self.send_response_only(answer.status, answer.reason)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        if length is not None and answer.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        if kind == "truncate" and body:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if len(body) % 2:
                self._reset()
            self.close_connection = True
        elif kind == "slow":
            step = max(len(body) // 50, 1)
            for at in range(0, len(body), step):
                self.wfile.write(body[at : at + step])
                time.sleep(trickle)
        else:
            self.wfile.write(body)

    def _error(self, kind: str) -> None:
        body = b"" if self.command == "HEAD" else _SLOW_DOWN if kind == "busy" else _INTERNAL
        self.send_response_only(503 if kind == "busy" else 500, "Slow Down" if kind == "busy" else "Internal Server Error")
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        _abandon(self.connection)


def _flipped(body: bytes) -> bytes:
    """The same but for a bit in the middle."""
    if not body:
        return body
    changed = bytearray(body)
    changed[len(body) // 2] ^= 1 << len(body) % 8
    return bytes(changed)


def _abandon(connection: socket.socket) -> None:
    """Close a connection with a reset, not in good order."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket.close(connection.detach())
