"""Reading the saves of a run: which, in what order, and how few."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from ckpt.runs.report.history import read_history, spread_evenly
from tests.observe.saves import many, row, save


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_every_number_once_and_each_beginning_spread(count: int) -> None:
    order = list(spread_evenly(count))
    assert sorted(order) == list(range(count))
    for some in (3, 9, 100):
        if count > some:
            chosen = sorted(order[:some])
            gaps = [b - a for a, b in pairwise(chosen)]
            assert (chosen[0], chosen[-1]) == (0, count - 1)
            assert max(gaps) <= 2 * min(gaps) + 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Forty saves: the first one, copied. Ten more directories have names that look like steps."""
    first = save(tmp_path / "one", {0: row(("write", 0, 1, 5)), 1: row(("write", 0, 2, 5))})
    root = tmp_path / "run"
    for step in range(40):
        shutil.copytree(first, root / f"step-{step}")
    for step in range(40, 50):
        (root / f"step-{step}").mkdir()
    (root / "logs").mkdir()
    return root


def test_all_of_a_short_run(run: Path) -> None:
    history = read_history(str(run))
    assert [saved.step for saved in history.saves] == list(range(40))
    assert (history.candidates, history.left_out) == (40, 0)
    assert {saved.summary.seconds for saved in history.saves if saved.summary} == {2.0}
    assert not any(saved.tables for saved in history.saves)


def test_a_long_run_is_sampled_with_few_reads(run: Path) -> None:
    for step in range(40, 50):
        shutil.copytree(run / "step-0", run / f"step-{step}", dirs_exist_ok=True)
    process = FaultyProcess()
    with wrap_backends(lambda inner: FaultyBackend(inner, process=process)):
        history = read_history(str(run), limit=5)
    assert [saved.step for saved in history.saves] == [0, 12, 24, 36, 49]
    assert (history.candidates, history.left_out) == (50, 45)
    assert process.operations <= 6 * 5 + 2  # it does not look at the 45 others


def test_large_spans_end_the_reading_sooner(tmp_path: Path) -> None:
    first = save(tmp_path / "one", many(40))
    for step in range(70):
        shutil.copytree(first, tmp_path / "run" / f"step-{step}")
    size = next(first.glob("index-*/spans.json")).stat().st_size
    assert [len(read_history(str(tmp_path / "run"), most_bytes=n * size).saves) for n in (1, 2, 20, 999)] == [1, 2, 20, 70]


def test_the_newest_save_that_ended_is_always_read(run: Path) -> None:
    for step in range(40, 44):
        shutil.copytree(run / "step-0", run / f"step-{step}", dirs_exist_ok=True)
    for step in range(44, 50):
        (run / f"step-{step}" / "data").mkdir()
        (run / f"step-{step}" / "data" / f"{16 * 'a'}-00000.safetensors").write_text("")
    steps = [(saved.step, saved.summary is not None) for saved in read_history(str(run), limit=9).saves]
    assert steps == [(0, True), (24, True), (43, True), *((step, False) for step in range(44, 50))]


def test_what_is_wrong_with_one_save_is_kept_beside_it(run: Path) -> None:
    (run / "step-3" / "checkpoint.json").write_text("{")
    next((run / "step-4").glob("index-*/spans.json")).write_text('{"digest":"')
    next((run / "step-5").glob("index-*/spans.json")).unlink()
    problems = {saved.step: saved.problem for saved in read_history(str(run)).saves if saved.problem}
    assert sorted(problems) == [3, 4, 5]
    assert "commit record" in problems[3]
    assert problems[4] == "the file of spans is damaged: its digest is wrong"
    assert problems[5] == "no spans were kept with this checkpoint"
