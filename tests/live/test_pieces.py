"""Pieces over real sockets and shared memory: what comes, what is refused, and who is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from ckpt.errors import AccessError, CkptError, CorruptError, DeadlineError, ExchangeError, FormatError, NotFoundError, RankFailedError
from ckpt.live import server as live_server
from ckpt.live.holdings import BoxMemory, Holdings, TensorParts
from ckpt.live.pieces import PURPOSE
from ckpt.live.publication import not_sealed
from ckpt.live.pull import Holder, PieceClient, PiecePull, Pulled, piece_boxes
from ckpt.live.server import PieceServer
from ckpt.net.wire import dial
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.transfers import Share, TransferPlan, plan_transfers
from tests.plan.layout_strategies import local_array, numbered
from tests.plan.test_transfers import want

SECRET = b"of this test"
SHAPE = (96, 40)
PIECE = 512
SOURCE = TensorLayout(Mesh(("replica", "dp"), (2, 2), range(4)), (Shard(0, "dp"),))
ARRAYS = [numbered(SHAPE).astype(np.int32) + 1000 * i for i in range(3)]
RECEIVER = 9


def held(rank: int, check: Callable[[int, Box], None] | None = None) -> Holdings:
    tensors = {}
    for number, array in enumerate(ARRAYS):
        (piece,) = SOURCE.pieces(SHAPE, rank)
        local = local_array(SOURCE, array, rank)
        assert local is not None
        tensors[number] = TensorParts(2, 4, [BoxMemory(piece.box, np.ascontiguousarray(local))])
    return Holdings(tensors=tensors, check=check)


def serving(rank: int, timeout: float = 5.0, check: Callable[[int, Box], None] | None = None) -> PieceServer:
    mine = held(rank, check)

    def holdings(version: str) -> Holdings:
        if version != "v1":
            raise NotFoundError(f"there is no version {version}")
        return mine

    return PieceServer(holdings, SECRET, timeout)


def holder_of(server: PieceServer, rank: int) -> Holder:
    return Holder(rank=rank, addresses=tuple(server.addresses), network=server.network)


@pytest.fixture
def servers() -> Iterator[list[PieceServer]]:
    started = [serving(rank) for rank in range(4)]
    yield started
    for server in started:
        server.close()


def plan_of(*boxes: Box) -> TransferPlan:
    wants = [want(f"t{i}", i, 4, SOURCE, SHAPE, boxes or (Box((5, 3), (80, 30)),)) for i in range(3)]
    return plan_transfers(wants, rank=RECEIVER, piece=PIECE)


class Filled:
    """Global arrays that pieces are placed into; −1 where nothing came."""

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        self.arrays = [np.full(SHAPE, -1, dtype=np.int32) for _ in ARRAYS]

    def place(self, share: Share, piece: int, view: memoryview) -> None:
        for place, request, start, stop in piece_boxes(share, piece):
            box = share.requests.box(request, 2)
            self.arrays[place][box.slices] = np.frombuffer(view[start:stop], np.int32).reshape(box.shape)

    def check(self) -> None:
        for array, got, wanted in zip(ARRAYS, self.arrays, self.plan.wants, strict=True):
            expected = np.full(SHAPE, -1, dtype=np.int32)
            for box in wanted.boxes:
                expected[box.slices] = array[box.slices]
            np.testing.assert_array_equal(got, expected)


def pull(plan: TransferPlan, holders: dict[int, Holder], filled: Filled, **options: Any) -> Pulled:
    kwargs: dict[str, Any] = {"version": "v1", "rank": RECEIVER, "secret": SECRET, "timeout": 5.0, **options}
    return PiecePull(**kwargs).run(plan, holders, filled.place)


@pytest.mark.parametrize("shared", [True, False])
def test_boxes_of_four_holders_come_bit_for_bit(servers: list[PieceServer], shared: bool) -> None:
    plan = plan_of()
    filled = Filled(plan)
    pulled = pull(plan, {r: holder_of(s, r) for r, s in enumerate(servers)}, filled, shared=shared)
    filled.check()
    assert not pulled.lost and sum(pulled.received.values()) == plan.needed
    assert {r: s.bytes_sent for r, s in enumerate(servers)} == pulled.received
    assert all(len(share.requests.pieces) > 2 for share in plan.shares.values())


def test_a_list_is_sent_once(servers: list[PieceServer]) -> None:
    plan = plan_of()
    holder = holder_of(servers[0], 0)
    share = plan.shares[0]
    filled = Filled(plan)
    client = PieceClient(holder, SECRET, 5.0)
    sent: list[int] = []
    send = client._channel.send
    client._channel.send = lambda *views: (sent.append(sum(map(len, views))), send(*views))[1]  # type: ignore[method-assign]
    for _ in range(2):
        client.pull("v1", share.requests, lambda piece, view: filled.place(share, piece, view))
    client.close()
    assert sum(sent) == 2 * (23 + len("v1")) + 8 + len(share.requests.packed), "the second time only its digest goes"


@pytest.mark.parametrize("shared", [True, False])
def test_no_piece_waits_for_anything_but_the_one_before(servers: list[PieceServer], shared: bool) -> None:
    """Neither for a slice of a wait, nor for an acknowledgement that the kernel holds back: 200 pieces take a fraction of a second."""
    wanted = [want("t0", 0, 4, SOURCE, SHAPE, (Box((0, 0), (48, 40)),))]
    share = plan_transfers(wanted, rank=RECEIVER, near=frozenset({0}), piece=32).shares[0]
    assert len(share.requests.pieces) == 240

    def seconds() -> float:
        client = PieceClient(holder_of(servers[0], 0), SECRET, 5.0, shared=shared)
        began = time.monotonic()
        client.pull("v1", share.requests, lambda piece, view: None)
        client.close()
        return time.monotonic() - began

    assert any(seconds() < 5 for _ in range(3)), "a stall of 40 ms for each would take 10 s"


def test_a_version_that_is_gone_is_named_and_the_connection_lives(servers: list[PieceServer]) -> None:
    holder, share = holder_of(servers[0], 0), plan_of().shares[0]
    client = PieceClient(holder, SECRET, 5.0)
    with pytest.raises(NotFoundError, match=r"rank 0 .*there is no version v0"):
        client.pull("v0", share.requests, lambda piece, view: None)
    came: list[int] = []
    client.pull("v1", share.requests, lambda piece, view: came.append(piece))
    client.close()
    assert came == list(range(len(share.requests.pieces)))


def test_a_version_that_is_not_sealed_in_time_is_said() -> None:
    def unsealed(version: str) -> Holdings:
        raise not_sealed(version, 10.0)

    server = PieceServer(unsealed, SECRET, 5.0)
    client = PieceClient(holder_of(server, 0), SECRET, 5.0)
    try:
        with pytest.raises(DeadlineError, match="rank 0 .*has not sealed version v1 within 10 s"):
            client.pull("v1", plan_of().shares[0].requests, lambda piece, view: None)
    finally:
        client.close()
        server.close()


def test_who_sends_a_byte_now_and_then_is_dropped(servers: list[PieceServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.net.connections.GREETING_SECONDS", 1.0)
    with socket.create_connection(_near(servers[0])) as sock:
        sock.settimeout(0.3)
        end = time.monotonic() + 60
        with suppress(ConnectionError):
            while time.monotonic() < end:
                sock.sendall(b"c")
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert time.monotonic() < end


def test_another_secret_is_refused_at_once_on_both_sides(servers: list[PieceServer]) -> None:
    began = time.monotonic()
    with pytest.raises(AccessError, match="another secret"):
        PieceClient(holder_of(servers[0], 0), b"wrong", 60.0)
    assert time.monotonic() - began < 30
    with socket.create_connection(_near(servers[0])) as sock:
        sock.settimeout(5)
        sock.sendall(b"ckl1" + (1).to_bytes(2, "little") + bytes(32))
        assert len(sock.recv(1 << 10)) == 70
        sock.sendall(bytes(48))
        assert sock.recv(1) == b"x" and sock.recv(1) == b""


def _near(server: PieceServer) -> tuple[str, int]:
    return next(a for a in server.addresses if a[0].startswith("127."))


def test_the_secret_never_goes_over_the_wire(servers: list[PieceServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:
        heard: list[bytes] = []
        thread = threading.Thread(target=lambda: heard.append(_hear(fake)))
        thread.start()
        with pytest.raises((RankFailedError, ConnectionError, AccessError)):
            PieceClient(Holder(rank=0, addresses=(fake.getsockname(),), network=""), SECRET, 2.0)
        thread.join()
    assert heard and SECRET not in heard[0]


def _hear(fake: socket.socket) -> bytes:
    sock, _ = fake.accept()
    with sock:
        data = sock.recv(100)
        sock.sendall(b"ckl1" + (1).to_bytes(2, "little") + bytes(64))
        return data + sock.recv(100)


def _answer_as_ssh(fake: socket.socket) -> None:
    sock, _ = fake.accept()
    with sock:
        sock.sendall(b"SSH-2.0-OpenSSH_9.6 " * 5)
        sock.recv(100)


def test_something_else_at_the_address_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:
        thread = threading.Thread(target=_answer_as_ssh, args=(fake,))
        thread.start()
        with pytest.raises(FormatError, match="something else answers"):
            PieceClient(Holder(rank=0, addresses=(fake.getsockname(),), network=""), SECRET, 2.0)
        thread.join()


def test_another_protocol_is_said(servers: list[PieceServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.net.wire._check_protocol", lambda *a: None)  # of the server, which is in this process too
    with socket.create_connection(_near(servers[0])) as sock:
        sock.settimeout(5)
        sock.sendall(b"ckl1" + (7).to_bytes(2, "little") + bytes(32))
        assert sock.recv(70)[4:6] == (1).to_bytes(2, "little"), "the server says which protocol it speaks"


def test_rubbish_does_not_end_the_server(servers: list[PieceServer]) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"ckl1" + os.urandom(36) + os.urandom(500)):
        with socket.create_connection(_near(servers[0])) as sock:
            sock.sendall(data)
    authenticated = dial(servers[0].addresses, SECRET, 5.0, peer="the server", purpose=PURPOSE)
    authenticated.send((9).to_bytes(2, "little"), b"elsewhere", b"n", os.urandom(23))
    authenticated.close()
    plan = plan_of()
    filled = Filled(plan)
    pull(plan, {r: holder_of(s, r) for r, s in enumerate(servers)}, filled)
    filled.check()


@pytest.mark.parametrize("shared", [True, False])
def test_a_flipped_byte_is_never_placed(servers: list[PieceServer], monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """On the way, in the slot or the stream: between the digest of the sender and the look of the receiver."""
    plan = plan_of()
    flips = iter([3])

    def damage(share: int, view: memoryview) -> None:
        if next(flips, None) is not None:
            view[7] ^= 1

    check = PieceClient._check
    monkeypatch.setattr(PieceClient, "_check", lambda self, view, digest: (damage(0, view), check(self, view, digest))[1])
    filled = Filled(plan)
    pulled = pull(plan, {r: holder_of(s, r) for r, s in enumerate(servers)}, filled, shared=shared)
    filled.check()
    (lost,) = pulled.lost.values()
    assert isinstance(lost, ExchangeError) and "damaged on the way" in lost.message


def test_damage_at_the_only_holder_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(number: int, box: Box) -> None:
        raise CorruptError(f"block of tensor {number} is not what was published")

    server = serving(0, check=check)
    plan = plan_transfers([want("t0", 0, 4, SOURCE, SHAPE, (Box((0, 0), (4, 4)),))], rank=RECEIVER, near=frozenset({0}), piece=PIECE)
    client = PieceClient(holder_of(server, 0), SECRET, 5.0)
    with pytest.raises(CorruptError, match=r"rank 0 .*block of tensor 0 is not what was published"):
        client.pull("v1", plan.shares[0].requests, lambda piece, view: pytest.fail("placed"))
    client.close()
    server.close()


def test_a_receiver_that_wants_too_much_is_told(servers: list[PieceServer]) -> None:
    shape = (200, 40)
    plan = plan_transfers([want("t0", 0, 4, SOURCE, shape, (Box((0, 0), (99, 40)),))], rank=RECEIVER, near=frozenset({0}), piece=PIECE)
    client = PieceClient(holder_of(servers[0], 0), SECRET, 5.0)
    with pytest.raises(NotFoundError, match="elements of .* of tensor number 0"):
        client.pull("v1", plan.shares[0].requests, lambda piece, view: None)
    client.close()


# ---- processes that die or hang


def _serve(pipe: Connection, rank: int) -> None:
    server = serving(rank)
    pipe.send(holder_of(server, rank))
    pipe.recv()


def _take(pipe: Connection, holder: Holder, pause: int) -> None:
    """A receiver that hangs after so many pieces."""
    share = plan_of().shares[holder.rank]
    client = PieceClient(holder, SECRET, 30.0)

    def place(piece: int, view: memoryview) -> None:
        if piece == pause:
            pipe.send("hangs")
            pipe.recv()

    client.pull("v1", share.requests, place)


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    context, processes = get_context("fork"), []

    def start(function: Callable[..., None], *args: object) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *args), daemon=True)
        process.start()
        processes.append(process)
        return process, ours

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("shared", [True, False])
def test_a_holder_that_dies_is_replaced_in_the_same_call(started: Any, shared: bool) -> None:
    processes = {rank: started(_serve, rank) for rank in range(4)}
    holders = {rank: pipe.recv() for rank, (_, pipe) in processes.items()}
    plan = plan_of()
    filled = Filled(plan)
    pieces = 0

    def place(share: Share, piece: int, view: memoryview) -> None:
        nonlocal pieces
        pieces += 1
        filled.place(share, piece, view)
        if pieces == 3:
            processes[1][0].kill()
            processes[1][0].join()

    how = PiecePull(version="v1", rank=RECEIVER, secret=SECRET, timeout=5.0, threads=1, shared=shared)
    pulled = how.run(plan, holders, place)
    filled.check()
    assert list(pulled.lost) == [1] and 1 in pulled.lost[1].ranks  # type: ignore[attr-defined]


def test_without_another_holder_the_error_names_who_died(started: Any) -> None:
    process, pipe = started(_serve, 0)
    holders = {0: pipe.recv()}
    plan = plan_transfers([want("t0", 0, 4, TensorLayout(Mesh.flat([0]), ()), SHAPE, (Box((0, 0), (48, 40)),))], rank=RECEIVER, piece=PIECE)
    began = 0.0

    def place(share: Share, piece: int, view: memoryview) -> None:
        nonlocal began
        if piece == 2:
            process.kill()
            process.join()
            began = time.monotonic()

    with pytest.raises(RankFailedError, match=r"rank 0 \(.*is gone.*only rank 0 had .*of tensor t0") as caught:
        PiecePull(version="v1", rank=9, secret=SECRET, timeout=60.0).run(plan, holders, place)
    assert caught.value.ranks == (0,) and time.monotonic() - began < 30


def test_a_holder_that_hangs_is_named_at_the_deadline(started: Any) -> None:
    process, pipe = started(_serve, 0)
    holder = pipe.recv()
    share = plan_of().shares[0]
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 0 .*sends nothing for 1 s") as caught:
        PieceClient(holder, SECRET, 1.0).pull("v1", share.requests, lambda piece, view: None)
    assert caught.value.ranks == (0,) and time.monotonic() - began < 20


def test_a_receiver_that_hangs_or_dies_leaves_the_others_theirs(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped at the deadline, and its slots are there for others again."""
    monkeypatch.setattr(live_server, "SLOTS", 6)
    server = serving(0, timeout=3.0)
    holder = holder_of(server, 0)
    stuck = [started(_take, holder, 1) for _ in range(2)]
    for _, pipe in stuck:
        assert pipe.recv() == "hangs"
    stuck[1][0].kill()
    share, came = plan_of().shares[0], []
    client = PieceClient(holder, SECRET, 5.0)
    client.pull("v1", share.requests, lambda piece, view: came.append(piece))
    assert len(came) == len(share.requests.pieces)
    end = time.monotonic() + 30
    while len(server._connections) > 1 or any(server._pool._holds):
        assert time.monotonic() < end, "who hangs is never dropped"
        time.sleep(0.05)
    client.close()
    server.close()


def test_a_receiver_that_wakes_up_too_late_places_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot may have other bytes by then: what it was copying does not count."""
    server = serving(0, timeout=2.0)
    share, placed = plan_of().shares[0], []

    def place(piece: int, view: memoryview) -> None:
        end = time.monotonic() + 30
        while piece == 1 and server._connections and time.monotonic() < end:
            time.sleep(0.05)
        placed.append(piece)

    client = PieceClient(holder_of(server, 0), SECRET, 5.0)
    with pytest.raises(RankFailedError, match="taken for dead"):
        client.pull("v1", share.requests, place)
    assert placed == [0, 1]
    client.close()
    server.close()


def test_an_error_of_the_caller_ends_all_threads(servers: list[PieceServer]) -> None:
    plan = plan_of()

    def alive() -> None:
        raise CkptError("this rank stops")

    def place(share: Share, piece: int, view: memoryview) -> None:
        time.sleep(0.05)

    before = threading.active_count()
    how = PiecePull(version="v1", rank=9, secret=SECRET, timeout=5.0, alive=alive)
    with pytest.raises(CkptError, match="this rank stops"):
        how.run(plan, {r: holder_of(s, r) for r, s in enumerate(servers)}, place)
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt-pull")] and threading.active_count() <= before + 4
