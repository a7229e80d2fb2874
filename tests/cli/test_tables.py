"""Tables that fit the terminal, and that are never cut elsewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ckpt.cli.output import rendered, style, table_lines
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import Row
from tests.cli.checkpoints import sample, write_checkpoint
from tests.cli.terminal import START, environment, on_a_terminal

LONG = "model.layers.17.self_attention.query_key_value.weight"
TEXT = "no commit record: the save did not finish, or is still going on"


def lines(heads: list[str], rows: list[list[str]], limit: int | None) -> list[str]:
    return [rendered(line, colours=False) for line in table_lines(heads, rows, limit)]


def test_without_a_limit_nothing_is_cut() -> None:
    assert lines(["NAME", ">SIZE", "~WHY"], [[LONG, "12", TEXT]], None)[1] == f"{LONG}    12  {TEXT}"


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


def test_columns_wins_over_the_terminal(run_root: Path) -> None:
    assert "…" in on_a_terminal("ls", str(run_root), columns=300, COLUMNS="40")
    assert "…" not in on_a_terminal("ls", str(run_root), columns=300)
