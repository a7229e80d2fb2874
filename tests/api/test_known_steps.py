"""What a job knows of its run: cheap to ask again, and never believed where the storage shows something else."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import CorruptError, NamesError, NotFoundError
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.rebuild import rebuild_checkpoint
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.policies import EverySteps, Latest, StepInfo, retention
from ckpt.runs.removal import infos, remove_steps
from ckpt.runs.step_listing import KnownSteps, Step, list_steps
from ckpt.runs.tiers import Tiers
from tests.cli.checkpoints import flip, write_checkpoint

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
TINY = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


def write(root: Path, *numbers: int) -> None:
    for n in numbers:
        write_checkpoint(str(root / f"step-{n}"), TINY, ranks=1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight steps, on a file system whose times are exact enough to be believed at once."""
    monkeypatch.setattr("ckpt.io_backends.posix_backend._COARSE", 0)
    write(tmp_path / "run", *range(8))
    return tmp_path / "run"


def read(ask: Any) -> tuple[Any, set[str]]:
    """What ``ask`` gives, and the commit records that were read for it."""
    process = FaultyProcess()
    with wrap_backends(process.wrap):
        answer = ask()
    return answer, {
        line.split()[1].split("/")[0] for line in process.log if line.startswith(("read", "size")) and "checkpoint.json" in line
    }


def test_only_what_is_new_or_changed_is_read_again(run: Path) -> None:
    known = KnownSteps(str(run))
    everything = {f"step-{n}" for n in range(8)}
    steps, records = read(known.list)
    assert steps == list_steps(str(run)) and records == everything
    assert read(known.list) == (steps, set())

    write(run, 8)
    set_tags(open_backend(str(run / "step-1")), ["mine"])
    write(run, 2)  # replaced under the same name
    (run / "step-3" / "checkpoint.json").unlink()
    shutil.rmtree(run / "step-4")
    flip(run / "step-5" / "checkpoint.json", 40)
    shutil.move(run / "step-6", run.parent / "moved")
    (run / "step-6").symlink_to(run.parent / "moved")  # the same file, and yet nothing may be removed there any more
    steps, records = read(known.list)
    assert steps == list_steps(str(run))
    assert records == {f"step-{n}" for n in (1, 2, 3, 5, 6, 8)}
    told = {s.number: s for s in steps}
    assert (told[1].tags, told[3].committed, told[5].damaged, bool(told[6].link), 4 in told) == (("mine",), False, True, True, False)


def test_what_may_have_changed_within_the_same_tick_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    known = KnownSteps(str(tmp_path))
    assert len(known.list()) == 1
    assert read(known.list)[1] == {"step-1"}


@pytest.mark.parametrize("scheme", ["file://", "inprocess://"])
def test_storages_of_every_kind_are_listed_as_they_are(tmp_path: Path, scheme: str) -> None:
    root = f"{scheme}{tmp_path}" if scheme == "file://" else f"inprocess://{tmp_path.name}"
    known = KnownSteps(root)
    for n in (3, 1, 2):
        write_checkpoint(f"{root}/step-{n}", TINY, ranks=1)
        assert known.list() == list_steps(root)
    set_tags(open_backend(f"{root}/step-2"), ["t"])
    assert known.list() == list_steps(root)
    assert [s.number for s in known.list()] == [1, 2, 3]


