"""Processes that are killed or stopped at any moment of a push, and bytes that flip: every sink has one version, whole, on all its ranks.

Three jobs: a source of two ranks, an engine of two, an engine of one; with relays, a twin of that one. With the first version everywhere,
the second one is published and taken, and meanwhile something happens. ``--slow`` does it at 200 random moments and phases, as does
``python -m tests.live.test_faults kill 200``.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
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


@dataclass(frozen=True, kw_only=True)
class Result:
    """Ranks by job; the victim is Lost. ``armed``: when it was to happen."""

    fault: Fault
    by_job: dict[str, list[Ending | Lost]]
    armed: float | None

    def living(self, job: str) -> list[Ending]:
        gone = self.fault.how in ("kill", "stop") and not self.fault.resume
        endings = [e for rank, e in enumerate(self.by_job[job]) if self.fault.victim != (job, rank) or not gone or not isinstance(e, Lost)]
        lost = [e for e in endings if isinstance(e, Lost)]
        assert not lost, f"{self.fault}: {lost[0]}"
        return [e for e in endings if isinstance(e, Ending)]


def happen(fault: Fault) -> Result:
    ranks = Ranks(2)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(fault.jobs)) as pool:

        def run(job: str, function: Any, *args: Any) -> Any:
            alone = fault.jobs[job] == 1
            return pool.submit(
                ranks.run, fault.jobs[job], function, folder, *args, fault, timeout=45, allow_death=True, process_group=not alone
            )

        jobs = {name: run(name, faults.source) if name == "source" else run(name, faults.sink, name) for name in fault.jobs}
        by_job = {name: job.result() for name, job in jobs.items()}
        armed = Path(folder, "armed")
        return Result(fault=fault, by_job=by_job, armed=float(armed.read_text()) if armed.exists() else None)


def check(result: Result) -> None:
    """What holds whatever happens."""
    fault = result.fault
    sinks = [job for job in fault.jobs if job != "source"]
    brief = 0 < fault.resume < TIMEOUT
    for job in sinks:
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
                assert ending.at - result.armed < 2 * TIMEOUT + fault.resume + MARGIN, f"{ending.at - result.armed:.1f} s. {about}"
            assert not brief or ending.whole == 2, about
        if fault.victim[0] != job:
            assert len({(e.whole, e.torn) for e in endings}) == 1, about  # all ranks have the same
            assert fault.victim[0] == "source" or all(e.whole == 2 for e in endings), f"another sink did not finish. {about}"
    source = result.living("source")
    assert fault.victim[0] == "source" or [e.error for e in source] == [None] * 2, f"{fault}: the source noticed: {source}"
    leaked = [e.leaked for job in fault.jobs for e in result.living(job) if e.leaked]
    assert not leaked, f"{fault}: shared memory is left: {leaked}"


def point(chance: random.Random, how: str = "kill") -> Fault:
    """A process, a moment or a phase, and all that a source and its sinks can be told."""
    relay = chance.random() < 0.5
    victims = [("source", 0), ("source", 1), ("pair", 0), ("pair", 1), ("single", 0), *([("twin", 0)] if relay else [])]
    victim = chance.choice(victims)
    phases = [phase for phase in faults.PHASES if (phase in faults.SOURCE_PHASES) == (victim[0] == "source")]
    delta = chance.random() < 0.3
    return Fault(
        victim=victim,
        how=how,
        seconds=chance.uniform(0, 0.4) ** 1.5,
        phase=chance.choice(phases) if chance.random() < 0.5 else "",
        resume=chance.choice([0.0, 1.0, 1.5 * TIMEOUT]) if how == "stop" else 0.0,
        copies=chance.random() < 0.5,
        shared=not relay and not delta and chance.random() < 0.5,
        switch="in-place" if not relay and chance.random() < 0.35 else "double",
        relay=relay,
        delta=delta,
        sparse=delta,
        lazy=chance.random() < 0.5,
    )


pytestmark = pytest.mark.alone  # the jobs' deadlines are seconds


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


@pytest.mark.parametrize(
    "fault",
    [
        Fault(victim=("single", 0), phase="relayed", shared=False, relay=True),
        pytest.param(Fault(victim=("twin", 0), phase="relayed", shared=False, relay=True, copies=True), marks=pytest.mark.slow),
        pytest.param(Fault(victim=("single", 0), how="stop", phase="relayed", shared=False, relay=True), marks=pytest.mark.slow),
        pytest.param(Fault(victim=("source", 1), phase="digests", shared=False, relay=True, copies=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_relay_dies_or_hangs_and_the_others_finish(fault: Fault) -> None:
    check(happen(fault))


def campaign(count: int, seed: int, how: str, at_once: int = 3) -> tuple[Counter[str], list[str]]:
    """Have faults at so many points; how often each result came, and what was wrong."""
    chance = random.Random(seed)
    points = [point(chance, how) for _ in range(count)]
    results: Counter[str] = Counter()
    wrong: list[str] = []
    tried: list[Fault] = []
    lock = threading.Lock()

    def try_one(fault: Fault) -> None:
        outcome = happen(fault)
        with lock:
            results[f"points, victim {fault.victim[0]}"] += 1
            if any(isinstance(each, Lost) for each in outcome.by_job[fault.victim[0]]):
                results["processes that died"] += 1
            for job in fault.jobs:
                for ending in outcome.by_job[job] if job != "source" else ():
                    kind = "lost" if isinstance(ending, Lost) else "torn" if ending.torn else f"version {ending.whole}"
                    results[f"sink ranks, {kind}"] += 1
        try:
            check(outcome)
        except AssertionError as err:
            with lock:
                wrong.append(str(err))
                print(err)
        with lock:  # for who watches
            tried.append(fault)
            print(f"{len(tried)} of {count}, {len(wrong)} wrong", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(try_one, points))
    return results, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed"), [*(("kill", seed) for seed in range(20)), *(("stop", seed) for seed in range(3))])
def test_processes_are_killed_and_stopped_at_any_moment(how: str, seed: int) -> None:
    """200 and 30 points, as many in one test as end within its time on a busy machine."""
    results, wrong = campaign(10, seed, how)
    assert not wrong, "\n".join(wrong)
    assert results["sink ranks, version 1"] > 0 and results["sink ranks, version 2"] > 0  # else badly chosen moments


if __name__ == "__main__":
    kind, number, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 5
    counts, problems = campaign(number, first, kind, at_once=int(sys.argv[4]) if len(sys.argv) > 4 else 3)
    for what, times in sorted(counts.items()):
        print(f"{times:5} {what}")
    print(f"{len(problems)} wrong")
