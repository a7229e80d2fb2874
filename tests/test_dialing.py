"""Connections to other ranks: an address that leads nowhere does not hold up the next one, and strangers do not hold up ranks."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ckpt.net import connections, dialing
from ckpt.net.connections import Listener
from ckpt.net.dialing import Dialer
from ckpt.net.endpoints import prepare
from ckpt.net.streams import PURPOSE, RECORD, Feed, Hello, Sending, Views
from ckpt.net.wire import Prover

SECRET = bytes(range(16))
HELLO = Hello(number=1, rank=7, size=3, announcement=b"")
PROVER = partial(Prover, SECRET, PURPOSE, "rank 3", HELLO.pack())


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address at which nothing answers, not even that nobody listens: no more connections fit into its queue."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    queued = []
    for _ in range(3):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(server.getsockname())
        queued.append(sock)
    time.sleep(0.1)
    yield server.getsockname()
    for sock in [server, *queued]:
        sock.close()


@pytest.fixture
def nobody() -> Iterator[tuple[str, int]]:
    """An address at which connections are refused."""
    with socket.socket() as taken:  # nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


def turns(selector: selectors.BaseSelector, dialer: Dialer, door: Listener, seconds: float) -> list[Hello]:
    """What comes to the door, until something does."""
    heard: list[Hello] = []
    end = time.monotonic() + seconds
    while not heard and time.monotonic() < end:
        dialer.advance()
        for key, _ in selector.select(dialer.wait(0.05)):
            if isinstance(key.data, connections.Listening):
                for client in door.accept(key.data):
                    heard.append(Hello.unpack(client.said))
                    client.sock.close()
            elif isinstance(key.data, Sending):
                try:
                    greeted = key.data.greeted
                    key.data.step()
                    if not greeted:
                        dialer.connected(key.data)
                    selector.modify(key.data.sock, selectors.EVENT_READ, key.data)
                except OSError as err:
                    selector.unregister(key.data.sock)
                    key.data.sock.close()
                    dialer.failed(key.data, err)
            elif door.greet(key.data):
                heard.append(Hello.unpack(key.data.said))
                key.data.sock.close()
        door.tick()
    return heard


def test_one_silent_address_does_not_take_the_time_of_the_others(silent: tuple[str, int], nobody: tuple[str, int]) -> None:
    door = Listener([socket.create_server(("127.0.0.1", 0))], SECRET, 60.0, PURPOSE, len(HELLO.pack()))
    with selectors.DefaultSelector() as selector:
        dialer = Dialer(selector, 60.0)
        door.attach(selector)
        began = time.monotonic()
        dialer.begin(3, [silent, nobody, *door.addresses], PROVER, Views([memoryview(b"abc")]))
        assert turns(selector, dialer, door, 40.0) == [HELLO]
        assert time.monotonic() - began < 30
        text = str(dialer.dials[3])
        assert f"127.0.0.1:{silent[1]}: no connection yet, 127.0.0.1:{nobody[1]}: Connection refused" in text
        assert f"127.0.0.1:{door.addresses[0][1]}: connected, no answer" in text
        for key in list(selector.get_map().values()):
            if isinstance(key.data, Sending):
                key.data.sock.close()
    door.detach()
    door.close()


def test_nothing_is_left_to_wait_for_where_all_refuse(nobody: tuple[str, int]) -> None:
    with selectors.DefaultSelector() as selector:
        dialer = Dialer(selector, 60.0)
        dialer.begin(3, [nobody, ("::1", nobody[1])], PROVER, Views([]))
        end = time.monotonic() + 30
        while not (hopeless := dialer.advance()) and time.monotonic() < end:
            for key, _ in selector.select(0.05):
                with pytest.raises(OSError, match="connect") as caught:
                    key.data.step()
                selector.unregister(key.data.sock)
                dialer.failed(key.data, caught.value)
                key.data.sock.close()
        (dial,) = hopeless
        assert dial.rank == 3 and f"127.0.0.1:{nobody[1]}: Connection refused" in str(dial) and f"[::1]:{nobody[1]}: " in str(dial)


def test_a_rank_gets_in_among_many_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its greeting comes after more of them than may wait, and it connects again when it was dropped."""
    monkeypatch.setattr(connections, "MOST_GREETINGS", 4)
    monkeypatch.setattr(dialing, "_PAUSE", 0.01)
    door = Listener([socket.create_server(("127.0.0.1", 0), backlog=100)], SECRET, 60.0, PURPOSE, len(HELLO.pack()))
    (address,) = door.addresses
    idle = [socket.create_connection(address) for _ in range(50)]
    with selectors.DefaultSelector() as selector:
        door.attach(selector)
        dialer = Dialer(selector, 60.0)
        dialer.begin(3, [address], PROVER, Views([memoryview(b"abc")]))
        assert turns(selector, dialer, door, 10.0) == [HELLO]
        assert len(door._greetings) <= 4
        for key in list(selector.get_map().values()):
            if isinstance(key.data, Sending):
                key.data.sock.close()
        door.close()
    closed = 0
    for sock in idle:
        sock.settimeout(2)
        closed += not sock.recv(1)
        sock.close()
    assert closed == len(idle)


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GREETING_SECONDS", 0.1)
    door = Listener([socket.create_server(("127.0.0.1", 0))], SECRET, 60.0, PURPOSE, len(HELLO.pack()))
    with socket.create_connection(door.addresses[0]) as idle, selectors.DefaultSelector() as selector:
        door.attach(selector)
        idle.sendall(b"ckl")
        assert not door.accept(selector.select(5)[0][0].data)
        time.sleep(0.2)
        door.tick()
        idle.settimeout(2)
        assert not idle.recv(1)
        door.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_the_kernel_gives_up_a_silent_machine_within_the_timeout() -> None:
    with socket.socket() as sock:
        prepare(sock, 8.0)
        options = {n: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")}
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        assert options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] <= 8
        prepare(sock, 1e9)  # what the kernel takes
        prepare(sock, 0.001)


# ------------------------------------ Streams whose bytes become known while they flow: nothing that was put in before the end is left out.


class Hurried(deque[Any]):
    """A queue that another thread puts a last piece into, and closes the feed, just after somebody saw it empty."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.late = True

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self.late:
            self.late = False
            self.feed.put_slot(3, 4, slot=5, generation=6, digest=7, packed=list, sent=lambda: None)
            self.feed.close()
        return found


def test_a_last_piece_before_the_end_is_sent() -> None:
    feed = Feed(1)
    feed._queue = Hurried(feed)
    feed.answered(opened=True)
    here, there = socket.socketpair()
    with here, there:
        assert not feed.send(here)
        assert feed.send(here)
        assert RECORD.unpack(there.recv(4096)) == (3, 4, 5, 6, 7)
