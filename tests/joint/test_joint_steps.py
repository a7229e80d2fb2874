"""The joint step of several members: what becomes of it whoever is late, gone or back again. Members are threads with a JointRun each, and
their checkpoints are real."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import ConflictError, CorruptError, FormatError, NotCommittedError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.commit import CommitRecord, new_id
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.runs import joint, removal
from ckpt.runs.joint import JointRun
from ckpt.runs.members import Generation, JointOutcome, MemberChanges, check_members, member_path
from ckpt.runs.removal import remove_at
from ckpt.runs.step_listing import Step, list_steps
from tests.cli.running import run as run_command

T = TypeVar("T")
NAMES = ("trainer", "buffer", "rollouts")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def members(root: str, names: Sequence[str] = NAMES, timeout: float = 20) -> list[JointRun]:
    return [JointRun(root, name, names, timeout) for name in names]


def together(*work: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(60) for future in [pool.submit(one) for one in work]]


def restored(runs: Sequence[JointRun], step: int | None = None) -> list[int | None]:
    """All members restore, and load nothing."""

    def restore(run: JointRun) -> int | None:
        run.start_over()
        while True:
            decided = run.join(step)
            if run.loaded():
                return decided.step

    return together(*(lambda run=run: restore(run) for run in runs))  # type: ignore[misc]


def save(run: JointRun, n: int, value: float = 0.0) -> Callable[[], JointOutcome]:
    """A member commits its checkpoint of step ``n``; gives how to wait for the joint one."""
    future = saving(run, n, value)
    return lambda: future.result(60)


def saving(run: JointRun, n: int, value: float = 0.0) -> Future[JointOutcome]:
    run.begin(n)
    report = ckpt.save(f"{run.root}/{member_path(run.member, n)}", {"w": torch.full((4,), n + value)})
    return run.prepared(n, report.id, 1, report.tensor_bytes)


def steps(root: str) -> list[int]:
    return [s.number for s in list_steps(root) if s.committed and s.number is not None]


def record(root: str, n: int) -> CommitRecord:
    path = Path(root) / f"step-{n:08d}" / "checkpoint.json"
    return CommitRecord.from_bytes(path.read_bytes(), str(path))


def test_a_step_exists_once_the_last_member_has_saved_it(root: str) -> None:
    runs = members(root)
    assert restored(runs) == [None] * 3
    first = [save(run, 10) for run in runs[:2]]
    end = time.monotonic() + 20
    while [s.reason for s in list_steps(root)] != ["saved by buffer, trainer; awaited: rollouts"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert steps(root) == []
    with pytest.raises(NotCommittedError, match="not committed: saved by buffer, trainer; awaited: rollouts"):
        ckpt.open(f"{root}/step-00000010")
    with pytest.raises(NotCommittedError, match=r"committed no step: trainer \(restored\), buffer \(restored\), rollouts \(restored\)"):
        ckpt.open(root)
    assert "saved by buffer, trainer; awaited: rollouts" in ckpt_command("ls", f"{root}/step-00000010").stdout
    last = save(runs[2], 10)
    assert [ended().given_up for ended in (*first, last)] == [None] * 3
    (step,) = list_steps(root)
    assert (step.number, step.committed, step.world_size, step.tensor_bytes) == (10, True, 3, 48)
    assert {name: c.path for name, c in step.members.items()} == {name: f"{name}/step-00000010" for name in NAMES}
    for name, checkpoint in step.members.items():
        opened = ckpt.open(f"{root}/{checkpoint.path}")
        assert opened["w"][...].eq(10).all() and list_steps(f"{root}/{name}")[0].id == checkpoint.id
    with pytest.raises(UsageError, match="several jobs: trainer, buffer, rollouts") as err:
        ckpt.open(f"{root}/step-00000010")
    assert f"{root}/buffer/step-00000010" in (err.value.hint or "")


def test_a_member_that_does_not_come_ends_the_step_for_all_and_the_one_before_stays(root: str) -> None:
    runs = members(root, timeout=4)
    restored(runs)
    assert {ended().given_up for ended in [save(run, 1) for run in runs]} == {None}
    given_up = [ended().given_up for ended in [save(run, 2) for run in runs[:2]]]
    assert given_up == ["rollouts did not save it within 4 s"] * 2
    assert save(runs[2], 2)().given_up == "rollouts did not save it within 4 s", "it comes too late, and hears so"
    assert steps(root) == [1]
    with pytest.raises(NotCommittedError, match="given up: rollouts"):
        ckpt.open(f"{root}/step-00000002")
    watched = [run_command("watch", "--once", f"{root}/step-0000000{n}") for n in (1, 2)]
    assert [w.exit_code for w in watched] == [0, 11] and "failed: this step was given up: rollouts" in watched[1].stdout
    assert {ended().given_up for ended in [save(run, 3) for run in runs]} == {None}
    assert restored(members(root)) == [3] * 3


@pytest.mark.parametrize("count", [1, 8, 64])
def test_a_joint_commit_takes_three_requests_of_a_member_and_one_more_of_the_last(
    count: int, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits looks again when the last one has committed: how often it does so before is time, and no more than once a second."""
    names, runs, counts = tuple(f"m{n}" for n in range(count)), list[JointRun](), list[FaultyProcess]()
    for name in names:
        counts.append(FaultyProcess())
        with wrap_backends(counts[-1].wrap):
            runs.append(JointRun(root, name, names, 60))
    generation = joint.Generation(id=new_id(), members=names, decided=True)
    assert runs[0]._swap(None, generation)
    committed = threading.Event()

    def requests(process: FaultyProcess, since: int = 0) -> int:
        """The size of an object comes with its bytes, wherever a request is a message."""
        return sum(not what.startswith("size ") for what in process.log) - since

    def polls(end: float) -> Iterator[None]:
        yield None
        assert committed.wait(60)
        yield None

    monkeypatch.setattr(joint, "_polls", polls)
    before, waiting = [requests(process) for process in counts], []
    for run, process, since in zip(runs, counts, before, strict=True):
        run.generation = generation
        run.begin(1)
        waiting.append(run.prepared(1, new_id(), 1, 0))
        end = time.monotonic() + 60
        while requests(process, since) < 2:  # its mark, and a look at those of all
            assert time.monotonic() < end
            time.sleep(0.001)
    assert waiting[-1].result(60).given_up is None
    committed.set()
    assert {future.result(60).given_up for future in waiting} == {None}
    assert record(root, 1).members.keys() == set(names)
    assert [requests(process, since) for process, since in zip(counts, before, strict=True)] == [3] * (count - 1) + [4]

    for n in (2, 3, 4):
        since = requests(counts[0])
        runs[0].request(n)
        assert requests(counts[0], since) == 1
    since = requests(counts[-1])
    assert (runs[-1].requested(), requests(counts[-1], since)) == (4, 1)
    for name in names:
        os.makedirs(f"{root}/{name}/step-00000001")
    since = requests(counts[0])
    assert [s.number for s in runs[0].steps()] == [1]
    assert requests(counts[0], since) <= 3, "the directories of the members are not looked into"


