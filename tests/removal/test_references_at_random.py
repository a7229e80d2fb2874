"""Saves with references, retention, collection, copies and moves in any order, stopped anywhere: every checkpoint that is kept loads bit
for bit, and no data file stays that none of them needs."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ckpt
from ckpt.coordination.group import current_group
from ckpt.engine.save.base.reuse import SeenVersions
from ckpt.engine.save.job import save_cache
from ckpt.errors import CkptError, ConflictError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.maintenance.copy import copy_checkpoint
from ckpt.maintenance.orphans import find_orphans, remove_orphans
from ckpt.maintenance.step_listing import infos, list_steps, remove_steps
from ckpt.policies import Latest, retention

NAMES = ("a", "b", "c", "d")
STOPS = st.one_of(st.none(), st.none(), st.integers(0, 60))
"""Number of the operation on the storage that the process dies at."""

Tensors = dict[str, bytes]


def stored(url: Path) -> Tensors:
    view = ckpt.open(str(url))
    return {name: torch.as_tensor(view[name][...]).numpy().tobytes() for name in NAMES}


class Run(RuleBasedStateMachine):
    """``saved``: what each committed step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="ckpt-references-"))
        self.root = self.place / "run"
        self.state = {name: torch.full((40 + i,), float(i)) for i, name in enumerate(NAMES)}
        self.saved: dict[int, Tensors] = {}
        self.copies = 0
        save_cache(current_group()).seen = SeenVersions()

    def teardown(self) -> None:
        self.collect(None)
        self.check()
        needed = set()
        for step in self.saved:
            catalog = open_catalog(self.url(step))
            needed |= {(Path(self.url(step)) / file.path).resolve() for file in catalog.files}
        assert {path.resolve() for path in self.root.rglob("*.safetensors")} == needed
        shutil.rmtree(self.place)

    def url(self, step: int) -> str:
        return str(self.root / f"step-{step}")

    def dies(self, at: int | None) -> FaultyProcess:
        return FaultyProcess(None if at is None else Fault(at=at, kind="crash"))

    @rule(name=st.sampled_from(NAMES), counted=st.booleans())
    def change(self, name: str, counted: bool) -> None:
        if counted:
            self.state[name] += 1
        else:
            self.state[name].data.numpy()[0] += 1

    @rule(step=st.integers(1, 9), base=st.one_of(st.none(), st.integers(1, 9)), at=STOPS, codec=st.sampled_from([None, None, "zstd"]))
    def save(self, step: int, base: int | None, at: int | None, codec: str | None) -> None:
        now = {name: tensor.numpy().tobytes() for name, tensor in self.state.items()}
        before = self.saved.get(step)
        given = self.url(base) if base in self.saved and base != step else None
        with suppress(SimulatedCrash, ConflictError), wrap_backends(self.dies(at).wrap):
            ckpt.save(self.url(step), self.state, base=given, reusable=True, codec=codec)
            assert at is None or self.saved is not None
        with suppress(CkptError):
            there = stored(Path(self.url(step)))
            assert there in (before, now), "neither what was there nor what was saved"
            self.saved[step] = there
        assert before is None or step in self.saved, "what was committed is lost"

    @rule(keep=st.integers(1, 3), at=STOPS)
    def retain(self, keep: int, at: int | None) -> None:
        steps = list_steps(str(self.root))
        facts = infos([s for s in steps if s.committed])
        by_number = {s.number: s for s in steps}
        verdicts = retention(Latest(keep), facts, datetime.now(timezone.utc))
        going = [by_number[number] for number in verdicts.removed]
        with suppress(SimulatedCrash), wrap_backends(self.dies(at).wrap):
            remove_steps(str(self.root), going, {i.step: i.referred_by for i in facts})
        committed = {s.number for s in list_steps(str(self.root)) if s.committed}
        assert set(self.saved) - committed <= set(verdicts.removed)
        self.saved = {step: tensors for step, tensors in self.saved.items() if step in committed}

    @rule(at=STOPS)
    def collect(self, at: int | None) -> None:
        backend = open_backend(str(self.root))
        with suppress(SimulatedCrash), wrap_backends(self.dies(at).wrap):
            remove_orphans(open_backend(str(self.root)), find_orphans(backend, older_than=0, now=backend.now() or 0.0))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.saved)))
        target = self.place / f"copy-{self.copies}"
        self.copies += 1
        copy_checkpoint(self.url(step), str(target))
        aside = self.place / "aside"
        self.root.rename(aside)  # a copy needs no other checkpoint
        assert stored(target) == self.saved[step]
        aside.rename(self.root)

    @rule()
    def move(self) -> None:
        if self.root.exists():
            self.root = self.root.rename(self.place / ("moved" if self.root.name == "run" else "run"))

    @invariant()
    def check(self) -> None:
        for step, tensors in self.saved.items():
            assert stored(Path(self.url(step))) == tensors, step


def random_runs(examples: int, steps: int) -> None:
    checks = list(HealthCheck)
    run_state_machine_as_test(
        Run, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks)
    )


def test_every_checkpoint_that_is_kept_loads_and_nothing_else_stays() -> None:
    random_runs(examples=8, steps=20)


@pytest.mark.slow
def test_every_checkpoint_that_is_kept_loads_and_nothing_else_stays_for_long() -> None:
    random_runs(examples=100, steps=50)
