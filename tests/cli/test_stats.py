"""``ckpt stats``: what people and scripts see of spans that were kept, and what they are told when there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ckpt.cli.main import cli
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import Row
from tests.cli.checkpoints import flip, sample, write_checkpoint

MIB = 1 << 20
PHASES = ["agree", "write", "sync", "commit"]


def row(*spans: tuple[str, float, float, int], threads: int = 1, began: float = 1.7e9, folded: tuple[list[int], ...] = ()) -> Row:
    """A rank's row, made by hand: phase, start and end in seconds, bytes."""
    columns = [
        [PHASES.index(phase) for phase, *_ in spans],
        [i % threads for i in range(len(spans))],
        [round(start * 1e6) for _, start, _, _ in spans],
        [round((end - start) * 1e6) for _, start, end, _ in spans],
        [nbytes for *_, nbytes in spans],
    ]
    return {"began": began, "phases": PHASES, "threads": [f"t{i}" for i in range(threads)], "spans": columns, "folded": list(folded)}


ROWS = {
    0: row(("agree", 0, 1, 0), ("write", 1, 3, 2 * MIB), ("write", 1, 3, 2 * MIB), ("agree", 3, 9, 0), ("commit", 9, 10, 0), threads=2),
    1: row(("agree", 0, 1, 0), ("write", 1, 9, 4 * MIB), ("sync", 9, 9.5, 4 * MIB), began=1.7e9 + 0.5),
    2: row(("agree", 0, 1, 0), ("write", 1, 2, MIB), ("agree", 2, 9, 0), folded=([1, 3, 3 * MIB, 3_000_000, 2_000_000, 4_000_000],)),
}
"""Work: rank 0 4 s, rank 1 8.5 s, rank 2 4 s; the median is 4 s."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    url = tmp_path / "step-7"
    write_checkpoint(str(url), sample(), ranks=4)
    keep(url, ROWS)
    return url


def keep(url: Path, rows: dict[int, Row]) -> Path:
    backend = open_backend(str(url))
    write_spans(backend, NativeCatalog(backend).record.id, rows)
    (path,) = url.glob("index-*/spans.json")
    return path


def stats(*args: object) -> Result:
    return CliRunner().invoke(cli, ["stats", *[str(arg) for arg in args]])


def document(result: Result) -> Any:
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# --------------------------------------------------------------------------------------------------------------- people


def test_phases_slowest_first(saved: Path) -> None:
    result = stats(saved)
    lines = [cells(line) for line in result.stdout.splitlines()]
    assert lines[0] == ["PHASE", "RANK", "SECONDS", "MEDIAN", "WALL", "BYTES", "RATE", "NOTE"]
    assert lines[1:5] == [
        ["agree", "2", "8.000", "7.000", "9.000", "waits for ranks"],
        ["write", "1", "8.000", "4.000", "8.000", "12 MiB", "1.5 MiB/s"],
        ["commit", "0", "1.000", "1.000", "1.000", "the leader alone"],
        ["sync", "1", "0.500", "0.500", "0.500", "4.0 MiB", "8.0 MiB/s"],
    ]
    size = sum(a.nbytes for a in sample().values())
    assert result.stdout.splitlines()[5:] == [
        f"4 ranks, {size} B in 10.000 s ({size / 10:.0f} B/s)",
        "stragglers: rank 1",
        "verdict: rank 1's disk or network: write takes 2.0 × the median (8.00 s), for as many bytes",
        "no spans were kept of 1 rank: rank 3",
        "3 spans are kept as sums only",
    ]
    assert (result.exit_code, result.stderr) == (0, "")


def test_ranks_slowest_first(saved: Path) -> None:
    lines = [cells(line) for line in stats("--ranks", saved).stdout.splitlines()]
    assert lines[0] == ["RANK", "WORK", "agree", "write", "commit", "sync", "NOTE"]
    assert lines[1:4] == [
        ["1", "8.500", "1.000", "8.000", "0.500", "2.1 × the median"],
        ["0", "4.000", "7.000", "4.000", "1.000"],
        ["2", "4.000", "8.000", "4.000"],
    ]


def test_quiet_gives_bare_names(saved: Path) -> None:
    assert stats("-q", saved).output.split() == ["agree", "write", "commit", "sync"]
    assert stats("-q", "--ranks", saved).output.split() == ["1", "0", "2"]


def test_equal_ranks_have_no_stragglers(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample(), ranks=2)
    keep(tmp_path, {rank: row(("write", 0, 2 + rank / 100, 5)) for rank in range(2)})
    assert stats(tmp_path).stdout.splitlines()[-2:] == ["no stragglers", "verdict: no rank is slow; write takes longest, 2.01 s on rank 1"]


def test_what_nobody_notices_makes_no_straggler(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample(), ranks=3)
    keep(tmp_path, {rank: row(("write", 0, (0.003, 0.003, 0.052)[rank], 5)) for rank in range(3)})
    assert document(stats("--json", tmp_path))["stragglers"] == []
    keep_again = {rank: row(("write", 0, (0.003, 0.003, 0.054)[rank], 5)) for rank in range(3)}
    next(tmp_path.glob("index-*/spans.json")).unlink()
    keep(tmp_path, keep_again)
    assert document(stats("--json", tmp_path))["stragglers"] == [2]


def test_ranks_that_only_waited(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample(), ranks=2)
    keep(tmp_path, {rank: row(("agree", 1, 1, 0)) for rank in range(2)})
    assert [cells(line) for line in stats(tmp_path).stdout.splitlines()][1] == [
        "agree",
        "0",
        "0.000",
        "0.000",
        "0.000",
        "waits for ranks",
    ]
    assert stats("--ranks", tmp_path).exit_code == 0
    assert document(stats("--json", tmp_path))["stragglers"] == []


def test_many_stragglers_are_counted(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), {"w": np.zeros((40, 2), dtype=np.float32)}, ranks=40)
    keep(tmp_path, {rank: row(("write", 0, 9 if rank < 12 else 1, 5)) for rank in range(40)})
    (line,) = [line for line in stats(tmp_path).stdout.splitlines() if line.startswith("stragglers")]
    assert line == "stragglers: " + ", ".join(f"rank {rank}" for rank in range(8)) + " and 4 more"


def test_time_that_no_span_covers(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample(), ranks=3)
    rows = {
        0: row(("write", 0, 4, 5), ("write", 1, 5, 5), ("sync", 8, 10, 5), threads=2),  # 3 of 10 s
        1: row(("write", 1, 9, 5), ("sync", 2, 3, 5), ("commit", 9, 9, 0)),  # 1 of 9 s: the save began before the first span
        2: row(("write", 9, 10, 5), folded=([1, 2, 10, 1_000_000, 0, 1_000_000],)),  # not known
    }
    keep(tmp_path, rows)
    lines = [cells(line) for line in stats(tmp_path).stdout.splitlines()]
    assert ["unaccounted", "0", "3.000", "2.000", "30 % of the save"] in lines
    expected = {"rank": 0, "seconds": 3.0, "share": 0.3, "median": 2.0, "ranks": 2}
    assert document(stats("--json", tmp_path))["unaccounted"] == expected


def test_the_verdict_tells_more_work_from_slower_machines(tmp_path: Path) -> None:
    for name, nbytes, verdict in (
        ("slow", 8 * MIB, "rank 2's disk or network: write takes 2.2 × the median (22.0 s), for as many bytes"),
        ("more", 20 * MIB, "rank 2 has more to write than others: 20 MiB, the median is 8.0 MiB; 2.2 × the median"),
    ):
        write_checkpoint(str(tmp_path / name), sample(), ranks=4)
        keep(tmp_path / name, {rank: row(("write", 0, 10, 8 * MIB)) if rank != 2 else row(("write", 0, 22, nbytes)) for rank in range(4)})
        assert f"verdict: {verdict}" in stats(tmp_path / name).stdout.splitlines()


# ------------------------------------------------------------------------------------------------------------- heat map


def test_the_heat_map_shows_slow_ranks_in_80_columns(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), {"w": np.zeros((200, 2), dtype=np.float32)}, ranks=200)
    rows = {rank: row(("write", 0, {7: 16.0, 150: 35.0}.get(rank, 10.0), 5), ("agree", 10, 11, 0)) for rank in range(200)}
    rows[0] = row(("write", 0, 10, 5), ("commit", 10, 11, 0))
    keep(tmp_path, rows)
    lines = stats("--heatmap", tmp_path).stdout.splitlines()
    assert max(map(len, lines[:5])) <= 80
    assert "\x1b" not in "".join(lines)
    head, *phases = lines[:4]
    assert head.split() == ["PHASE", "ranks", "0", "to", "199,", "5", "a", "column", "SLOWEST"]
    expected = "".join("▒" if 7 in range(at, at + 5) else "█" if 150 in range(at, at + 5) else "·" for at in range(0, 200, 5))
    assert [line for line in phases if line.startswith("write")] == [f"{'write':11}  {expected}  150: 35.0 s"]
    (commit,) = [line for line in phases if line.startswith("commit")]
    assert commit[13:53] == "·" + 39 * " "  # the leader's block alone
    assert [line.split()[0] for line in phases] == ["write", "agree", "commit"]  # the slowest first
    assert lines[4].split("   ") == ["· about the median, or faster", "░ ≥ 1.25 ×", "▒ ≥ 1.5 ×", "▓ ≥ 2 ×", "█ ≥ 3 ×"]


def test_the_heat_map_where_the_terminal_has_no_blocks(saved: Path) -> None:
    code = "import sys; from ckpt.cli.main import cli; cli.main(['stats', '--heatmap', sys.argv[1]])"
    environment = {"PATH": "", "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, check=True, env=environment)
    lines = done.stdout.decode("latin-1").splitlines()
    assert next(line for line in lines if line.startswith("write")).split() == ["write", ".*.", "1:", "8.00", "s"]


# ---------------------------------------------------------------------------------------------------------------- a run


def test_a_run_is_a_line_for_each_save(tmp_path: Path) -> None:
    for step, seconds in ((10, 2.0), (9, 1.0), (100, 4.0)):
        write_checkpoint(str(tmp_path / f"step-{step}"), sample())
        keep(tmp_path / f"step-{step}", {rank: row(("write", 0, seconds, 5), ("sync", seconds, 2 * seconds, 5)) for rank in range(2)})
    write_checkpoint(str(tmp_path / "step-101"), sample())
    write_checkpoint(str(tmp_path / "step-102"), sample(), commit=False)
    (tmp_path / "step-103").mkdir()
    (tmp_path / "step-104").mkdir()
    (tmp_path / "step-104" / "notes.txt").write_text("no checkpoint")
    lines = [cells(line) for line in stats(tmp_path).stdout.splitlines()]
    assert lines[0][:4] == ["STEP", "CREATED", "SECONDS", "BLOCKED"]
    assert [(line[0], line[2], line[3]) for line in lines[1:4]] == [
        ("9", "2.000", "2.000"),
        ("10", "4.000", "4.000"),
        ("100", "8.000", "8.000"),
    ]
    assert lines[4][0] == "101" and lines[4][-1] == "no spans were kept with this checkpoint"
    assert lines[5] == ["102", "the save failed, or still goes on"]
    assert len(lines) == 6
    found = document(stats("--json", tmp_path))
    assert (found["root"], found["left_out"]) == (str(tmp_path), 0)
    assert [(s["step"], s["seconds"]) for s in found["saves"]] == [(9, 2.0), (10, 4.0), (100, 8.0), (101, None), (102, None)]
    assert stats("-q", tmp_path).output.split() == [str(tmp_path / name) for name in ("step-9", "step-10", "step-100")]
    assert stats("--heatmap", tmp_path).exit_code == 2
    assert stats("--heatmap", "--ranks", tmp_path).exit_code == 2


# -------------------------------------------------------------------------------------------------------------- machines


def test_json(saved: Path) -> None:
    found = document(stats("--json", saved))
    assert found["url"] == str(saved)
    assert found.keys() == {
        *("url", "id", "created", "world_size", "tensor_bytes", "seconds", "median", "stragglers", "missing", "folded", "phases"),
        *("blocked", "blocked_measured", "background", "retries", "throttled", "unaccounted", "verdict"),
    }
    assert (found["world_size"], found["seconds"], found["median"], found["folded"]) == (4, 10.0, 4.0, 3)
    assert (found["stragglers"], found["missing"]) == ([1], [3])
    assert found["tensor_bytes"] == sum(a.nbytes for a in sample().values())
    assert {p.pop("phase"): p for p in found["phases"]} == {
        "write": {"ranks": 3, "rank": 1, "seconds": 8.0, "median": 4.0, "wall": 8.0, "spans": 7, "bytes": 12 * MIB, "rate": 1.5 * MIB},
        "agree": {"ranks": 3, "rank": 2, "seconds": 8.0, "median": 7.0, "wall": 9.0, "spans": 5, "bytes": 0, "rate": None},
        "commit": {"ranks": 1, "rank": 0, "seconds": 1.0, "median": 1.0, "wall": 1.0, "spans": 1, "bytes": 0, "rate": None},
        "sync": {"ranks": 1, "rank": 1, "seconds": 0.5, "median": 0.5, "wall": 0.5, "spans": 1, "bytes": 4 * MIB, "rate": 8.0 * MIB},
    }


def test_json_of_ranks(saved: Path) -> None:
    ranks = document(stats("--json", "--ranks", saved))["ranks"]
    assert [(r["rank"], r["seconds"], r["wall"], r["folded"]) for r in ranks] == [(1, 8.5, 9.5, 0), (0, 4.0, 10.0, 0), (2, 4.0, 9.0, 3)]
    assert [r["began"] for r in ranks] == ["2023-11-14T22:13:20.500000+00:00", *["2023-11-14T22:13:20.000000+00:00"] * 2]
    assert ranks[2]["phases"] == [
        {"phase": "agree", "seconds": 8.0, "wall": 9.0, "spans": 2, "bytes": 0},
        {"phase": "write", "seconds": 4.0, "wall": 3.0, "spans": 4, "bytes": 4 * MIB},
    ]


def test_a_trace(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    result = stats("--trace", path, saved)
    assert result.stderr == f"{path}: 11 spans of 3 ranks; open it in ui.perfetto.dev\n"
    events = json.loads(path.read_text())["traceEvents"]
    found = sorted((e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    expected = [
        (rank, PHASES[phase], start + (500_000 if rank == 1 else 0), duration)
        for rank, one in ROWS.items()
        for phase, _, start, duration, _ in zip(*one["spans"], strict=True)
    ]
    assert found == sorted([*expected, (2, "write", 2_000_000, 2_000_000)])
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1", "rank 2"}
    assert stats("-q", "--trace", path, saved).stderr == ""
    assert document(stats("--json", "--trace", path, saved))["missing"] == [3]


def test_a_trace_that_cannot_be_written(saved: Path, tmp_path: Path) -> None:
    result = stats("--json", "--trace", tmp_path / "no" / "trace.json", saved)
    error = document(result)["error"]
    assert (result.exit_code, error["type"], error["where"]) == (30, "StorageError", str(tmp_path / "no" / "trace.json"))


# --------------------------------------------------------------------------------------------------------------- faults


def test_no_spans(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample())
    result = stats(tmp_path)
    assert (result.exit_code, result.stdout) == (10, "")
    assert result.stderr.startswith("error: no spans were kept with this checkpoint\n  where: ")


def test_damaged_spans_are_named_and_harm_nothing_else(saved: Path) -> None:
    (path,) = saved.glob("index-*/spans.json")
    flip(path, 100)
    result = stats(saved)
    assert (result.exit_code, result.stdout) == (20, "")
    assert str(path) in result.stderr
    for command in ("verify", "inspect", "ls"):
        assert CliRunner().invoke(cli, [command, str(saved)]).exit_code == 0


def test_a_damaged_index_harms_no_spans(saved: Path) -> None:
    flip(next(saved.glob("index-*/tensors.arrow")), 50)
    assert stats("-q", saved).output.split()[0] == "agree"


def test_something_else(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "a"), sample(), commit=False)
    assert stats(tmp_path / "a").exit_code == 11
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert stats(tmp_path / "b").exit_code == 12
    assert stats(tmp_path / "c").exit_code == 10


def test_it_loads_no_torch(saved: Path) -> None:
    code = "import sys; from ckpt.cli.main import cli; sys.exit = print; cli.main(['stats', sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["0", "False"]
