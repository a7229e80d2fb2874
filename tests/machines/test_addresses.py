"""Jobs over several machines whose names, routes and cards are what clusters have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.machines import work
from tests.machines.bed import NETWORK, Bed, Card, Host
from tests.machines.jobs import Job
from tests.machines.work import Task

pytestmark = pytest.mark.alone

MANAGEMENT = Card(name="mgmt0", network="10.78.0")
TRAINING = Card(name="eth0")
OUTSIDE = Card(name="out0", network="172.31.0", alone=True)
DEBIAN = tuple((f"127.0.1.1 h{i}", *(f"{NETWORK}.{k + 1} h{k}" for k in range(3) if k != i)) for i in range(3))
"""What Debian's installer writes into /etc/hosts: a machine's own name stands for itself, the others' for their addresses."""

BEDS: dict[str, list[Host]] = {
    "plain": [Host(name=f"h{i}") for i in range(3)],
    "without a default route": [Host(name=f"h{i}", route=None) for i in range(3)],
    "Debian names": [Host(name=f"h{i}", hosts=DEBIAN[i]) for i in range(3)],
    "Debian names, no default route": [Host(name=f"h{i}", hosts=DEBIAN[i], route=None) for i in range(3)],
    "Debian names, default route elsewhere": [
        Host(name=f"h{i}", hosts=DEBIAN[i], route="out0", cards=(TRAINING, OUTSIDE)) for i in range(3)
    ],
    "store on the management network": [Host(name=f"h{i}", cards=(MANAGEMENT, TRAINING)) for i in range(3)],
}


def _all(url: str) -> list[Task]:
    return [
        Task(do="save", url=url, version=1),
        Task(do="load", url=url, version=1),
        Task(do="load", url=url, version=1, exchange=True),
        Task(do="save_async", url=url, version=2),
        Task(do="load", url=url, version=2, exchange=True),
    ]


@pytest.mark.parametrize("hosts", BEDS.values(), ids=BEDS.keys())
def test_saves_loads_and_exchanges(server: None, hosts: Sequence[Host], tmp_path: Path) -> None:
    with Bed(hosts, tmp_path) as bed:
        tasks = _all(f"{tmp_path}/checkpoint")
        with Job(bed, work.run, tasks, hosts=(0, 1, 2)) as job:
            assert job.results() == [[f"{task.do} {task.version}" for task in tasks]] * 3


def test_two_ranks_on_each_host(bed: Bed, tmp_path: Path) -> None:
    tasks = _all(f"{tmp_path}/checkpoint")
    with Job(bed, work.run, tasks, hosts=(0, 0, 1, 1, 2, 2), store=1) as job:
        assert job.results() == [[f"{task.do} {task.version}" for task in tasks]] * 6
