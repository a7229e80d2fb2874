"""Saves with references and anchors, removals, retention, collection, copies and moves in random order, stopped at any operation on the
storage: every checkpoint that is kept loads bit for bit, and after a collection no data file is there that none of them needs."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
import xxhash

import ckpt
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, ConflictError
from ckpt.formats.native.commit import ANCHORS, COMMIT_PATH, CommitRecord
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.net.group import current_group
from ckpt.policies import Latest, retention
from ckpt.runs.orphans import find_orphans, remove_orphans
from ckpt.runs.removal import infos, remove_at, remove_steps
from ckpt.runs.step_listing import list_steps

NAMES = ("a", "b", "c", "d", "m.f")
STEPS = range(1, 13)
CODECS = (None, "zstd", "planes-zstd", "xor-planes-zstd", "xor-planes-zstd")
OPERATIONS = 60
"""On the storage, that a call takes at most, about: a process dies at one of them."""

Tensors = dict[str, bytes]


class History:
    """One run and what happens to it. ``saved``: what each committed step has; ``log``: what was done, for whom a seed fails."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place = place
        self.root = place / "run"
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.state = {name: torch.full((40 + i,), float(i)) for i, name in enumerate(NAMES)}
        self.state |= {NAMES[1]: torch.randn(6000), NAMES[2]: torch.randn(5000)}  # large enough to be stored as differences
        self.state |= {NAMES[4]: torch.randn(4, 50)}
        self.saved: dict[int, Tensors] = {}
        self.log: list[str] = []
        self.referring = self.anchored = self.crashed = 0

    def url(self, step: int) -> str:
        return str(self.root / f"step-{step}")

    def stored(self, url: str) -> Tensors:
        view = ckpt.open(url)
        return {name: torch.as_tensor(view[name][...]).numpy().tobytes() for name in NAMES}

    def committed(self) -> set[int]:
        return {step.number for step in list_steps(self.root) if step.committed and step.number is not None}

    def call(self, what: str, run: Callable[[], object]) -> bool:
        """``run``, in a process that dies at some operation in two of five cases. Whether it came to its end."""
        at = self.random.randrange(OPERATIONS) if self.random.random() < 0.4 else None
        self.log.append(what if at is None else f"{what}, dies at {at}")
        try:
            with wrap_backends(FaultyProcess(None if at is None else Fault(at=at, kind="crash")).wrap):
                run()
        except SimulatedCrash:
            self.crashed += 1
            return False
        return True

    # ---- what happens

    def change(self) -> None:
        name = self.random.choice(NAMES)
        self.state[NAMES[4]] += 1
        match self.random.randrange(6):
            case 0:
                self.state[name].data.numpy().flat[0] += 1  # torch does not count it
            case 1:
                # One keeps its shape: a base that has nothing of the state is an error.
                self.state[NAMES[3]] = torch.full((self.random.randrange(30, 60),), self.random.random())
            case 2:
                self.state[name] += 1
            case _:
                self.state[self.random.choice(NAMES[1:3])] *= 1 + 2e-7

    def save(self) -> None:
        step = self.random.choice(STEPS)
        others = sorted(self.saved.keys() - {step})
        base = self.random.choice(others) if others and self.random.random() < 0.8 else None
        codec = self.random.choice(CODECS)
        now, before = {name: tensor.numpy().tobytes() for name, tensor in self.state.items()}, self.saved.get(step)

        options = SaveOptions.of({"codec": codec}, base=None if base is None else self.url(base), reusable=True)

        def run() -> None:
            with suppress(ConflictError):  # the base refers to what would be replaced
                report = save_state(self.url(step), self.state, current_group(), options)
                self.referring += report.reused_bytes > 0
                self.anchored += ANCHORS in CommitRecord.from_bytes((self.root / f"step-{step}" / COMMIT_PATH).read_bytes(), "").features

        self.call(f"save {step} on {base} with {codec}", run)
        with suppress(CkptError):
            there = self.stored(self.url(step))
            assert there in (before, now), "neither what was there nor what was saved"
            self.saved[step] = there
        assert before is None or step in self.saved, "what was committed is lost"

    def retain(self) -> None:
        keep = self.random.randrange(1, 6)
        steps = {step.number: step for step in list_steps(self.root)}
        facts = infos(list(steps.values()))
        verdicts = retention(Latest(keep), facts, datetime.now(timezone.utc))
        going = [steps[number] for number in verdicts.removed]
        self.call(f"keep {keep}", lambda: remove_steps(str(self.root), going, {i.step: i.referred_by for i in facts}))
        self.lost_only(set(verdicts.removed))

    def remove(self) -> None:
        step = self.random.choice(STEPS)

        def run() -> None:
            with suppress(ConflictError):
                remove_at(self.url(step))

        self.call(f"remove {step}", run)
        self.lost_only({step})

    def lost_only(self, going: set[int]) -> None:
        committed = self.committed()
        assert self.saved.keys() - committed <= going
        self.saved = {step: tensors for step, tensors in self.saved.items() if step in committed}

    def collect(self) -> None:
        def run() -> None:
            backend = open_backend(str(self.root))
            remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))

        if self.call("collect", run):
            needed = set()
            for step in self.saved:
                needed |= {(Path(self.url(step)) / file.path).resolve() for file in open_catalog(self.url(step)).files}
            assert {path.resolve() for path in self.root.rglob("*.safetensors")} == needed, "bytes that nobody needs, or too few"

    def copy(self) -> None:
        if not self.saved:
            return
        step, target = self.random.choice(sorted(self.saved)), self.place / "copy"
        while not self.call(f"copy {step}", lambda: copy_checkpoint(self.url(step), target)):
            pass
        self.root.rename(self.place / "aside")  # a copy needs no other checkpoint
        assert self.stored(str(target)) == self.saved[step]
        assert not verify(str(target)).problems
        (self.place / "aside").rename(self.root)
        if self.random.random() < 0.3 and len(self.saved) < len(STEPS):  # it takes a place in the run
            free = self.random.choice(sorted(set(STEPS) - self.saved.keys()))
            shutil.rmtree(self.url(free), ignore_errors=True)
            self.log.append(f"the copy becomes {free}")
            target.rename(self.url(free))
            self.saved[free] = self.saved[step]
        else:
            shutil.rmtree(target)

    def move(self) -> None:
        if self.root.exists():
            self.log.append("move the run")
            self.root = self.root.rename(self.place / ("moved" if self.root.name == "run" else "run"))

    def check(self) -> None:
        for step, tensors in self.saved.items():
            assert self.stored(self.url(step)) == tensors, step

    def go_on(self, saves: int) -> None:
        """Until so many saves were tried; one of some other things happens after each, and is checked."""
        others = [self.retain, self.remove, self.collect, self.copy, self.move]
        for number in range(saves):
            for _ in range(self.random.randrange(3)):
                self.change()
            self.save()
            self.check()
            self.random.choice(others)()
            self.check()
            if number % 50 == 49:
                assert not any(verify(self.url(step)).problems for step in self.saved)


