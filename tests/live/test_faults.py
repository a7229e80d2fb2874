"""Processes that are killed or stopped at any moment of a push, and bytes that flip: every sink has one version, whole, on all its ranks.

Three jobs: a source of two ranks, an engine of two, an engine of one. With the first version everywhere, the second one is published and
taken, and meanwhile something happens. ``--slow`` does it at 200 random moments.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ckpt.errors import CorruptError, ExchangeError, GroupError
from tests.distributed.ranks import Lost, Ranks
from tests.live import faults
from tests.live.faults import TIMEOUT, Ending, Fault

MARGIN = 6.0
"""Seconds that a rank may be late on a busy machine."""
JOBS = {"source": 2, "pair": 2, "single": 1}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Ranks by job; the victim is Lost. ``armed``: when it was to happen."""

    fault: Fault
    by_job: dict[str, list[Ending | Lost]]
    armed: float | None

    def living(self, job: str) -> list[Ending]:
        endings = [
            e for rank, e in enumerate(self.by_job[job]) if self.fault.victim != (job, rank) or self.fault.how not in ("kill", "stop")
        ]
        lost = [e for e in endings if isinstance(e, Lost)]
        assert not lost, f"{self.fault}: {lost[0]}"
        return [e for e in endings if isinstance(e, Ending)]


def happen(fault: Fault) -> Result:
    ranks = Ranks(2)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:

        def run(job: str, function: Any, *args: Any) -> Any:
            alone = JOBS[job] == 1
            return pool.submit(ranks.run, JOBS[job], function, folder, *args, fault, timeout=45, allow_death=True, process_group=not alone)

        jobs = {
            "source": run("source", faults.source),
            "pair": run("pair", faults.sink, "pair"),
            "single": run("single", faults.sink, "single"),
        }
        by_job = {name: job.result() for name, job in jobs.items()}
        armed = Path(folder, "armed")
        return Result(fault=fault, by_job=by_job, armed=float(armed.read_text()) if armed.exists() else None)


def check(result: Result) -> None:
    """What holds whatever happens."""
    fault = result.fault
    for job in ("pair", "single"):
        endings = result.living(job)
        about = f"{fault}: {job} has {[(e.content[:3], e.version, e.error) for e in endings]}"
        for ending in endings:
            if ending.torn:
                assert fault.switch == "in-place" and ending.error is not None, about
                continue
            assert ending.whole is not None, about  # never a mix
            assert ending.version == ending.whole, about  # and it says which
            # A rank that dies while all switch is an error of the others, which have the new version.
            assert (ending.error is None) == (ending.whole == 2) or fault.victim[0] == job, about
            if ending.error is not None and result.armed is not None:
                assert ending.at - result.armed < 2 * TIMEOUT + MARGIN, f"{ending.at - result.armed:.1f} s. {about}"
        if fault.victim[0] != job:
            assert len({(e.whole, e.torn) for e in endings}) == 1, about  # all ranks have the same
    if fault.victim[0] in ("pair", "single"):
        other = "single" if fault.victim[0] == "pair" else "pair"
        assert [e.whole for e in result.living(other)] == [2] * JOBS[other], f"{fault}: the other sink did not finish"
        assert [e.error for e in result.living("source")] == [None] * 2, f"{fault}: the source noticed"


def point(chance: random.Random, how: str = "kill") -> Fault:
    victim = chance.choice([("source", 0), ("source", 1), ("pair", 0), ("pair", 1), ("single", 0)])
    kinds = {"copies": chance.random() < 0.5, "shared": chance.random() < 0.5}
    switch = "in-place" if chance.random() < 0.25 else "double"
    return Fault(victim=victim, how=how, seconds=chance.uniform(0, 0.4) ** 1.5, switch=switch, **kinds)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(victim=("source", 0), seconds=0.1),
        Fault(victim=("pair", 1), seconds=0.05, shared=False, switch="in-place"),
        pytest.param(Fault(victim=("source", 1), seconds=0.05, shared=False), marks=pytest.mark.slow),
        pytest.param(Fault(victim=("single", 0), seconds=0.02), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_process_is_killed(fault: Fault) -> None:
    check(happen(fault))


def test_a_holder_that_hangs_is_named(request: pytest.FixtureRequest) -> None:
    """It is stopped before it has sealed the second version or after; nobody waits longer than the deadline."""
    result = happen(Fault(victim=("source", 1), how="stop", seconds=0.0, shared=False))
    check(result)
    assert all(isinstance(e.error, GroupError) for job in ("pair", "single") for e in result.living(job))


@pytest.mark.parametrize(
    ("how", "victim", "shared"),
    [
        ("segment", ("source", 1), True),
        pytest.param("segment", ("source", 1), False, marks=pytest.mark.slow),
        pytest.param("wire", ("pair", 0), False, marks=pytest.mark.slow),
    ],
)
def test_a_byte_flips_and_nobody_else_has_it(how: str, victim: tuple[str, int], shared: bool) -> None:
    """Damage is an error of all ranks of the sink, and the version before stays."""
    result = happen(Fault(how=how, victim=victim, shared=shared))
    check(result)
    endings = result.living("pair")
    assert [e.whole for e in endings] == [1, 1]
    assert any(isinstance(e.error, (CorruptError, ExchangeError)) for e in endings), [e.error for e in endings]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(how="segment", victim=("source", 1), shared=False, copies=True), marks=pytest.mark.slow),
        Fault(how="segment", victim=("source", 1), shared=True, copies=True, switch="in-place"),
        Fault(how="wire", victim=("pair", 0), shared=False, copies=True),
    ],
    ids=str,
)
def test_a_byte_flips_and_another_holder_stands_in(fault: Fault) -> None:
    result = happen(fault)
    check(result)
    assert [e.whole for job in ("pair", "single") for e in result.living(job)] == [2, 2, 2]


@pytest.mark.slow
def test_processes_are_killed_at_two_hundred_moments() -> None:
    chance, ends = random.Random(5), []
    for _ in range(200):
        result = happen(point(chance))
        check(result)
        ends += [e.whole for job in ("pair", "single") for e in result.living(job)]
    assert ends.count(1) > 20 and ends.count(2) > 20  # else the moments are badly chosen


@pytest.mark.slow
def test_processes_hang_at_any_moment() -> None:
    chance = random.Random(6)
    for _ in range(10):
        check(happen(point(chance, "stop")))
