"""The protocol of a call between many ranks, which are threads here, each with a connection of its own to a real store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, TCPStore

from ckpt.errors import ConsistencyError, DeadlineError, RankFailedError
from ckpt.net import channel
from ckpt.net.call import asked_of, whom_to_ask
from ckpt.net.channel import FEW, TEAM, ControlChannel, longest_pause
from ckpt.net.group import Due, Group, StepAgreement, current_group
from ckpt.net.store import MOST, PUT_OFF, Connection, KeyValues, Store, group_store
from tests.distributed.ranks import Ranks, at_once

Play = Callable[[Group], Any]


def play(ranks: Sequence[int], base: Any, work: Play) -> list[Any]:
    """What ``work`` gives on each rank, or raises."""
    groups = [Group(rank, tuple(ranks), group_store(base, "played", rank)) for rank in ranks]

    def one(group: Group) -> Any:
        try:
            return work(group)
        except Exception as err:  # noqa: BLE001  what the test looks at
            return err

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(one, groups))


class Counting:
    """A store that counts by method and key."""

    def __init__(self, inner: Any) -> None:
        self.underlying_store = inner
        self.asked: Counter[tuple[str, str]] = Counter()

    def has_extended_api(self) -> bool:
        return bool(self.underlying_store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.underlying_store, name)

        def counted(first: Any, *arguments: Any) -> Any:
            self.asked[name, first if isinstance(first, str) else "several"] += 1
            return method(first, *arguments)

        return counted


def store_over(inner: Any) -> Store:
    return Store(Connection(lambda sockets: KeyValues(inner), "here", None), timeout=20.0)


SIZES = [3, FEW + 4, TEAM + 6]


# --------------------------------------------------------------------------------------------------------- rows and words


@pytest.mark.parametrize("size", SIZES)
def test_the_leader_has_the_rows_of_all_ranks_in_their_order(size: int) -> None:
    """Ranks of a group that is a part of the job; some rows are equal, one is longer than a store takes at once."""
    ranks = range(5, 5 + 2 * size, 2)
    large = "x" * (2 * MOST + 5)

    def work(group: Group) -> Any:
        call = group.call("test", "u", 20.0)
        sums = []
        for turn in range(3):
            row = {"rank": group.rank, "large": large if group.rank == 7 else ""} if turn else {"same": 1}
            sums.append(
                call.map_reduce(
                    "x", lambda row=row: row, lambda rows: [[r, row.get("rank"), len(row.get("large", ""))] for r, row in rows.items()]
                )
            )
        call.drain()
        return sums

    found = play(ranks, HashStore(), work)
    plain = [[r, None, 0] for r in ranks]
    assert found == [[plain, *[[[r, r, len(large) if r == 7 else 0] for r in ranks]] * 2]] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_raises_is_named_on_all_others(size: int) -> None:
    def work(group: Group) -> None:
        def fail() -> Any:
            if group.rank == size - 2:
                raise ValueError("my own defect")
            return {}

        group.call("test", "u", 120.0).map_reduce("x", fail, lambda rows: None)

    began = time.monotonic()
    found = play(range(size), HashStore(), work)
    assert time.monotonic() - began < 60
    for rank, error in enumerate(found):
        assert isinstance(error, ValueError if rank == size - 2 else RankFailedError), error
        assert rank == size - 2 or f"rank {size - 2} raised ValueError: my own defect" in str(error)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_an_error_after_the_decision_ends_the_next_phase_of_all_others(size: int, who: int) -> None:
    """At once: nobody waits for the deadline."""

    def work(group: Group) -> None:
        call = group.call("test", "u", 120.0)
        with call.phase("begin"):
            id = call.lead({}, lambda rows: "id") if call.is_leader else call.follow({})
            assert id == "id"
            if group.rank == who:
                raise ValueError("no memory for it")
        call.map_reduce("write", dict, lambda rows: None)

    began = time.monotonic()
    outcomes = play(range(size), HashStore(), work)
    assert time.monotonic() - began < 60
    for rank, error in enumerate(outcomes):
        assert isinstance(error, ValueError if rank == who else RankFailedError), error
        assert rank == who or f"rank {who} raised ValueError: no memory for it" in str(error)


@pytest.mark.parametrize("public", [lambda decision: 1 / 0, lambda decision: {1, 2}])
def test_a_decision_that_cannot_be_told_is_an_error_of_all(public: Callable[[Any], Any]) -> None:
    def work(group: Group) -> None:
        call = group.call("test", "u", 120.0)
        with call.phase("begin"):
            if call.is_leader:
                call.lead({}, lambda rows: rows, public)
            else:
                call.follow({})

    began = time.monotonic()
    first, *others = play(range(3), HashStore(), work)
    assert time.monotonic() - began < 60 and isinstance(first, ZeroDivisionError | TypeError)
    assert all(isinstance(error, RankFailedError) and type(first).__name__ in str(error) for error in others)


@pytest.mark.alone
def test_only_the_rank_that_is_silent_is_named() -> None:
    """Its neighbours are late too, and give signs of life."""

    def work(group: Group) -> None:
        call = group.call("test", "u", 1.5)
        if group.rank == 2:
            return

        def late() -> Any:
            end = time.monotonic() + (2.5 if group.rank == 1 else 0)
            while time.monotonic() < end:
                time.sleep(0.05)
                call.heartbeat()
            return {}

        call.map_reduce("x", late, lambda rows: None)

    def check(size: int) -> None:
        found = play(range(size), HashStore(), work)
        for error in [*found[:2], *found[3:]]:
            assert isinstance(error, DeadlineError) and "nothing was heard of rank 2 for 1.5 s" in str(error), error

    at_once(check, [(size,) for size in SIZES])


@pytest.mark.parametrize("size", SIZES)
def test_different_calls_are_found(size: int) -> None:
    def work(group: Group) -> None:
        group.call("save" if group.rank == 1 else "load", "u", 20.0).map_reduce("x", dict, lambda rows: None)

    for error in play(range(size), HashStore(), work):
        assert isinstance(error, ConsistencyError) and "rank 1 calls save('u') while rank 0 calls load('u')" in str(error)


def test_a_look_finds_what_ended_the_call_elsewhere() -> None:
    def work(group: Group) -> None:
        call = group.call("test", "u", 20.0)

        def wait_or_fail() -> Any:
            if group.rank == 2:
                raise OSError("the disk is on fire")
            while True:
                call.check_failures()
                time.sleep(0.05)

        call.map_reduce("x", wait_or_fail, lambda rows: None)

    found = play(range(3), HashStore(), work)
    assert isinstance(found[1], RankFailedError) and "rank 2 failed: the disk is on fire" in str(found[1])


# ------------------------------------------------------------------------------------------- bytes that the leader asks for


@pytest.mark.parametrize("size", SIZES)
def test_the_leader_asks_for_what_it_does_not_know_once(size: int) -> None:
    """Something of each rank alone, something that half of them have, and something that all have; the second phase wants more."""
    inner = HashStore()
    counting: list[Counting] = []

    def work(group: Group) -> Any:
        counting.append(Counting(inner))
        group.store = store_over(counting[-1])
        call = group.call("test", "u", 20.0)
        blobs = [f"rank {group.rank}".encode(), b"half %d" % (2 * group.rank // size), b"all"]

        def decide(keys: tuple[str, ...], rows: dict[int, Any]) -> Any:
            call.fetch_all(row[key] for row in rows.values() for key in keys)
            return [[call.fetch(row[key]).decode() for key in keys] for row in rows.values()]

        row = dict(zip(("own", "half", "all"), map(call.share, blobs), strict=True))
        first = call.map_reduce("x", lambda: row, lambda rows: decide(("half", "all"), rows))
        second = call.map_reduce("y", lambda: row, lambda rows: decide(("own",), rows))
        call.drain()
        return first, second

    found = play(range(size), inner, work)
    assert found == [([[f"half {2 * r // size}", "all"] for r in range(size)], [[f"rank {r}"] for r in range(size)])] * size
    sent = [key for c in counting for (method, key), n in c.asked.items() for _ in range(n) if method == "set" and "/blob/" in key]
    assert len(sent) == len(set(sent)) == size, "one of the other half, and each rank's own but the leader's"


def test_a_leader_that_fetches_one_after_another_asks_twice() -> None:
    inner = HashStore()
    counting = Counting(inner)

    def work(group: Group) -> Any:
        group.store = store_over(counting if group.rank == 0 else inner)
        call = group.call("test", "u", 20.0)
        row = {"it": call.share(f"{group.rank}".encode())}
        return call.map_reduce("x", lambda: row, lambda rows: [call.fetch(row["it"]).decode() for row in rows.values()])

    assert play(range(12), inner, work) == [[f"{rank}" for rank in range(12)]] * 12
    assert [key for (method, key) in counting.asked if "/word/" in key] == ["1/1/word/0", "1/1/word/1", "1/1/word/2"]


def test_bytes_that_are_too_large_for_one_message_arrive() -> None:
    """A server on libuv refuses more than 8 MiB and closes the connection."""
    large = os.urandom(9 << 20)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(group: Group) -> Any:
        call = group.call("test", "u", 60.0)
        shared = call.share(large if group.rank else b"small")
        taken = call.map_reduce("x", lambda: {"it": shared}, lambda rows: call.leave(call.fetch(rows[1]["it"])))
        return call.fetch(taken) == large

    assert play(range(2), served, work) == [True, True]


@pytest.mark.alone
def test_a_rank_that_dies_with_what_it_offered_is_named() -> None:
    def work(group: Group) -> Any:
        call = group.call("test", "u", 1.5)
        if group.rank == 1:
            call.share(b"only here")
            message = {"kind": "test", "url": "u", "row": {"it": call.share(b"it")}, "offers": [call.share(b"it")]}
            call._own_channel.next_turn()
            call._own_channel.post(json.dumps(message).encode())
            return None
        return call.map_reduce("x", lambda: {"it": call.share(b"mine")}, lambda rows: call.fetch(rows[1]["it"]).decode())

    leader, _, other = play(range(3), HashStore(), work)
    for error in (leader, other):
        assert isinstance(error, DeadlineError) and "nothing was heard of rank 1" in str(error), error


def test_who_is_asked_is_said_in_few_words() -> None:
    offers = {p: ["all", f"half {p // 5000}", f"own {p}"] for p in range(10_000)}
    wanted = {f"own {p}": p for p in range(1, 10_000)} | {"half 1": 5000}
    asks = json.loads(json.dumps(whom_to_ask(wanted, offers)))
    assert len(json.dumps(asks)) < 100
    given = {p: asked_of(asks, p, offers[p]) for p in range(10_000)}
    assert given == {0: [], **{p: [f"own {p}"] for p in range(1, 10_000)}, 5000: ["half 1", "own 5000"]}


# --------------------------------------------------------------------------------------------------------- what it costs


def calls_of_a_leader(ranks: int) -> int:
    """Requests of a save of two phases, in which all others are there before the leader."""
    inner = HashStore()
    counting = Counting(inner)
    group = Group(0, tuple(range(ranks)), store_over(counting))
    others = store_over(inner)
    call = group.call("save", "u", 20.0)
    for rank in range(1, ranks):
        channel = ControlChannel(others, call.number, rank, ranks, lambda key: None)
        for turn in (1, 2):
            channel.turn = turn
            channel.post(json.dumps({"kind": "save", "url": "u", "row": {"rank": rank}, "offers": []}).encode())
            channel.confirm()
    for phase in ("begin", "write"):
        assert call.map_reduce(phase, lambda: {"rank": 0}, lambda rows: [row["rank"] for row in rows.values()]) == list(range(ranks))
    asked = sum(counting.asked.values())
    call.drain()
    return asked + 1


def test_the_leader_hears_from_teams_not_from_ranks() -> None:
    few, many = calls_of_a_leader(256), calls_of_a_leader(2048)
    assert few <= 3 * 256 / 8, "three for each machine of eight"
    assert many <= few + 2


def test_ranks_of_a_large_job_look_seldom() -> None:
    for size in (1024, 16_384, 100_000):
        assert size / longest_pause(size) <= channel.QUESTIONS
        notices = StepAgreement(Group(1, tuple(range(size)), None), store_over(HashStore()), 20.0)
        assert size / notices._pause * 20e-6 <= 0.05, "of one thread, at 20 µs a look"


def test_a_look_for_notices_is_one_request() -> None:
    counting = Counting(HashStore())
    for rank in (0, 1):
        notices = StepAgreement(Group(rank, (0, 1, 2), None), store_over(counting), 20.0)
        counting.asked.clear()
        (notices._follow if rank else notices._lead)()
        assert sum(counting.asked.values()) == 1, counting.asked


def steps_with_notices(size: int) -> list[tuple[list[int], float]]:
    """Ranks that train in lockstep: after which steps they saved when the leader proposed that, and the most seconds that each waited."""
    barrier = threading.Barrier(size)

    def work(group: Group) -> tuple[list[int], float]:
        assert group.store is not None
        notices = StepAgreement(group, group.store.part("own"), 20.0)
        saved, longest = [], 0.0
        notices.start()
        for n in range(1, 120):
            barrier.wait()
            time.sleep(0.02)
            if n == 10 and group.rank == 0:
                notices.propose(n, Due(reason="because"))
            began = time.monotonic()
            if notices.due(n) is not None:
                saved.append(n)
            longest = max(longest, time.monotonic() - began)
        notices.stop()
        return saved, longest

    return play(range(size), HashStore(), work)


@pytest.mark.alone
def test_where_looks_are_seldom_a_step_is_proposed_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.net.group.LOOKS", 3 / 1.2)
    found = steps_with_notices(3)
    saved, _ = found[0]
    assert len(saved) == 1 and saved[0] >= 10
    assert [s for s, _ in found] == [saved] * 3
    assert max(waited for _, waited in found) < 1.0, "without that the leader waits for the others' next look"


# ------------------------------------------------------------------------------------------------ the end of a call and of jobs


def hears_late() -> str:
    """Rank 1 looks seldom, as one of many does; rank 0 serves the store, decides just after a look, and ends at once."""
    channel.QUESTIONS = 2 / 1.5
    call = current_group().call("test", "u", 20.0)
    call.map_reduce("x", dict, lambda rows: time.sleep(1.2))
    call.drain(0.1)
    if dist.get_rank() == 0:
        os._exit(0)
    return "heard"


@pytest.mark.alone
def test_the_leader_waits_for_ranks_that_look_seldom(ranks: Ranks) -> None:
    """The store may end with it."""
    assert longest_pause(16_384) < 4
    assert ranks.run(2, hears_late, allow_death=True, store_on_rank0=True)[1] == "heard"


def test_nothing_is_left_in_the_store() -> None:
    inner = HashStore()
    base = inner.num_keys()
    held: list[Group] = []

    def work(group: Group) -> None:
        held.append(group)
        for _ in range(12):
            call = group.call("test", "u", 20.0)
            shared = call.share(f"{group.rank}".encode())
            call.map_reduce(
                "x", lambda shared=shared: {"it": shared}, lambda rows, call=call: [call.fetch(row["it"]).decode() for row in rows.values()]
            )
            call.drain()

    play(range(FEW + 4), inner, work)
    end = time.monotonic() + 10
    most = 3 * (FEW + 4)  # each rank's life, and what it left in the last two calls
    while inner.num_keys() - base > most and time.monotonic() < end:
        time.sleep(0.05)
    assert inner.num_keys() - base <= most


def test_what_is_put_off_is_done_also_while_the_connection_is_busy() -> None:
    inner = HashStore()
    store = store_over(inner)
    for n in range(PUT_OFF + 50):
        store.set(f"{n}", b"")
    store.delete_later(f"{n}" for n in range(PUT_OFF + 50))
    end = time.monotonic() + 10
    while inner.num_keys() > PUT_OFF and time.monotonic() < end:
        assert store.peek("none") is None
    assert inner.num_keys() <= PUT_OFF
    while inner.num_keys() and time.monotonic() < end:
        time.sleep(0.05)
    assert inner.num_keys() == 0


# --------------------------------------------------------------------------------------------------------- kinds of stores


class Plain:
    """A store that has only what every store has."""

    def __init__(self) -> None:
        self._inner = HashStore()
        for name in ("set", "get", "add", "check", "delete_key"):
            setattr(self, name, getattr(self._inner, name))

    def has_extended_api(self) -> bool:
        return False


@pytest.mark.parametrize("kind", ["file", "tcp", "tcp without libuv", "plain"])
def test_kinds_of_stores(tmp_path: Path, kind: str) -> None:
    served: Any = None
    if kind.startswith("tcp"):
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=kind == "tcp")
    inner = {"file": lambda: FileStore(str(tmp_path / "store"), 1), "plain": Plain}.get(kind, lambda: served)()

    def work(group: Group) -> Any:
        if kind == "plain":
            group.store = store_over(inner)
        call = group.call("test", "u", 30.0)
        shared = call.share(f"{group.rank}".encode())
        taken = call.map_reduce("x", lambda: {"it": shared}, lambda rows: [call.fetch(row["it"]).decode() for row in rows.values()])
        call.heartbeat()
        call.drain()
        return taken

    size = 3 if kind.endswith("libuv") else FEW + 2
    assert play(range(size), inner if kind != "plain" else HashStore(), work) == [[f"{r}" for r in range(size)]] * size