def check_history(place: Path, seed: int, saves: int) -> History:
    history = History(place, seed)
    try:
        history.go_on(saves)
    except Exception as err:
        raise AssertionError(f"seed {seed}: " + "\n".join(history.log[-30:])) from err
    assert history.referring > saves / 8
    assert history.crashed > saves / 20
    assert history.anchored > saves / 20
    return history


def test_every_checkpoint_that_is_kept_loads_and_nothing_else_stays(tmp_path: Path) -> None:
    check_history(tmp_path, seed=1, saves=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_thousand_saves(tmp_path: Path, seed: int) -> None:
    check_history(tmp_path, seed, saves=1000)


# ------------------------ Files of which nobody can say whether another checkpoint needs them stay; and references that lead through links.

STATE = {"a": torch.arange(100.0), "b": torch.arange(50.0)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 1 has all bytes, step 2 refers to them; step 3 is another one."""
    root = tmp_path / "run"
    ckpt.save(root / "step-1", STATE, reuse=True)
    ckpt.save(root / "step-2", STATE, reuse=root / "step-1")
    ckpt.save(root / "step-3", {"c": torch.ones(3)}, reuse=True)
    return root


def check_loads(url: Path) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    ckpt.load(url, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in STATE.items())
    assert not verify(str(url)).problems


def of_a_later_release(data: bytes) -> bytes:
    """The record as a release writes it that has another feature."""
    members = json.loads(data) | {"features": ["references", "deltas-of-deltas"], "digest": "0" * 32}
    changed = json.dumps(members).encode()
    return changed.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(changed).encode())


def going(root: Path, keep: int) -> dict[int, str]:
    """What retention says of each step."""
    return {v.step: str(v) for v in retention(Latest(keep), infos(list_steps(root)), datetime.now(timezone.utc))}


def remove(root: Path, keep: int) -> list[int | None]:
    steps = {s.number: s for s in list_steps(root)}
    facts = infos(list(steps.values()))
    verdicts = retention(Latest(keep), facts, datetime.now(timezone.utc))
    return [s.number for s in remove_steps(str(root), [steps[n] for n in verdicts.removed], {i.step: i.referred_by for i in facts})]


DAMAGED: Callable[[bytes], bytes] = lambda data: data[:-20]  # noqa: E731


@pytest.mark.parametrize("damage", [DAMAGED, of_a_later_release])
def test_a_step_that_cannot_be_read_keeps_its_base(run: Path, damage: Callable[[bytes], bytes]) -> None:
    record = run / "step-2" / "checkpoint.json"
    whole = record.read_bytes()
    record.write_bytes(damage(whole))
    certain = damage is DAMAGED  # its index is whole: only the base stays that it names
    why = "step 2 refers to it" if certain else "step-2 may use it: its record or index cannot be read"
    assert why in going(run, 1)[1]
    ckpt.save(run / "step-4", {"c": torch.ones(3)})
    assert remove(run, 1) == ([3] if certain else [])
    with pytest.raises(ConflictError, match="step-2 refers to it" if certain else "step-2 may refer to it"):
        remove_at(str(run / "step-1"))
    record.write_bytes(whole)  # from a copy, or for the later release
    check_loads(run / "step-2")


def test_orphans_that_a_step_may_need_stay(run: Path) -> None:
    record = run / "step-2" / "checkpoint.json"
    whole = record.read_bytes()
    record.write_bytes(of_a_later_release(whole))
    ckpt.save(run / "step-1", {"c": torch.zeros(3)})  # replaces what step 2 refers to
    backend = open_backend(str(run))
    orphans = find_orphans(backend, older_than=0, now=backend.now() or 0.0)
    assert [(o.removable, o.reason) for o in orphans] == [(False, "step-2 may refer to it: the record or index there cannot be read")]
    remove_orphans(backend, orphans)
    record.write_bytes(whole)
    check_loads(run / "step-2")


def test_other_software_and_runs_without_references_are_in_no_doubt(run: Path) -> None:
    (run / "other").mkdir()
    (run / "other" / "checkpoint.json").write_text('{"format": "another"}')
    ckpt.save(run / "step-5", STATE)
    ckpt.save(run / "step-6", STATE)
    data = (run / "step-6" / "checkpoint.json").read_bytes()
    (run / "step-6" / "checkpoint.json").write_bytes(of_a_later_release(data))
    remove_at(str(run / "step-5"))  # nobody can refer to it
    remove_at(str(run / "step-6"))
    remove_at(str(run / "step-3"))
    assert [s.number for s in list_steps(run) if s.committed] == [1, 2]


def test_a_link_to_a_step_with_references_loads(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "step-7").symlink_to(run / "step-2")
    (run / "latest").symlink_to("step-2")
    check_loads(other / "step-7")
    check_loads(run / "latest")
    assert [s.sources for s in list_steps(other)] == [(str(run / "step-1"),)]
    copy_checkpoint(other / "step-7", tmp_path / "copy")
    check_loads(tmp_path / "copy")


def test_a_base_that_was_moved_away_behind_a_link_stays_as_long_as_it_is_needed(run: Path, tmp_path: Path) -> None:
    ckpt.save(run / "step-4", STATE, reuse=run / "step-2")
    (run / "step-2").rename(tmp_path / "cold-2")  # it refers to step 1 itself, which stays here
    (run / "step-2").symlink_to(tmp_path / "cold-2")
    check_loads(run / "step-2")
    (run / "step-1").rename(tmp_path / "cold")
    (run / "step-1").symlink_to(tmp_path / "cold")
    (run / "latest").symlink_to("step-3")
    check_loads(run / "step-4")
    with pytest.raises(ConflictError, match="step-2, step-4 refer to it"):
        remove_at(str(run / "step-1"))
    step = next(s for s in list_steps(run) if s.number == 1)
    assert remove_steps(str(run), [replace(step)], {}) == []
    check_loads(run / "step-4")
    remove_at(str(run / "latest"))
    for name in ("step-4", "step-2", "step-1"):
        remove_at(str(run / name))
    assert not os.path.lexists(run / "step-1") and (tmp_path / "cold" / "checkpoint.json").exists()
    assert CommitRecord.from_bytes((tmp_path / "cold" / "checkpoint.json").read_bytes(), "").reusable


def test_a_save_over_a_step_that_is_not_reusable_keeps_what_a_virtual_one_points_into(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckpt.save(run / "step-1", STATE)
    import_checkpoint(str(run / "step-1"), str(run / "step-2"))
    for _ in range(2):
        ckpt.save(run / "step-1", {"c": torch.ones(3)})
    backend = open_backend(str(run))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    check_loads(run / "step-2")
    remove_at(str(run / "step-2"))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    assert len(list((run / "step-1").rglob("*.safetensors"))) == 1


def test_files_that_a_virtual_checkpoint_points_into_stay(run: Path) -> None:
    """Step 3 becomes a virtual step 2; then the steps are replaced that have its bytes, and nobody refers to the older ones."""
    remove_at(str(run / "step-3"))
    import_checkpoint(str(run / "step-2"), str(run / "step-3"))
    for step in (1, 2):
        ckpt.save(run / f"step-{step}", {"c": torch.ones(3)}, reuse=True)
    backend = open_backend(str(run))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    check_loads(run / "step-3")
    with pytest.raises(ConflictError, match="step-3 refers to it"):
        remove_at(str(run / "step-1"))
    remove_at(str(run / "step-3"))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    assert len(list(run.rglob("*.safetensors"))) == 2
