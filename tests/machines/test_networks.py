"""Which network the bytes between ranks take on hosts with several cards, and what ranks say that cannot reach each other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckpt.errors import DeadlineError, UsageError
from tests.machines import work
from tests.machines.bed import Bed, Card, Host
from tests.machines.jobs import Job
from tests.machines.work import Task

pytestmark = pytest.mark.alone

SLOW = Card(name="mgmt0", network="10.78.0")
FAST = Card(name="eth0")
NOWHERE = Card(name="out0", network="172.31.0", alone=True)
MOVED = 200_000
"""Bytes; more than that moves to and from each rank when one reads ``same`` for all (work.py) and the others get the rest in turn."""


@pytest.fixture(scope="module")
def bed(server: None, bed_directory: Path) -> object:
    """The names of hosts, and so the job's store, are on the slow network."""
    with Bed([Host(name=f"h{i}", cards=(SLOW, FAST, NOWHERE), route="out0") for i in range(3)], bed_directory) as bed:
        yield bed


def _traffic() -> dict[str, int]:
    """Bytes that have come in and gone out by each card of this host."""
    rows = [line.replace(":", " ").split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return {row[0]: int(row[1]) + int(row[9]) for row in rows}


def exchange(url: str) -> tuple[dict[str, int], float]:
    """Save and load so that ranks send each other bytes; what each card carried of the load, and the seconds that it took."""
    work.run([Task(do="save", url=url, version=1)])
    before, began = _traffic(), time.monotonic()
    work.run([Task(do="load", url=url, version=1, exchange=True)])
    seconds = time.monotonic() - began
    return {card: count - before[card] for card, count in _traffic().items()}, seconds


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"CKPT_SOCKET_IFNAME": "^mgmt,out,lo"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "mgmt0", "CKPT_SOCKET_IFNAME": "=eth0"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": ""}, "mgmt0"),
        ({"CKPT_SOCKET_IFNAME": "out0,eth0"}, "eth0"),
    ],
    ids=["Gloo's", "excluded", "ours before Gloo's", "NCCL's", "that of the store", "one that leads nowhere first"],
)
def test_bytes_go_over_the_network_that_is_chosen(bed: Bed, tmp_path: Path, environment: Mapping[str, str], used: str) -> None:
    with Job(bed, exchange, f"{tmp_path}/checkpoint", hosts=(0, 1, 2), environment=environment) as job:
        results = job.results()
    for carried, seconds in results:
        other = {"eth0": "mgmt0", "mgmt0": "eth0"}[used]
        assert carried[used] > MOVED > carried[other] and carried["out0"] < 10_000, carried
        assert seconds < 8  # an address that leads nowhere takes seconds to be found out, and others do not wait for that


def test_an_interface_that_is_not_there(bed: Bed, tmp_path: Path) -> None:
    environment = {"CKPT_SOCKET_IFNAME": "ib0"}
    with Job(bed, exchange, f"{tmp_path}/checkpoint", hosts=(0, 1), environment=environment) as job:
        ended = job.wait(30)
    texts = [str(outcome.error) for outcome in ended.values()]
    assert len(texts) == 2 and isinstance(ended[0].error, UsageError) and isinstance(ended[1].error, UsageError)
    for part in ("'ib0' names no network interface", "eth0 (10.77.0.1)", "mgmt0 (10.78.0.1)", "out0 (172.31.0.1)", "CKPT_SOCKET_IFNAME"):
        assert part in texts[0]


def test_ranks_that_cannot_reach_each_other(bed: Bed, tmp_path: Path) -> None:
    """Nobody is said to be dead, and each address is named with what happened there."""
    environment = {"CKPT_SOCKET_IFNAME": "out0"}
    with Job(bed, exchange, f"{tmp_path}/checkpoint", hosts=(0, 1, 2), environment=environment) as job:
        ended = job.wait(40)
    assert len(ended) == 3
    print([(o.at, str(o.error)) for o in ended.values()])
    errors = [outcome.error for outcome in ended.values()]
    (first, *_) = [str(error) for error in errors if isinstance(error, DeadlineError)]
    assert "cannot be reached (172.31.0." in first and "No route to host" in first and "CKPT_SOCKET_IFNAME" in first
    assert not any("died" in str(error) for error in errors)
