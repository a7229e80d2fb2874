"""The log of a run: what failed and what was loaded, bounded, and never in anybody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import CkptError, CorruptError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.runlog import NEWEST, PATH, SIZE_LIMIT, LogEntry, add_entry, entry_line, read_log
from ckpt.formats.native.spans import read_spans
from ckpt.io_backends import checks
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.io_backends.s3_tries import Acquaintance, Tries
from ckpt.live import Sink, Source
from ckpt.runs.events import AlertRules, Alerts, Event
from ckpt.runs.report.content import Setting, build_report
from tests.observe.saves import many, save


def state(n: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(n))}


def log_of(root: Path) -> tuple[LogEntry, ...]:
    return read_log(open_backend(str(root)))


def test_a_save_that_failed_and_loads(tmp_path: Path) -> None:
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(state()) is None and not (tmp_path / PATH).exists()
        c.save(1, state(1)).result()
        with wrap_backends(FaultyProcess(Fault(at=5, kind="no_space")).wrap):
            c.save(2, state(2))
            with pytest.raises(CkptError):
                c.wait()
        with pytest.raises(CkptError):
            c.save(3, {"x": object()})
        assert c.restore(state()) == 1
    *of_saves, loaded = log_of(tmp_path)
    failed, not_begun = sorted(of_saves, key=lambda e: e.step or 0)  # how a save ended is told while its waiter goes on
    assert (failed.kind, failed.step, failed.error, failed.ranks) == ("save", 2, "NoSpaceError", 1)
    assert failed.phase == "write" and failed.seconds is not None and failed.url == c.url(2)
    assert (not_begun.step, not_begun.error, not_begun.phase) == (3, "StateError", "begin")
    assert "step 2 failed in write: NoSpaceError: " in entry_line(failed)
    assert (loaded.kind, loaded.step, loaded.error, loaded.tensor_bytes) == ("load", 1, None, 4000)
    assert loaded.tables[0].sums["read"].nbytes >= 4000 and {"open", "match"} <= loaded.tables[0].sums.keys()
    assert [s.number for s in c.steps()] == [1] and [s.number for s in ckpt.list_steps(str(tmp_path))] == [1]


def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUN_LOG", "off")
    with ckpt.Checkpointer(str(tmp_path)) as c:
        c.save(1, state()).result()
        c.restore(state())
    assert not (tmp_path / PATH).exists()


def test_a_storage_that_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.Checkpointer(str(tmp_path)) as c:
        c.save(1, state()).result()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ckpt.errors.AccessError("read only", where=str(tmp_path))

    monkeypatch.setattr("ckpt.io_backends.posix_backend.PosixBackend.put_if", refuse)
    with ckpt.Checkpointer(str(tmp_path)) as c:
        assert c.restore(state()) == 1
    assert not (tmp_path / PATH).exists()


def test_it_is_bounded(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    for n in range(NEWEST + 5):
        for kind in ("save", "load"):
            add_entry(backend, LogEntry(kind=kind, at=float(n), rank=0, ranks=4, step=n, reason="x" * 100_000, error="E"))  # type: ignore[arg-type]
    found = log_of(tmp_path)
    for kind in ("save", "load"):
        assert [e.step for e in found if e.kind == kind] == list(range(5, NEWEST + 5))
    assert os.path.getsize(tmp_path / PATH) < 60_000 and os.listdir(tmp_path) == [PATH]


ENTRY = {"kind": "save", "at": 1.0, "rank": 0, "ranks": 1, "error": "E", "reason": "r"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 10_000,
        '{"version": 2, "entries": []}',
        '{"version": 1, "entries": 5}',
        json.dumps({"version": 1, "entries": [ENTRY] * 41}),
        *(
            json.dumps({"version": 1, "entries": [{**ENTRY, **change}]})
            for change in (
                {"kind": "other"},
                {"at": "now"},
                {"at": float("inf")},
                {"rank": -1},
                {"ranks": None},
                {"step": 1.5},
                {"reason": ["x"]},
                {"at": 10**400},
                {"url": "\ud800"},
                {"failed_ranks": [-1]},
                {"spans": {"x": {}}},
                {"spans": {"0": {"began": 1}}},
            )
        ),
    ],
)
def test_a_damaged_log_is_said_to_be_and_begun_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / PATH).write_text(text)
    with pytest.raises(CorruptError, match="log of the run"):
        log_of(tmp_path)
    add_entry(open_backend(str(tmp_path)), LogEntry(kind="save", at=1.0, rank=0, ranks=1, error="E", reason="r"))
    assert len(log_of(tmp_path)) == 1


def test_a_log_that_is_too_long_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / PATH).write_bytes(b" " * (SIZE_LIMIT + 1))
    with pytest.raises(CorruptError):
        log_of(tmp_path)
    add_entry(open_backend(str(tmp_path)), LogEntry(kind="save", at=1.0, rank=0, ranks=1, error="E", reason="r"))
    assert len(log_of(tmp_path)) == 1


def test_control_characters_stay_text(tmp_path: Path) -> None:
    entry = LogEntry(kind="save", at=1.0, rank=0, ranks=1, step=5, error="E", reason="a\x1b[31m\nb", failed_ranks=(3,))
    add_entry(open_backend(str(tmp_path)), entry)
    assert entry_line(log_of(tmp_path)[0]) == "step 5 failed on rank 3: E: a\\x1b[31m\\nb"


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    for step in range(2):
        add_entry(backend, LogEntry(kind="save", at=1.0, rank=0, ranks=1, step=step, error="E", url="/x/\udcff", reason="\udcff" * 900))
    first, second = log_of(tmp_path)
    assert (first.step, second.step, first.url) == (0, 1, "/x/\\udcff")


def test_reports_and_stats_show_it(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ckpt.cli.main import cli

    root = str(tmp_path / "run")
    with ckpt.Checkpointer(root) as c, wrap_backends(FaultyProcess(Fault(at=7, kind="no_space")).wrap):
        c.save(2, {"<b>x": torch.zeros(4)})
        with pytest.raises(CkptError):
            c.wait()
    for _ in range(2):  # the first time, nothing is committed
        found = CliRunner().invoke(cli, ["stats", root])
        assert found.exit_code == 0 and "step 2 failed in write: NoSpaceError: injected fault" in found.stdout
        (failed,) = json.loads(CliRunner().invoke(cli, ["stats", root, "--json"]).stdout)["failed"]
        assert (failed["step"], failed["phase"], failed["error"]) == (2, "write", "NoSpaceError")
        assert CliRunner().invoke(cli, ["report", root, "-o", str(tmp_path / "r.html")]).exit_code == 0
        page = (tmp_path / "r.html").read_text()
        assert "Saves that failed" in page and "NoSpaceError: injected fault" in page
        with ckpt.Checkpointer(root) as c:
            c.save(3, state()).result()
            c.restore(state())
    (load,) = json.loads(CliRunner().invoke(cli, ["stats", root, "--json"]).stdout)["loads"][:1]
    assert load["step"] == 3 and load["phases"]["read"] > 0 and load["tensor_bytes"] == 4000
    CliRunner().invoke(cli, ["report", root, "-o", str(tmp_path / "r.html")])
    assert "step 3 was loaded" in (tmp_path / "r.html").read_text()
    (tmp_path / "run" / PATH).write_text("<script>")
    assert CliRunner().invoke(cli, ["report", root, "-o", str(tmp_path / "r.html")]).exit_code == 0
    assert "the log of the run is damaged" in (tmp_path / "r.html").read_text()


def wait_for_entries(run: Path, count: int) -> None:
    until = time.monotonic() + 20
    while len(log_of(run)) < count and time.monotonic() < until:
        time.sleep(0.01)


def test_a_save_that_failed_outside_of_a_checkpointer(tmp_path: Path) -> None:
    """It is noted if its URL is that of a step, beside others or a log; anywhere else there is no run that it could belong to."""
    run, bad = tmp_path / "run", {"x": object()}
    with pytest.raises(CkptError):
        ckpt.save(f"{run}/step-00000001", bad)
    with ckpt.Checkpointer(str(run)) as c:
        c.save(1, state(1)).result()
    with pytest.raises(CkptError):
        ckpt.save(f"{run}/step-00000002", bad)
    with pytest.raises(CkptError):
        ckpt.save_async(f"{run}/step-00000003", bad)
    wait_for_entries(run, 2)  # whatever writes them must not meet the fault
    with wrap_backends(FaultyProcess(Fault(at=5, kind="no_space")).wrap):
        handle = ckpt.save_async(f"{run}/step-00000004/", state(4))
        assert isinstance(handle.durable.exception(), CkptError)
    with pytest.raises(CkptError):
        ckpt.save(f"{run}/best", bad)
    wait_for_entries(run, 3)
    noted = sorted(log_of(run), key=lambda entry: entry.step or 0)
    assert [(e.step, e.phase, e.error) for e in noted] == [
        (2, "begin", "StateError"),
        (3, "begin", "StateError"),
        (4, "write", "NoSpaceError"),
    ]
    assert not (tmp_path / PATH).exists()


AT_EXIT = """
import sys, torch, ckpt
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
c = ckpt.Checkpointer(sys.argv[1], on_event=lambda event: print(event.kind, flush=True))
c.save(1, {"x": torch.zeros(1000)}).result()
with wrap_backends(FaultyProcess(Fault(at=5, kind="no_space")).wrap):
    c.save(2, {"x": torch.zeros(1000)}).wait()
