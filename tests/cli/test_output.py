"""Units, tables, colours and progress: the parts that all commands print with."""

from __future__ import annotations

import re
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
from ckpt.cli.output import Lines, Output, progress, rendered, style, table_lines
from ckpt.errors import FormatError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import Row
from tests.cli.checkpoints import sample, write_checkpoint
from tests.cli.terminal import ROOT, START, environment, on_a_terminal


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


def test_a_standard_output_that_is_closed_is_no_defect(checkpoint: str) -> None:
    for code, redirected in (("0", ">&-"), ("10", "2>&-")):
        url = checkpoint if code == "0" else f"{checkpoint}-none"
        done = subprocess.run(["bash", "-c", f"{shlex.join([*START, 'ls', url])} {redirected}; echo $?"], capture_output=True, text=True)
        assert (done.stdout.split(), done.stderr) == ([code], "")


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


# -------------------------------------------------------------------------- Tables that fit the terminal, and that are never cut elsewhere.

LONG = "model.layers.17.self_attention.query_key_value.weight"
TEXT = "no commit record: the save did not finish, or is still going on"


def lines(heads: list[str], rows: list[list[str]], limit: int, *, whole: bool = False) -> list[str]:
    return [rendered(line, colours=False) for line in table_lines(heads, rows, limit, whole=whole)]


@pytest.mark.parametrize("limit", [70, 80, 100])
def test_a_whole_name_that_is_wider_than_its_column_ends_its_line(limit: int) -> None:
    names = [LONG, "model.norm", f"{LONG}.exp_avg", "x" * (limit + 1)]
    url = f"s3://a-bucket/{LONG}"
    cut = lines(["NAME", "WHAT", ">SIZE", "~WHY"], [[name, url, "12", f"see {url} {TEXT}"] for name in names], limit, whole=True)
    assert [line for line in cut if len(line) > max(limit, len(url))] == [names[-1]], "a name that is wider than the limit is not cut"
    assert [word for line in cut for word in line.split() if word in names] == names
    words = " ".join(cut).split()
    assert words.count(url) == 2 * len(names) and words.count("12") == len(names), "of names and numbers nothing is lost"
    assert all(words.count(word) >= len(names) for word in TEXT.split())
    assert {line.index(" 12") + 3 for line in cut if " 12" in line} == {cut[0].index("SIZE") + 4}, "numbers stay below their head"
    short = lines(["NAME", ">SIZE"], [[LONG, "12"], ["model.norm", "1,024"]], 120, whole=True)
    assert short == [f"{'NAME':{len(LONG)}}   SIZE", f"{LONG}     12", f"{'model.norm':{len(LONG)}}  1,024"]


@pytest.mark.parametrize("limit", [40, 60, 80])
def test_a_limit_holds(limit: int) -> None:
    rows = [[f"{LONG}.{n}", style("committed", "green"), f"{n:,}", TEXT] for n in (5, 10_000)]
    cut = lines(["NAME", "STATUS", ">SIZE", "~WHY"], rows, limit)
    assert max(map(len, cut)) <= limit
    assert "10,000" in "".join(cut) and " ".join(TEXT.split()[:2]) in "".join(cut)
    assert {name[-3:] for line in cut if "…" in line for name in line.split()[:1]} == {"t.5", "000"}  # the ends differ, and stay
    words = " ".join(line[line.rindex("  ") :] if "  " in line else "" for line in cut)
    assert all(word in words for word in TEXT.split())


def test_numbers_go_into_several_tables() -> None:
    heads = [">RANK", *(f">PHASE {n}" for n in range(20))]
    cut = lines(heads, [[str(rank), *(f"{n}.123" for n in range(20))] for rank in range(3)], 80)
    assert max(map(len, cut)) <= 80
    assert sum("RANK" in line for line in cut) == len(cut) // 4 > 1
    assert all(f"{n}.123" in " ".join(cut) for n in range(20))


