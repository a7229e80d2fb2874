"""What the spans of a save say besides phases: how long training really waited, where ranks ran, and what the storage refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import read_spans
from ckpt.io_backends import checks
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.io_backends.s3_tries import Acquaintance, Tries
from ckpt.runs.events import AlertRules, Alerts, Event
from ckpt.runs.report.content import Setting, build_report
from tests.observe.saves import many, save


class SlowCommits(FaultyProcess):
    """A process whose storage takes a quarter of a second to make a data file durable."""

    def operate(self, what: str, effect: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if what.startswith("commit data"):
            time.sleep(0.25)
        return super().operate(what, effect, half)


def test_the_time_that_training_waited_is_in_the_spans(tmp_path: Path) -> None:
    waited = 0.0
    state = {"x": torch.zeros(1 << 20)}
    with ckpt.Checkpointer(str(tmp_path)) as c, wrap_backends(SlowCommits().wrap):
        for n in range(4):
            began = time.perf_counter()
            c.save(n, state)  # waits for the save before
            if n == 1:
                c.wait()
            if n == 3:
                c.wait()
            waited += time.perf_counter() - began
        c.save(4, state)  # has what was waited for the last one after its spans were kept
        c.wait()
    backends = [open_backend(step.url) for step in c.steps()]
    tables = [read_spans(backend, NativeCatalog(backend).record)[0] for backend in backends]
    assert all(table.blocked is not None and table.waited is not None for table in tables)
    told = sum((table.blocked or 0) + (table.waited or 0) for table in tables[:4]) / 1e6 + (tables[4].waited or 0) / 1e6
    assert 0.5 * waited < told <= 1.25 * waited  # a busy machine may stop between the two clocks
    shown = CliRunner().invoke(cli, ["stats", str(tmp_path)]).stdout
    assert "≥" not in shown
    assert tables[0].host and tables[0].coordinates == {} and tables[0].retries == 0


def test_a_report_groups_by_what_ranks_say(tmp_path: Path) -> None:
    rows = many(64)
    for rank, row in rows.items():
        row |= {"host": f"<b>node{rank // 8}", "at": {"dp": rank // 4, "tp": rank % 4}, "storage": [3, 1] if rank == 9 else [0, 0]}
    url = save(tmp_path / "step-1", rows)
    report = build_report([str(url)], Setting())
    assert report.detail is not None and {group.title for group in report.detail.groups} == {"host", "dp", "tp"}
    (hosts,) = (group for group in report.detail.groups if group.title == "host")
    assert hosts.labels == tuple(f"host <b>node{i}" for i in range(8)) and hosts.heat.groups[3] == tuple(range(24, 32))
    (tp,) = (group for group in report.detail.groups if group.title == "tp")
    assert tp.heat.groups[1] == tuple(range(1, 64, 4))
    assert CliRunner().invoke(cli, ["report", str(url), "-o", str(tmp_path / "r.html")]).exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert "host &lt;b&gt;node3" in page and "<b>node3" not in page and "requests made again" in page
    shown = CliRunner().invoke(cli, ["stats", str(url)]).stdout
    assert "3 requests to the storage made again, 1 since the storage asked to slow down: rank 9" in shown
    assert "node1" in CliRunner().invoke(cli, ["stats", "--ranks", str(url)]).stdout


def test_requests_that_are_made_again_are_counted() -> None:
    before = checks.total()
    tries = Tries("read", "s3://b/k", 60.0, Acquaintance())
    for code, status in (("SlowDown", 503), ("InternalError", 500)):
        tries.again(ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"))  # type: ignore[typeddict-item]
    assert checks.total().since(before) == (2, 1)


@pytest.mark.parametrize(("again", "alerts"), [(0, 0), (19, 0), (20, 1)])
def test_a_storage_that_refuses_much_is_alerted(again: int, alerts: int) -> None:
    rules = AlertRules(Alerts())
    event = Event(kind="save.durable", at=1.0, rank=0, ranks=1, root="r", step=1, seconds=1.0, retries=again, throttled=again // 2)
    found = rules.follow(event)
    assert [alert.topic for alert in found] == ["storage"] * alerts
    if alerts:
        assert found[0].reason and "20 requests" in found[0].reason and "of these 10" in found[0].reason
        assert rules.follow(event) == []  # once