"""


def test_a_checkpointer_that_nobody_closes_loses_no_note(tmp_path: Path) -> None:
    """The program ends while the note of its last save, and what a listener has not had yet, are on their way."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [(e.step, e.error) for e in log_of(tmp_path)] == [(2, "NoSpaceError")]
    assert done.stdout.split()[-2:] == ["save.failed", "alert"]


# ------------------------------------------------------------------------------------------------------------------------------------------
# What the spans of a save say besides phases: how long training really waited, where ranks ran, and what the storage refused.


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
    assert checks.total(before) == (2, 1)


@pytest.mark.parametrize(("again", "alerts"), [(0, 0), (19, 0), (20, 1)])
def test_a_storage_that_refuses_much_is_alerted(again: int, alerts: int) -> None:
    rules = AlertRules(Alerts())
    event = Event(kind="save.durable", at=1.0, rank=0, ranks=1, root="r", step=1, seconds=1.0, retries=again, throttled=again // 2)
    found = rules.follow(event)
    assert [alert.topic for alert in found] == ["storage"] * alerts
    if alerts:
        assert found[0].reason and "20 requests" in found[0].reason and "of these 10" in found[0].reason
        assert rules.follow(event) == []  # once


# ------------------------------------------------------- What a save does stands in the trace of torch.profiler, beside what training does.


def ranges(root: Path, **more: object) -> dict[str, list[tuple[int, int]]]:
    """Name → start and end of the ranges of ckpt in a profile of a save and two steps of training."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer(str(root)) as c, profile(activities=[ProfilerActivity.CPU], **more) as profiled:  # type: ignore[arg-type]
        for n in (1, 2):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            if n == 1:
                c.save(n, {"model": model, "optimizer": optimizer}).fence()
                c.save(n + 1, {"model": model, "optimizer": optimizer})
    found: dict[str, list[tuple[int, int]]] = {}
    for event in profiled.events() or ():
        if event.name.startswith(("ckpt.", "Optimizer.step")):
            found.setdefault(event.name.partition("#")[0], []).append((event.time_range.start, event.time_range.end))
    return found


def test_saves_are_ranges_beside_the_steps_of_training(tmp_path: Path) -> None:
    found = ranges(tmp_path)
    assert len(found["ckpt.save"]) == 2 and len(found["Optimizer.step"]) == 2 and "ckpt.wait" in found
    first, last = found["Optimizer.step"]
    assert all(first[1] <= start <= end <= last[1] for start, end in found["ckpt.save"])


def test_the_copy_shows_where_other_threads_do(tmp_path: Path) -> None:
    config = torch._C._profiler._ExperimentalConfig
    if "profile_all_threads" not in str(config.__init__.__doc__):
        pytest.skip("this torch profiles its own thread alone")
    assert len(ranges(tmp_path, experimental_config=config(profile_all_threads=True))["ckpt.capture"]) == 2


def test_without_a_profiler_there_is_no_range() -> None:
    from ckpt.engine.save.staging import in_trace

    @in_trace("ckpt.nothing")
    def nothing() -> int:
        return 3

    assert nothing() == 3
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert nothing() == 3
    assert [e.name for e in profiled.events() or ()].count("ckpt.nothing") == 1


# ------------------------------------------------------------------------- What reports print, and which checkpoint of a run is the newest.


def test_reports_print_as_one_line(tmp_path: Path) -> None:
    url, state = str(tmp_path / "run" / "step-3"), {"w": torch.ones(300, 300)}
    assert str(ckpt.save(url, state, dry_run=True)).startswith(f"would save 352 KiB to {url}")
    assert str(ckpt.save(url, state)).startswith(f"saved 352 KiB to {url} in ")
    loaded = ckpt.load(url, {"w": torch.ones(300, 300), "v": torch.ones(3)}, strict=False)
    assert str(loaded).startswith(f"loaded 1 tensor, 352 KiB, from {url} in ") and str(loaded).endswith(", 1 missing")
    assert str(ckpt.verify(url)) == "ok: 1 file, 1 chunk, 352 KiB"
    target = str(tmp_path / "copy")
    assert f" to {target} in " in str(ckpt.copy(url, target))
    assert str(ckpt.convert(url, str(tmp_path / "torch"), to="torch")).startswith("wrote 1 tensor, 352 KiB, to ")
    merged = ckpt.merge(str(tmp_path / "merged"), [url, target])
    assert str(merged).startswith("averaged 1 tensor of 2 checkpoints; wrote 1 tensor")
    assert all("\n" not in str(report) for report in (loaded, merged))


def test_every_public_report_prints_itself() -> None:
    modules = [ckpt, *(getattr(ckpt, face) for face in ckpt.FACES)]
    reports = {getattr(module, name) for module in modules for name in getattr(module, "__all__", ()) if name.endswith("Report")}
    assert len(reports) >= 10 and [r.__name__ for r in reports if r.__str__ is object.__str__] == []


def names_of(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_what_a_run_is_shown_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpt.Checkpointer(tmp_path) as c:
        assert repr(c) == f"<ckpt.Checkpointer of {tmp_path}: saves EverySteps(1000), keeps All()>"
        c.save(1, {"w": torch.ones(3)})
        assert c.handle is not None
        ends = {"url", "captured", "durable", "fence", "wait", "done", "result", "progress", "cancel"}
        assert names_of(c.handle) == ends
        done = {"best", "latest", "preempted", "steps", "url", "handle", "restored_from", "uncopied", "unpublished", "root"}
        assert names_of(c) == done | {"close", "requested", "restore", "save", "step", "wait"}
    assert repr(c).endswith("; closed>")
    monkeypatch.setenv("CKPT_LIVE_SECRET", "secret")
    state = {"w": torch.ones(3)}
    with Source("tcp://127.0.0.1:0/a", state) as source, Sink(source.address, state) as sink:
        assert repr(source) == f"<ckpt.live.Source at {source.address}>" and repr(sink) == f"<ckpt.live.Sink of {source.address}>"
        publication = source.publish(1)
        publication.result()
        assert str(publication.report).startswith("published step 1, 12 B, in ")
        assert names_of(publication) == {"step", "captured", "sealed", "report", "fence", "done", "result"}
        assert names_of(source) == {"address", "publish", "report", "close"}
        assert names_of(sink) == {"address", "version", "report", "take", "tensors", "run_on_all", "close"}
        assert sink.take().step == 1 and str(sink.report).startswith("took step 1, 12 B, in ")
    assert repr(sink).endswith(": closed>") and repr(source).endswith(": closed>")


def test_the_newest_of_a_run(tmp_path: Path) -> None:
    assert ckpt.latest(tmp_path / "nothing") is None
    for name in ("b", "step-9", "step-10", "a"):
        ckpt.save(tmp_path / name, {"w": torch.ones(3)})
    assert ckpt.latest(tmp_path) == str(tmp_path / "step-10")
    (tmp_path / "step-10" / "checkpoint.json").unlink()
    (tmp_path / "step-9" / "checkpoint.json").unlink()
    assert ckpt.latest(tmp_path) == str(tmp_path / "a")  # saved last
    assert ckpt.latest(tmp_path / "a") == str(tmp_path / "a")
