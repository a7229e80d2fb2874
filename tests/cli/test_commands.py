"""The commands as people and scripts call them: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import Result

from ckpt import export, save, units
from ckpt.cli.main import COMMANDS, cli
from ckpt.errors import CkptError
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends.registry import open_backend
from tests.cli.checkpoints import data_files, flip, sample, stored, write_checkpoint
from tests.cli.running import run as ckpt

STATE = {"lr": 0.5, "model": {"w": {"$tensor": "model.wq.weight"}}, "names": ["a", "b"], "sampler": {"seed": 3}}
RANKS = {1: {"rng": {"$bytes": "AA=="}}}


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    options: dict[str, Any] = {"aliases": {"tied": "model.wq.weight"}, "state": STATE, "rank_values": RANKS}
    write_checkpoint(str(tmp_path / "step-5"), sample(), **options)
    write_checkpoint(str(tmp_path / "step-10"), sample(), ranks=3, **options)
    write_checkpoint(str(tmp_path / "step-15"), sample(), commit=False)
    return tmp_path


def document(result: Result) -> Any:
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def rows(result: Result) -> list[list[str]]:
    """Cells of a printed table: columns are two or more spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]


# ------------------------------------------------------------------------------------------------------------------- ls


def test_ls(run_root: Path) -> None:
    result = ckpt("ls", run_root)
    size = f"{sum(a.nbytes for a in sample().values())} B"
    head, first, second, third = rows(result)
    disk = {n: units.size(sum(f.stat().st_size for f in (run_root / f"step-{n}").rglob("*") if f.is_file())) for n in (5, 10, 15)}
    assert head == ["CHECKPOINT", "STEP", "STATUS", "BYTES", "ON DISK", "RANKS", "AGE", "NOTE"]
    assert first[:6] == ["step-5", "5", "committed", size, disk[5], "2"]
    assert second[:6] == ["step-10", "10", "committed", size, disk[10], "3"]
    assert third[:4] == ["step-15", "15", "unfinished", disk[15]]
    assert (result.exit_code, result.stderr) == (0, "")


def test_ls_quiet_gives_what_can_be_loaded(run_root: Path) -> None:
    assert ckpt("ls", "-q", run_root).stdout.split() == [f"{run_root}/step-5", f"{run_root}/step-10"]


def test_ls_json(run_root: Path) -> None:
    found = document(ckpt("ls", "--json", run_root))
    assert found["root"] == str(run_root)
    assert [(s["step"], s["committed"], s["damaged"], s["world_size"]) for s in found["steps"]] == [
        (5, True, False, 2),
        (10, True, False, 3),
        (15, False, False, None),
    ]
    assert set(found["steps"][0]) == {
        "step",
        "lost",
        "url",
        "committed",
        "damaged",
        "created",
        "tensor_bytes",
        "world_size",
        "reason",
        "metrics",
        "tags",
        "id",
        "sources",
        "link",
        "also",
        "stored_bytes",
        "shared_bytes",
        "part",
        "other_release",
        "references_unknown",
        "branches",
        "abandoned",
        "reusable",
        "members",
        "prepared",
    }
    for step in found["steps"]:
        assert step["stored_bytes"] == sum(f.stat().st_size for f in Path(step["url"]).rglob("*") if f.is_file())


