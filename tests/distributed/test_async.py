"""Saves in the background on several ranks: the state of the call is stored while training goes on, errors reach every rank, and the
ranks stay in step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Flat, GlobalShape, Layout
from ckpt.engine.save import capture as capture_module
from ckpt.engine.save.capture import Capture
from ckpt.engine.save.job import save_cache
from ckpt.errors import CkptError
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from ckpt.net.group import current_group
from tests.distributed.gathered import differences, full_state, spoil
from tests.distributed.plain import build
from tests.distributed.ranks import Ranks

BIG = 300_000
"""Elements of a float tensor that is too large to be set aside at the call."""


class Gate:
    """Holds this rank's captures until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        capture_module.WHOLE = 0  # else small tensors are captured in the call
        fill = Capture._fill

        def held(capture: Capture, *args: Any) -> None:
            assert self._open.wait(30), "nobody opened the gate"
            fill(capture, *args)

        Capture._fill = held  # type: ignore[method-assign]  # the process ends with the test

    def open(self) -> None:
        self._open.set()


def raised(work: Callable[[], Any]) -> str:
    """Class and text of what it raises."""
    try:
        work()
    except CkptError as err:
        return f"{type(err).__name__}: {err}"
    return "nothing"


def stepped(fill: float) -> dict[str, Any]:
    """A state whose tensor ``m.w`` is captured after the call: an optimizer of it steps it."""
    weights = torch.nn.ParameterDict({"w": torch.full((BIG,), fill)})
    return {"m": weights, "optimizer": torch.optim.SGD(weights.parameters())}


def value(url: str, name: str = "w") -> list[float]:
    return ckpt.open(url)[name].read().unique().tolist()


# ----------------------------------------------------------------------------------------------------------- training


def train_on(layout: str, url: str, codec: Any) -> list[str]:
    """Save while training, with the capture held until the optimizer waits for it."""
    which = build(layout, 1).steps(2)
    problems = []
    for n in range(2):
        gate = Gate()
        wanted = full_state(which)
        handle = ckpt.save_async(f"{url}/{n}", which.state(), layout=which.layout, codec=codec)
        assert not handle.captured.done()
        threading.Timer(0.3, gate.open).start()
        which.steps(2)
        assert handle.captured.done()
        moved = full_state(which)
        assert len(differences(moved, wanted)) > len(wanted) // 2
        handle.result(30)
        other = build(layout, 7).steps(1)
        spoil(other)
        ckpt.load(f"{url}/{n}", other.state(), layout=other.layout)
        problems += differences(full_state(other), wanted)
    return problems


