"""Jobs that are members of one run: real processes that share nothing but storage, killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import ConflictError, CorruptError, FormatError, StorageError, UsageError
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import Latest
from ckpt.runs.members import MemberChanges
from ckpt.runs.step_listing import list_steps
from ckpt.runs.tiers import Tiers
from tests.api.checked import empty_directory
from tests.distributed.ranks import fork_server
from tests.failures.damage import change_record
from tests.joint.campaign import WAYS
from tests.joint.campaign import campaign as toy_run

NAMES = ("trainer", "buffer", "rollouts")


def member(root: str, name: str, last: int, every: int, seconds: float, out: str) -> None:
    """One job: it counts, saves every few steps, and notes what it restored and how it ended."""
    state = {"sum": torch.zeros(1000, dtype=torch.int64), "step": 0, "name": name}
    with open(out, "a") as log, ckpt.Checkpointer(root, member=ckpt.Member(name, of=NAMES), job=ckpt.Job(timeout=60), keep=Latest(2)) as c:
        start = c.restore(state) or 0
        right = bool(state["sum"].eq(start * (start + 1) // 2).all()) and state["step"] == start and state["name"] == name
        print(json.dumps({"restored": start, "right": right}), file=log, flush=True)
        for n in range(start + 1, last + 1):
            state["sum"] += n
            state["step"] = n
            time.sleep(seconds)
            if n % every == 0:
                c.save(n, state)
        c.wait()
        print(json.dumps({"sum": int(state["sum"][0]), "steps": [s.number for s in c.steps()]}), file=log, flush=True)


class Job:
    """A member in a process of its own, forked from a server that has imported torch."""

    may_fail = False
    """Another process of the same member may be at work."""

    def __init__(self, root: str, name: str, last: int, every: int, seconds: float) -> None:
        self.out = Path(root).with_name(f"noted-{uuid.uuid4().hex}")
        self.out.touch()
        self.process = fork_server().Process(target=member, args=(root, name, last, every, seconds, str(self.out)))
        self.process.start()

    def await_restored(self) -> None:
        """Wait until it has gone on from something."""
        while not self.out.read_bytes().endswith(b"\n") and self.process.is_alive():
            time.sleep(0.01)

    def lines(self) -> list[dict[str, Any]]:
        """What it noted, when it has ended or been killed."""
        self.process.join(240)
        assert self.process.exitcode in (0, -9, *((1,) if self.may_fail else ()))
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def root() -> Iterator[str]:
    with empty_directory() as path:
        run = Path(path, "run")
        run.mkdir()  # what a test has beside it goes, too
        yield str(run)


def restored(printed: dict[str, list[dict[str, Any]]]) -> set[int]:
    """The steps that the members of one life went on from."""
    first = [noted[0] for noted in printed.values() if noted]
    assert all(one["right"] for one in first), printed
    return {one["restored"] for one in first}


def test_members_that_are_killed_go_on_from_one_step_and_end_as_if_nothing_had_been(root: str) -> None:
    campaign(root, kills=3, last=60, every=5, seconds=0.02, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_300_kills(root: str, seed: int) -> None:
    campaign(root, kills=30, last=600, every=5, seconds=0.02, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_100_members_that_stand_still_while_the_others_are_restarted(root: str, seed: int) -> None:
    campaign(root, kills=20, last=600, every=5, seconds=0.02, seed=seed, stops=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_prompts_are_lost_by_jobs_that_save_for_themselves_and_not_by_members_of_a_run(way: str) -> None:
    """The table of docs/guides/joint-run.md."""
    result = toy_run(way, kills=50, seed=0)
    assert result["kills"] == 50
    assert (result["disagree"] + result["lost"] + result["repeated"] > 0) == (way != "ckpt"), result


def campaign(root: str, *, kills: int, last: int, every: int, seconds: float, seed: int, stops: bool = False) -> None:
    """Kill one or several members at a random moment after they have begun, then start all of them again. With ``stops`` one of them stands
    still in place of that, and goes on beside the next life at a random moment of it."""
    chance, before, still = random.Random(seed), 0, list[Job]()
    for _ in range(kills):
        jobs = {name: Job(root, name, last, every, seconds) for name in NAMES}
        if stops:
            for job in (*jobs.values(), *still):
                job.may_fail = True
        for name in NAMES if stops else chance.sample(NAMES, chance.choice((0, 1, 3))):
            jobs[name].await_restored()
        time.sleep(chance.uniform(0, 40 * seconds))
        for job in still:
            send(job, signal.SIGCONT)
            time.sleep(chance.uniform(0, 40 * seconds))
            job.process.kill()
            job.lines()
        still = [jobs.pop(chance.choice(NAMES))] if stops else []
        for job in still:
            send(job, signal.SIGSTOP)
            time.sleep(chance.uniform(0, 10 * seconds))
        for job in (*chance.sample(list(jobs.values()), chance.choice((1, 2, len(jobs)))), *jobs.values()):
            job.process.kill()
        steps = restored({name: job.lines() for name, job in jobs.items()})
        assert len(steps) <= 1
        assert all(step >= before for step in steps), "what was committed is never undone"
        visible = [s.number for s in list_steps(root) if s.committed and s.number is not None]
        assert max(visible, default=0) >= before
        before = max(visible, default=0)
    for job in still:
        job.process.kill()
    jobs = {name: Job(root, name, last, every, 0.0) for name in NAMES}
    printed = {name: job.lines() for name, job in jobs.items()}
    assert restored(printed) == {before}
    assert {noted[1]["sum"] for noted in printed.values()} == {last * (last + 1) // 2}
    assert all(last in noted[1]["steps"] for noted in printed.values())
    for name in NAMES:
        assert list_steps(f"{root}/{name}")[-1].number == last


def send(job: Job, number: signal.Signals) -> None:
    if job.process.is_alive() and job.process.pid is not None:
        os.kill(job.process.pid, number)


def one_member(root: str, name: str = "trainer", names: tuple[str, ...] = ("trainer",), **options: Any) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(root, member=ckpt.Member(name, of=names), job=ckpt.Job(timeout=options.pop("timeout", 20)), **options)


def test_a_checkpointer_of_a_joint_run_restores_what_is_joint_alone(root: str) -> None:
    events: list[Any] = []
    state = {"w": torch.zeros(3)}
    with one_member(root, on_event=events.append) as c:
        with pytest.raises(UsageError, match="restores before it saves"):
            c.save(1, state)
        assert c.restore(state) is None
        state["w"] += 1
        c.save(1, state)
        c.wait()
        assert (c.latest, [s.number for s in c.steps()]) == (1, [1])
    assert [e.kind for e in events if e.kind.startswith("save.j")] == ["save.joint"]
    ckpt.save(f"{root}/trainer/step-00000009", {"w": torch.full((3,), 9.0)})  # which no joint step has
    state["w"].zero_()
    with one_member(root) as c:
        assert c.restore(state) == 1
        assert state["w"].eq(1).all()
        with pytest.raises(UsageError, match="step 1 is not after the one that the members of this run went on from"):
            c.save(1, state)
    assert [s.number for s in list_steps(f"{root}/trainer")] == [1], "what belongs to no joint step is removed"


@pytest.mark.parametrize("tier", [False, True])
def test_a_checkpointer_of_its_own_saves_to_no_directory_of_a_member(root: str, tier: bool) -> None:
    """By its retention, or by a save of the same step, joint steps would lose their parts."""
    state = {"w": torch.ones(3)}
    with one_member(root) as c:
        c.restore(state)
        for n in (1, 2, 3):
            c.save(n, state)
            c.wait()
    with ckpt.Checkpointer(f"{root}/trainer", keep=Latest(1), local=f"{root}-local" if tier else None) as alone:
        assert alone.restore(state) == 3
        for n in (3, 4):
            with pytest.raises(UsageError, match="only a member of the run of several jobs saves to its directory"):
                alone.save(n, state).result()
            with suppress(UsageError):
                alone.wait()
    assert [s.number for s in list_steps(f"{root}/trainer")] == [1, 2, 3]
    with ckpt.Checkpointer(f"{root}/judge", keep=Latest(1)) as other:  # beside them
        for n in (1, 2):
            other.save(n, state)
            other.wait()
    assert [s.number for s in list_steps(f"{root}/judge")] == [2]


@pytest.mark.parametrize("content", ['{"joints": [1, 2]}', "[1]", "none of ours", '{"format": "ckpt-joint", "version": 1}'])
def test_a_joint_json_of_another_program_keeps_no_job_from_saving(tmp_path: Path, content: str) -> None:
    (tmp_path / "joint.json").write_text(content)
    with ckpt.Checkpointer(str(tmp_path / "arm")) as c:
        c.save(1, {"w": torch.ones(3)}).result()
    assert [s.number for s in list_steps(str(tmp_path / "arm"))] == [1]


def test_whether_a_root_is_a_members_is_asked_until_it_answers(root: str) -> None:
    with one_member(root) as c:
        c.restore({"w": torch.ones(3)})

    def silent(backend: Any) -> Any:
        raise StorageError("no answer", where=backend.url)

    tiers = Tiers(f"{root}/trainer", local=f"{root}-local")
    with wrap_backends(silent):
        for _ in range(2):
            tiers.check_no_member()
    assert tiers.steps() == []  # it answers
    with pytest.raises(UsageError, match="only a member of the run of several jobs saves to its directory"):
        tiers.check_no_member()


def test_what_was_saved_before_the_root_answered_is_not_published_to_a_member(root: str) -> None:
    with one_member(root) as c:
        c.restore({"w": torch.ones(3)})
        c.save(1, {"w": torch.ones(3)}).result()
    away = True

    def wrap(backend: Any) -> Any:
        if away and backend.url.startswith(f"{root}/"):
            raise StorageError("no answer", where=backend.url)
        return backend

    with wrap_backends(wrap):
        alone = ckpt.Checkpointer(f"{root}/trainer", local=f"{root}-local", publish_timeout=5, job=ckpt.Job(timeout=60))
        alone.save(2, {"w": torch.zeros(3)}).result()
        away = False
        with pytest.raises(StorageError, match=r"step 2 is committed in .* but could not be published: only a member"):
            alone.close()
    assert [path.name for path in Path(root, "trainer").iterdir()] == ["step-00000001"]


def test_a_job_that_is_no_member_takes_no_step_from_a_joint_run_and_the_run_none_from_it(root: str) -> None:
    state = {"w": torch.ones(3)}
    with one_member(root) as c:
        c.restore(state)
        for n in (1, 2):
            c.save(n, state)
        c.wait()
        ckpt.save(f"{root}/step-00000003", state)
        c.save(3, state)
        with pytest.raises(ConflictError, match="a checkpoint of one job is here"):
            c.wait()
    with pytest.raises(UsageError, match="a step of several jobs is here") as err:
        ckpt.save(f"{root}/step-00000002", state)
    assert "member=" in (err.value.hint or "")
    with ckpt.Checkpointer(root, keep=Latest(1)) as alone:
        for n in (4, 5):
            alone.save(n, state)
        alone.wait()
    assert [(s.number, [*s.members]) for s in list_steps(root) if s.number != 3] == [(1, ["trainer"]), (2, ["trainer"]), (5, [])]
    assert [ckpt.load(ckpt.open(f"{root}/step-0000000{n}", member="trainer").url, state).bytes_needed for n in (1, 2)] == [12, 12]


def test_a_member_that_restores_again_is_asked_for_lower_steps_too(root: str) -> None:
    state = {"w": torch.zeros(3)}
    with one_member(root) as c:
        c.restore(state)
        for n in (1, 9):
            c.save(n, state)
            c.wait()
        assert c.restore(state, step=1) == 1
        assert c._joint is not None
        c._joint._run.request(2)
        assert c.requested() == 2


def test_data_that_a_member_finds_damaged_moves_it_to_the_step_before(root: str) -> None:
    state = {"w": torch.zeros(3)}
    with one_member(root) as c:
        c.restore(state)
        for n in (1, 2):
            state["w"] += 1
            c.save(n, state)
        c.wait()
    (data,) = Path(root, "trainer", "step-00000002", "data").iterdir()
    data.write_bytes(data.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    with one_member(root) as c:
        assert c.restore(state) == 1
        assert state["w"].eq(1).all()
    with one_member(root) as c, pytest.raises(CorruptError):
        c.restore(state, step=2)


def test_what_a_member_that_stood_still_has_on_its_disk_replaces_nothing_of_a_later_process(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, state = threading.Event(), {"w": torch.zeros(3)}
    old = one_member(root, local=tmp_path / "old", publish_timeout=0.5)
    old.restore(state)
    old.save(1, state)
    old.wait()
    uploader = old._tiers.uploader
    assert uploader is not None
    choose = uploader._choose
    monkeypatch.setattr(uploader, "_choose", lambda: choose() if goes_on.wait(60) else None)
    now = time.time_ns
    with monkeypatch.context() as patch:  # its clock is ahead, so its save counts as the later one
        patch.setattr("ckpt.formats.native.commit.time.time_ns", lambda: now() + 24 * 3600 * 10**9)
        old.save(2, state).result()
    with one_member(root, local=tmp_path / "new") as new:
        assert new.restore(state) == 1
        state["w"] += 1
        new.save(2, state)
    goes_on.set()
    with pytest.raises(StorageError, match="could not be published: trainer restarted"):
        old.close()
    state["w"] += 1
    with one_member(root) as again:
        assert again.restore(state) == 2 and state["w"].eq(1).all()


@pytest.mark.parametrize("place", ["trainer/step-00000002", "step-00000002"])
@pytest.mark.parametrize("change", [{"version": 2}, {"features": ["members", "later"]}])
def test_what_a_later_release_saved_is_an_error_by_name_and_nobody_goes_back_behind_it(
    place: str, change: dict[str, Any], root: str
) -> None:
    state = {"w": torch.zeros(3)}
    with one_member(root) as c:
        c.restore(state)
        for n in (1, 2):
            state["w"] += 1
            c.save(n, state)
            c.wait()
    change_record(Path(root, place), **change)
    with one_member(root) as c:
        for step in (None, 2):
            with pytest.raises(FormatError, match="not known"):
                c.restore(state, step=step)
            assert Path(root, place, "checkpoint.json").exists()
        assert c.restore(state, step=1) == 1, "who says so gives up what it has"
        c.save(3, state)
        c.wait()
    with one_member(root) as c:
        assert c.restore(state) == 3
    assert list_steps(root)[1].abandoned == 1, "the branch that was written last is without it"


def added_judge(root: str) -> None:
    """In a process of its own; its exit code is the step that it restored."""
    c = ckpt.Checkpointer(root, member=ckpt.Member("judge", of=("trainer", "judge")), job=ckpt.Job(timeout=60))
    os._exit(c.restore({"w": 0}, members=MemberChanges(added=["judge"])) or 0)


def test_a_step_that_was_given_up_is_said_by_wait_and_by_an_event(root: str) -> None:
    events: list[Any] = []
    state = {"w": torch.zeros(3)}
    with one_member(root) as c:
        c.restore(state)
        c.save(1, state)
    changes = MemberChanges(added=["judge"])
    judge = fork_server().Process(target=added_judge, args=(root,))
    judge.start()
    try:
        c = one_member(root, names=("trainer", "judge"), timeout=60, on_event=events.append)
        assert c.restore(state, members=changes) == 1
        judge.join(60)
        assert judge.exitcode == 1, "a new member begins where the others are"
        assert c._joint is not None
        c._joint._run.timeout = 1.0
        c.save(2, state)
        with pytest.raises(ConflictError, match="step 2 was given up: judge did not save it within 1 s"):
            c.close()
    finally:
        judge.kill()
    assert [(e.step, e.reason) for e in events if e.kind == "save.given_up"] == [(2, "judge did not save it within 1 s")]
    assert [s.number for s in list_steps(root) if s.committed] == [1]
