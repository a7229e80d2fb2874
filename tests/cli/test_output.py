"""Units, tables, colours and progress: the parts that all commands print with."""

from __future__ import annotations

import shlex
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import ckpt
from ckpt import units
from ckpt.cli.main import cli
from ckpt.cli.output import Lines, Output, progress
from ckpt.errors import FormatError
from tests.cli.checkpoints import sample, write_checkpoint
from tests.cli.terminal import ROOT, START, on_a_terminal


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10_200, "10 KiB"),
        (1023.6 * 1024, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_size(count: float, text: str) -> None:
    assert units.size(count) == text


def test_size_is_right_to_five_percent() -> None:
    powers = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}
    for count in np.random.default_rng(3).integers(1, 1 << 59, 500) >> np.arange(500) % 50:
        number, unit = units.size(float(count)).split()
        assert float(number) * 1024 ** powers[unit] == pytest.approx(float(count), rel=0.055)
        assert len(number) <= 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.4, "9.4 s"), (9.6, "10 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_age() -> None:
    now = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
    assert units.age("2026-01-02T09:00:00Z", now) == "3 h ago"
    assert units.age("2026-01-02T09:00:00", now) == "3 h ago"
    assert units.age((now - timedelta(seconds=1)).isoformat(), now) == "just now"
    assert units.age("2026-01-02T13:00:00+02:00", now) == "60 min ago"
    assert units.age("yesterday", now) == units.age(None, now) == "?"


def test_a_table_aligns_and_drops_empty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(("NAME", ">SIZE", "NOTE", "X"), [("a", "1", "", "x"), ("long one", "12345", "", "")])
    assert capsys.readouterr().out.splitlines() == ["NAME       SIZE  X", "a             1  x", "long one  12345"]


def test_talk_goes_to_stderr_and_quiet_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    Output().talk("hello")
    Output(quiet=True).talk("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_progress_in_a_log_is_a_line_every_ten_seconds() -> None:
    time, said = 100.0, list[str]()
    lines = Lines("verify", said.append, lambda: time)
    for second in range(31):
        time = 100.0 + second
        lines(second << 30, 60 << 30)
    assert said == [
        "verify: 10 GiB of 60 GiB (16 %), 1.0 GiB/s, 50 s left",
        "verify: 20 GiB of 60 GiB (33 %), 1.0 GiB/s, 40 s left",
        "verify: 30 GiB of 60 GiB (50 %), 1.0 GiB/s, 30 s left",
    ]


def test_progress_without_bytes_or_voice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.cli.output.INTERVAL", 0.0)
    with progress("verify", Output(quiet=True)) as update:
        update(0, 0)
    assert capsys.readouterr() == ("", "")
    with progress("verify", Output()) as update:
        update(0, 0)
    assert capsys.readouterr().err == "verify: 0 B of 0 B (0 %), 0 B/s\n"


# ------------------------------------------------------------------------------------------------------- a real process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run") / "step-1"
    write_checkpoint(str(path), sample())
    return str(path)


def test_colours_only_where_they_are_seen(checkpoint: str) -> None:
    assert "\x1b[32mcommitted" in on_a_terminal("ls", checkpoint)
    assert "\x1b" not in on_a_terminal("ls", checkpoint, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal("ls", checkpoint, TERM="dumb")
    piped = subprocess.run([*START, "ls", checkpoint], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "committed" in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr


def test_a_bar_on_a_terminal(checkpoint: str) -> None:
    assert "verify" in on_a_terminal("verify", checkpoint).partition("ok")[0]
    assert on_a_terminal("verify", "-q", checkpoint) == ""


def test_a_reader_that_leaves_is_no_error_worth_a_traceback(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), {f"tensor.{i:05d}": np.zeros(2, dtype=np.uint8) for i in range(4000)}, ranks=1)
    process = subprocess.Popen([*START, "inspect", str(tmp_path), "*"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_a_diff_into_head(tmp_path: Path) -> None:
    for number in range(2):
        arrays = {f"tensor.{i:05d}": np.full(2, number, dtype=np.uint8) for i in range(4000)}
        write_checkpoint(str(tmp_path / str(number)), arrays, ranks=1)
    command = shlex.join([*START, "diff", str(tmp_path / "0"), str(tmp_path / "1")])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (141, "") and done.stdout.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("command", [["ls"], ["stats"], ["gc", "--dry-run"]])
def test_standard_output_that_takes_nothing_is_an_error(tmp_path: Path, command: list[str], more: list[str]) -> None:
    write_checkpoint(str(tmp_path / "step-1"), sample())
    with open("/dev/full", "w") as full:
        done = subprocess.run([*START, *command, str(tmp_path), *more], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (30, "error: standard output cannot be written: No space left on device")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_a_run_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), sample())
    result = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert result.exit_code == 12 and "this directory holds checkpoints, but is not one itself" in result.stderr
    assert f"such as {tmp_path / 'step-1'}" in result.stderr


def test_the_parent_of_runs_names_them(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    for run in "ab":
        write_checkpoint(str(tmp_path / run / "step-1"), sample())
    for command in ("verify", "inspect", "stats", "report", "tag"):
        result = CliRunner().invoke(cli, [command, str(tmp_path)])
        message = f"error: this directory holds runs, but is not a checkpoint itself: {tmp_path}/a, {tmp_path}/b\n"
        assert result.exit_code == 12 and result.output.startswith(message), (command, result.output)
        assert f"`ckpt ls {tmp_path}/b`" in result.output
    with pytest.raises(FormatError, match="this directory holds runs"):
        ckpt.open(tmp_path)
