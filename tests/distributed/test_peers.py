"""Bytes between ranks: every byte arrives whatever the sizes, beside training's own collectives, and a rank that dies or hangs is named."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ckpt.net.exchange
from ckpt.errors import CkptError
from ckpt.net.connections import Listener
from ckpt.net.group import Group, current_group
from ckpt.net.peers import Peers, peers_of
from ckpt.net.streams import Views
from tests.distributed.ranks import Lost, Ranks

SIZES = (0, 1, 7, 4096, 100_000, 3_000_000)


def sizes_between(source: int, target: int, seed: int) -> list[int]:
    """Sizes of the views that one rank sends another; both compute it."""
    random = np.random.default_rng([seed, source, target])
    return [int(random.choice(SIZES)) for _ in range(random.integers(0, 5))]


def bytes_between(source: int, target: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng([seed, source, target, 1])
    return [random.integers(0, 256, n, dtype=np.uint8) for n in sizes_between(source, target, seed)]


def everything(peers: Peers, ranks: tuple[int, ...], seed: int) -> bool:
    """Exchange with every rank of the group, this one too; whether all came that should."""
    me = dist.get_rank()
    outgoing = {r: [a.data for a in bytes_between(me, r, seed)] for r in ranks}
    rooms = {r: [np.zeros(n, dtype=np.uint8) for n in sizes_between(r, me, seed)] for r in ranks}
    peers.exchange(outgoing, {r: [a.data for a in arrays] for r, arrays in rooms.items()})
    return all(np.array_equal(a, b) for r in ranks for a, b in zip(rooms[r], bytes_between(r, me, seed), strict=True))


def told(peers: Peers, outgoing: dict[int, int], incoming: dict[int, int]) -> tuple[str, str, float]:
    """Exchange so many bytes; the error's class and text, and after how many seconds it came."""
    began = time.monotonic()
    try:
        peers.exchange(*({r: [memoryview(bytearray(n))] for r, n in table.items()} for table in (outgoing, incoming)))
    except CkptError as err:
        return type(err).__name__, str(err), time.monotonic() - began
    return "", "", time.monotonic() - began


# ------------------------------------------------------------------------------------------------------------- all arrives


