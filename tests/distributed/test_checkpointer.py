"""Ranks that save after the same step, whatever told one of them to, and go on together."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError
from ckpt.formats.native.rebuild import rebuild_checkpoint
from ckpt.io_backends.faulty import Fault, FaultyBackend, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import AtSteps, Before, EveryBudget, EveryMinutes, EverySteps, Latest, OnPreemption
from ckpt.runs.events import Event
from tests.distributed.ranks import Ranks


def notice_on_one_rank(root: str, who: int, lockstep: bool, stride: int) -> tuple[list[int], int]:
    """Ranks step at their own speed unless ``lockstep``; one is told in between. Gives what it saved, and where it ended."""
    rank = dist.get_rank()
    saved = []
    n = 0
    with ckpt.Checkpointer(root, save=EverySteps(10**6) | OnPreemption(), job=ckpt.Job(timeout=30)) as c:
        for turn in range(1, 4000):
            n = turn * stride
            if lockstep:
                dist.all_reduce(torch.ones(1))
            time.sleep(0.002 * (1 + rank))
            if turn == 20 and rank == who:
                os.kill(os.getpid(), signal.SIGTERM)
            if c.step(n, {"x": torch.full((3,), float(n)), "own": ckpt.PerRank(rank)}):
                saved.append(n)
            if c.preempted:
                break
        assert c.preempted
    return saved, n


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("lockstep", "stride"), [(True, 1), (True, 7), (False, 1)])
def test_all_ranks_save_after_the_same_step(ranks: Ranks, tmp_path: Path, who: int, lockstep: bool, stride: int) -> None:
    found = ranks.run(3, notice_on_one_rank, str(tmp_path), who, lockstep, stride)
    assert len({(tuple(saved), n) for saved, n in found}) == 1
    saved, n = found[0]
    assert saved == [n] and n >= 20 * stride
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


def by_the_clock(root: str) -> list[int]:
    saved = []
    with ckpt.Checkpointer(root, save=EveryMinutes(0.01), job=ckpt.Job(timeout=30)) as c:
        for n in range(1, 60):
            time.sleep(0.02 + 0.005 * dist.get_rank())
            dist.all_reduce(torch.ones(1))
            if c.step(n, {"x": torch.full((3,), float(n))}):
                saved.append(n)
    return saved


def test_a_clock_of_the_leader(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, by_the_clock, str(tmp_path))
    assert found[0] == found[1] and len(found[0]) >= 2
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == found[0]


def until_a_deadline(root: str) -> tuple[list[int], bool]:
    """Only the leader's deadline counts: the ranks' clocks may differ."""
    deadline = time.time() + (1.5 if dist.get_rank() == 0 else 1e6)
    saved = []
    with ckpt.Checkpointer(root, save=EverySteps(30) | Before(deadline, reserve=0.7), job=ckpt.Job(timeout=30)) as c:
        for n in range(1, 4000):
            time.sleep(0.01 + 0.005 * dist.get_rank())
            if c.step(n, {"x": torch.full((3,), float(n))}):
                saved.append(n)
            if c.preempted:
                break
    return saved, c.preempted


def test_a_deadline_is_agreed_on(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, until_a_deadline, str(tmp_path))
    (saved, ended), other = results
    assert ended and other == (saved, True)
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


def by_what_saves_cost(root: str) -> tuple[list[int], list[str]]:
    """Gives the steps saved, and the kinds of events told on this rank."""
    saved: list[int] = []
    told: list[str] = []
    with ckpt.Checkpointer(
        root, save=EveryBudget(25.0, least_seconds=0.3), job=ckpt.Job(timeout=30), on_event=lambda e: told.append(e.kind)
    ) as c:
        for n in range(1, 2000):
            time.sleep(0.02 + 0.005 * dist.get_rank())
            dist.all_reduce(torch.ones(1))
            if c.step(n, {"x": torch.full((3,), float(n)), "own": ckpt.PerRank(dist.get_rank())}):
                saved.append(n)
            if n >= 30 and len(saved) > 1:  # on all ranks after the same step
                break
    return saved, told


def test_saving_by_cost_is_agreed_and_told_on_the_leader(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, by_what_saves_cost, str(tmp_path))
    (saved, told), (other, silent) = found
    assert saved == other and len(saved) >= 2 and silent == []
    assert [told.count(kind) for kind in ("save.begun", "save.captured", "save.durable")] == [len(saved)] * 3
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


def fails_on_one_rank(root: str, who: int) -> list[tuple[str, str | None, tuple[int, ...]]]:
    events: list[Event] = []
    bad = FaultyProcess(Fault(at=2, kind="no_space")) if dist.get_rank() == who else FaultyProcess()
    with ckpt.Checkpointer(root, job=ckpt.Job(timeout=30), on_event=events.append) as c, wrap_backends(bad.wrap):
        c.save(1, {"x": torch.zeros(100), "own": ckpt.PerRank(torch.ones(100))})
        with pytest.raises(CkptError):
            c.wait()
    return [(e.kind, e.error, e.failed_ranks) for e in events]


def test_which_rank_failed_is_told(ranks: Ranks, tmp_path: Path) -> None:
    leader, other = ranks.run(2, fails_on_one_rank, str(tmp_path), 1)
    assert other == [] and ("save.failed", "RankFailedError", (1,)) in leader
    assert [kind for kind, *_ in leader if kind == "alert"] == ["alert"]


def passed_over(root: str) -> tuple[int | None, float]:
    x = torch.zeros(1000)
    with ckpt.Checkpointer(root, job=ckpt.Job(timeout=30)) as c:
        return c.restore({"x": x}), float(x[0])


def save_two(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        for n in (1, 2):
            c.save(n, {"x": torch.full((1000,), float(n))})
            c.wait()


def test_damage_that_only_one_rank_reads_sends_all_ranks_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, save_two, str(tmp_path))
    (path,) = (tmp_path / "step-00000002").glob("data/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert ranks.run(2, passed_over, str(tmp_path)) == [(1, 1.0)] * 2


def loses_values_of_one_rank(root: str) -> int | None:
    """Both ranks go back where the values that only one of them needs are lost."""
    state: dict[str, object] = {"x": torch.zeros(3), **({"own": 0} if dist.get_rank() else {})}
    with ckpt.Checkpointer(root, job=ckpt.Job(timeout=30)) as c:
        return c.restore(state)


def test_values_that_a_rebuild_lost_send_all_ranks_back(ranks: Ranks, tmp_path: Path) -> None:
    for n in (1, 2):
        ckpt.save(tmp_path / f"step-{n:08d}", {"x": torch.full((3,), float(n)), "own": n})
    (tmp_path / "step-00000002" / "checkpoint.json").write_bytes(b"{")
    assert "values" in rebuild_checkpoint(str(tmp_path / "step-00000002")).lost
    assert ranks.run(2, loses_values_of_one_rank, str(tmp_path)) == [1, 1]


def noticed_where_a_save_is_due_anyway(root: str, every: int, who: int) -> tuple[list[int], int]:
    """Gives what this rank saved, and the step at which it left the loop."""
    rank = dist.get_rank()
    saved = []
    n = 0
    with ckpt.Checkpointer(root, save=EverySteps(every) | OnPreemption(), job=ckpt.Job(timeout=30)) as c:
        for n in range(1, 2000):
            dist.all_reduce(torch.ones(1))  # hangs if a rank has left
            if n == 5 and rank == who:
                os.kill(os.getpid(), signal.SIGUSR1)
            if c.step(n, {"x": torch.full((3,), float(n))}):
                saved.append(n)
            if c.preempted:
                break
            time.sleep(0.01)
    return saved, n


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("every", [1, 5])
def test_a_notice_at_a_step_that_is_saved_anyway(ranks: Ranks, tmp_path: Path, every: int, who: int) -> None:
    found = ranks.run(2, noticed_where_a_save_is_due_anyway, str(tmp_path), every, who)
    assert found[0] == found[1]
    saved, n = found[0]
    assert saved[-1] == n and 5 <= n < 1999
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


def leaving_early(root: str) -> float:
    """Rank 1 has ended its loop when the leader's clock says to save at the last step."""
    with ckpt.Checkpointer(root, save=EveryMinutes(0.005), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 3):
            if n == 2 and dist.get_rank() == 0:
                time.sleep(0.6)
            began = time.monotonic()
            c.step(n, {"x": torch.ones(3)})
    return time.monotonic() - began


