"""A rank dies or hangs in the middle of a reshard: every other one hears who, in time, and whether its new state was changed.

And what a reshard may cost: memory beside the states, and a second time between the same layouts.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Layout, Mesh, Shard, live
from ckpt.errors import CkptError
from ckpt.live import reshard_offers, resharding, server
from ckpt.live.holdings import Holdings
from tests.distributed.ranks import Lost, Ranks

ROWS, COLUMNS, TENSORS = 512, 1024, 4
TIMEOUT = 5.0


def halves(rank: int, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], Layout | None, Any, Layout | None]:
    """Rows over the ranks ``old``, columns over ``new``."""
    before, after, layout, new_layout = {}, {}, None, None
    if rank in old:
        at, rows = old.index(rank), ROWS // len(old)
        before = {f"w{n}": torch.arange(at * rows * COLUMNS, (at + 1) * rows * COLUMNS).view(rows, COLUMNS) + n for n in range(TENSORS)}
        layout = Layout(Mesh(("dp",), (len(old),), old), [("*", Shard(0, "dp"))])
    if rank in new:
        after = {f"w{n}": torch.zeros(ROWS, COLUMNS // len(new), dtype=torch.int64) for n in range(TENSORS)}
        new_layout = Layout(Mesh(("tp",), (len(new),), new), [("*", Shard(1, "tp"))])
    return before, layout, after, new_layout


def reshard_with(victim: int, how: str) -> tuple[str, tuple[int, ...], bool, float]:
    """The error of this rank: its text, the ranks that it names, whether the new state was changed, and after how many seconds."""
    rank = dist.get_rank()
    old, layout, new, new_layout = halves(rank, (0, 1), (2, 3))
    if rank == victim:
        _ends_after_some_pieces(how)
    began = time.monotonic()
    try:
        live.reshard(old, new, layout=layout, new_layout=new_layout, job=ckpt.Job(timeout=TIMEOUT))
    except CkptError as err:
        changed = any(bool(t.any()) for t in new.values())
        return str(err), getattr(err, "ranks", ()), changed, time.monotonic() - began
    return "no error", (), False, 0.0


def _ends_after_some_pieces(how: str) -> None:
    """This rank kills or stops itself when it has packed, or placed, its third piece."""
    count = 0

    def counted(real: Any) -> Any:
        def work(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            return real(*args)

        return work

    Holdings.pack = counted(Holdings.pack)  # type: ignore[method-assign]
    resharding.Filling.place = counted(resharding.Filling.place)  # type: ignore[method-assign]


@pytest.mark.parametrize(("victim", "how"), [(1, "killed"), (3, "killed"), (0, "killed"), (1, "stopped")])
def test_who_is_lost_is_named_on_every_other_rank(ranks: Ranks, victim: int, how: str) -> None:
    found = ranks.run(4, reshard_with, victim, how, allow_death=True, await_stopped=False)
    for rank, result in enumerate(found):
        if rank == victim:
            assert isinstance(result, Lost)
            continue
        assert not isinstance(result, Lost), result
        text, _, changed, seconds = result
        assert f"rank {victim}" in text, text
        assert seconds < 4 * TIMEOUT
        said = "is now partly overwritten" in text
        assert said != ("nothing in the new state was changed" in text)
        assert said or not changed, "what was changed is not said"


def refused_pull() -> tuple[str, bool]:
    """Rank 0 finds at once that it cannot give what it has."""
    rank = dist.get_rank()
    old, layout, new, new_layout = halves(rank, (0, 1), (2, 3))
    if rank == 0:
        Holdings.pack = refuse_to_pack  # type: ignore[method-assign,assignment]
    try:
        live.reshard(old, new, layout=layout, new_layout=new_layout, job=ckpt.Job(timeout=TIMEOUT))
    except CkptError as err:
        return str(err), True
    return "no error", False


def test_a_holder_that_fails_is_named(ranks: Ranks) -> None:
    for text, failed in ranks.run(4, refused_pull):
        assert failed and "rank 0" in text and "MemoryError: of this test" in text, text


# ---- cost


def peak_beside(megabytes: int) -> int:
    """Bytes by which this rank's memory grew while it resharded a state of this size, at the most."""
    rank, side = dist.get_rank(), 1024
    rows = megabytes * (1 << 20) // 8 // side // 8
    old, layout, new, new_layout = {}, None, {}, None
    if rank < 2:
        old = {f"w{n}": torch.full((rows // 2, side), n, dtype=torch.int64) for n in range(8)}
        layout = Layout(Mesh(("dp",), (2,), (0, 1)), [("*", Shard(0, "dp"))])
    else:
        new = {f"w{n}": torch.ones(rows, side // 2, dtype=torch.int64) for n in range(8)}
        new_layout = Layout(Mesh(("tp",), (2,), (2, 3)), [("*", Shard(1, "tp"))])
    small = {"x": torch.zeros(4)}
    live.reshard(small if rank < 2 else {}, {"x": torch.ones(4)})  # what is imported and cached the first time
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    live.reshard(old, new, layout=layout, new_layout=new_layout)
    assert all(bool((t == n).all()) for n, t in enumerate(new.values()))
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_the_memory_beside_the_states_does_not_grow_with_them(ranks: Ranks) -> None:
    for grown in ranks.run(4, peak_beside, 256):
        assert grown <= 2 * (64 << 20)


def second_time() -> list[str]:
    """Problems of a second reshard between the same layouts, with other values."""
    rank = dist.get_rank()
    old, layout, new, new_layout = halves(rank, (0, 1), (2, 3))
    problems = []
    joined = 0
    real = reshard_offers.join_tables

    def join(*args: Any, **options: Any) -> Any:
        nonlocal joined
        joined += 1
        return real(*args, **options)

    reshard_offers.join_tables = join  # type: ignore[assignment]
    plans = []
    for turn in range(3):
        for tensor in old.values():
            tensor.add_(turn)
        state = {**new, "step": -1} if new else new
        live.reshard({**old, "step": turn} if old else old, state, layout=layout, new_layout=new_layout)
        (known,) = reshard_offers._known.values()
        plans.append(known.cache.plans.transfers)
        if new and state["step"] != turn:
            problems.append(f"step {state['step']} in turn {turn}")
        whole = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + sum(range(turn + 1))
        for n, tensor in enumerate(new.values()):
            if not torch.equal(tensor, whole.chunk(2, 1)[rank - 2] + n):
                problems.append(f"w{n} is wrong in turn {turn}")
    if joined != 1:
        problems.append(f"tables were joined {joined} times")
    if new and any(plan is not plans[0] for plan in plans):
        problems.append("a second plan was made")
    return problems


def test_a_second_time_makes_no_plan_and_joins_no_tables(ranks: Ranks) -> None:
    assert ranks.run(4, second_time) == [[]] * 4


def kept_between_reshards() -> list[str]:
    """Problems of what a group keeps: one server and one pool, whatever fails between; and nothing once the group is gone."""
    rank, problems = dist.get_rank(), []
    group = dist.new_group(range(4))
    old, layout, new, new_layout = halves(rank, (0, 1), (2, 3))

    def there() -> tuple[int, int]:
        gc.collect()
        files = [os.readlink(file.path) for file in os.scandir("/proc/self/fd") if os.path.islink(file.path)]
        return sum("memfd:ckpt-pool" in file for file in files), sum(t.name == "ckpt-serve" for t in threading.enumerate())

    def awaited(*wanted: int) -> list[str]:  # threads that end take a moment on a busy machine
        end = time.monotonic() + 10 * TIMEOUT
        while (last := there()) != wanted and time.monotonic() < end:
            time.sleep(0.05)
        return [] if last == wanted else [f"{last} files and threads, not {wanted}"]

    server.PATIENCE = 10 * TIMEOUT
    assert there() == (0, 0)
    servers, clients = set(), set()
    for turn, timeout in enumerate((TIMEOUT, TIMEOUT, 2 * TIMEOUT, 2 * TIMEOUT)):
        job = ckpt.Job(process_group=group, timeout=timeout)
        if turn == 3:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Holdings, "pack", refuse_to_pack)
                with pytest.raises(CkptError, match="MemoryError: of this test"):
                    live.reshard(old, new, layout=layout, new_layout=new_layout, job=job)
            problems += awaited(0, 0)
        for tensor in old.values():
            tensor.add_(1)
        live.reshard(old, new, layout=layout, new_layout=new_layout, job=job)
        (known,) = reshard_offers._known.values()
        servers.add(str(known._server and known._server.addresses))
        clients.update(client._channel.sock.getsockname() for client in known.clients.values())
        whole = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) + turn + 1
        problems += [f"w{n}, turn {turn}" for n, t in enumerate(new.values()) if not torch.equal(t, whole.chunk(2, 1)[rank - 2] + n)]
        problems += awaited(2, 3 if old else 0)
        problems += [f"{known.served} are served in turn {turn}"] if known.served else []
    if (len(servers), len(clients)) != ((3, 0) if old else (1, 6)):
        problems.append(f"{len(servers)} servers, {len(clients)} connections")
    dist.barrier()  # who is through closes its connections, which others still count
    del known, job, servers, clients
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return problems + awaited(0, 0)


def refuse_to_pack(*args: object) -> int:
    raise MemoryError("of this test")


def test_server_and_connections_outlive_a_reshard_and_end_with_a_failure_or_the_group(ranks: Ranks) -> None:
    assert ranks.run(4, kept_between_reshards) == [[]] * 4


def without_a_server(victim: int) -> tuple[str, float]:
    """The error of this rank, where ``victim`` cannot serve, and after how many seconds."""
    rank = dist.get_rank()
    old, layout, new, new_layout = halves(rank, (0, 1), (2, 3))

    def refuse(*args: Any, **options: Any) -> Any:
        raise CkptError("too many open files")

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(reshard_offers, "PieceServer", refuse)
        with pytest.raises(CkptError) as caught:
            live.reshard(old, new, layout=layout, new_layout=new_layout, job=ckpt.Job(timeout=60))
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_cannot_serve_ends_the_call_on_all_ranks_at_once(ranks: Ranks) -> None:
    for text, seconds in ranks.run(4, without_a_server, 1, timeout=40):
        assert "too many open files" in text and "nothing in the new state was changed" in text
        assert seconds < 20
