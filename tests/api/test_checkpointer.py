"""The training loop's face on one process: what is saved when, what stays, and where a job goes on."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import CkptError, CorruptError, FormatError, NamesError, NoSpaceError, NotFoundError, UsageError
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.policies import AtSteps, Best, EveryMinutes, EverySteps, Latest, Moment, OnPreemption, SavePolicy, Tagged
from tests.failures.damage import change_record


class Job:
    """A small deterministic training job."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, n: int) -> float:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(n))
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def run(root: Path, steps: range, job: Job, **options: Any) -> list[float]:
    losses = []
    with ckpt.Checkpointer(str(root), **options) as c:
        for n in steps:
            losses.append(job.train(n))
            c.step(n, job.state(), metrics={"loss": losses[-1]})
    return losses


def numbers(root: Path) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(str(root)) if s.committed]


def test_a_job_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", range(1, 31), Job(), save=EverySteps(1000))
    root = tmp_path / "run"
    first = run(root, range(1, 18), Job(), save=EverySteps(5))
    assert numbers(root) == [5, 10, 15] and first == whole[:17]
    job = Job(seed=9)
    with ckpt.Checkpointer(str(root), save=EverySteps(5)) as c:
        assert c.latest == 15
        step = c.restore(job.state())
        assert step == 15
        rest = []
        for n in range(16, 31):
            rest.append(job.train(n))
            assert c.step(n, job.state()) == (n in (20, 25, 30))
    assert rest == whole[15:] and numbers(root) == [5, 10, 15, 20, 25, 30]


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    with ckpt.Checkpointer(str(tmp_path / "none")) as c:
        assert c.restore(Job().state()) is None and c.latest is None and c.steps() == [] and c.best("loss", mode="min") is None
        with pytest.raises(NotFoundError):
            c.restore(Job().state(), step=3)


def flip(directory: Path) -> None:
    (path,) = directory.glob("data/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    run(tmp_path, range(1, 7), job, save=EverySteps(2))
    flip(tmp_path / "step-00000006")
    os.truncate(next((tmp_path / "step-00000004").glob("index-*/tensors.arrow")), 40)
    again = Job(seed=3)
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(again.state()) == 2
        assert "step-00000006 is passed over" in caplog.text and "step-00000004 is passed over" in caplog.text
        assert "overwritten" not in caplog.text, "what was loaded next has overwritten all of it"
        with pytest.raises(CorruptError):
            c.restore(again.state(), step=6)
    flip(tmp_path / "step-00000002")
    with ckpt.Checkpointer(str(tmp_path)) as c, pytest.raises(CorruptError):
        c.restore(again.state())


@pytest.mark.parametrize("change", [{"version": 2}, {"features": ["later"]}])
def test_nobody_goes_back_behind_what_a_later_release_saved_unless_told(change: dict[str, Any], tmp_path: Path) -> None:
    job = Job()
    run(tmp_path, range(1, 7), job, save=EverySteps(2))
    change_record(tmp_path / "step-00000006", **change)
    with ckpt.Checkpointer(str(tmp_path)) as c:
        for step in (None, 6):
            with pytest.raises(FormatError, match="another release wrote the newest step") as err:
                c.restore(job.state(), step=step)
            assert "restore with the release that wrote it" in (err.value.hint or "")
        assert c.restore(job.state(), step=2) == 2
        c.save(3, job.state())
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(job.state()) == 3, "the branch that was written last is without it"
        assert c.latest == 3


def test_a_state_that_does_not_fit_is_no_reason_to_go_back(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5), Job(), save=EverySteps(2))
    with ckpt.Checkpointer(str(tmp_path)) as c, pytest.raises(NamesError):
        c.restore({"model": torch.nn.Linear(6, 3)})


def test_a_metric_that_no_step_has_is_no_silent_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for metric, warned in (("loss", False), ("los", True)):
        with ckpt.Checkpointer(tmp_path / metric, keep=Latest(1) | Best(metric, mode="min")) as c:
            for n in (1, 2, 3):
                c.save(n, {"x": torch.ones(3)}, metrics={"loss": n})
        assert ("no step has this metric" in caplog.text) == warned
        assert [s.number for s in ckpt.list_steps(tmp_path / metric)] == ([3] if warned else [1, 3])


