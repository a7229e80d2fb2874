"""Jobs that do not resume exactly are found, and what they lack is named."""

from __future__ import annotations

import json
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.errors import GroupError, NotFoundError, UsageError
from ckpt.testing import assert_resumes, observe, prove
from ckpt.testing.comparison import Name, Noted, Notes, Reference
from tests.testing.jobs import failing, job, silent

SLOW = pytest.mark.slow
MISTAKES = {
    "scheduler": ("learning rate", "CosineAnnealingLR is not in the state"),
    "rng": ("metric", "random numbers of torch"),
    "loader": ("batch", "the data loader begins again"),
    "average": ("not in the state", "Linear: not in the state"),
    "optimizer": ("value", "AdamW: not in the state"),
    "worker": ("batch", "two runs from the start differ"),
}
"""Mistake → the kind of the first difference, and what its cause says."""


def test_an_exact_job_on_any_number_of_ranks() -> None:
    report = assert_resumes(job[""], at=5, after=2, worlds=(1, 2))
    assert [(run.name, run.ranks, run.first_step, run.last_step, run.exact) for run in report.runs] == [
        ("uninterrupted", 1, 1, 7, True),
        ("interrupted", 1, 1, 5, True),
        ("resumed", 1, 6, 7, True),
        ("resumed", 2, 6, 7, False),
    ]
    assert "generator python" in report.unrepeatable  # which nobody has seeded


def test_a_rank_that_ends_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question whether a process lives is answered with yes once, and then it has ended."""
    monkeypatch.setattr(BaseProcess, "is_alive", lambda self: self.exitcode is None and self.join() is None)
    assert prove(job[""], at=1, after=1).exact


@pytest.mark.parametrize("mistake", [m if m in ("rng", "average") else pytest.param(m, marks=SLOW) for m in MISTAKES])
def test_what_a_job_forgets_is_named(mistake: str) -> None:
    report = prove(job[mistake], at=2, after=1)
    kind, cause = MISTAKES[mistake]
    run = report.runs[-1]
    assert not report.exact and run.cause is not None
    assert (run.differences[0].kind, run.differences[0].step) == (kind, 1 if mistake == "worker" else 3)
    assert cause in run.cause and cause in str(report)


def test_jobs_that_cannot_be_proved(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"(?s)exit code 1; its last lines:.*no such data"):
        prove(failing, at=2)
    with pytest.raises(NotFoundError, match="no such script"):
        prove("nothing.py", at=2)
    with pytest.raises(UsageError, match="at least 1"):
        prove(failing, at=0)
    with pytest.raises(UsageError, match="the job notes none"):
        prove(silent, at=1, after=1, worlds=(1, 2))
    (tmp_path / "mine").touch()
    with pytest.raises(UsageError, match="must be empty"):
        prove(failing, at=2, folder=tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


@SLOW
def test_a_job_that_restores_nothing() -> None:
    with pytest.raises(UsageError, match="the job restores nothing and goes on with step 1, not with 3"):
        prove(job["restore"], at=2, after=1)


@SLOW
@pytest.mark.parametrize(("mistake", "code"), [("", 0), ("scheduler", 3)])
def test_a_script_under_torchrun(mistake: str, code: int, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("jobs.py"))
    ended = CliRunner().invoke(
        cli, ["prove", script, "--at", "2", "--after", "1", "--ranks", "2,1", "--json", "--folder", str(tmp_path), "--", mistake]
    )
    assert ended.exit_code == code, ended.output
    document = json.loads(ended.stdout)
    assert document["exact"] is (code == 0) and document["runs"][0]["ranks"] == 2
    assert not Path("runs/a").exists() and (tmp_path / "resumed-2" / "rank-1.jsonl").exists()


def test_observing_without_a_proof_does_nothing() -> None:
    observe("loss", object())


# ---- the comparison alone


def notes(ranks: int, steps: dict[int, dict[Name, Noted]], restored: dict[int, dict[Name, Noted]] | None = None) -> Notes:
    """Every rank notes the same."""
    every = [{step: dict.fromkeys(range(ranks), items) for step, items in noted.items()} for noted in (steps, restored or {})]
    return Notes(ranks, *every)


BATCH, LOSS, TIME, PYTHON, TORCH = (
    ("batch", "Samples"),
    ("metric", "loss"),
    ("metric", "seconds"),
    ("generator", "python"),
    ("generator", "torch"),
)
WHOLE: dict[int, dict[Name, Noted]] = {n: {LOSS: 1.0 / n, TIME: float(n), PYTHON: "idle", TORCH: f"at {n}"} for n in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("ranks", "changed", "differs"),
    [
        (1, {TIME: 99.0}, None),  # a clock
        (1, {PYTHON: "other"}, None),  # nobody draws from it
        (1, {TORCH: "other"}, "step 4, rank 0: generator torch: other, not at 4"),
        (1, {LOSS: 0.25 * (1 + 1e-12)}, "step 4, rank 0: metric loss: 0.25000000000025, not 0.25"),
        (2, {LOSS: 0.25 * (1 + 1e-12), TORCH: "other"}, None),
        (2, {LOSS: 0.26}, "step 4: metric loss: 0.26, not 0.25"),
        (1, {BATCH: ["skipped", "a"]}, None),  # and what was made of them is the same
        (2, {LOSS: float("nan")}, "step 4: metric loss: nan, not 0.25"),
    ],
)
def test_what_counts_as_a_difference(ranks: int, changed: dict[Name, Noted], differs: str | None) -> None:
    again = notes(1, {n: {**WHOLE[n], TIME: n + 0.5} for n in (1, 2)})
    reference = Reference(notes(1, WHOLE), again, 2)
    assert not reference.repeats(again).differences
    resumed = notes(ranks, {3: WHOLE[3], 4: {**WHOLE[4], **changed}})
    found = reference.compare(resumed, 1e-6).differences
    assert [str(d) for d in found] == ([] if differs is None else [differs])


def test_batches_of_other_ranks_are_sets() -> None:
    batch = ("observed", "samples")
    reference = Reference(notes(1, {1: {batch: ["a", "b"]}, 2: {batch: ["c", "d"]}}), notes(1, {1: {batch: ["a", "b"]}}), 1)
    split = Notes(2, {2: {0: {batch: ["d"]}, 1: {batch: ["c"]}}})
    assert not reference.compare(split, 0.0).differences
    (lost,) = reference.compare(Notes(2, {2: {0: {batch: ["d"]}, 1: {batch: ["d"]}}}), 0.0).differences
    assert (lost.rank, lost.expected, lost.actual) == (None, ["c", "d"], ["d"])
    (missing,) = reference.compare(Notes(2), 0.0).differences
    assert missing.step == 2


def test_a_variable_that_names_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_PROVE", str(tmp_path))
    with pytest.raises(UsageError, match="names no run of a proof"):
        observe("loss", 1.0)