def test_a_step_that_was_committed_and_removed_before_a_member_looks_is_not_given_up(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, removed = members(root, NAMES[:2]), threading.Event()
    restored(runs)

    def polls(end: float) -> Iterator[None]:
        yield None
        assert removed.wait(60)
        yield None

    monkeypatch.setattr(joint, "_polls", polls)
    run, last = runs
    first = [save(run, 1)]
    marks = Path(root, "step-00000001", "members")
    while not list(marks.rglob("*-1-*")):
        time.sleep(0.001)
    time.sleep(0.05)
    assert save(last, 1)().given_up is None
    late = save(last, 2)
    while not list(Path(root, "step-00000002", "members").rglob("*-1-*")):
        time.sleep(0.001)
    assert save(run, 2)().given_up is None
    assert [s.number for s in run.retain(ckpt.policies.Latest(1))] == [1]
    removed.set()
    assert [ended().given_up for ended in (*first, late)] == [None, None]
    assert steps(root) == [2] and not Path(root, "step-00000001").exists()


def test_a_step_that_a_member_has_passed_is_given_up_at_once(root: str) -> None:
    runs = members(root, timeout=120)
    restored(runs)
    passed = [save(run, 1) for run in runs[:2]]
    assert {ended().given_up for ended in [save(run, 2) for run in runs]} == {None}
    assert {ended().given_up for ended in passed} == {"rollouts did not save it before step 2"}
    assert steps(root) == [2]


def test_a_step_that_was_not_complete_never_comes_back(root: str) -> None:
    """Marks of one life of the job and those of the next are not added up, and a job that is not alive any more commits nothing."""
    old = members(root)
    restored(old)
    assert {ended().given_up for ended in [save(run, 10) for run in old]} == {None}
    late = [save(run, 20, 0.25) for run in old[:2]]  # the third dies, and all are restarted
    new = members(root)
    assert restored(new) == [10] * 3
    for ended in (*late, save(old[2], 20, 0.25)):  # who is told by the record, and who by the generation, is chance
        reason: str | None
        try:
            reason = ended().given_up
        except ConflictError as err:
            reason = err.message
        assert reason is not None and "restarted" in reason
    for run in old:
        with pytest.raises(ConflictError, match="restarted, and the members of this run restore again"):
            save(run, 30)()
        with pytest.raises(ConflictError, match="restarted"):
            run.begin(40)
    assert {ended().given_up for ended in [save(run, 20, 0.5) for run in new]} == {None}
    assert steps(root) == [10, 20]
    for name in NAMES:
        assert ckpt.open(f"{root}/{name}/step-00000020")["w"][...].eq(20.5).all()


@pytest.mark.parametrize("stops", ["while it waits", "before it commits"])
def test_a_member_that_stood_still_undoes_nothing_of_those_that_restarted_meanwhile(
    stops: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, goes_on, stopped = members(root), threading.Event(), threading.Event()
    restored(old)
    assert {ended().given_up for ended in [save(run, 10) for run in old]} == {None}
    if stops == "while it waits":  # and its deadline passes
        monkeypatch.setattr(joint, "_polls", lambda end: (goes_on.wait(60) if turn else stopped.set() for turn in range(2)))
        late = [saving(old[0], 20, 0.25)]
        assert stopped.wait(60)
        monkeypatch.undo()
    else:
        late = [saving(run, 20, 0.25) for run in old[:2]]
        put = old[2]._put

        def put_later(n: int, record: CommitRecord) -> CommitRecord:
            stopped.set()
            assert goes_on.wait(60)
            return put(n, record)

        for run in old:
            monkeypatch.setattr(run, "_put", put_later)
        late = [*late, saving(old[2], 20, 0.25)]
        assert stopped.wait(60)
    new = members(root)
    assert restored(new) == [10] * 3
    assert {ended().given_up for ended in [save(run, 20, 0.5) for run in new]} == {None}
    before = record(root, 20)
    goes_on.set()
    for ended in late:
        told = ended.exception(60)  # who is told by the record, and who by the generation, is chance
        assert "restarted" in str(told or ended.result().given_up)
    assert record(root, 20) == before, "what counts stays"
    new[0].request(30)
    old[0].request(25)
    assert new[1].requested() == 30
    assert old[0].retain(ckpt.policies.Latest(1)) == []
    old[1].sweep()
    assert steps(root) == steps(f"{root}/buffer") == [10, 20]
    assert restored(members(root)) == [20] * 3


@pytest.mark.parametrize("late", [2, 3])
def test_a_member_that_stood_still_saves_no_step_again_that_a_later_process_has_saved(late: int, root: str) -> None:
    """Step 2 is one that both go back behind; of step 3 the member hears when its save looks at what is there."""
    state = {"w": torch.zeros(3)}
    old, new = (ckpt.Checkpointer(root, member=ckpt.Member("trainer", of=("trainer",)), job=ckpt.Job(timeout=20)) for _ in range(2))
    old.restore(state)
    for n in (1, 2):
        old.save(n, state)
        old.wait()
    old.restore(state, step=1)
    new.restore(state, step=1)
    state["w"] += 1
    for n in (2, 3):
        new.save(n, state)
        new.wait()
    state["w"] += 1
    with pytest.raises(ConflictError, match="trainer restarted"):
        old.save(late, state).result()
    new.close()
    with ckpt.Checkpointer(root, member=ckpt.Member("trainer", of=("trainer",)), job=ckpt.Job(timeout=20)) as again:
        assert again.restore(state) == 3
        assert again.restore(state, step=2) == 2
    assert state["w"].eq(1).all()


@pytest.mark.parametrize("moment", ["after it is removed", "while it is removed"])
def test_a_step_that_retention_removes_is_not_committed_again_by_a_member_that_saw_its_marks(
    moment: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, goes_on, stopped = members(root, NAMES[:2]), threading.Event(), threading.Event()
    restored(runs)
    monkeypatch.setattr(joint, "_SOON", -1.0)
    run, last = runs
    put = last._put

    def put_later(n: int, record: CommitRecord) -> CommitRecord:
        if n == 1:
            stopped.set()
            assert goes_on.wait(60)
        return put(n, record)

    monkeypatch.setattr(last, "_put", put_later)
    first = [save(run, 1), save(last, 1)]
    assert stopped.wait(60)
    assert first[0]().given_up is None
    committed = Path(root, "step-00000001", "checkpoint.json").read_bytes()
    assert {ended().given_up for ended in [save(each, 2) for each in runs]} == {None}
    if moment == "while it is removed":
        remove = removal._remove_members

        def put_between(backend: Backend, step: Step) -> None:
            backend.put_if("step-00000001/checkpoint.json", committed, expected=None)
            remove(backend, step)

        monkeypatch.setattr(removal, "_remove_members", put_between)
    assert [s.number for s in run.retain(ckpt.policies.Latest(1))] == [1]
    assert not Path(root, "step-00000001", "checkpoint.json").exists()
    goes_on.set()
    assert first[1]().given_up is None
    assert steps(root) == [2]
    monkeypatch.undo()
    run.retain(ckpt.policies.Latest(1))
    assert not Path(root, "step-00000001", "checkpoint.json").exists()
    assert restored(members(root, NAMES[:2])) == [2] * 2


def test_clocks_that_are_days_apart_change_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is off by up to a day in either direction: no two members, and no two looks of one, agree."""
    chance, now = random.Random(0), time.time_ns
    monkeypatch.setattr("ckpt.formats.native.commit.time.time_ns", lambda: now() + chance.choice((-24, -1, 1, 24)) * 3600 * 10**9)
    names, last = NAMES[:2], 0
    for life in range(3):
        runs = members(root, names)
        assert restored(runs) == [last or None] * 2
        for n in (last + 1, last + 2):
            assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
        runs[0].retain(ckpt.policies.Latest(2))
        late = save(runs[1], last + 3)  # of which the next life knows nothing
        last += 2
        assert steps(root) == [last - 1, last]
        if life == 1:
            Path(root, "joint.json").unlink()  # the next generation sorts after those before all the same
        again = members(root, names)
        assert restored(again) == [last] * 2
        again[1].sweep()
        assert steps(f"{root}/buffer") == [last - 1, last]
        with suppress(ConflictError):
            assert late().given_up is not None


def test_members_that_disagree_about_the_step_or_the_leader_are_errors_by_name(root: str) -> None:
    runs = members(root, NAMES[:2], timeout=1)
    restored(runs)
    ended = [save(runs[0], 10), save(runs[1], 11)]
    assert [each().given_up for each in ended] == ["buffer did not save it within 1 s", "trainer did not save it within 1 s"]
    assert steps(root) == []
    JointRun(root, "buffer", ("buffer", "trainer"), 1).join()
    with pytest.raises(ConflictError, match="here they are trainer, buffer, in joint.json buffer, trainer") as err:
        JointRun(root, "trainer", ("trainer", "buffer"), 1).join()
    assert "in the same order" in (err.value.hint or "")


def test_a_checkpoint_of_another_run_or_none_in_the_place_of_a_member_is_an_error_by_name(root: str, tmp_path: Path) -> None:
    for place in (root, str(tmp_path / "other")):
        runs = members(place, NAMES[:2])
        restored(runs)
        assert {ended().given_up for ended in [save(run, 1) for run in runs]} == {None}
    shutil.rmtree(f"{root}/buffer")
    shutil.copytree(tmp_path / "other" / "buffer", f"{root}/buffer")
    with pytest.raises(CorruptError, match="step-00000001: the checkpoint of buffer is another one: buffer/step-00000001"):
        JointRun(root, "trainer", NAMES[:2], 5).join()
    shutil.rmtree(f"{root}/buffer")
    with pytest.raises(CorruptError, match="step-00000001: the checkpoint of buffer is gone: buffer/step-00000001"):
        JointRun(root, "trainer", NAMES[:2], 5).join()
    assert steps(f"{root}/trainer") == [1], "nothing is lost"


def test_members_that_restart_at_once_agree_in_one_generation(root: str) -> None:
    names = tuple(f"m{n}" for n in range(8))
    for last in (None, 1):
        runs = members(root, names)
        assert restored(runs) == [last] * 8
        assert len({run.check_present().id for run in runs}) == 1
        assert {ended().given_up for ended in [save(run, (last or 0) + 1) for run in runs]} == {None}


def test_going_back_is_a_branch_of_all_members(root: str) -> None:
    runs = members(root)
    restored(runs)
    for n in (1, 2, 3):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
    runs = members(root)
    assert restored(runs, step=1) == [1] * 3
    assert {ended().given_up for ended in [save(run, 2, 0.5) for run in runs]} == {None}
    assert [(s.number, s.abandoned) for s in list_steps(root)] == [(1, None), (2, None), (3, 1)]
    assert restored(members(root)) == [2] * 3
    assert restored(members(root), step=3) == [3] * 3


def test_a_damaged_checkpoint_of_one_member_moves_all_to_the_step_before(root: str) -> None:
    runs = members(root)
    restored(runs)
    for n in (1, 2, 3):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
    remove_at(f"{root}/buffer/step-00000003")  # which the records say
    runs = members(root)

    def restore(run: JointRun) -> int | None:
        while True:
            decided = run.join()
            if run.member == "rollouts" and decided.step == 2:  # which only who reads its data sees
                run.refuse("the digest is wrong")
            elif run.loaded():
                return decided.step

    assert together(*(lambda run=run: restore(run) for run in runs)) == [1] * 3  # type: ignore[misc]
    remove_at(f"{root}/trainer/step-00000002")
    remove_at(f"{root}/trainer/step-00000001")
    with pytest.raises(CorruptError, match="no joint step is whole"):
        JointRun(root, "trainer", NAMES, 5).join()


def test_a_restore_waits_for_all_and_a_member_that_died_in_it_does_not_count(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = members(root, timeout=1)
    for run in runs[:2]:
        run.join()
    monkeypatch.setattr("ckpt.runs.joint._QUIET", 0.1)
    with pytest.raises(ConflictError, match="^rollouts did not begin to restore and buffer did not end the restore within 1 s"):
        runs[0].loaded()
    assert f"{root}: the restore waits for rollouts to start, for 1 s in all" in caplog.messages
    dead = members(root, timeout=1)[2]
    dead.join()
    again = members(root)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(restored, again[:2])
        time.sleep(1)
        assert not waiting.done(), "a process that joined and died is awaited"
        assert restored(again[2:]) == [None]
        assert waiting.result(60) == [None] * 2


def test_two_processes_of_one_member_and_a_step_that_falls_are_errors(root: str) -> None:
    first, second = JointRun(root, "trainer", ("trainer",), 20), JointRun(root, "trainer", ("trainer",), 20)
    first.join()
    second.join()
    with pytest.raises(ConflictError, match="another process restores as member trainer"):
        assert not first.loaded() and first.join()
    assert restored([second]) == [None]
    assert save(second, 5)().given_up is None
    for n in (5, 4):
        with pytest.raises(UsageError, match=f"step {n} is saved already"):
            second.begin(n)
    second.begin(6)  # and the save fails
    second.failed()
    assert save(second, 6)().given_up is None
    third = JointRun(root, "trainer", ("trainer",), 20)
    assert restored([third]) == [6]
    for n in (6, 5):
        with pytest.raises(UsageError, match="not after the one that the members of this run went on from"):
            third.begin(n)


def test_a_run_without_a_step_says_which_members_have_begun(root: str) -> None:
    JointRun(root, "trainer", NAMES, 5).join()
    text = "members have committed no step: trainer (restored), buffer (awaited), rollouts (awaited)"
    for command in ("ls", "inspect"):
        assert text in ckpt_command(command, root).stderr
    marks = Path(root, "step-00000004", "members", "0" * 16)
    marks.mkdir(parents=True)
    (marks / f"buffer-{'0' * 16}-1-8").touch()
    listed = ckpt_command("ls", root)
    assert listed.exit_code == 0 and "saved by buffer before the members restarted: it will not be committed" in listed.stdout


def test_members_that_do_not_agree_are_an_error_by_name(root: str) -> None:
    JointRun(root, "trainer", ("trainer", "buffer"), 1).join()
    with pytest.raises(ConflictError, match=r"here they are trainer, buffer, rollouts, in joint.json trainer, buffer"):
        JointRun(root, "buffer", NAMES, 1).join()
    for wrong, text in (
        (("a", ["a", "a"]), "twice"),
        (("c", ["a", "b"]), "not among"),
        (("a-b", ["a-b"]), "cannot be the name"),
        (("members", ["members"]), "cannot be the name"),
        (("a", "a"), "list of names"),
        (("a", ()), "'a' is not among the members none"),
        ((None, ["a", "b"]), "None is not among the members a, b"),
    ):
        with pytest.raises(UsageError, match=text):
            check_members(*wrong)
    with pytest.raises(UsageError, match="restores before it saves"):
        JointRun(root, "trainer", NAMES, 1).begin(1)


def test_members_are_added_dropped_and_renamed_by_name_alone(root: str) -> None:
    runs = members(root)
    restored(runs)
    assert {ended().given_up for ended in [save(run, 4) for run in runs]} == {None}
    names = ("actor", "buffer", "judge")
    with pytest.raises(UsageError, match="step 4 has no actor, judge and has trainer, rollouts as well"):
        JointRun(root, "actor", names, 5).join()
    changes = MemberChanges(added=["judge"], dropped=["rollouts"], renamed={"actor": "trainer"})
    others = members(root, names)
    decided = together(*(lambda run=run: run.join(None, changes) for run in others))  # type: ignore[misc]
    assert [{name: c.path for name, c in d.checkpoints.items()} for d in decided] == [
        {"actor": "trainer/step-00000004", "buffer": "buffer/step-00000004"}
    ] * 3
    with pytest.raises(UsageError, match="asks for step 3, and the others continue from 4"):
        others[0].join(3)


def test_what_no_rule_keeps_goes_and_what_belongs_to_no_step_too(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the rule that keeps none, as no step has its metric."""
    runs, keep = members(root, timeout=4), ckpt.policies.Latest(2) | ckpt.policies.Best("reward", mode="max")
    restored(runs)
    for n in (1, 2, 3):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
    assert save(runs[0], 4)().given_up is not None
    assert {ended().given_up for ended in [save(run, 5) for run in runs]} == {None}
    assert [s.number for s in runs[0].retain(keep)] == [1, 2]
    (warning,) = (record.getMessage() for record in caplog.records if "steps are removed" in record.getMessage())
    assert root in warning and "Best('reward', mode='max') keeps none: no step has this metric" in warning
    caplog.clear()
    for run in runs:
        run.sweep([s.id for s in list_steps(f"{root}/{run.member}") if s.number == 4 and s.id is not None])
        assert steps(f"{root}/{run.member}") == [3, 5]
    runs = members(root)
    assert restored(runs) == [5] * 3
    assert [s.number for s in runs[0].retain(keep)] == [4], "which nobody asks about any more"
    assert "steps are removed" not in caplog.text
    assert sorted(os.listdir(root)) == ["buffer", "joint.json", "rollouts", "step-00000003", "step-00000005", "trainer"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": "ckpt-joint", "version": 1}', b"\xff" * 40])
def test_a_damaged_generation_is_an_error_that_says_where(root: str, text: bytes) -> None:
    os.makedirs(root)
    Path(root, "joint.json").write_bytes(text)
    with pytest.raises((CorruptError, FormatError)) as err:
        JointRun(root, "trainer", NAMES, 1).join()
    assert err.value.where == f"{root}/joint.json"


def test_a_later_generation_is_not_read_by_an_older_release(root: str) -> None:
    os.makedirs(root)
    data = Generation(id="0" * 16, members=NAMES).to_bytes().replace(b'"version": 1', b'"version": 2')
    Path(root, "joint.json").write_bytes(data)
    with pytest.raises(FormatError, match="version 2"):
        JointRun(root, "trainer", NAMES, 1).join()


def test_the_leader_asks_and_only_its_own_generation_hears(root: str) -> None:
    runs = members(root)
    restored(runs)
    assert runs[1].requested() is None
    runs[0].request(70)
    assert [run.requested() for run in runs] == [70] * 3
    runs = members(root)
    restored(runs)
    assert runs[1].requested() is None
    runs[0].request(80)
    assert runs[2].requested() == 80
    for damaged in (b"", b"{", b'{"step": 90}', b'{"generation": 1, "step": 90}'):
        Path(root, "requested.json").write_bytes(damaged)
        assert runs[1].requested() is None
        runs[0].request(90)
        assert runs[1].requested() == 90, damaged


def test_a_joint_record_that_is_damaged_hides_no_other(root: str) -> None:
    runs = members(root)
    restored(runs)
    for n in (1, 2):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
    path = Path(root) / "step-00000002" / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b"trainer/", b"traiter/"))
    assert [(s.number, s.committed, s.damaged) for s in list_steps(root)] == [(1, True, False), (2, False, True)]
    assert restored(members(root)) == [1] * 3
    Path(root, "joint.json").unlink()
    assert restored(members(root)) == [1] * 3
    assert record(root, 1).features == ("members",)
    remove_at(f"{root}/step-00000001")
    with pytest.raises(CorruptError, match="no joint step is whole: step-00000002: .*damaged"):
        JointRun(root, "trainer", NAMES, 5).join()


def test_nothing_of_a_member_is_removed_while_storage_does_not_say_what_joint_steps_need(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = members(root, NAMES[:2])
    restored(runs)
    for n in (1, 2):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}

    def fails(*_: object) -> list[Step]:
        raise StorageError("timed out")

    monkeypatch.setattr("ckpt.runs.members.joint_steps", fails)
    for command in (("gc", f"{root}/trainer", "--keep", "latest=1"), ("rm", f"{root}/trainer/step-00000001")):
        assert "timed out" in ckpt_command(*command, "--yes").stderr
    assert steps(f"{root}/trainer") == [1, 2]


def ckpt_command(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_commands_work_on_a_joint_step_as_on_any_other(root: str, tmp_path: Path) -> None:
    runs = members(root)
    restored(runs)
    for n in (1, 2, 3):
        assert {ended().given_up for ended in [save(run, n) for run in runs]} == {None}
    one, two, three = (f"{root}/step-0000000{n}" for n in (1, 2, 3))
    listed = json.loads(ckpt_command("ls", "--json", root).stdout)["steps"]
    assert [(s["step"], list(s["members"])) for s in listed] == [(n, list(NAMES)) for n in (1, 2, 3)]
    own = json.loads(ckpt_command("ls", "--json", f"{root}/trainer").stdout)["steps"]
    assert listed[0]["stored_bytes"] > 2 * own[0]["stored_bytes"] > 0
    assert "of trainer, buffer, rollouts" in ckpt_command("ls", root).stdout
    assert f"{root}/buffer/step-00000002" in ckpt_command("inspect", two).stdout
    stats = ckpt_command("stats", two)
    assert (stats.exit_code, stats.stdout) == (2, "") and f"{root}/buffer/step-00000002" in stats.stderr, "where the spans are"
    saves = json.loads(ckpt_command("stats", "--json", root).stdout)["saves"]
    assert [(save["step"], save["member"]) for save in saves] == [(n, name) for n in (1, 2, 3) for name in NAMES]
    assert all(save["seconds"] > 0 and save["problem"] is None for save in saves)
    table = [line.split() for line in ckpt_command("stats", root).stdout.splitlines()]
    assert [row[:2] for row in table] == [["STEP", "MEMBER"], *([str(n), name] for n in (1, 2, 3) for name in NAMES)]
    for command in (("report", root, "-o", str(tmp_path / "report.html")), ("watch", root)):
        refused = ckpt_command(*command)
        assert refused.exit_code == 2 and f"name the run of one: {root}/trainer, {root}/buffer" in refused.stderr

    assert ckpt.open(two, member="buffer").url == ckpt.open(f"{root}/buffer/step-00000002").url
    with pytest.raises(NotFoundError, match="member 'judge' has no part in this step: it is of trainer, buffer, rollouts"):
        ckpt.open(two, member="judge")
    with pytest.raises(NotFoundError, match="of one job, or none"):
        ckpt.open(f"{root}/buffer/step-00000002", member="buffer")

    assert ckpt_command("tag", two, "good").exit_code == 0
    assert ckpt_command("rm", two, "--yes").exit_code != 0
    assert steps(root) == [1, 2, 3]

    copied = f"{tmp_path}/copy"
    assert ckpt_command("cp", two, f"{copied}/").exit_code == 0
    assert ckpt_command("cp", two, f"{copied}/").exit_code == 0, "again, with nothing left to copy"
    assert ckpt_command("verify", f"{copied}/step-00000002").exit_code == 0
    assert restored(members(copied)) == [2] * 3
    data = next(Path(copied, "buffer", "step-00000002", "data").iterdir())
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    verified = ckpt_command("verify", f"{copied}/step-00000002", "--json")
    found = json.loads(verified.stdout)
    assert (verified.exit_code, found["ok"]) == (20, False)
    assert {name: one["ok"] for name, one in found["members"].items()} == {name: name != "buffer" for name in NAMES}

    waiting = saving(runs[0], 4)
    refused = ckpt_command("rm", f"{root}/buffer/step-00000002", "--yes")
    assert (refused.exit_code, "it is a part of ../step-00000002" in refused.stderr) == (33, True)
    assert ckpt_command("gc", f"{root}/trainer", "--keep", "latest=1", "--yes").exit_code == 0
    assert steps(f"{root}/trainer") == [1, 2, 3, 4] and ckpt_command("rm", f"{root}/trainer/step-00000004", "--yes").exit_code == 33
    assert {ended().given_up for ended in [save(run, 4) for run in runs[1:]]} | {waiting.result(60).given_up} == {None}
    assert ckpt_command("rm", f"{root}/step-00000004", "--yes").exit_code == 0

    assert ckpt_command("rm", one, "--yes").exit_code == 0
    orphan = Path(root, "buffer", "step-00000001", "data", f"{new_id()}-00000.safetensors")
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"of a save that was killed")
    assert ckpt_command("gc", root, "--yes").exit_code == 0 and orphan.exists(), "it is young"
    assert ckpt_command("gc", root, "--keep", "latest=1", "--older-than", "0", "--yes").exit_code == 0 and not orphan.exists()
    assert steps(root) == [2, 3]
    assert all(steps(f"{root}/{name}") == [2, 3] for name in NAMES)
    assert ckpt_command("rm", three, "--yes").exit_code == 0
    assert sorted(os.listdir(root)) == ["buffer", "joint.json", "rollouts", "step-00000002", "trainer"]
    assert restored(members(root)) == [2] * 3

    record = Path(root, "buffer", "step-00000002", "checkpoint.json")
    for damage, reason in (
        (lambda: record.write_bytes(b"{"), "buffer is damaged"),
        (record.unlink, "buffer is gone: buffer/step-00000002"),
    ):
        damage()
        (lacking,) = json.loads(ckpt_command("ls", "--json", root).stdout)["steps"]
        assert (lacking["committed"], lacking["damaged"], reason in lacking["reason"]) == (False, True, True)
        assert ckpt_command("ls", "-q", root).stdout == "" and reason in " ".join(ckpt_command("ls", two).stdout.split())