def test_best_takes_the_later_of_equals_and_nothing_infinite(tmp_path: Path) -> None:
    state = Job().state()
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(1)) as c:
        for n, score in (1, 5.0), (2, 5.0), (3, float("inf")), (4, -float("inf")), (5, float("nan")):
            c.save(n, state, metrics={"score": score})
        c.wait()
        assert c.best("score", mode="max") == 2 and c.best("score", mode="min") == 2


def test_what_is_kept(tmp_path: Path) -> None:
    job = Job()
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(1), keep=Latest(2) | Best("score", mode="max") | Tagged("keep*")) as c:
        for n in range(1, 8):
            job.train(n)
            c.step(n, job.state(), metrics={"score": 100.0 if n == 3 else n})
            c.wait()
            if n == 2:
                set_tags(open_backend(c.url(2)), ["keep me"])
        assert [s.number for s in c.steps()] == [2, 3, 6, 7]
        assert c.best("score", mode="max") == 3 and c.best("score", mode="min") == 2 and c.latest == 7
        with pytest.raises(UsageError, match='"max" or "min", not \'low\''):
            c.best("score", mode="low")  # type: ignore[arg-type]
        assert c.steps()[0].tags == ("keep me",) and c.steps()[1].metrics == {"score": 100.0}
    left = {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {f"step-{n:08d}" for n in (2, 3, 6, 7)}
    assert ckpt.open(str(tmp_path / "step-00000002"))["model.weight"].read().shape == (3, 6)


def test_metrics_that_are_no_finite_number_come_back(tmp_path: Path) -> None:
    with ckpt.Checkpointer(str(tmp_path)) as c:
        c.save(1, {"x": torch.ones(2)}, metrics={"nan": float("nan"), "inf": float("inf"), "n": 3})
        c.wait()
        found = c.steps()[0].metrics
    assert found["inf"] == float("inf") and found["n"] == 3.0 and found["nan"] != found["nan"]


def test_a_notice_saves_once_and_says_so(tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *a: seen.append(1))
    try:
        job = Job()
        with ckpt.Checkpointer(str(tmp_path), save=EverySteps(100) | OnPreemption()) as c:
            for n in range(1, 10):
                job.train(n)
                if n == 4:
                    os.kill(os.getpid(), signal.SIGUSR1)
                assert c.step(n, job.state()) == (n == 4)
                assert c.preempted == (n >= 4)
        assert seen == [1] and numbers(tmp_path) == [4]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_is_named_twice(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with ckpt.Checkpointer(str(tmp_path), save=OnPreemption(signals=[signal.SIGUSR1, signal.SIGUSR1])) as c:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert c.step(1, {"x": torch.ones(3)}) and c.preempted
    assert signal.getsignal(signal.SIGUSR1) == before and numbers(tmp_path) == [1]


def test_a_clock(tmp_path: Path) -> None:
    began = time.monotonic()
    with ckpt.Checkpointer(str(tmp_path), save=EveryMinutes(0.005)) as c:
        saved = []
        for n in range(1, 9):
            time.sleep(0.1)
            if c.step(n, {"x": torch.ones(1)}):
                saved.append(n)
    assert 1 <= len(saved) <= (time.monotonic() - began) / 0.3 and numbers(tmp_path) == saved


def failing_at_once(c: ckpt.Checkpointer, n: int) -> None:
    """Step ``n`` is saved, and the storage is full meanwhile."""
    with wrap_backends(FaultyProcess(Fault(at=4, kind="no_space")).wrap):
        assert c.step(n, {"x": torch.ones(3)})
        assert c.handle is not None and c.handle.wait(20)


def test_an_error_in_the_background_is_raised_by_the_next_step(tmp_path: Path) -> None:
    with ckpt.Checkpointer(str(tmp_path), save=AtSteps(2, 6)) as c:
        failing_at_once(c, 2)
        with pytest.raises(NoSpaceError):
            c.step(3, {"x": torch.ones(3)})
        assert c.step(4, {"x": torch.ones(3)}), "what was due and failed is still due"
        assert not c.step(5, {"x": torch.ones(3)})
        assert c.step(6, {"x": torch.ones(3)})
    assert numbers(tmp_path) == [4, 6]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_tells_of_an_error_is_saved_if_it_is_due(tmp_path: Path, by_hand: bool) -> None:
    with ckpt.Checkpointer(str(tmp_path), save=AtSteps(2, 3, 6)) as c:
        failing_at_once(c, 2)
        with pytest.raises(NoSpaceError):
            (c.save if by_hand else c.step)(3, {"x": torch.ones(3)})
        assert not c.step(4, {"x": torch.ones(3)})
    assert numbers(tmp_path) == [3]


def test_signals_are_watched_only_for_a_policy_that_heeds_them(tmp_path: Path) -> None:
    """A job that saves by the clock alone ends with SIGTERM, as without ckpt."""
    before = signal.getsignal(signal.SIGTERM)
    for save in (EverySteps(3), EveryMinutes(3), EverySteps(3) | EveryMinutes(3)):
        with ckpt.Checkpointer(str(tmp_path), save=save):
            assert signal.getsignal(signal.SIGTERM) == before
    for save in (OnPreemption(), EverySteps(3) | OnPreemption() | EveryMinutes(3)):
        with ckpt.Checkpointer(str(tmp_path), save=save):
            assert signal.getsignal(signal.SIGTERM) != before
        assert signal.getsignal(signal.SIGTERM) == before
    wrong: list[dict[str, Any]] = [{"give_up_after": 0}, {"on_event": 3}, {"alerts": "x"}, {"job": 3}, {"member": "a"}]
    for arguments in wrong:  # nobody would heed the notice
        with pytest.raises(UsageError):
            ckpt.Checkpointer(str(tmp_path), save=OnPreemption(), **arguments)
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("signals", "problem"),
    [
        ((signal.SIGTERM, signal.SIGKILL), "cannot be watched"),
        ((signal.SIGTERM, "HUP"), "cannot be watched"),
        (15, "are not numbers of signals"),
        (lambda: (signal.SIGTERM,), "are not numbers of signals"),
    ],
)
def test_signals_that_cannot_be_watched_leave_the_others_as_they_were(tmp_path: Path, signals: Any, problem: str) -> None:
    class Heeds(SavePolicy):
        watched_signals = signals

        def reason(self, now: Moment) -> str | None:
            return None

    before = signal.getsignal(signal.SIGTERM)
    for save in (Heeds(), Heeds() | EverySteps(3)):
        with pytest.raises(UsageError, match=problem):
            ckpt.Checkpointer(str(tmp_path), save=save)
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("local", [3, True, ckpt.NodeLocal])
def test_a_local_tier_that_is_no_directory_is_named(tmp_path: Path, local: Any) -> None:
    with pytest.raises(UsageError, match="local= is a directory") as err:
        ckpt.Checkpointer(str(tmp_path), local=local)
    assert err.value.hint is not None and err.value.hint.startswith("local=")


def test_what_training_raised_is_not_hidden(tmp_path: Path) -> None:
    def train(root: Path) -> None:
        with ckpt.Checkpointer(str(root), save=EverySteps(1)) as c:
            c.step(1, {"x": torch.ones(3)})
            raise ZeroDivisionError

    process = FaultyProcess(Fault(at=4, kind="error"))
    with pytest.raises(ZeroDivisionError), wrap_backends(process.wrap):
        train(tmp_path)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "b")
    assert numbers(tmp_path) == []
    assert numbers(tmp_path / "b") == [1]