def test_a_rank_that_is_done_is_not_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(2, leaving_early, str(tmp_path))) < 15


def going_on_after_a_failure(root: str, fails_on: int) -> tuple[list[int], list[int]]:
    """Every rank catches what a step raises, looks at its handle in its own time, and trains on. Gives where saves were begun, and where it
    was told."""
    rank = dist.get_rank()
    begun, told = [], []
    process = FaultyProcess(Fault(at=1, kind="no_space"))
    with ckpt.Checkpointer(root, save=AtSteps(2, 4, 8, 12), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 14):
            before = c.handle
            try:
                if n == 2 and rank == fails_on:
                    with wrap_backends(process.wrap):
                        c.step(n, {"x": torch.full((50_000,), float(n))})
                        assert c.handle is not None and c.handle.wait(20)
                else:
                    c.step(n, {"x": torch.full((50_000,), float(n))})
            except CkptError:
                told.append(n)
            if c.handle is not None and c.handle is not before:
                begun.append(n)
            if n == 2 and rank == 0:
                assert c.handle is not None and c.handle.wait(20)  # so one rank is told at the next step, the other perhaps later
    return begun, told


@pytest.mark.parametrize("fails_on", [0, 1])
def test_after_a_failure_all_ranks_save_after_the_same_steps(ranks: Ranks, tmp_path: Path, fails_on: int) -> None:
    found = ranks.run(2, going_on_after_a_failure, str(tmp_path), fails_on)
    assert [begun for begun, _ in found] == [[2, 4, 8, 12]] * 2
    assert [len(told) for _, told in found] == [1, 1], "each rank is told once"
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == [4, 8, 12]