def test_further_tables_have_the_rows_that_say_something() -> None:
    heads = [">STEP", *(f">PHASE {n}" for n in range(9)), "~TAGS"]
    cut = lines(heads, [[str(n), *["1.123"] * 9, "release" if n == 1 else ""] for n in range(3)], 80)
    assert [line.split() for line in cut[4:]] == [
        ["STEP", "PHASE", "8", "TAGS"],
        *([str(n), "1.123", *["release"] * (n == 1)] for n in range(3)),
    ]
    tagged = lines(["NAME", ">SIZE", "~TAGS"], [["x" * 60, "1" * 60, ""], ["y", "2", "mine"]], 80)
    assert [line.split() for line in tagged[-2:]] == [["NAME", "TAGS"], ["y", "mine"]]


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run-with-a-rather-long-name-as-people-give-them") / "experiment"
    long = {f"{LONG}.{name}": array for name, array in sample().items()}
    state = {"text": "words " * 40, "list": list(range(200))}
    changed = {name: array + 1 if array.size else array for name, array in long.items()}
    for step, arrays in ((5, long), (10, changed), (15, {f"{name}.b": a for name, a in long.items()})):
        url = str(root / f"step-{step:012d}")
        write_checkpoint(url, arrays, state=state | {"text": f"step {step} " * 40}, commit=step != 15)
        if step != 15:
            backend = open_backend(url)
            write_spans(backend, NativeCatalog(backend).record.id, {rank: _spans(rank) for rank in range(2)})
    return root


def _spans(rank: int) -> Row:
    """A rank's row of a save with many phases, on a host with a long name."""
    columns = [list(range(len(PHASES))), [0] * len(PHASES), [1_000_000 * i for i in range(len(PHASES))]]
    columns += [[900_000 + 50_000_000 * rank] * len(PHASES), [(1 << 40) * rank] * len(PHASES)]
    names = {"host": "node-with-a-long-name-0123456789.cluster.example", "storage": [12, 3]}
    return {"began": 1.7e9, "phases": list(PHASES), "threads": ["t"], "spans": columns, "folded": [], **names}


PHASES = ("collect", "plan", "agree", "stage", "capture", "settle", "exchange", "hash", "encode", "write", "sync", "commit")
CODES = {"diff": 3}
"""Exit codes other than 0: the checkpoints differ."""
PROSE = ("verdict: ", "24 requests to the storage")
"""How lines begin that are sentences: the terminal wraps them."""
COMMANDS = (
    "ls {0}",
    "inspect {0}/{1}",
    "inspect {0}/{1} *",
    "inspect --files {0}/{1}",
    "inspect --state {0}/{1}",
    "gc {0} --older-than 0",
    "gc {0} --older-than 0 --keep latest=1",
    "diff {0}/{1} {0}/{2}",
    "stats {0}",
    "stats {0}/{1}",
    "stats --ranks {0}/{1}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_tables_of_the_commands_fit(run_root: Path, command: str) -> None:
    steps = [f"step-{n:012d}" for n in (5, 10)]
    args = [word.format(run_root, *steps) for word in command.split()]
    code = CODES.get(args[0], 0)
    shown = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|[^\n]*\r", "", on_a_terminal(*args, code=code))  # colours, and the bar of ``diff``
    assert len(shown.splitlines()) >= 3
    assert [line for line in shown.splitlines() if len(line) > 80 and not line.startswith(PROSE) and "━" not in line] == []
    piped = subprocess.run([*START, *args], env=environment(COLUMNS="80"), capture_output=True, text=True, check=False)
    assert piped.returncode == code
    assert "…" not in re.sub(r'…"?(?=\s)', "", piped.stdout)  # but for values, which are abridged everywhere
    wide = [line for line in piped.stdout.splitlines() if len(line) > 80 and not line.startswith(PROSE)]
    assert [line for line in wide if " " in line.strip()] == [], "only a name that is wider by itself, and has a line of its own"


def test_columns_wins_over_the_terminal(run_root: Path) -> None:
    assert "…" in on_a_terminal("ls", str(run_root), columns=300, COLUMNS="28")
    assert "…" not in on_a_terminal("ls", str(run_root), columns=300)