def all_to_all(exchanges: int) -> list[bool]:
    group = current_group()
    peers = peers_of(group)
    return [everything(peers, group.ranks, seed) for seed in range(exchanges)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_byte_arrives(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, all_to_all, 3) == [[True] * 3] * world


def few_at_a_time() -> list[bool]:
    ckpt.net.exchange.CONNECTIONS = 2
    return all_to_all(2)


def test_more_ranks_than_connections(ranks: Ranks) -> None:
    assert ranks.run(6, few_at_a_time) == [[True] * 2] * 6


def without_a_group() -> bytes:
    room = bytearray(5)
    peers_of(Group(0, (0,))).exchange({0: [memoryview(b"ab"), memoryview(b"cde")]}, {0: [memoryview(room)]})
    return bytes(room)


def test_one_process_copies(ranks: Ranks) -> None:
    assert ranks.run(1, without_a_group, process_group=False) == [b"abcde"]


def ring_of_ahead() -> list[int]:
    """Rank 0 sends three exchanges at once to rank 1, which is slow and takes part in others before."""
    peers = peers_of(current_group())
    me, found = dist.get_rank(), []
    for n in range(1, 4):
        room = bytearray(n)
        if me == 1:
            time.sleep(0.3)
        sends = {(me + 1) % 3: [memoryview(bytes([n]) * n)]} if (me, n) != (2, 2) else {}
        receives = {(me - 1) % 3: [memoryview(room)]} if (me, n) != (0, 2) else {}
        peers.exchange(sends, receives)
        found.append(sum(room))
    return found


def test_ranks_may_be_ahead_of_others(ranks: Ranks) -> None:
    assert ranks.run(3, ring_of_ahead) == [[1, 0, 9], [1, 4, 9], [1, 4, 9]]


def on_typed_memory() -> list[float]:
    me = dist.get_rank()
    source = torch.arange(6, dtype=torch.float32).reshape(2, 3) + me
    room = torch.zeros(2, 3)
    peers_of(current_group()).exchange({1 - me: [source.numpy().data]}, {1 - me: [room.numpy().data]})
    return room.flatten().tolist()


def test_memory_of_any_dtype_and_shape(ranks: Ranks) -> None:
    assert ranks.run(2, on_typed_memory) == [[1.0, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5]]


def in_a_subset() -> list[bool]:
    """Ranks 0 and 3, and ranks 1 and 2, at the same time; then all."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    groups = [current_group(halves[rank in (1, 2)]), current_group()]
    found = []
    for group in (*groups, groups[0]):
        found += [everything(peers_of(group), group.ranks, seed) for seed in range(2)]
    return found


def test_groups_of_some_ranks(ranks: Ranks) -> None:
    assert ranks.run(4, in_a_subset) == [[True] * 6] * 4


def beside_training() -> tuple[bool, float, int]:
    """Exchanges in the background while this thread reduces on the default group."""
    group = current_group()
    peers, found, beats = peers_of(group), [], [0]
    room, me = bytearray(150_000_000), dist.get_rank()

    def alive() -> None:
        beats[0] += 1

    def work() -> None:
        found.extend(everything(peers, group.ranks, seed) for seed in range(5))
        peers.exchange({1 - me: [memoryview(bytes(len(room)))]}, {1 - me: [memoryview(room)]}, alive=alive)

    thread = threading.Thread(target=work)
    thread.start()
    value, rounds = torch.ones(1000), 0
    more = torch.ones(1)
    while more.item():
        dist.all_reduce(value)
        value /= 2
        rounds += 1
        more = torch.tensor([float(thread.is_alive())])
        dist.all_reduce(more)
    thread.join()
    return all(found) and len(found) == 5, float(value.mean()), beats[0]


def test_training_goes_on_meanwhile(ranks: Ranks) -> None:
    for arrived, mean, beats in ranks.run(2, beside_training):
        assert arrived
        assert mean == 1.0
        assert beats > 0


# ----------------------------------------------------------------------------------------------------------- what fails


def one_dies(how: str) -> tuple[str, str, float]:
    """Rank 1 dies or stops before an exchange, or when it has half of what comes from some rank. All others send to it."""
    me, peers = dist.get_rank(), peers_of(current_group(), timeout=2.0 if how.startswith("stopped") else 40.0)
    dist.barrier()
    if me == 1:
        end, receive = signal.SIGKILL if how.startswith("killed") else signal.SIGSTOP, Views.receive
        if how.endswith("before"):
            os.kill(os.getpid(), end)

        def receive_half(views: Views, sock: socket.socket) -> bool:
            done = receive(views, sock)
            if views.nbytes < 50_000_000:
                os.kill(os.getpid(), end)
            return done

        Views.receive = receive_half  # type: ignore[method-assign]
        return told(peers, {}, {0: 100_000_000, 2: 100_000_000})
    return told(peers, {1: 100_000_000}, {})


@pytest.mark.alone
@pytest.mark.parametrize("how", ["killed", "killed before", "stopped", "stopped before"])
def test_a_rank_that_dies_or_hangs_is_named(ranks: Ranks, how: str) -> None:
    first, lost, third = ranks.run(3, one_dies, how, allow_death=True, await_stopped=False)
    assert isinstance(lost, Lost)
    assert "DeadlineError" in (first[0], third[0])
    for kind, text, seconds in (first, third):
        assert kind in ("DeadlineError", "RankFailedError")  # who finds it later may hear of it before
        assert "rank 1" in text
        assert seconds < 20


def error_spreads() -> tuple[list[tuple[str, str]], bool]:
    """Rank 0 fails; rank 1 exchanges with both it and rank 2. Then all make a new call."""
    group = current_group()
    group.call("test", "x", 10.0)
    peers, me = peers_of(group, timeout=10.0), dist.get_rank()
    assert peers_of(group) is peers
    found = []
    if me == 0:

        def fail() -> None:
            raise OSError("the disk is on fire")

        try:
            peers.exchange({1: [memoryview(bytearray(10))]}, {1: [memoryview(bytearray(10))]}, alive=fail)
        except OSError as err:
            found.append((type(err).__name__, str(err)))
    else:
        time.sleep(0.5)
        found.append(told(peers, {r: 10 for r in range(3) if abs(r - me) == 1}, {r: 10 for r in range(3) if abs(r - me) == 1})[:2])
    found.append(told(peers, {}, {})[:2])
    group.call("test", "y", 10.0)
    return found, everything(peers_of(group), group.ranks, 3)


def test_an_error_is_told_to_the_ranks_that_wait(ranks: Ranks) -> None:
    found = ranks.run(3, error_spreads)
    assert [again for _, again in found] == [True] * 3
    first, second, third = (errors for errors, _ in found)
    assert first[0] == ("OSError", "the disk is on fire")
    assert second[0][0] == "RankFailedError"
    assert "rank 0" in second[0][1]
    assert "the disk is on fire" in second[0][1]
    assert third[0] == ("", "") or (third[0][0] == "RankFailedError" and "rank 0" in third[0][1])
    for errors in (first, second):
        assert errors[1][0] == "GroupError"
        assert "an earlier exchange failed" in errors[1][1]
        assert "new connections" in errors[1][1]


def disagree(here: int, there: int) -> tuple[str, str]:
    me, peers = dist.get_rank(), peers_of(current_group(), timeout=5.0)
    return told(peers, {1: here}, {})[:2] if me == 0 else told(peers, {}, {0: there})[:2]


@pytest.mark.alone
def test_ranks_that_disagree_about_sizes(ranks: Ranks) -> None:
    (first, told_first), (second, told_second) = ranks.run(2, disagree, 100, 90)
    assert first == second == "ConsistencyError"
    assert "108 bytes for rank 1" in told_first  # with the digest
    assert "108 bytes for rank 1, which expects 98" in told_second


def misuse() -> list[str]:
    peers = peers_of(current_group())
    if dist.get_rank() == 1:  # which never comes to an exchange
        return []
    found = [told(peers, {7: 1}, {})[1]]

    def inside() -> None:
        found.append(told(peers, {}, {})[1])
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        peers.exchange({1: [memoryview(b"x")]}, {}, alive=inside)
    peers = peers_of(Group(0, (0,)))
    peers.close()
    peers.close()
    return [*found, told(peers, {}, {})[1]]


def test_misuse_is_told(ranks: Ranks) -> None:
    strange, twice, closed = ranks.run(2, misuse)[0]
    assert "rank 7 is not in the group" in strange
    assert "in progress already" in twice
    assert "connections are closed" in closed


def strangers() -> tuple[bool, str]:
    """Connections that are not from a rank do not disturb an exchange, and what they say is not read on."""
    group = current_group()
    peers, me = peers_of(group, timeout=10.0), dist.get_rank()
    assert peers._port.listener is not None
    _, port = peers._port.listener.addresses[0]
    silent = socket.create_connection(("127.0.0.1", port))
    loud = socket.create_connection(("127.0.0.1", port))
    loud.sendall(b"GET / HTTP/1.1\r\n" + bytes(200))
    gone = socket.create_connection(("127.0.0.1", port))
    gone.close()
    found = everything(peers, group.ranks, 1)
    peers.exchange({1 - me: [memoryview(b"x")]}, {1 - me: [memoryview(bytearray(1))]})
    loud.settimeout(5)
    try:
        answer = repr(loud.recv(10))
    except ConnectionResetError:
        answer = "b''"
    silent.close()
    loud.close()
    return found, answer


@pytest.mark.alone
def test_strangers_are_turned_away(ranks: Ranks) -> None:
    assert ranks.run(2, strangers) == [(True, "b''")] * 2


def wrong_addresses() -> bool:
    """The first addresses of every rank lead nowhere, or to another rank."""
    other = socket.create_server(("127.0.0.1", 0))  # which never says anything

    class Misled(Listener):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.addresses = [("127.0.0.2", 1), ("::1", 1), other.getsockname(), *self.addresses]

    ckpt.net.peers.Listener = Misled  # type: ignore[attr-defined,misc]
    group = current_group()
    return everything(peers_of(group, timeout=20.0), group.ranks, 1)


def test_the_next_address_is_tried(ranks: Ranks) -> None:
    assert ranks.run(2, wrong_addresses) == [True] * 2


def store_dies() -> tuple[str, str, float]:
    peers = peers_of(current_group(), timeout=5.0)
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(3)
    time.sleep(1)
    return told(peers, {0: 100}, {})


@pytest.mark.alone
def test_a_store_that_is_gone_is_named(ranks: Ranks) -> None:
    _, found = ranks.run(2, store_dies, store_on_rank0=True, allow_death=True, timeout=20.0)
    assert found[0] == "DeadlineError"
    assert "the job's store is gone" in found[1]
    assert found[2] < 10


# ---------------------------------------------------------------------------------------------------------- what is left


def forgotten() -> tuple[int, int]:
    """Groups that are over leave no connections, and calls that are over leave nothing in the store."""
    used = []
    for _ in range(3):
        pg = dist.new_group([0, 1])
        group = current_group(pg)
        assert everything(peers_of(group), group.ranks, 1)
        used += [weakref.ref(group), weakref.ref(peers_of(group))]
        dist.barrier()
        dist.destroy_process_group(pg)
        del pg, group
    gc.collect()
    group = current_group()
    peers_of(group)  # its connection to the store is there
    open_before = len(os.listdir("/proc/self/fd"))
    for n in range(5):
        call = group.call("test", f"{n}", 10.0)
        peers_of(group)
        call.map_reduce("a", dict, lambda rows: None)
    return sum(r() is not None for r in used), len(os.listdir("/proc/self/fd")) - open_before


def test_nothing_is_left_of_groups_and_calls_that_are_over(ranks: Ranks) -> None:
    for alive, opened in ranks.run(2, forgotten):
        assert alive == 0
        assert opened <= 0