def test_a_step_with_nothing_due_is_cheap(tmp_path: Path) -> None:
    with ckpt.Checkpointer(str(tmp_path), save=EverySteps(10**6) | OnPreemption() | EveryMinutes(10)) as c:
        state = Job().state()
        c.step(1, state)
        each = []
        for turn in range(5):
            began = time.thread_time()
            for n in range(2, 1002):
                c.step(1000 * turn + n, state)
            each.append((time.thread_time() - began) / 1000)
        assert min(each) < 50e-6, each  # some 10 µs


def test_a_state_is_made_only_when_it_is_saved(tmp_path: Path) -> None:
    made = []

    def state() -> dict[str, Any]:
        made.append(None)
        return {"n": len(made)}

    with ckpt.Checkpointer(str(tmp_path), save=AtSteps((3,))) as c:
        assert [c.step(n, state) for n in range(1, 5)] == [False, False, True, False]
    assert len(made) == 1 and ckpt.open(c.url(3)).state() == {"n": 1}


@pytest.mark.parametrize(
    ("given", "said", "meant"),
    [
        (
            {"save": Latest(3)},
            "save= selects when to save, but Latest(3) is a policy of what to keep",
            "keep=Latest(3), and save=EverySteps(500)",
        ),
        ({"save": 200}, "save= is a policy of when to save, not 200", "save=EverySteps(200)"),
        ({"save": "200"}, "save= is a policy of when to save, not '200'", "save=EverySteps(500)"),
        ({"keep": 3}, "keep= is a policy of what to keep, not 3", "keep=Latest(3)"),
        ({"keep": EveryMinutes(5)}, "keep= selects what to keep, but EveryMinutes(5) is a policy of when to save", "save=EveryMinutes(5)"),
        ({"memory": True}, "memory= takes a ckpt.Memory, not True", "memory=ckpt.Memory(keep=2)"),
        ({"local": ckpt.Memory()}, "local= is a directory, a ckpt.SharedLocal or a ckpt.NodeLocal, not a ckpt.Memory", "memory=Memory("),
        (
            {"memory": ckpt.Memory(), "local": ckpt.NodeLocal("memory://fast")},
            "local= is in the memory of the machines, and so is memory=",
            "leave one of them out",
        ),
    ],
)
def test_what_is_no_policy_of_its_side(root: str, given: dict[str, Any], said: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        ckpt.Checkpointer(root, **given)
    assert said in raised.value.message and meant in str(raised.value.hint)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"read": "off"}, "read= is a ckpt.ReadOptions, not 'off'"),
        ({"strict": "no"}, "strict= is True or False, not 'no'"),
        ({"only": 3}, "only="),
        ({"rename": 3}, "rename= takes a dict"),
        ({"job": 60}, "job= is a ckpt.Job, not 60"),
        ({"members": ckpt.MemberChanges(added=["judge"])}, "members= is for a run of several jobs"),
        ({"verify": "off"}, "restore has no argument 'verify'$"),
    ],
)
def test_a_first_start_refuses_what_a_restart_would_refuse(root: str, given: dict[str, Any], said: str) -> None:
    with ckpt.Checkpointer(root) as c, pytest.raises((UsageError, TypeError), match=said):
        c.restore(Job().state(), **given)