def final_save_that_fails(root: str) -> tuple[list[int], list[int], int]:
    """Storage refuses the last save once. Gives where a step raised, and what was saved after it."""
    process = FaultyProcess(Fault(at=3, kind="no_space"))
    raised, saved = [], []
    n = 0
    with wrap_backends(process.wrap), ckpt.Checkpointer(root, save=OnPreemption(), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 4000):
            dist.all_reduce(torch.ones(1))
            if n == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                if c.step(n, {"x": torch.full((3,), float(n))}):
                    saved.append(n)
            except CkptError:
                raised.append(n)
                assert not c.preempted, "nothing is saved yet"
            if c.preempted:
                break
            time.sleep(0.005)
        assert c.preempted
    return raised, saved, n


def test_a_last_save_that_fails_is_tried_again(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, final_save_that_fails, str(tmp_path))
    assert found[0] == found[1]
    raised, saved, n = found[0]
    assert len(raised) == 1 and saved == [n] and n > raised[0]
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


class Held(FaultyBackend):
    """Deletes nothing until ``GATE`` is open."""

    def delete(self, path: str) -> None:
        assert GATE.wait(60)
        super().delete(path)


GATE = threading.Event()


def saves_while_nothing_is_deleted(root: str) -> list[float]:
    """A save after each step, with a deadline that is shorter than the deletes take."""
    if dist.get_rank() == 0:
        GATE.clear()
    waited = []
    state = {"x": torch.zeros(1000)}
    with wrap_backends(Held), ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(1), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 6):
            began = time.monotonic()
            state["x"].fill_(n)
            c.step(n, state)
            waited.append(time.monotonic() - began)
            dist.barrier()
        assert c.handle is not None
        c.handle.result()
        for _ in range(3):
            ckpt.save_async(f"{root}-again", state).result()
        dist.barrier()
        if dist.get_rank() == 0:
            assert [s.number for s in ckpt.list_steps(root) if s.committed] == [1, 2, 3, 4, 5]
        GATE.set()
    dist.barrier()
    return waited