def test_ls_of_nothing(tmp_path: Path) -> None:
    result = ckpt("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (10, "")
    assert result.stderr.splitlines()[:2] == ["error: nothing lies below this URL", f"  where: {tmp_path}"]
    (tmp_path / "notes.txt").write_text("x")
    assert ckpt("ls", tmp_path / "notes.txt").stderr.startswith("error: this file is no checkpoint of a known format\n")


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect(run_root: Path) -> None:
    result = ckpt("inspect", run_root / "step-10", "*")
    arrays = sample()
    table = {line[0]: line[1:] for line in rows(result)[1:-1]}
    assert table["model.wq.weight"] == ["float32", "10 × 6", "240 B", "3"]
    assert table["optimizer.step"] == ["int64", "scalar", "8 B", "1"]
    assert table["tied"] == ["float32", "10 × 6", "= model.wq.weight"]
    assert table.keys() == {*arrays, "tied"}
    elements, size = sum(a.size for a in arrays.values()), sum(a.nbytes for a in arrays.values())
    assert result.stdout.splitlines()[-1] == f"5 tensors, {elements} elements, {size} B in 11 chunks (ckpt 1)"


def test_inspect_shows_a_head_and_a_tree(run_root: Path) -> None:
    result = ckpt("inspect", run_root / "step-10")
    head, _, tree = result.stdout.partition("\n\n")
    fields = {line[:8].strip(): line[8:].strip() for line in head.splitlines()}
    files = data_files(run_root / "step-10")
    assert fields["step"] == "10"
    assert fields["format"].startswith("ckpt 1, written by ckpt ") and fields["format"].endswith(", 3 ranks")
    assert fields["files"] == f"3 data files, {units.size(sum(f.stat().st_size for f in files))}"
    arrays = sample()
    assert "int64 in 1 tensor" in fields["dtypes"] and " UTC, " in fields["saved"]
    lines = [line.split() for line in tree.splitlines()[1:-1]]
    inside = [a for name, a in arrays.items() if name.startswith("model.")]
    assert ["model", str(len(inside)), str(sum(a.nbytes for a in inside)), "B"] in lines
    assert ["wq.weight", "240", "B", "float32", "10", "×", "6"] in lines
    assert ["tied", "=", "model.wq.weight"] in lines
    flat = [line.split() for line in ckpt("inspect", "--depth", "1", run_root / "step-10").stdout.partition("\n\n")[2].splitlines()]
    assert ["wq.weight"] not in [line[:1] for line in flat] and ["model"] in [line[:1] for line in flat]


def test_the_tree_is_as_deep_as_40_lines(tmp_path: Path) -> None:
    arrays = {f"m.layers.{layer}.{name}": np.zeros(2, np.float32) for layer in range(12) for name in ("a", "b", "c")}
    write_checkpoint(str(tmp_path / "few"), dict(list(arrays.items())[:24]))
    write_checkpoint(str(tmp_path / "many"), arrays)
    few, many = (ckpt("inspect", tmp_path / name).stdout.partition("\n\n")[2].splitlines()[1:-1] for name in ("few", "many"))
    assert len(few) == 1 + 8 + 24 and len(many) == 1 + 12
    assert [line.split()[0] for line in many] == ["m.layers", *(str(n) for n in range(12))]  # 9 before 10
    assert len(ckpt("inspect", "--depth", "9", tmp_path / "many").stdout.partition("\n\n")[2].splitlines()) == 2 + 1 + 12 + 36
    assert ckpt("inspect", "--depth", "2", tmp_path / "many", "m.*").exit_code == 2


def test_inspect_a_pattern(run_root: Path) -> None:
    result = ckpt("inspect", "-q", run_root / "step-5", "model.*")
    assert result.stdout.split() == ["model.ids", "model.norm", "model.wq.weight"]


def test_inspect_a_pattern_without_a_match(run_root: Path) -> None:
    result = ckpt("inspect", run_root / "step-5", "model.wz*")
    assert (result.exit_code, result.stdout) == (21, "")
    assert result.stderr.startswith("error: no tensor matches 'model.wz*'\n  try: ")


def test_inspect_json(run_root: Path) -> None:
    found = document(ckpt("inspect", "--json", run_root / "step-5"))
    arrays = sample()
    assert (found["url"], found["format"]) == (str(run_root / "step-5"), "ckpt 1")
    assert found["totals"] == {
        "tensors": 5,
        "aliases": 1,
        "elements": sum(a.size for a in arrays.values()),
        "bytes": sum(a.nbytes for a in arrays.values()),
        "chunks": sum(len(stored(path)) for path in data_files(run_root / "step-5")),
    }
    summary = found["summary"]
    assert (summary["step"], summary["world_size"], summary["codec"]) == (5, 2, None)
    assert summary["stored_bytes"] == sum(f.stat().st_size for f in data_files(run_root / "step-5"))
    assert sum(kind["bytes"] for kind in summary["kinds"]) == found["totals"]["bytes"]
    assert sum(summary["dtypes"].values()) == 5
    tensors = {t["name"]: t for t in found["tensors"]}
    assert {n: (t["dtype"], tuple(t["shape"]), t["bytes"]) for n, t in tensors.items() if n != "tied"} == {
        n: (a.dtype.name, a.shape, a.nbytes) for n, a in arrays.items()
    }
    assert (tensors["tied"]["alias"], tensors["tied"]["rank"], tensors["tied"]["logical"]) == ("model.wq.weight", None, None)


def test_inspect_files(run_root: Path) -> None:
    paths = data_files(run_root / "step-10")
    spans = [stored(path).values() for path in paths]
    expected = [
        (f"data/{p.name}", p.stat().st_size, len(s), sum(end - begin for begin, end in s)) for p, s in zip(paths, spans, strict=True)
    ]
    found = document(ckpt("inspect", "--json", "--files", run_root / "step-10"))["files"]
    assert [(f["path"], f["size"], f["chunks"], f["bytes"]) for f in found] == expected
    assert [f["rank"] for f in found] == [0, 1, 2]
    table = rows(ckpt("inspect", "--files", run_root / "step-10"))
    assert [line[:2] + line[3:] for line in table[1:]] == [[p, str(r), str(n), f"{b} B"] for r, (p, _, n, b) in enumerate(expected)]
    assert ckpt("inspect", "-q", "--files", run_root / "step-10", "optimizer.step").stdout.split() == [expected[0][0]]


def test_inspect_state(run_root: Path) -> None:
    result = ckpt("inspect", "--state", run_root / "step-5")
    assert rows(result)[1:] == [["lr", "0.5"], ["names", '["a","b"]'], ["sampler.seed", "3"], ["rank 1: rng", '{"$bytes":"AA=="}']]
    assert ckpt("inspect", "-q", "--state", run_root / "step-5", "sampler.*").stdout.split() == ["sampler.seed"]
    found = document(ckpt("inspect", "--json", "--state", run_root / "step-5"))
    assert (found["state"], found["ranks"]) == (STATE, {"1": RANKS[1]})
    assert ckpt("inspect", "--state", "--files", run_root / "step-10").exit_code == 2


def test_inspect_values_without_tensors(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"ids": np.arange(6).reshape(2, 3), "cursor": 7})
    assert ckpt("inspect", tmp_path / "step-1").stdout.endswith("2 values: --state shows them\n")
    assert rows(ckpt("inspect", "--state", tmp_path / "step-1"))[1:] == [["ids", "array int64 2 × 3"], ["cursor", "7"]]