@pytest.mark.parametrize("n", ["1", 1.0, True, -1, None])
def test_what_is_no_step(root: str, n: Any) -> None:
    with ckpt.Checkpointer(root) as c:
        for call in (c.step, c.save):
            with pytest.raises(UsageError, match="a step is a whole number of at least 0"):
                call(n, Job().state())
        if n is not None:
            with pytest.raises(UsageError, match="a step is a whole number of at least 0"):
                c.restore(Job().state(), step=n)
    assert not os.path.exists(root) or not os.listdir(root)


@pytest.mark.parametrize("nodes", [False, True])
def test_what_is_closed_saves_and_restores_nothing(tmp_path: Path, nodes: bool) -> None:
    local = ckpt.NodeLocal(tmp_path / "disk", copies=0) if nodes else None
    with ckpt.Checkpointer(str(tmp_path / "run"), save=EverySteps(1), local=local) as c:
        c.step(1, Job().state())
    calls: list[Callable[[], object]] = [
        lambda: c.step(2, Job().state()),
        lambda: c.save(2, Job().state()),
        lambda: c.restore(Job().state()),
    ]
    if nodes:  # what they have is not known any more
        calls += [c.steps, lambda: c.latest]
    else:
        assert [step.number for step in c.steps()] == [1] == [c.latest]
    for call in calls:
        with pytest.raises(UsageError, match="this Checkpointer is closed"):
            call()


@pytest.mark.parametrize("member", [None, ckpt.Member("actor", of=("actor",))], ids=["run", "joint"])
@pytest.mark.parametrize("save", [ckpt.save, lambda url, state: ckpt.save_async(url, state).result(60)], ids=["save", "save_async"])
@pytest.mark.parametrize("name", ["4711", "tuned-from-step-5000", "ckpt-2"])  # a run may be named as a number, or as a step
def test_a_save_onto_a_run_is_refused(tmp_path: Path, save: Any, member: ckpt.Member | None, name: str) -> None:
    state, root = {"w": torch.zeros(4)}, tmp_path / name
    with ckpt.Checkpointer(root, member=member) as c:
        c.restore(state)
        c.save(10, state)
    before = sorted(root.rglob("*"))
    for onto in (save, partial(ckpt.save, dry_run=True)):
        with pytest.raises(UsageError, match=f"(?s)this is a run, not a place for one checkpoint.*/{name}/final"):
            onto(root, {"w": torch.ones(4)})
    assert sorted(root.rglob("*")) == before
    save(root / "final", state)
    with ckpt.Checkpointer(root, member=member) as c:
        assert c.restore(state) == 10


