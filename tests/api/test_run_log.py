"""The log of a run: what failed and what was loaded, bounded, and never in anybody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, CorruptError
from ckpt.formats.native.runlog import NEWEST, PATH, SIZE_LIMIT, LogEntry, add_entry, entry_line, read_log
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends


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
