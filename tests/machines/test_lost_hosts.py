"""Hosts that are cut off or die without a word, at each phase of a save and a load: every rank that is left, and the one that is cut off,
has its error in time; the checkpoint is the previous one or the new one, whole; and the other hosts go on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import DeadlineError, GroupError
from tests.machines import work
from tests.machines.bed import Bed
from tests.machines.jobs import Job, Stop
from tests.machines.work import Task

pytestmark = pytest.mark.alone

TIMEOUT = 5.0
MARGIN = 2.0
"""Seconds after the timeout in which every rank has its error."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """At ``phase`` of the leader, rank 0 on host 0, or of another ``rank``, ``how`` (cut or kill) happens to ``host``. ``store``: the host
    of the process that serves the store and is no rank; None: the leader serves it."""

    how: str
    host: int
    phase: str
    do: str = "save"
    rank: int = 0
    store: int | None = None
    hosts: tuple[int, ...] = (0, 1, 2)

    @property
    def alone(self) -> bool:
        """The leader is cut off with the store: if the others have done their part, it may end the call well."""
        return self.how == "cut" and self.store is None and self.host == self.hosts[0]

    def __str__(self) -> str:
        roles = [
            role
            for role, at in (("leader", self.hosts[0]), ("store", self.hosts[0] if self.store is None else self.store))
            if at == self.host
        ]
        return f"{self.do}: {self.how} {' and '.join(roles) or 'follower'} at {self.phase}"


SHORT = [
    Case(how="cut", host=1, phase="written", rank=1),
    Case(how="kill", host=2, phase="commit", store=2, hosts=(0, 1)),
    Case(how="cut", host=0, phase="committed", store=2),
]
SAVE, LOAD = ("begin", "write", "exchange", "written", "commit", "committed"), ("match", "read", "exchange")
OF_ALL = ("begin", "write", "exchange", "written", "match", "read")
"""Phases that every rank comes to."""


def _all() -> list[Case]:
    cases = []
    for do, phases in (("save", SAVE), ("load", LOAD)):
        for phase in phases:
            for how in ("cut", "kill"):
                if phase in OF_ALL:
                    cases.append(Case(how=how, host=1, phase=phase, do=do, rank=1))
                cases.append(Case(how=how, host=0, phase=phase, do=do))
                cases.append(Case(how=how, host=0, phase=phase, do=do, store=2))
                cases.append(Case(how=how, host=2, phase=phase, do=do, store=2, hosts=(0, 1)))
    cases.append(Case(how="kill", host=2, phase="commit", do="save_async", store=2, hosts=(0, 1)))
    cases.append(Case(how="cut", host=1, phase="write", do="save_async", rank=1))
    return [case for case in cases if case not in SHORT]


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.slow) for case in _all())], ids=str)
def test_every_rank_has_its_error_in_time(bed: Bed, tmp_path: Path, case: Case) -> None:
    url = f"{tmp_path}/checkpoint"
    _run(bed, [Task(do="save", url=url, version=1)], (0, 1, 2))
    task = Task(do=case.do, url=url, version=1 if case.do == "load" else 2, timeout=TIMEOUT, exchange=case.phase == "exchange")
    stop = Stop(rank=case.rank, phase=case.phase)
    try:
        with Job(bed, work.run, [task], hosts=case.hosts, store=case.store, stop=stop) as job:
            job.reach()
            time.sleep(0.3)  # the other ranks come to where they wait
            fault = time.monotonic()
            (bed.cut if case.how == "cut" else bed.kill)(case.host)
            job.go_on()
            left = [rank for rank, host in enumerate(case.hosts) if case.how == "cut" or host != case.host]
            ended = job.wait(TIMEOUT + MARGIN + 3.0, left)
            seconds = {rank: round(outcome.at - fault, 1) for rank, outcome in ended.items()}
            print(f"{case} | " + ", ".join(f"rank {r} {s} s" for r, s in seconds.items()))
            hang = [rank for rank in left if rank not in ended]
            assert not hang, "\n".join(job.log(rank) for rank in hang)
            for rank, outcome in ended.items():
                print(f"  rank {rank}: {type(outcome.error).__name__}: {outcome.error}")
                if not (case.alone and rank == 0 and outcome.error is None):
                    assert isinstance(outcome.error, GroupError), f"rank {rank}: {outcome.text or outcome.value}"
            assert max(seconds.values()) <= TIMEOUT + MARGIN, seconds
            if case.how == "cut" and case.host in case.hosts and not case.alone:
                _says_that_the_store_cannot_be_reached(ended[case.hosts.index(case.host)].error, bed, case)
    finally:
        bed.mend()
    version = ckpt.open(url).state()["version"]
    assert version in _possible(case), version
    again = [
        Task(do="load", url=url, version=version, exchange=True),
        Task(do="save", url=url, version=3),
        Task(do="load", url=url, version=3),
    ]
    _run(bed, again, tuple(host for host in (0, 1, 2) if host != case.host))


def _possible(case: Case) -> tuple[int, ...]:
    """Versions that may be committed."""
    if case.do == "load" or case.phase in ("begin", "write", "exchange"):
        return (1,)
    if case.phase == "committed":
        return (2,)
    return (1,) if case.phase == "written" and not case.alone else (1, 2)


@pytest.mark.slow
def test_a_training_loop_that_is_cut_off_is_told(bed: Bed, tmp_path: Path) -> None:
    """Between saves, too: it would neither hear that the job is to be stopped nor agree on a step to save after."""
    long = TIMEOUT + MARGIN + 2.0
    try:
        with Job(bed, work.train, f"{tmp_path}/run", TIMEOUT, long, hosts=(0, 1, 2)) as job:
            time.sleep(3.0)  # the loops have begun
            fault = time.monotonic()
            bed.cut(1)
            ended = job.wait(2 * long + TIMEOUT + MARGIN)
            assert len(ended) == 3, "\n".join(job.log(rank) for rank in range(3) if rank not in ended)
            assert ended[1].at - fault <= TIMEOUT + MARGIN
            assert "cannot be reached: it has not answered for" in str(ended[1].error)
            for rank in (0, 2):
                assert "nothing was heard of rank 1" in str(ended[rank].error), ended[rank].text
    finally:
        bed.mend()


def _says_that_the_store_cannot_be_reached(error: BaseException | None, bed: Bed, case: Case) -> None:
    assert isinstance(error, DeadlineError)
    host = bed.hosts[case.hosts[0] if case.store is None else case.store].name
    text = str(error)
    assert f"the job's store at {host}:" in text and "it has not answered for" in text, text
    assert "network" in text and "`ckpt ls` shows what is committed" in text, text


def _run(bed: Bed, tasks: list[Task], hosts: tuple[int, ...]) -> None:
    with Job(bed, work.run, tasks, hosts=hosts) as job:
        assert job.results() == [[f"{task.do} {task.version}" for task in tasks]] * len(hosts)
