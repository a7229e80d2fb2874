"""The same bytes for all ranks: handed on in a tree, right whatever happens to the ranks in the middle of it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

import ckpt
from ckpt import live
from ckpt.net import broadcast_tree
from ckpt.net.group import current_group
from tests.distributed.ranks import Lost, Ranks

BYTES = 3_000_000
"""More than a socket takes at once."""


def value(step: int) -> bytes:
    return bytes([step % 251]) * BYTES


def count_questions() -> list[tuple[int, str, int]]:
    """From now on: the ranks above that this one has asked, what for, and how many bytes came."""
    asked: list[tuple[int, str, int]] = []
    ask = broadcast_tree.BroadcastTree._ask

    def asking(self: Any, position: int, names: list[str], *args: Any) -> Any:
        here = {*self._values.all()}
        found = ask(self, position, names, *args)
        for name, value in found.items():
            asked.append((position, name, 0 if value.digest in here else len(value.data or b"")))
        return found

    broadcast_tree.BroadcastTree._ask = asking  # type: ignore[method-assign]
    return asked


def broadcasts(machines: list[int], values: list[int]) -> tuple[list[bool], int, list[tuple[int, str, int]]]:
    """Whether each value is right here, how often this rank loaded, and what it asked."""
    broadcast_tree.FAN = 2
    group, loads = current_group(), 0
    asked = count_questions()
    assert group.tree is not None
    group.tree.know_machines({"each": machines})
    right = []
    for step in values:
        call = group.call("test", "here", 20)

        def load(step: int = step) -> bytes:
            nonlocal loads
            loads += 1
            return value(step)

        with call.phase("hand on"):
            right.append(call.broadcast("value", load) == value(step))
            _ = call.lead({}, lambda rows: None) if call.is_leader else call.follow({})
        call.drain()
    return right, loads, asked


def test_a_machine_gets_a_value_once_and_nobody_what_it_has(ranks: Ranks) -> None:
    """Eight ranks on four machines, dealt out in turns; the third value is the first one again."""
    machines = [0, 1, 2, 3, 0, 1, 2, 3]
    found = ranks.run(8, broadcasts, machines, [1, 2, 1])
    assert all(right == [True] * 3 for right, _, _ in found)
    assert [loads for _, loads, _ in found] == [3] + [0] * 7
    for number, size in (("1", BYTES), ("2", BYTES), ("3", 0)):
        edges = [(above, rank, n) for rank, (_, _, asked) in enumerate(found) for above, name, n in asked if name == f"{number}/value"]
        assert sorted(rank for _, rank, _ in edges) == [*range(1, 8)]
        assert {n for _, _, n in edges} == {size}
        into = Counter(machines[rank] for above, rank, _ in edges if machines[above] != machines[rank])
        assert into == {1: 1, 2: 1, 3: 1}


def broadcast_with(victim: int, how: str, folder: str) -> tuple[bool, int, float]:
    """One value; something happens to the rank ``victim`` when it has been asked for it."""
    broadcast_tree.FAN = 2
    rank, group, loads = dist.get_rank(), current_group(), 0
    if rank == victim and how in ("killed", "stopped"):
        serve = broadcast_tree._serve

        def end(values: Any, channel: Any) -> None:
            broadcast_tree.receive(channel, 1 << 16)
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            serve(values, channel)

        broadcast_tree._serve = end
    if rank == victim and how == "damaged":
        put = broadcast_tree._Values.put

        def damage(self: Any, name: str, value: Any) -> None:
            put(self, name, value._replace(data=b"x" + value.data[1:]))

        broadcast_tree._Values.put = damage  # type: ignore[method-assign]
    if rank == victim and how == "without sockets":

        def refuse(*args: Any) -> Any:
            raise OSError("no sockets here")

        broadcast_tree.listen = refuse

    def load() -> bytes:
        nonlocal loads
        loads += 1
        if rank == 0:
            time.sleep(0.5)  # the others have come, and ask
        return value(7)

    call = group.call("test", "here", 4 * broadcast_tree.PATIENCE)
    with call.phase("hand on"):
        began = time.monotonic()
        found = call.broadcast("value", load) == value(7), loads, time.monotonic() - began
        # The victim may be dead, so the phase would not end well; but nobody goes before all have what they asked for.
        Path(folder, f"{rank}").touch()
        while len(os.listdir(folder)) < dist.get_world_size() - (how in ("killed", "stopped")):
            time.sleep(0.05)
        call._posted = True
    return found


@pytest.mark.parametrize("how", ["killed", "stopped", "damaged", "without sockets"])
def test_a_rank_in_the_middle_that_fails_costs_those_below_it_a_moment(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """Ranks 3 and 4 ask rank 1, and 7 asks 3: all of them get it, and nobody loads it a second time."""
    found = ranks.run(8, broadcast_with, 1, how, f"{tmp_path}", allow_death=True, await_stopped=False)
    for rank, result in enumerate(found):
        if rank == 1 and how in ("killed", "stopped"):
            assert isinstance(result, Lost)
            continue
        assert not isinstance(result, Lost), result
        right, loads, seconds = result
        assert right, rank
        assert loads == (rank == 0), rank
        assert seconds < broadcast_tree.PATIENCE, "it waited for the deadline"


def reshards() -> list[int]:
    """How many ranks this one has asked in each of three reshards; the last one is of another shape."""
    rank, asked, counts = dist.get_rank(), count_questions(), []
    for rows in (8, 8, 16):
        old, new = torch.arange(rows * 2.0), torch.zeros(rows * 2)
        layout = ckpt.Layout({"dp": dist.get_world_size()}, [("*", ckpt.Replicate())])
        before = len({*asked})
        live.reshard({"w": old, "rank": ckpt.PerRank(rank)}, {"w": new, "rank": ckpt.PerRank(-1)}, layout=layout, new_layout=layout)
        assert torch.equal(old, new)
        counts.append(len({*asked}) - before)
    return counts


def test_tables_of_a_reshard_are_asked_for_once_and_not_again(ranks: Ranks) -> None:
    """Tables are one value; state, what single ranks have and addresses are another, which is the same each time."""
    assert ranks.run(4, reshards) == [[0, 0, 0]] + [[2, 0, 1]] * 3


def test_what_a_rank_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_tree, "KEPT", 10_000)
    values = broadcast_tree._Values()
    for n in range(50):
        data = bytes([n]) * 3000
        values.put(f"{n}/value", broadcast_tree.DigestedBytes(xxhash.xxh3_128_hexdigest(data), data))
    assert [data[:1] for data in values.all().values()] == [bytes([n]) for n in (47, 48, 49)]
    values.put("large", broadcast_tree.DigestedBytes("of it", bytes(20_000)))
    assert [*values.all()] == ["of it"]
    gone = values.get("48/value")
    assert gone is not None and not gone.is_right(), "what is gone is not taken for nothing"


def fails(folder: str) -> tuple[str, int]:
    """The leader cannot load it: all load, and raise what they find."""
    broadcast_tree.FAN = 2
    rank, call = dist.get_rank(), current_group().call("test", "here", 20)

    def load() -> bytes:
        raise FileNotFoundError(f"of rank {rank}")

    try:
        with call.phase("hand on"):
            call.broadcast("value", load)
    except FileNotFoundError as err:
        return str(err), rank
    return "no error", rank


def test_each_rank_raises_its_own_error_if_the_leader_fails(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, fails, f"{tmp_path}") == [(f"of rank {rank}", rank) for rank in range(4)]
