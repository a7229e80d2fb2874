"""A run that goes back to an earlier step: what was written last is gone on from, whatever the numbers and the clocks say.

The oracle is a tree of saves, each with the one that it went on from; it knows nothing of branches and their ids.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt import Checkpointer, list_steps
from ckpt.engine.copy import copy_checkpoint
from ckpt.errors import CorruptError
from ckpt.policies import All, EverySteps, KeepPolicy, Latest, Tagged
from tests.cli.checkpoints import flip
from tests.formats import oracle

NEVER = EverySteps(10**9)


def state(value: float = -1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


def saved(root: Path | str, *steps: int, go_on_from: int | None = None, restore: bool = True, keep: KeepPolicy = All()) -> None:  # noqa: B008
    """One job, which saves these steps."""
    with Checkpointer(root, save=NEVER, keep=keep) as c:
        if restore:
            c.restore(state(), step=go_on_from)
        for n in steps:
            c.save(n, state(float(n)))


def resumed(root: Path | str, **options: object) -> int | None:
    """Where a restart goes on from."""
    with Checkpointer(root, save=NEVER, **options) as c:  # type: ignore[arg-type]
        into = state()
        step = c.restore(into)
        assert step is None or torch.equal(into["w"], torch.full((4,), float(step)))
        assert c.latest == step
        return step


def abandoned(root: Path | str) -> dict[int | None, int]:
    return {s.number: s.abandoned for s in list_steps(str(root)) if s.abandoned is not None}


# ------------------------------------------------------------------------------------------------------------ what is gone on from


def test_a_restart_goes_on_from_the_branch_that_was_written_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 700, 800, 900, 1000)
    saved(tmp_path, 850, 900, go_on_from=800)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert resumed(tmp_path) == 900
    assert "the run went back, and went on without step 1000;" in caplog.text
    assert abandoned(tmp_path) == {1000: 800}
    saved(tmp_path, 950)  # a restart without a word about steps
    assert resumed(tmp_path) == 950
    assert all(np.allclose(np.frombuffer(oracle.read(p)["w"][2], np.float32), float(p.name[5:])) for p in tmp_path.glob("step-*"))
    saved(tmp_path, 1010, go_on_from=1000)  # and back again
    assert resumed(tmp_path) == 1010
    assert abandoned(tmp_path) == {850: 800, 900: 800, 950: 800}


def test_a_run_that_never_went_back_has_no_branches(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    saved(tmp_path, 3)
    saved(tmp_path, 3, 4, restore=False)
    assert [s.branches for s in list_steps(str(tmp_path))] == [()] * 4
    assert not any("branches" in json.loads(p.read_text()) for p in tmp_path.glob("*/checkpoint.json"))


def test_going_back_without_a_save_is_no_branch(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    saved(tmp_path, go_on_from=1)
    assert resumed(tmp_path) == 2


def test_a_job_that_restores_nothing_is_known_by_its_numbers(tmp_path: Path) -> None:
    saved(tmp_path, 800, 900, 1000)
    saved(tmp_path, 850, restore=False)
    assert (resumed(tmp_path), abandoned(tmp_path)) == (850, {900: 849, 1000: 849})
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-00000850")
    saved(tmp_path, 860, restore=False)
    assert (resumed(tmp_path), abandoned(tmp_path)) == (860, {900: 849, 1000: 849})
    ckpt.save(str(tmp_path / "step-870"), state(870.0))  # it knows of no branch: what is saved since is on the last one
    assert (resumed(tmp_path), abandoned(tmp_path)) == (870, {900: 849, 1000: 849})


def test_a_lower_number_within_a_job_goes_back(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 2)
    assert (resumed(tmp_path), abandoned(tmp_path)) == (2, {3: 1})


def test_what_is_damaged_gives_way_along_the_branch(tmp_path: Path) -> None:
    saved(tmp_path, 80, 90, 100)
    saved(tmp_path, 85, go_on_from=80)
    for file in (tmp_path / "step-00000085" / "data").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    assert resumed_after_damage(tmp_path) == 80
    saved(tmp_path, 83)  # it went on from 80, and 85 is not gone on from if somebody mends it
    assert abandoned(tmp_path) == {85: 80, 90: 80, 100: 80}
    for file in (tmp_path / "step-00000080" / "data").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    for file in (tmp_path / "step-00000083" / "data").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    with Checkpointer(tmp_path) as c, pytest.raises(CorruptError):
        c.restore(state())
    with Checkpointer(tmp_path) as c:
        assert c.restore(state(), step=100) == 100


def test_a_branch_whose_only_record_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 80, 90, 100)
    saved(tmp_path, 85, go_on_from=80)
    flip(tmp_path / "step-00000085" / "checkpoint.json", 40)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert resumed(tmp_path) == 100
    assert "step-00000085 cannot be read, nor whether the run had gone back before it" in caplog.text


def resumed_after_damage(root: Path) -> int | None:
    with Checkpointer(root) as c:
        return c.restore(state())


def test_a_local_tier_and_the_root_tell_one_story(tmp_path: Path) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    saved(root, 800, 900, 1000)
    with Checkpointer(root, save=NEVER, local=local) as c:
        assert c.restore(state(), step=800) == 800
        c.save(850, state(850.0))
    assert resumed(root, local=local) == 850
    assert resumed(root) == 850
    assert abandoned(root) == {900: 800, 1000: 800}
    assert {s.number for s in list_steps(str(local)) if s.committed} == {850}


# ------------------------------------------------------------------------------------------------------------------------ what stays


def test_latest_counts_along_the_branch(tmp_path: Path) -> None:
    saved(tmp_path, 80, 90, 100)
    saved(tmp_path, 81, 82, 83, go_on_from=80, keep=Latest(3))
    assert {s.number for s in list_steps(str(tmp_path))} == {81, 82, 83, 90, 100}
    saved(tmp_path, 84, 95, 110, keep=Latest(3))
    assert {s.number for s in list_steps(str(tmp_path))} == {84, 95, 100, 110}
    saved(tmp_path, 120, 130, keep=Latest(3))
    assert {s.number for s in list_steps(str(tmp_path))} == {110, 120, 130}  # passed by three, as it always was


def test_a_job_that_forgets_to_restore_removes_nothing_that_it_would_not_have_removed(tmp_path: Path) -> None:
    saved(tmp_path, 800, 900, 1000)
    saved(tmp_path, 100, 200, 300, 400, restore=False, keep=Latest(3))
    assert {s.number for s in list_steps(str(tmp_path))} == {200, 300, 400, 800, 900, 1000}


# ----------------------------------------------------------------------------------------------------------------- random histories


@dataclass(eq=False)
class Save:
    step: int
    parent: Save | None
    damaged: bool = False

    def line(self) -> list[Save]:
        line, at = [], self
        while at is not None:
            line.append(at)
            at = at.parent  # type: ignore[assignment]
        return line


@dataclass
class History:
    """What happened to a run. ``there``: what each step holds now."""

    there: dict[int, Save] = field(default_factory=dict)
    last: Save | None = None

    def on_line(self) -> list[Save]:
        """What is there of the line of the last save, the newest first."""
        return [s for s in (self.last.line() if self.last is not None else []) if self.there.get(s.step) is s]

    def begin(self, at: Save | None, n: int) -> Save:
        while at is not None and at.step >= n:
            at = at.parent
        self.last = self.there[n] = Save(n, at)
        return self.last


def play(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    root, model, log = folder / "run", History(), list[str]()
    clock = time.time_ns

    def jumping() -> int:
        return clock() + random_.randrange(-(10**14), 10**14)

    monkeypatch.setattr("ckpt.formats.native.commit.time.time_ns", jumping)
    for _ in range(random_.randrange(2, 7)):
        keep = random_.choice([All(), All(), Latest(1), Latest(2), Latest(3), Tagged()])
        at: Save | None
        with Checkpointer(root, save=NEVER, keep=keep) as c:
            how = random_.choice(["restore", "back", "back", "nothing"])
            whole = [s for s in model.there.values() if not s.damaged]
            if how == "back" and whole:
                at = random_.choice(whole)
                log.append(f"restore({at.step})")
                assert c.restore(state(), step=at.step) == at.step, log
            elif how == "nothing":
                log.append("no restore")
                at = next(iter(model.on_line()), None)
            else:
                log.append("restore")
                at = next((s for s in model.on_line() if not s.damaged), None)
                if at is None and model.there:
                    with pytest.raises(CorruptError):
                        c.restore(state())
                    return
                assert c.restore(state()) == (None if at is None else at.step), log
            for _ in range(random_.randrange(5)):
                n = random_.choice([(at.step if at is not None else 0) + random_.randrange(1, 4)] * 4 + [random_.randrange(12)])
                log.append(f"save({n}) keep={keep}")
                c.save(n, state(float(n)))
                c.wait()  # old steps go in the background
                at = model.begin(at, n)
                line = [s.step for s in model.on_line()]
                gone = set(model.there) - {s.number for s in list_steps(str(root)) if s.committed}
                for step in gone:
                    del model.there[step]
                kept = [s.step for s in model.on_line()]
                assert kept[0] == n, log
                if isinstance(keep, Latest):
                    assert kept[: keep.n] == line[: keep.n], log
        event = random_.choice(["", "", "copy", "remove", "damage", "kill"])
        if event == "copy":
            other = folder / f"run-{random_.randrange(10**9)}"
            for s in model.there.values():
                name = f"step-{s.step:08d}"
                if s.damaged:
                    shutil.copytree(root / name, other / name)
                else:
                    copy_checkpoint(str(root / name), str(other / name))
            root = other
        elif event == "remove" and len(model.there) > 1:
            step = random_.choice([n for n, s in model.there.items() if s is not model.last])
            shutil.rmtree(root / f"step-{step:08d}")
            del model.there[step]
        elif event == "damage" and model.last is not None:
            model.last.damaged = True
            for file in (root / f"step-{model.last.step:08d}" / "data").iterdir():
                with suppress(FileNotFoundError), file.open("r+b") as data:  # what it replaced is removed in the background
                    data.write(bytes(os.fstat(data.fileno()).st_size))
        elif event == "kill":
            name = root / "step-00000013" / "data"
            name.mkdir(parents=True, exist_ok=True)
            (name / "0mfzzzzzz0000000-00000.safetensors").write_bytes(b"half")
        log.append(event)
        line = {s.step for s in model.on_line()}
        assert set(abandoned(root)) == set(model.there) - line, log


def test_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(15):
        with tempfile.TemporaryDirectory() as folder:
            play(seed, Path(folder), monkeypatch)


@pytest.mark.slow
def test_many_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(15, 2015):
        with tempfile.TemporaryDirectory() as folder:
            play(seed, Path(folder), monkeypatch)


def test_a_first_save_below_steps_that_nobody_restored_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        words = [r.getMessage() for r in caplog.records if "nothing was restored" in r.getMessage()]
        caplog.clear()
        return words

    saved(tmp_path, 10, 20, restore=False)
    saved(tmp_path, 30, restore=False)
    saved(tmp_path, 25, go_on_from=20)
    assert warnings() == []
    saved(tmp_path, 20, 22, restore=False)
    (only,) = warnings()
    events: list[ckpt.monitors.Event] = []
    for alerts in (True, False):  # the log has it in any case
        with Checkpointer(tmp_path, save=NEVER, keep=All(), on_event=events.append, alerts=alerts) as c:
            c.save(21, state())
        assert len(warnings()) == 1
    (alert,) = [e for e in events if e.kind == "alert"]
    assert (alert.topic, alert.step) == ("unrestored", 21) and "nothing was restored" in (alert.reason or "")
    assert "step 20 is saved in a run that has 2 steps already (20, 25)" in only and "call restore()" in only