def test_what_a_checkpoint_uses_stays_if_that_one_is_tagged_meanwhile(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckpt.save(str(run / "step-1"), {"w": torch.full((4,), 1.0)})
    import_checkpoint(str(run / "step-1"), str(run / "step-3"))
    ckpt.save(str(run / "step-5"), {"w": torch.full((4,), 5.0)})
    steps = list_steps(str(run))
    facts = infos(steps)
    going = retention(Latest(1), facts, facts[0].created).removed
    assert going == (3, 1)
    set_tags(open_backend(str(run / "step-3")), ["release"])
    by_number = {s.number: s for s in steps}
    assert remove_steps(str(run), [by_number[n] for n in going], {i.step: i.referred_by for i in facts}) == []
    assert [s.number for s in list_steps(str(run)) if s.committed] == [1, 3, 5]
    loaded = {"w": torch.zeros(4)}
    ckpt.load(str(run / "step-3"), loaded)
    assert torch.equal(loaded["w"], torch.full((4,), 1.0))


def test_a_step_that_became_virtual_keeps_what_it_points_into(run: Path) -> None:
    """The job knows step 7 as a checkpoint with files of its own; somebody has put another in its place since."""
    tiers = Tiers(str(run), keep=Latest(2))
    assert len(tiers.steps()) == 8
    shutil.rmtree(run / "step-7")
    import_checkpoint(str(run / "step-0"), str(run / "step-7"))
    tiers.retain()
    assert sorted(p.name for p in run.iterdir()) == ["step-0", "step-6", "step-7"]


@pytest.mark.parametrize("name", ["release", "checkpoint-6", "a-step-6"])
def test_what_a_checkpoint_uses_that_is_not_judged_stays(run: Path, name: str) -> None:
    """It has no number, or that of another."""
    import_checkpoint(str(run / "step-1"), str(run / name))
    tiers = Tiers(str(run), keep=Latest(1))
    tiers.retain()
    assert {name, "step-1", "step-7"} <= {p.name for p in run.iterdir()} <= {name, "step-1", "step-6", "step-7"}
    tiers.retain()
    assert np.array_equal(ckpt.open(str(run / name))["w"][:].numpy(), TINY["w"])


# ------------------------------------------------------------------------------------------------------ the newest first


def test_what_is_gone_on_from(run: Path) -> None:
    tiers = Tiers(str(run))
    rows, records = read(lambda: tiers.copies(None))
    assert [row[0] for row in rows] == [7]
    assert records == {f"step-{n}" for n in range(8)}  # a low step may be of the branch that was written last
    rows, records = read(lambda: tiers.copies(None, {(rows[0][1], rows[0][2])}))
    assert [row[0] for row in rows] == [6] and records == set()
    flip(run / "step-7" / "checkpoint.json", 40)
    (run / "step-6" / "checkpoint.json").unlink()
    assert (tiers.latest(), tiers.copies(None)[0][0]) == (5, 5)
    assert [row[0] for row in tiers.copies(2)] == [2]


def test_with_a_local_tier_both_are_read(run: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    shutil.copytree(run / "step-6", local / "step-6")
    tiers = Tiers(str(run), local=str(local))
    assert [row[1] for row in tiers.copies(None)] == [str(run / "step-7")]
    shutil.rmtree(run / "step-7")
    assert [row[1] for row in tiers.copies(None)] == [str(local / "step-6"), str(run / "step-6")]
    assert [row[1] for row in tiers.copies(3)] == [str(run / "step-3")]
    with pytest.raises(NotFoundError, match="step 9"):
        tiers.copies(9)


def test_links_are_left_out_as_a_listing_does(run: Path) -> None:
    (run / "step-9").symlink_to(run / "step-7")
    (run / "step-3.link").symlink_to(run / "step-2")
    (run / "link-step-4").symlink_to(run / "step-5")
    tiers = Tiers(str(run))
    assert tiers.steps() == list_steps(str(run))
    assert tiers.latest() == 7


# --------------------------------------------------------------------------------------------------------------- growth


def many(count: int) -> list[Step]:
    """Steps of which each tenth points into the one before it and into the first."""
    created = "2026-01-01T00:00:00.000+00:00"
    return [
        Step(
            number=n,
            url=f"/nowhere/run/step-{n:08d}",
            committed=True,
            created=created,
            id=f"{n:016d}",
            sources=(f"/nowhere/run/step-{n - 1:08d}/data", "/nowhere/run/step-00000000") if n and n % 10 == 0 else (),
        )
        for n in range(count)
    ]


def test_what_is_known_of_steps_grows_with_their_number() -> None:
    def seconds(count: int) -> float:
        steps = many(count)
        begin = time.thread_time()
        facts = infos(steps)
        verdicts = retention(Latest(3), facts, facts[0].created)
        taken = time.thread_time() - begin
        assert facts[9].referred_by == (10,) and len(facts[0].referred_by) == (count - 1) // 10
        assert len(verdicts.removed) >= count - 4
        return taken

    assert min(seconds(6000) for _ in range(3)) < 12 * min(seconds(1000) for _ in range(3))  # 36 if it were quadratic


def test_the_order_of_removal_grows_with_the_number_of_users() -> None:
    def seconds(count: int) -> float:
        facts = [StepInfo(step=n, created=NOW, referred_by=tuple(range(1, count)) if n == 0 else ()) for n in range(count)]
        begin = time.thread_time()
        assert retention(Latest(1), facts, NOW).removed == (*range(1, count - 1),)  # the newest uses the first
        return time.thread_time() - begin

    assert min(seconds(8000) for _ in range(3)) < 20 * min(seconds(1000) for _ in range(5)) + 0.1  # 0.3 and more if it were quadratic


def test_a_save_reads_as_many_records_however_many_steps_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.io_backends.posix_backend._COARSE", 0)
    write(tmp_path, 0)
    counts = {}
    for count in (8, 64):
        for n in range(1, count):
            copied(tmp_path, n)
        with ckpt.Checkpointer(str(tmp_path), save=EverySteps(1), keep=Latest(1000)) as checkpointer:
            checkpointer.save(1000 + count, {"x": 1})
            checkpointer.wait()

            def save(to: ckpt.Checkpointer = checkpointer, step: int = 2000 + count) -> None:
                to.save(step, {"x": 1})
                to.wait()

            _, counts[count] = read(save)
    assert len(counts[64]) == len(counts[8]) <= 2


def test_of_a_run_of_many_steps_removals_wait_for_several_saves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do meanwhile counts: each look is at all of the run. The end waits for no further save."""
    monkeypatch.setattr("ckpt.runs.step_listing._FEW", 3)

    def save(n: int) -> tuple[set[int], bool]:
        process = FaultyProcess()
        with wrap_backends(process.wrap):
            checkpointer.step(n, {"x": n})
            checkpointer.wait()
        return {s.number for s in list_steps(run) if s.number is not None}, "version_tokens checkpoint.json" in process.log

    with ckpt.Checkpointer(str(run), save=EverySteps(1), keep=Latest(7)) as checkpointer:
        assert save(8) == ({*range(2, 9)}, True)
        assert save(9) == ({*range(2, 10)}, False)
        set_tags(open_backend(str(run / "step-2")), ["mine"])
        shutil.rmtree(run / "step-3")
        write(run, 4)
        write(run, 100)
        assert save(10) == ({2, *range(4, 11), 100}, False)
        assert save(11) == ({2, *range(6, 12), 100}, True)
        assert save(12) == ({2, *range(6, 13), 100}, False)
    assert {s.number for s in list_steps(run)} == {2, *range(7, 13), 100}


def copied(root: Path, number: int) -> None:
    """A checkpoint of another step and id, without data: enough to be listed."""
    record = CommitRecord.from_bytes((root / "step-0" / "checkpoint.json").read_bytes(), "")
    (root / f"step-{number}").mkdir(exist_ok=True)
    (root / f"step-{number}" / "checkpoint.json").write_bytes(replace(record, id=f"{number:016d}").to_bytes())


def test_a_save_that_replaces_a_step_reads_the_records_of_others_once(run: Path) -> None:
    """Any of them may point into the files of the step that is replaced; what was read of a record is true while it is the same."""
    others = {f"step-{n}" for n in range(8)} - {"step-3"}

    def replace_step(number: int) -> set[str]:
        url = str(run / "step-3")
        _, records = read(lambda: ckpt.save(url, {"w": torch.full((4,), float(number))}))
        assert torch.equal(ckpt.open(url)["w"][:], torch.full((4,), float(number)))
        return records & others

    assert replace_step(1) == others
    assert replace_step(2) == set()
    shutil.rmtree(run / "step-5")
    import_checkpoint(str(run / "step-3"), str(run / "step-5"))
    set_tags(open_backend(str(run / "step-1")), ["mine"])
    assert replace_step(3) == {"step-1", "step-5"}
    assert torch.equal(ckpt.open(str(run / "step-5"))["w"][:], torch.full((4,), 2.0))
    shutil.rmtree(run / "step-5")
    assert replace_step(4) == set()


# ---------------------------- A run with a checkpoint that was rebuilt without its values: a job goes on from it only if it misses nothing.

LOST = ("values", "aliases and padding", "metrics and tags")


class Job:
    """A model, an optimizer with options, and a plain value."""

    def __init__(self, lr: float) -> None:
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.counters = {"seen": 0}
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "counters": self.counters}


def command(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def lose_values(step: Path) -> None:
    """Damage the commit record, which repeats the values, and rebuild."""
    (step / "checkpoint.json").write_bytes(b"{")
    assert rebuild_checkpoint(str(step)).lost == LOST


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 2 and 4, whose values are equal to their number; 4 is rebuilt without them."""
    job = Job(lr=0.5)
    with ckpt.Checkpointer(tmp_path) as c:
        for n in (2, 4):
            job.counters["seen"] = n
            with torch.no_grad():
                job.model.weight.fill_(n)
            c.save(n, job.state())
            c.wait()
    lose_values(tmp_path / "step-00000004")
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_the_older_whole_one_is_loaded(root: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c:
        assert c.restore(job.state(), **options) == 2
    assert job.counters == {"seen": 2} and job.optimizer.param_groups[0]["lr"] == 0.5 and bool((job.model.weight == 2).all())
    assert "step-00000004 is passed over" in caplog.text and "values, aliases and padding" in caplog.text


def test_asked_for_by_its_step_it_gives_what_is_left(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c:
        with pytest.raises(CorruptError, match="nothing in the state was changed") as raised:
            c.restore(job.state(), step=4)
        assert "strict=False" in str(raised.value.hint) and job.counters == {"seen": 0}
        assert c.restore(job.state(), step=4, strict=False) == 4
    assert job.counters == {"seen": 0} and job.optimizer.param_groups[0]["lr"] == 0.1 and bool((job.model.weight == 4).all())
    assert "optimizer.param_groups of model.bias" in caplog.text and "could not recover" in caplog.text


def test_alone_it_is_an_error_that_says_how_to_take_it(root: Path) -> None:
    lose_values(root / "step-00000002")
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c, pytest.raises(CorruptError, match="could not recover") as raised:
        c.restore(job.state(), strict=False)
    assert "step=2, strict=False" in str(raised.value.hint) and not bool((job.model.weight == 4).all())


def test_what_misses_nothing_is_loaded(tmp_path: Path) -> None:
    """A state of tensors alone."""
    with ckpt.Checkpointer(tmp_path) as c:
        for n in (2, 4):
            c.save(n, {"w": torch.full((3,), float(n))})
            c.wait()
        lose_values(tmp_path / "step-00000004")
        state = {"w": torch.zeros(3)}
        assert c.restore(state) == 4 and state["w"].tolist() == [4.0] * 3


def test_another_state_is_no_reason_to_go_back_further(root: Path) -> None:
    with ckpt.Checkpointer(root) as c, pytest.raises(NamesError):
        c.restore({"other": torch.zeros(3)})


def test_what_is_lost_stays_known(root: Path) -> None:
    """A second rebuild finds whole values that are none; conversions, tags and listings go on saying so."""
    step = root / "step-00000004"
    next(step.glob("index-*/grids.arrow")).unlink()
    assert rebuild_checkpoint(str(step)).lost == ("aliases and padding", "values", "metrics and tags")
    report = rebuild_checkpoint(str(step))
    assert not report.rebuilt and set(report.lost) == set(LOST)
    command("tag", str(step), "kept")
    command("convert", "--to", "native", str(step), str(root / "step-00000006"))
    steps = json.loads(command("ls", "--json", str(root)))["steps"]
    assert [set(s["lost"]) for s in steps] == [set(), set(LOST), set(LOST)]
    assert "could not recover" in command("inspect", str(step))