@pytest.mark.parametrize(
    "trained",
    [
        (("fsdp2", None), ("ddp2", "planes-zstd")),
        pytest.param((("ddp2", None), ("tp2", None)), marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_while_the_state_of_the_call_is_saved(
    ranks: Ranks, tmp_path: Path, trained: tuple[tuple[str, str | None], ...]
) -> None:
    """The forward pass changes buffers, which are replicated: each rank compares those of the call."""
    calls = [(train_on, layout, f"{tmp_path}/{layout}-{codec}", codec) for layout, codec in trained]
    for how, problems in zip(trained, ranks.run_in_turn(2, calls), strict=True):
        assert (how, problems) == (how, [[], []])


def reduce_all_the_while(url: str) -> tuple[int, list[float]]:
    """Each rank's own thread uses the default group while saves go on."""
    sums = 0
    state = {"w": torch.full((BIG,), 3.0), "own": ckpt.PerRank(dist.get_rank())}
    handles = []
    wrong = []
    for n in range(40):
        if n % 8 == 0:
            handles.append(ckpt.save_async(f"{url}/{n}", state))
        found = torch.tensor([float(dist.get_rank() + n)])
        dist.all_reduce(found)
        sums += 1
        if found.item() != 2 * n + 1:
            wrong.append(found.item())
    for handle in handles:
        handle.result(30)
    return sums, wrong


def test_collectives_of_the_training_do_not_meet_those_of_the_save(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, reduce_all_the_while, str(tmp_path)) == [(40, [])] * 2
    assert all(value(f"{tmp_path}/{n}") == [3.0] for n in range(0, 40, 8))


def change_by_hand(url: str) -> tuple[str, str]:
    which = build("fsdp2", 1).steps(1)
    gate = Gate()
    handle = ckpt.save_async(url, which.state())
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(p for n, p in which.model.named_parameters() if n == "head.weight").mul_(2)
    gate.open()
    return raised(handle.fence), raised(lambda: handle.result(30))


def test_a_dtensor_that_is_changed_too_early_fails_the_save_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    (fence0, result0), (fence1, result1) = ranks.run(2, change_by_hand, str(tmp_path / "a"))
    assert fence0 == "nothing" and fence1.startswith("ConsistencyError: tensor model.head.weight was changed") and result1 == fence1
    assert result0.startswith("RankFailedError") and "rank 1 raised ConsistencyError: tensor model.head.weight was changed" in result0
    assert not (tmp_path / "a" / "checkpoint.json").exists() and not list((tmp_path / "a").glob("data/*"))


# -------------------------------------------------------------------------------------------------------------- merging

SHAPES = {"rows": (301, 257), "line": (100_001,), "deep": (61, 5, 7, 11), "large": (1201, 1003), "tiny": (3,), "empty": (0, 5)}
"""Some are set aside at the call, ``large`` is not."""


def flat_states(world: int, rank: int) -> tuple[dict[str, torch.Tensor], Layout]:
    parts, rules = {}, []
    for name, shape in SHAPES.items():
        flat = wanted_whole(name).flatten()
        length = -(-len(flat) // world)
        parts[name] = flat[rank * length : (rank + 1) * length].clone()
        rules.append((name, Flat("dp"), GlobalShape(shape)))
    return parts, Layout({"dp": world}, rules)


def wanted_whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
    return torch.randn(SHAPES[name], generator=generator)


def save_flat(url: str, capture: Any, staging: int | None, codec: Any) -> int:
    parts, layout = flat_states(dist.get_world_size(), dist.get_rank())
    gate = Gate()
    if capture == "eager":
        gate.open()
    handle = ckpt.save_async(url, parts, layout=layout, capture=capture, staging_bytes=staging, codec=codec)
    for name in SHAPES:
        if capture == "eager" or name != "large":
            parts[name].fill_(-1.0)
    gate.open()
    handle.fence()
    parts["large"].fill_(-1.0)
    return handle.result(30).sent_bytes


FLAT_WAYS = [(capture, staging, codec) for capture in ("lazy", "eager") for staging in (None, 3 << 20) for codec in (None, "zstd")]


def save_flat_each_way(folder: str) -> list[int]:
    return [save_flat(f"{folder}/{number}", *way) for number, way in enumerate(FLAT_WAYS)]


def test_flat_shards_are_merged_as_they_were_at_the_call(ranks: Ranks, tmp_path: Path) -> None:
    sent = zip(*ranks.run(3, save_flat_each_way, str(tmp_path)), strict=True)
    for number, (way, by_rank) in enumerate(zip(FLAT_WAYS, sent, strict=True)):
        assert sum(by_rank) > 0, way
        view = ckpt.open(str(tmp_path / str(number)))
        for name in SHAPES:
            assert torch.equal(view[name].read(), wanted_whole(name)), (way, name)


# --------------------------------------------------------------------------------------------------------------- errors


def replicas_differ(url: str) -> tuple[str, str, list[float], int]:
    rank, logged = dist.get_rank(), list[logging.LogRecord]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    state = {"w": torch.ones(BIG), "same": torch.ones(3)}
    ckpt.save(url, state)
    if rank == 1:
        state["w"][17] = 2.0
    handle = ckpt.save_async(url, state)
    first = raised(lambda: handle.result(30))
    kept = value(url)
    state["w"].fill_(5.0)
    logging.getLogger("ckpt").removeHandler(handler)
    return first, raised(lambda: ckpt.save(url, state)), kept, len(logged)


def test_replicas_that_differ_are_found(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, replicas_differ, str(tmp_path / "a"))
    assert [lines for *_, lines in results] == [1, 0]  # one line for one failure
    for first, second, kept, _ in results:
        assert first.startswith("ReplicaError: replicas differ: tensor w: rank 0 ≠ rank 1")
        assert second == "nothing" and kept == [1.0]
    assert value(str(tmp_path / "a")) == [5.0]


def cancel_on_one(url: str) -> tuple[str, list[str], list[float]]:
    rank = dist.get_rank()
    gate = Gate()
    ckpt.save(url, {"w": torch.full((BIG,), 1.0)})
    before = sorted(os.listdir(f"{url}/data"))
    handle = ckpt.save_async(url, stepped(2.0) | {"own": ckpt.PerRank(torch.ones(BIG))})
    assert not handle.captured.done()
    if rank == 1:
        handle.cancel()
    gate.open()
    ended = raised(lambda: handle.result(30))
    dist.barrier()
    after = sorted(os.listdir(f"{url}/data"))
    dist.barrier()
    for n in range(3):
        ckpt.save_async(url, {"w": torch.full((BIG,), 3.0 + n)})
    ckpt.save(f"{url}-2", {"w": torch.zeros(1)})
    return ended, [name for name in after if name not in before], value(url)


def test_cancelling_on_one_rank_ends_the_save_on_all(ranks: Ranks, tmp_path: Path) -> None:
    (ended0, left0, value0), (ended1, left1, value1) = ranks.run(2, cancel_on_one, str(tmp_path / "a"))
    assert ended1.startswith("CancelledError: the save was cancelled")
    assert ended0.startswith("RankFailedError") and "rank 1 raised CancelledError" in ended0
    assert left0 == left1 == [] and value0 == value1 == [5.0]


def state_error_on_one(url: str, wrong: int) -> list[str]:
    rank = dist.get_rank()
    state: dict[str, Any] = {"w": torch.ones(BIG)}
    found = []
    handles = []

    def begin() -> None:
        handles.append(ckpt.save_async(url, state | ({"x": object()} if rank == wrong else {})))

    found.append(raised(begin))
    found.append(raised(lambda: handles[0].result(30)) if handles else "no handle")
    found.append(raised(lambda: ckpt.save_async(url, state).result(30)))
    return found


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_rank_that_cannot_begin_fails_the_handles_of_the_others(ranks: Ranks, tmp_path: Path, wrong: int) -> None:
    found = ranks.run(2, state_error_on_one, str(tmp_path / "a"), wrong)
    assert found[wrong][0].startswith("StateError") and found[wrong][1:] == ["no handle", "nothing"]
    began, ended, then = found[1 - wrong]
    assert began == then == "nothing" and ended.startswith("RankFailedError") and f"rank {wrong} raised StateError" in ended


def full_disk(url: str, full: int, call: str) -> list[str]:
    """Nobody asks the handle: the next call says so on every rank, once."""
    rank = dist.get_rank()
    state = {"w": torch.full((BIG,), 1.0), "own": ckpt.PerRank(torch.ones(BIG) * rank)}
    ckpt.save(url, state)
    fault = Fault(at=3 - full, kind="no_space")  # the leader has looked whether this is a run
    with wrap_backends(FaultyProcess(fault if rank == full else None).wrap):
        handle = ckpt.save_async(f"{url}-2", state)
        handle.wait(30)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: ckpt.save(f"{url}-3", state),
        "save_async": lambda: ckpt.save_async(f"{url}-3", state).result(30),
        "load": lambda: ckpt.load(url, state),
    }
    return [raised(calls[call]) for _ in range(3)]


@pytest.mark.parametrize(("full", "call"), [(0, "save"), (1, "save_async"), (1, "load")])
def test_a_full_disk_that_nobody_asked_about_is_raised_once_by_the_next_call(ranks: Ranks, tmp_path: Path, full: int, call: str) -> None:
    found = ranks.run(2, full_disk, str(tmp_path / "a"), full, call)
    assert found[full][0].startswith("NoSpaceError")
    assert found[1 - full][0].startswith("RankFailedError") and f"rank {full} raised NoSpaceError" in found[1 - full][0]
    assert [f[1:] for f in found] == [["nothing", "nothing"]] * 2
    assert not (tmp_path / "a-2" / "checkpoint.json").exists() and not list((tmp_path / "a-2").glob("data/*"))
    assert call == "load" or value(str(tmp_path / "a-3")) == [1.0]


def refused(url: str) -> tuple[list[str], list[str], list[float]]:
    """Calls that are refused leave the ranks in step, and the save that goes on keeps what it left in the job's store."""
    rank = dist.get_rank()
    busy, ended = [], []
    for n in range(10):
        gate = Gate()
        state = stepped(float(n))
        handle = ckpt.save_async(url, state)
        assert not handle.captured.done()
        busy += [raised(lambda s=state: ckpt.save_async(f"{url}-2", s, when_busy="refuse"))[:9] for _ in range(3)]
        gate.open()
        if rank == 0:
            handle.wait()  # the leader goes on at once, the other rank finds out a little later
        ended.append(raised(lambda h=handle: h.result(30)))
    return busy, ended, value(url, "m.w")


def test_a_refused_save_harms_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for busy, ended, found in ranks.run(2, refused, str(tmp_path / "a")):
        assert set(busy) == {"BusyError"} and set(ended) == {"nothing"} and found == [9.0]


def too_small(url: str) -> list[str]:
    state = {"own": ckpt.PerRank(torch.ones(BIG)), "w": torch.ones(BIG)}
    return [
        raised(lambda: ckpt.save_async(url, state, staging_bytes=8192)),
        raised(lambda: ckpt.save_async(url, state, staging_bytes=0)),
        raised(lambda: ckpt.save_async(url, state, staging_bytes=4 << 20).result(30)),
    ]


def test_a_staging_budget_that_is_too_small_is_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for first, second, third in ranks.run(2, too_small, str(tmp_path / "a")):
        assert first.startswith("UsageError: staging_bytes=8192") and second.startswith("UsageError") and third == "nothing"


# --------------------------------------------------------------------------------------------------------- many saves


STAY = ("ckpt-broadcast", "ckpt-store")
"""Threads of a job."""


def many(url: str) -> tuple[int, int, list[str]]:
    """Growth of the job's store and of open files after many saves."""
    state = {"w": torch.ones(1000), "own": ckpt.PerRank(torch.ones(10))}

    def left() -> tuple[int, int, list[str]]:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("ckpt")]
        return dist.distributed_c10d._get_default_store().num_keys(), len(os.listdir("/proc/self/fd")), threads

    for _ in range(5):
        ckpt.save_async(url, state).result(30)
    address = save_cache(current_group()).arena._memory.data_ptr()
    dist.barrier()
    keys, fds, _ = left()
    dist.barrier()
    for _ in range(30):
        ckpt.save_async(url, state)
    ckpt.save_async(url, state).result(30)
    assert save_cache(current_group()).arena._memory.data_ptr() == address
    end = time.monotonic() + 20  # threads of a save end, and keys go, after its result is there
    while (after := left()) and time.monotonic() < end:
        if after[0] <= keys + 12 and after[1] <= fds + 1 and len(after[2]) == len(set(after[2]) & set(STAY)):
            break
        time.sleep(0.05)
    dist.barrier()
    return after[0] - keys, after[1] - fds, after[2]


def test_many_saves_leave_nothing_behind(ranks: Ranks, tmp_path: Path) -> None:
    for keys, fds, threads in ranks.run(2, many, str(tmp_path / "a")):
        assert keys <= 12 and fds <= 1 and set(threads) <= set(STAY) and len(threads) == len(set(threads))


def groups_gone(url: str) -> str:
    """The process group ends before the save does."""
    gate = Gate()
    group = dist.new_group([0, 1])
    handle = ckpt.save_async(url, stepped(4.0), job=ckpt.Job(process_group=group))
    assert not handle.captured.done()
    dist.destroy_process_group(group)
    del group
    gate.open()
    return raised(lambda: handle.result(30))


def test_a_group_that_is_destroyed_does_not_end_its_save(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, groups_gone, str(tmp_path / "a")) == ["nothing"] * 2
    assert value(str(tmp_path / "a"), "m.w") == [4.0]