def test_no_step_and_no_save_waits_for_deletes(ranks: Ranks, tmp_path: Path) -> None:
    waited = ranks.run(2, saves_while_nothing_is_deleted, str(tmp_path / "run"))
    assert max(map(max, waited)) < 20
    assert [s.number for s in ckpt.list_steps(tmp_path / "run")] == [5]
    end = time.monotonic() + 20
    while len(list((tmp_path / "run-again").rglob("*.safetensors"))) > 2:
        assert time.monotonic() < end
        time.sleep(0.05)


def wrong_steps(root: str, wrong: object, method: str, local: bool) -> list[tuple[int, str, str]]:
    """Rank 1 gives a wrong number of the step once, at step 3; every rank goes on. What each was told, and at which step."""
    told = []
    more = {"local": f"{root}-local"} if local else {}
    with ckpt.Checkpointer(f"{root}/run", save=EverySteps(1), job=ckpt.Job(timeout=20), **more) as c:
        for n in range(1, 6):
            given = wrong if n == 3 and dist.get_rank() == 1 else n
            state = {"x": torch.full((3,), float(n))}
            for call in (lambda: getattr(c, method)(given, state), c.wait):  # noqa: B023  called at once
                try:
                    call()
                except CkptError as err:
                    told.append((n, type(err).__name__, str(err)))
    return told


@pytest.mark.parametrize(
    ("wrong", "method", "local"), [(-1, "save", False), ("3", "step", False), (None, "step", True), (7, "save", True)], ids=str
)
def test_a_wrong_step_on_one_rank_fails_that_save_on_all(ranks: Ranks, tmp_path: Path, wrong: object, method: str, local: bool) -> None:
    of_others, own = ranks.run(2, wrong_steps, str(tmp_path), wrong, method, local)
    names = ("ConsistencyError", "ConsistencyError") if wrong == 7 else ("RankFailedError", "UsageError")
    assert [(n, name) for n, name, _ in (*of_others, *own)] == [(3, names[0]), (3, names[1])]
    assert all(("step-00000007" if wrong == 7 else repr(wrong)) in text for _, _, text in (*of_others, *own))
    assert wrong == 7 or "rank 1 raised UsageError" in of_others[0][2]
    for folder in ("run", *(["-local"] if local else ())):
        steps = [s.number for s in ckpt.list_steps(f"{tmp_path}{folder if folder != 'run' else '/run'}") if s.committed]
        assert steps == ([1, 2, 4, 5] if folder == "run" else [5])


def hiccups(root: str, where: str) -> list[tuple[int, str]]:
    """On rank 1 something of its own raises once, at step 2, and once when it restores; every rank catches it, and trains on."""
    who, told = dist.get_rank() == 1, []

    def state(n: int) -> dict[str, object]:
        if who and n == 2 and where == "state":
            raise ValueError("the file server hiccups")
        return {"x": torch.full((3,), float(n))}

    with ckpt.Checkpointer(root, save=EverySteps(1), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 5):
            try:
                bad = who and n == 2 and where == "metrics"
                c.step(n, lambda n=n: state(n), metrics={"loss": "none"} if bad else {"loss": 1.0})  # type: ignore[misc, dict-item]
                c.wait()
            except (CkptError, ValueError) as err:
                told.append((n, type(err).__name__))
        try:
            c.restore([] if who else state(5))  # type: ignore[arg-type]
        except CkptError as err:
            told.append((5, type(err).__name__))
        assert c.restore(state(5)) == 4
        assert c.restore(state(5), step=1) == 1
        c.save(2, {"x": torch.full((3,), 2.0)})
        c.wait()
        assert c.latest == 2 == c.restore(state(5))  # the branch that was written last
    return told


@pytest.mark.parametrize(("where", "error"), [("state", "ValueError"), ("metrics", "UsageError")])
def test_what_goes_wrong_on_one_rank_ends_the_call_on_all(ranks: Ranks, tmp_path: Path, where: str, error: str) -> None:
    of_others, own = ranks.run(2, hiccups, str(tmp_path), where)
    assert own == [(2, error), (5, "UsageError")]
    assert of_others == [(2, "RankFailedError"), (5, "RankFailedError")]
    assert [(s.number, s.abandoned) for s in ckpt.list_steps(str(tmp_path)) if s.committed] == [(1, None), (2, None), (3, 1), (4, 1)]