def test_inspect_a_damaged_one(run_root: Path) -> None:
    flip(next((run_root / "step-5").glob("index-*/tensors.arrow")), 50)
    result = ckpt("inspect", run_root / "step-5")
    assert (result.exit_code, result.stdout) == (20, "")
    assert "tensors.arrow" in result.stderr


# --------------------------------------------------------------------------------------------------------------- verify


def test_verify(run_root: Path) -> None:
    result = ckpt("verify", run_root / "step-5")
    size = sum(a.nbytes for a in sample().values())
    assert result.exit_code == 0
    assert result.stdout.startswith(f"ok: 2 files, 8 chunks, {size} B in ")
    assert ckpt("verify", "-q", run_root / "step-5").output == ""


def test_verify_a_damaged_one(run_root: Path) -> None:
    path = data_files(run_root / "step-5")[0]
    for key in ("model.norm[0:4]", "model.ids[0:3,:,:]"):
        flip(path, stored(path)[key][0])
    result = ckpt("verify", run_root / "step-5")
    first, second, remedy, last = result.stdout.splitlines()
    assert result.exit_code == 20
    assert remedy.startswith("remedy: restore the files named above from another copy")
    assert first.endswith(f"(data/{path.name}, model.ids[0:3,0:2,0:3])")
    assert second.endswith(f"(data/{path.name}, model.norm[0:4])")
    assert last.startswith("2 problems: ")
    assert ckpt("verify", "-q", run_root / "step-5").stdout.splitlines() == [first, second]