def test_a_save_onto_a_run_whose_first_step_is_being_saved_is_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        c.save(10, {"w": torch.zeros(4)})
    (tmp_path / "step-00000010" / "checkpoint.json").unlink()  # as it is until the save commits
    with pytest.raises(UsageError, match="this is a run"):
        ckpt.save(tmp_path, {"w": torch.ones(4)})


def test_a_save_beside_directories_that_are_no_checkpoints_is_none_onto_a_run(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "loss.txt").write_text("0.1")
    ckpt.save(tmp_path, {"w": torch.zeros(4)})
    ckpt.save(tmp_path, {"w": torch.ones(4)})
    loaded = {"w": torch.zeros(4)}
    ckpt.load(tmp_path, loaded)
    assert torch.equal(loaded["w"], torch.ones(4))


def test_what_the_error_of_a_checkpoint_above_a_run_says_brings_its_steps_back(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    ckpt.save(tmp_path, {"w": torch.ones(4)})
    with ckpt.Checkpointer(tmp_path / "new") as c:
        c.save(10, state)
    (tmp_path / "new" / "step-00000010").rename(tmp_path / "step-00000010")
    with pytest.raises(UsageError, match=r"(?s)not a run.*move its checkpoint.json, data and index-\* out"):
        ckpt.Checkpointer(tmp_path).restore(state)
    for path in [tmp_path / "checkpoint.json", tmp_path / "data", *tmp_path.glob("index-*")]:
        path.rename(tmp_path.parent / f"{tmp_path.name} {path.name}")
    state["w"].fill_(2)
    with ckpt.Checkpointer(tmp_path) as c:
        assert c.restore(state) == 10
    assert torch.equal(state["w"], torch.zeros(4))


@pytest.mark.parametrize("name", ["step-00000003", "final"])
def test_a_checkpoint_is_no_run(tmp_path: Path, name: str) -> None:
    url = str(tmp_path / name)
    ckpt.save(url, Job().state())
    with ckpt.Checkpointer(url) as c:
        for ask in (lambda: c.restore(Job().state()), c.steps):
            with pytest.raises(UsageError, match="this is a checkpoint, not a run") as raised:
                ask()
            assert str(tmp_path) in str(raised.value.hint)


@pytest.mark.parametrize("root", ["{}", "file://{}", "{}/run"])
@pytest.mark.parametrize("which", ["root", "local"])
def test_a_file_is_no_run(tmp_path: Path, root: str, which: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    where = {"root": str(tmp_path / "run"), which: root.format(file)}
    with pytest.raises(UsageError, match="a run is a directory, and this is a file") as raised:
        ckpt.Checkpointer(**where)  # type: ignore[arg-type]
    assert raised.value.where == str(file) and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capture": "egaer"}, "capture is 'lazy' or 'eager', not 'egaer'"),
        ({"staging_bytes": 0}, "staging_bytes is a whole number of at least 1, not 0"),
        ({"staging_bytes": np.int64(4096)}, r"pass an int: int\(4096\)"),
        ({"publish_timeout": np.float32(4)}, r"pass a float: float\(4.0\)"),
        ({"layout": "tp"}, "layout must be a ckpt.Layout, not str"),
        ({"layout": ckpt.Layout({"tp": 2}, rules=[("*", ckpt.Replicate())])}, "is for 2 ranks"),
        ({"codec": "gzip"}, "gzip"),
        ({"reuse": "no"}, "reuse= is True, False, a TrustFrozen or an Anchor, not 'no'"),
        ({"check_replicas": 1}, "check_replicas= is True or False, not 1"),
        ({"job": ckpt.Job(timeout="3")}, "timeout must be a positive number, not '3'"),
        ({"job": 60}, "job= is a ckpt.Job, not 60"),
        ({"member": "trainer"}, "member= is a ckpt.Member, not 'trainer'"),
    ],
)
def test_a_mistake_in_the_arguments_is_found_before_the_first_save(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CkptError, match=text):
        ckpt.Checkpointer(str(tmp_path), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_call_is_named(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with ckpt.Checkpointer(str(tmp_path / "run"), save=EverySteps(1)) as c:
        wrong: tuple[Any, ...] = (torch.nn.Linear(2, 1), [state], lambda: 3)
        for given in wrong:
            with pytest.raises(UsageError, match="the state must be a dict"):
                c.step(1, given)
        with pytest.raises(UsageError, match="the state must be a dict"):
            c.restore("run")  # type: ignore[arg-type]
        mistaken: tuple[Any, ...] = (0.3, {"loss": "low"})
        for metrics in mistaken:
            with pytest.raises(UsageError, match="metrics= are numbers by name"):
                c.step(1, state, metrics=metrics)
    assert ckpt.list_steps(tmp_path / "run") == []


@pytest.mark.parametrize(
    "given", [{"every": 1}, {"every": Latest(1)}, {"keep": 1}, {"keep": Latest(2)}, {"max_bandwidth": "200MB"}, {"copies": "1"}]
)
def test_a_mistake_in_what_memory_is_given(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(given))}") as raised:
        ckpt.Memory(**given)
    assert "every" not in given or "every=EverySteps(" in str(raised.value.hint)


def test_processes_that_do_not_know_each_other_are_warned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.net.group._warned", [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for step in (1, 2):
        ckpt.save(tmp_path / f"step-{step}", {"n": step})
    assert caplog.text.count("WORLD_SIZE is 2, but torch.distributed is not initialized") == 1


# ------------------------------------------------------------------------------------------------------------------------------------------
# A program that ends without closing its ``Checkpointer``: what was begun ends well, and what was committed is not said to have failed.

LAST = {"ends": 3, "raises": 3, "atexit": 4, "local": 3}
"""The last step that is there, by how a program ends; with ``local`` it has a local tier."""

SCRIPT = """
import logging, os, sys, time, torch
import ckpt, ckpt.engine.load.load, ckpt.engine.save.background, ckpt.engine.save.save, ckpt.runs.checkpointer
from ckpt.policies import EverySteps, Latest
codes = {}
for how in ("ends", "raises", "atexit", "local"):
    child = os.fork()  # each goes on as a program that has just imported torch, and ends as any program does
    if not child:
        break
    codes[how] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(codes)
    sys.exit()
root = f"{sys.argv[1]}/{how}"
os.dup2(os.open(f"{root}.err", os.O_WRONLY | os.O_CREAT), 2)
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s")
heard = open(f"{root}.heard", "w", buffering=1)
options = {"local": f"{root}-local"} if how == "local" else {}
c = ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(1), on_event=lambda e: print(e.kind, e.step, file=heard), **options)
c.restore({"w": torch.zeros(300_000)})
for k in range(3):
    c.step(k + 1, {"w": torch.full((300_000,), float(k + 1))})
if how == "raises":
    raise RuntimeError("training ends here")
if how == "atexit":
    import atexit
    atexit.register(lambda: c.save(4, {"w": torch.full((300_000,), 4.0)}).result())
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder of all programs, and with which codes they ended."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=True)
    return folder, ast.literal_eval(done.stdout)


@pytest.mark.parametrize(("how", "last"), LAST.items())
def test_saves_end_well(ended: tuple[Path, dict[str, int]], how: str, last: int) -> None:
    folder, codes = ended
    root, said = folder / how, (folder / f"{how}.err").read_text()
    assert codes[how] == (1 if how == "raises" else 0), said
    assert "LOG" not in said and "interpreter shutdown" not in said, said
    assert "failed" not in (folder / f"{how}.heard").read_text()
    place = f"{root}-local" if how == "local" else str(root)
    there = [s.number for s in ckpt.list_steps(place) if s.committed]
    assert there[-1] == last and (there == [last] or how == "local")  # what was being published stays in the local tier
    into = {"w": torch.zeros(300_000)}
    with ckpt.Checkpointer(root, local=f"{root}-local") if how == "local" else ckpt.Checkpointer(root) as c:
        assert c.restore(into) == last
    assert torch.equal(into["w"], torch.full((300_000,), float(last)))
