"""The fault proxy does to each request what it says, and to no other."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.faults.proxy import KINDS, FaultProxy, Schedule

BODY = bytes(range(256)) * 1000


class Store(BaseHTTPRequestHandler):
    """The smallest object store."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    seen: list[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) == length:
            self.seen.append(f"PUT {self.path} {self.headers['Host']}")
            self.objects[self.path] = body
            self._reply(200)
        self.close_connection |= len(body) != length

    def do_GET(self) -> None:
        self.seen.append(f"{self.command} {self.path} {self.headers['Host']}")
        body = self.objects.get(self.path)
        self._reply(404 if body is None else 200, body or b"")

    do_HEAD = do_GET


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[type[Store]]:
    handler = type("Fresh", (Store,), {"objects": {}, "seen": []})
    server = Quiet(("127.0.0.1", 0), handler)
    handler.address = f"127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def ask(proxy: FaultProxy, method: str, path: str, body: bytes | None = None, timeout: float = 10) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def with_fault(store: type[Store], kind: str, **options: float) -> FaultProxy:
    return FaultProxy(store.address, Schedule(rates={kind: 1.0}, **options))  # type: ignore[attr-defined,arg-type]


def test_without_a_schedule_nothing_changes(store: type[Store]) -> None:
    with FaultProxy(f"http://{store.address}/") as proxy:  # type: ignore[attr-defined]
        host = proxy.url.removeprefix("http://")
        assert ask(proxy, "PUT", "/a%2Fb?x=1", BODY) == (200, b"")
        assert ask(proxy, "GET", "/a%2Fb?x=1") == (200, BODY)
        assert ask(proxy, "HEAD", "/a%2Fb?x=1") == (200, b"")
        assert ask(proxy, "GET", "/no") == (404, b"")
        assert store.seen[:2] == [f"PUT /a%2Fb?x=1 {host}", f"GET /a%2Fb?x=1 {host}"]
        assert (proxy.requests, proxy.injected) == (4, {})


def test_one_connection_serves_many_requests(store: type[Store]) -> None:
    with FaultProxy(store.address) as proxy:  # type: ignore[attr-defined]
        connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
        for n in range(5):
            connection.request("PUT", f"/{n}", b"x" * n)
            assert connection.getresponse().read() == b""
            connection.request("GET", f"/{n}")
            assert connection.getresponse().read() == b"x" * n
        connection.close()


@pytest.mark.parametrize("kind", ["refuse", "stall", "fail", "busy", "cut_request"])
def test_faults_that_the_server_never_sees(store: type[Store], kind: str) -> None:
    with with_fault(store, kind, stall=0.05) as proxy:
        if kind in ("fail", "busy"):
            assert ask(proxy, "PUT", "/a", BODY)[0] == (503 if kind == "busy" else 500)
        else:
            with pytest.raises(ConnectionError):
                ask(proxy, "PUT", "/a", BODY)
        assert proxy.injected == {kind: 1}
    assert (store.objects, store.seen) == ({}, [])


@pytest.mark.parametrize("kind", ["lose_answer", "hide_answer"])
def test_faults_after_the_server_acted(store: type[Store], kind: str) -> None:
    with with_fault(store, kind) as proxy:
        if kind == "hide_answer":
            assert ask(proxy, "PUT", "/a", BODY)[0] == 500
        else:
            with pytest.raises(ConnectionError):
                ask(proxy, "PUT", "/a", BODY)
    assert store.objects == {"/a": BODY}


@pytest.mark.parametrize("extra", [0, 1])
def test_a_truncated_answer_is_shorter_than_it_says(store: type[Store], extra: int) -> None:
    store.objects["/a"] = BODY[: len(BODY) - extra]
    with with_fault(store, "truncate") as proxy, pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(proxy, "GET", "/a")


def test_a_slow_answer_is_whole(store: type[Store]) -> None:
    store.objects["/a"] = BODY
    began = time.monotonic()
    with with_fault(store, "slow", trickle=0.004) as proxy:
        assert ask(proxy, "GET", "/a") == (200, BODY)
    assert time.monotonic() - began > 0.15


def test_a_stall_outlasts_a_client_that_does_not_wait(store: type[Store]) -> None:
    with with_fault(store, "stall", stall=5) as proxy, pytest.raises(TimeoutError):
        ask(proxy, "GET", "/a", timeout=0.1)


def test_a_burst_is_a_burst() -> None:
    schedule = Schedule(rates={"busy": 0.05}, burst=4, seed=3)
    drawn = [schedule.draw("GET") for _ in range(2000)]
    lengths = [len(run) for run in "".join("b" if k else "." for k in drawn).split(".") if run]
    assert all(n % 4 == 0 for n in lengths[:-1])
    assert sum(lengths) > 100


def test_rates_seeds_and_methods() -> None:
    rates = dict.fromkeys(KINDS, 0.05)
    first, second, other = (Schedule(rates=rates, seed=s, burst=1) for s in (1, 1, 2))
    drawn = [first.draw("GET") for _ in range(4000)]
    assert drawn == [second.draw("GET") for _ in range(4000)]
    assert drawn != [other.draw("GET") for _ in range(4000)]
    for kind in KINDS:
        assert 120 < drawn.count(kind) < 290
    only = Schedule(rates={"fail": 1.0}, methods=frozenset({"PUT"}))
    assert [only.draw(m) for m in ("GET", "PUT", "GET")] == [None, "fail", None]


def test_calm(store: type[Store]) -> None:
    with with_fault(store, "fail") as proxy:
        with proxy.calm():
            assert ask(proxy, "PUT", "/a", b"x") == (200, b"")
        assert ask(proxy, "GET", "/a")[0] == 500


def test_many_clients_at_once(store: type[Store]) -> None:
    """Each client tries until it is told yes; then the store has what it sent."""
    schedule = Schedule(rates={k: 0.06 for k in KINDS if k not in ("slow", "flip")}, seed=5, stall=0.01)
    with FaultProxy(store.address, schedule) as proxy:  # type: ignore[attr-defined]

        def put(n: int) -> None:
            while True:
                try:
                    if ask(proxy, "PUT", f"/{n}", BODY[n:])[0] == 200:
                        return
                except (OSError, http.client.HTTPException):
                    continue

        threads = [threading.Thread(target=lambda first=first: [put(n) for n in range(first, 60, 6)]) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert proxy.injected.keys() >= {"refuse", "fail", "busy", "lose_answer"}
        assert proxy.requests > 60
    assert store.objects == {f"/{n}": BODY[n:] for n in range(60)}