def test_verify_a_format_that_has_no_index_to_rebuild(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    for n in range(3):
        export(tmp_path / f"step-{n}", model, since=tmp_path / f"step-{n - 1}" if n else None)
    shutil.rmtree(tmp_path / "step-1")
    result = ckpt("verify", tmp_path / "step-2")
    problem, remedy, _ = result.stdout.splitlines()
    assert result.exit_code == 20 and "a link of the chain is missing" in problem
    assert remedy.startswith("remedy: restore what is missing or damaged from another copy")


def test_verify_json(run_root: Path) -> None:
    whole = document(ckpt("verify", "--json", "--threads", 1, run_root / "step-5"))
    assert set(whole) == {"url", "ok", "files", "chunks", "undigested", "bytes", "seconds", "problems", "remedy", "semantic"}
    assert (whole["ok"], whole["problems"], whole["files"], whole["remedy"]) == (True, [], 2, None)
    path = data_files(run_root / "step-5")[1]
    flip(path, stored(path)["model.norm[4:7]"][0])
    result = ckpt("verify", "--json", run_root / "step-5")
    found = document(result)
    (problem,) = found["problems"]
    assert (result.exit_code, found["ok"]) == (20, False) and found["remedy"].startswith("restore the files")
    assert (problem["kind"], problem["file"], problem["tensor"]) == ("digest", f"data/{path.name}", "model.norm")
    assert problem["box"] == {"offset": [4], "shape": [3]}


# --------------------------------------------------------------------------------------------------------------- errors


MORE = {
    "convert": ("--to", "native"),
    "merge": ("--last", "2"),
    "lora": ("merge",),
    "plan": ("--layout", "2"),
    "prove": ("--at", "1"),
    "advise": ("--mtbf", "6h"),
    "report": ("-o", "report.html"),
}
"""What a command needs besides URLs."""


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("completion", "live", "memory")])
def test_every_command_reports_an_absent_checkpoint_alike(command: str, tmp_path: Path) -> None:
    targets = [tmp_path / "copy"] if command in ("convert", "cp", "diff", "import", "lora", "merge") else []
    if command == "lora":
        targets.append(tmp_path / "out")
    given = [*targets, tmp_path / "nothing"] if command == "merge" else [tmp_path / "nothing", *targets]
    result = ckpt(command, "--json", *MORE.get(command, ()), *given)
    error = document(result)["error"]
    assert (result.exit_code, error["type"], error["exit_code"]) == (10, "NotFoundError", 10)
    assert result.stderr == f"error: {error['message']}\n  where: {error['where']}\n  try: {error['hint']}\n"
    assert error["where"] == str(tmp_path / "nothing")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_save_that_did_not_finish(command: str, run_root: Path) -> None:
    assert ckpt(command, run_root / "step-15").exit_code == 11


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_something_else(command: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert ckpt(command, tmp_path).exit_code == 12


@pytest.mark.parametrize("args", [("nothing",), ("verify",), ("ls", "--wrong", "x"), ("verify", "--threads", "0", "x")])
def test_usage(args: tuple[str, ...]) -> None:
    plain, machine = ckpt(*args), ckpt(*args, "--json")
    assert (plain.exit_code, plain.stdout, machine.exit_code) == (2, "", 2)
    assert plain.stderr.startswith("error: ")
    assert " --help" in plain.stderr
    assert document(machine)["error"]["type"] == "UsageError"


def _raise(error: BaseException) -> Any:
    def instead(*args: object, **kwargs: object) -> None:
        raise error

    return instead


def test_without_its_script() -> None:
    done = subprocess.run([sys.executable, "-m", "ckpt", "ls", "nothing/here"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (10, "") and "nothing/here" in done.stderr


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.runs.step_listing.list_steps", _raise(KeyboardInterrupt()))
    result = ckpt("ls", "x")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "interrupted")


def test_a_defect_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.runs.step_listing.list_steps", _raise(ZeroDivisionError("oops")))
    result = ckpt("ls", "--json", "x")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: oops" in result.stderr
    assert document(result)["error"] == {"type": "ZeroDivisionError", "message": "oops", "where": None, "hint": None, "exit_code": 1}


def test_an_error_without_place_or_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.runs.step_listing.list_steps", _raise(CkptError("it is so")))
    result = ckpt("ls", "x")
    assert (result.exit_code, result.stderr) == (1, "error: it is so\n")


# ----------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text_with_an_example(command: str) -> None:
    text = ckpt(command, "--help").stdout
    assert f"Usage: ckpt {command} " in text
    assert f"ckpt {command} " in text.partition("Example:")[2]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [("live", "status"), ("lora", "extract"), ("lora", "merge"), *(("memory", name) for name in ("drop", "serve", "status", "stop"))],
)
def test_every_command_of_a_group_has_a_help_text_of_its_own(words: tuple[str, str]) -> None:
    name = " ".join(words)
    text = ckpt(*words, "--help").stdout
    assert f"Usage: ckpt {name} " in text and f"ckpt {name}" in text.partition("Example:")[2]
    assert text == ckpt("help", *words).stdout and max(map(len, text.splitlines())) <= 80
    assert f"\n  {words[1]} " in ckpt(words[0]).stdout and ckpt(words[0]).stdout == ckpt("help", words[0]).stdout
    assert "did you mean" in ckpt(words[0], f"{words[1]}s").stderr


def test_the_overview_agrees_with_the_commands() -> None:
    text = ckpt("--help").stdout
    for name, line in COMMANDS.items():
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert (command.name, command.short_help) == (name, line)
        assert line in text


def test_version() -> None:
    from ckpt.settings import __version__

    assert ckpt("--version").stdout == f"ckpt {__version__}\n"


def test_the_page_has_a_section_for_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in COMMANDS if f"\n## ckpt {name}\n" not in page] == []


# ------------------------------------------------------------------------------------------------------------ small words


def test_json_and_quiet_before_the_command(run_root: Path) -> None:
    step = run_root / "step-5"
    for early in (["--json"], ["-v", "--json"], ["--json", "-q"]):
        assert document(ckpt(*early, "ls", run_root)) == document(ckpt("ls", "--json", run_root))
    assert ckpt("-q", "ls", run_root).stdout == ckpt("ls", "-q", run_root).stdout
    assert ckpt("--json", "inspect", step, "*wq*").stdout == ckpt("inspect", "--json", step, "*wq*").stdout
    assert ckpt("--jsn", "ls", run_root).exit_code == 2 and ckpt("--json").exit_code == 2
    colored = ckpt("--color", "always", "ls", run_root)
    assert "\x1b[1m" in colored.stdout and ckpt("ls", "--color=always", run_root).stdout == colored.stdout
    assert (
        click.unstyle(colored.stdout) == ckpt("ls", run_root, "--color", "never").stdout
        and ckpt("ls", run_root, "--color", "x").exit_code == 2
    )


def test_the_directory_of_data_files_is_no_checkpoint(run_root: Path) -> None:
    data = run_root / "step-5" / "data"
    assert ckpt("ls", data).exit_code == 10
    refused = ckpt("inspect", data)
    assert refused.exit_code == 12 and "name the directory above it" in refused.stderr
    assert ckpt("inspect", data_files(run_root / "step-5")[0]).exit_code == 0  # a file of it is a safetensors file like any other


@pytest.mark.parametrize("tag", ["a b", "", " a", "a\tb", "a\nb"])
def test_a_tag_is_a_word(run_root: Path, tag: str) -> None:
    step = run_root / "step-5"
    refused = ckpt("tag", step, "good", tag)
    assert refused.exit_code == 2 and "a tag is a word without spaces" in refused.stderr and ckpt("tag", step).stdout == ""
    refused = ckpt("tag", "-d", step, "nope")
    assert refused.exit_code == 2 and "nothing is to be removed" in refused.stderr
    assert ckpt("tag", step, "v1/release-2").stdout == "v1/release-2\n"


def test_a_tag_of_an_earlier_release_can_be_removed(run_root: Path) -> None:
    step = str(run_root / "step-5")
    set_tags(open_backend(step), ["a b"])
    assert ckpt("tag", "-d", step, "a b").exit_code == 0 and ckpt("tag", step).stdout == ""


@pytest.mark.parametrize(("short", "name"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32"), ("bfloat16", "BF16")])
def test_short_names_of_dtypes(run_root: Path, tmp_path: Path, short: str, name: str) -> None:
    options = ["--to", "hf", "--no-config", "--only", "*wq.weight", "--root", "model", "--dtype", short]
    made = ckpt("convert", *options, run_root / "step-5", tmp_path / "made")
    assert made.exit_code == 0, made.output
    assert f'"dtype":"{name}"'.encode() in (tmp_path / "made" / "model.safetensors").read_bytes()


def test_a_size_has_a_unit(run_root: Path, tmp_path: Path) -> None:
    for option in ("--shard-size", "--memory"):
        refused = ckpt("convert", "--to", "native", option, "5", run_root / "step-5", tmp_path / "made")
        assert refused.exit_code == 2 and "'5' has no unit: write 5GB, 5MiB or 5B" in refused.stderr
    assert ckpt("convert", "--to", "native", "--shard-size", "200B", run_root / "step-5", tmp_path / "made").exit_code == 0


def test_help_has_all_exit_codes_of_the_page() -> None:
    text = ckpt("--help").stdout.partition("Exit codes:")[2]
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    assert set(re.findall(r"\b(\d+) [a-z]", text)) == set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


def test_without_what_it_depends_on() -> None:
    """As after ``pip install --no-deps``: no traceback."""
    root = str(Path(__file__).parents[2])
    code = "from ckpt.cli.start import main; main()"
    done = subprocess.run([sys.executable, "-S", "-c", code, "ls"], env={"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: the command needs click, which is not installed\n")
