"""The documentation: guides run, links lead somewhere, quoted messages are in the code, the API's pages have all names."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shlex
import shutil
import traceback
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import COMMANDS, cli
from tests.cli.checkpoints import flip
from tests.distributed.ranks import in_process
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "examples" / "README.md"])


GUIDES = [DOCS / "README.md", *sorted((DOCS / "guides").glob("*.md"))]
"""Pages whose code runs."""
APART = {"move-from-dcp", "preemption", "s3-in-five-minutes"}
"""Those that do not run in this process: they send signals, serve a port, or print warnings of a library."""


def run_guide(guide: Path) -> int:
    """Run the blocks of a page in the working directory: Python, and the lines of shell blocks that call ``ckpt``. How many there were."""
    names: dict[str, object] = {}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    Path("train.py").write_text(next((b for language, b in blocks if language == "python"), ""))  # the name of a first block
    for language, block in blocks:
        if language == "python":
            exec(compile(block, str(guide), "exec"), names)
        for line in block.splitlines() if language == "sh" else ():
            if line.startswith("ckpt "):
                result = CliRunner().invoke(cli, shlex.split(line, comments=True)[1:])
                assert result.exit_code == 0, f"{line}: {result.output}"
    return len(blocks)


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide.stem not in APART], ids=lambda path: path.stem)
def test_the_blocks_of_a_guide_run(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_guide(guide)


def run_guides(pipe: Connection, guides: list[Path], folder: Path) -> None:
    """Each in a folder of its own; tells which have run, or what went wrong."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    try:
        for guide in guides:
            (folder / guide.stem).mkdir()
            os.chdir(folder / guide.stem)
            assert run_guide(guide)
            if guide.stem == "preemption":  # a second time, it resumes
                with redirect_stdout(StringIO()) as text:
                    run_guide(guide)
                assert text.getvalue() == "resumed from 3, saved 6\n"
        pipe.send({guide.stem for guide in guides})
    except BaseException:  # noqa: BLE001  the test shows it
        pipe.send(traceback.format_exc())


def test_the_blocks_of_the_other_guides_run(tmp_path: Path) -> None:
    process, pipe = in_process(run_guides, [guide for guide in GUIDES if guide.stem in APART], tmp_path)
    assert pipe.recv() == APART
    process.kill()
    process.join()


SAMPLES = {
    "ls": ["ls runs/first"],
    "inspect": ["inspect runs/first/step-00000030"],
    "plan": ["plan runs/wide --layout 2"],
    "verify": ["verify runs/first/step-00000030", "verify runs/damaged"],
    "diff": ["diff runs/first/step-00000020 runs/first/step-00000030"],
    "advise": ["advise runs/first --mtbf 6h"],
    "cp": ["cp runs/first/step-00000030 s3-bucket/runs/a/"],
    "gc": ["gc runs/first --keep latest=1"],
    "rm": ["rm runs/tagged"],
}
"""Section of docs/cli.md → the commands that print its samples, on the run of the first ten minutes."""


def test_samples_are_what_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for figures and places, and where a sample has ``…``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    first = re.search(r"^```python\n(.*?)^```", (DOCS / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert first is not None
    exec(compile(first[1], "train.py", "exec"), {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    ckpt.save("runs/wide", {"w": torch.zeros(1024, 1024)})
    for name in ("damaged", "tagged"):
        shutil.copytree("runs/first/step-00000030", f"runs/{name}")
    assert CliRunner().invoke(cli, ["tag", "runs/tagged", "release-1"]).exit_code == 0
    (data,) = Path("runs/damaged/data").iterdir()
    flip(data, data.stat().st_size // 2)

    def shape(text: str) -> str:
        """One line, without figures, sizes, digests and places."""
        text = re.sub(r"(?:s3://bucket)?/?(?:[\w.-]+/)*runs/[\w/-]+", "URL", text)
        text = re.sub(r"[0-9a-f]{16}|\d[\d.,:]*(?: (?:[KMGT]i)?B(?!\w)| \d\d:\d\d:\d\d)?", "0", text)
        return " ".join(text.replace("just now", "0 s ago").replace(" (0/s)", "").split())

    page = (DOCS / "cli.md").read_text()
    for name, commands in SAMPLES.items():
        section = page.partition(f"\n## ckpt {name}\n")[2].partition("\n## ")[0]
        samples = re.findall(r"^```text\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        assert len(samples) == len(commands), name
        for sample, command in zip(samples, commands, strict=True):
            result = CliRunner().invoke(cli, shlex.split(command))
            printed = shape(result.stdout + result.stderr)
            expected = ".*".join(re.escape(part) for part in shape(sample).split("…"))
            assert re.fullmatch(expected, printed), f"ckpt {command}: {printed}"


def test_guides_share_no_run() -> None:
    """Two can be followed in one directory."""
    guides: dict[str, set[str]] = {}
    for guide in GUIDES:
        code = "".join(re.findall(r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))
        for run in re.findall(r"(?<![/\w])runs/[\w-]+", code):
            guides.setdefault(run, set()).add(guide.stem)
    assert {run: sorted(names) for run, names in guides.items() if len(names) > 1} == {}


def test_a_guide_is_short_and_has_what_can_go_wrong() -> None:
    later = {"resume-on-fewer-gpus", "save-in-my-loop", "serve-from-a-training-checkpoint", "when-a-rank-dies"}  # they link to failures.md
    guides = GUIDES[1:]
    assert [g.stem for g in guides if g.stem not in later and "\n## What can go wrong\n" not in g.read_text()] == []
    assert {g.stem: n for g in guides if (n := len(g.read_text().split())) > 400} == {}


def test_the_pages_are_not_too_many_words() -> None:
    assert sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= 45_000
    assert sum(len((DOCS / name).read_text().split()) for name in ("architecture.md", "decisions.md")) <= 7_000
    assert len((DOCS / "benchmarks.md").read_text().split()) <= 1_500  # one page
    assert len((ROOT / "README.md").read_text().splitlines()) <= 175


RIDDLES = {
    "of its own": r"of (?:its|their|his|her|your|our|one's) own",
    "said, told": r"[Ss]aid|[Tt]old|[Ss]ays|[Tt]ells|[Ss]aying|[Tt]elling",
    "is no": r"(?<![Tt]here )(?:is|are|was|were) no(?! longer)",
    "take as a noun": r"(?:[Aa]n?|[Tt]he|[Nn]ext|same|another|first|last|its) take",
    "what without a noun": r"[Ww]hat (?:it|they|is|are|was|were|has|have|had|lies|lie|stands|goes|comes|stays|remains|others?)",
    "nobody": r"[Ss]omebody|[Nn]obody|[Aa]nybody|[Ww]hoever",
    "goes on": r"(?:go|goes|going|went|gone) on",
}
"""Turns of speech that readers stumbled over. The mark is none."""
HEARD_IN_ERRORS = set(RIDDLES) - {"what without a noun"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_plain_english(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    found = {name: [m[0] for m in re.finditer(rf".{{0,30}}\b(?:{pattern})\b.{{0,20}}", text)] for name, pattern in RIDDLES.items()}
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize("room", ["ckpt", "formats", "io_backends", "converters", "cli"])
def test_an_error_is_plain_english(room: str) -> None:
    """Messages and hints, and the text that f-strings have around values."""
    found = []
    for path in (ROOT / room).rglob("*.py"):
        if path.is_relative_to((ROOT / "ckpt").resolve()) or room != "ckpt":
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                if re.search("Error$|damaged$", getattr(call.func, "id", getattr(call.func, "attr", ""))):
                    for text in (n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)):
                        found += [f"{path.name}: {text}" for name in HEARD_IN_ERRORS if re.search(rf"\b(?:{RIDDLES[name]})\b", text)]
    assert found == []


def test_a_riddle_is_noticed() -> None:
    riddles = (
        "a state of its own",
        "the page says so",
        "It is no child",
        "until the next take has",
        "what it is",
        "nobody waits",
        "it goes on",
    )
    plain = ("there is no gather", "it takes a second", "are no longer used", "its own kind", "what the leader does")
    heard = [any(re.search(rf"\b(?:{pattern})\b", text) for pattern in RIDDLES.values()) for text in (*riddles, *plain)]
    assert heard == [True] * len(riddles) + [False] * len(plain)


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_relative_to(DOCS)], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_reads_well_as_a_web_page(page: Path) -> None:
    """Links have words, not names of files, and lines of code are not cut at the right."""
    text = page.read_text()
    assert re.findall(r"\[[\w./-]+\.md\]\(", text) == []
    assert [
        line
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if len(line) > 100
    ] == []


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if fragment:
            assert fragment in {anchor(h) for h in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)}, f"{page.name}: {target}"


def test_pages_that_the_code_names_exist() -> None:
    folders = ("ckpt", "cli", "converters", "formats", "io_backends", "tests", "benchmarks")
    named = {
        name for folder in folders for path in (ROOT / folder).rglob("*.py") for name in re.findall(r"docs/[a-z/-]+\.md", path.read_text())
    }
    assert len(named) > 8 and sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [p.name for p in DOCS.rglob("*.md") if f"({p.relative_to(DOCS)})" not in index] == ["README.md"]


@pytest.mark.parametrize("above", ["ckpt", "ckpt/engine", "converters"])
def test_the_architecture_names_every_room(above: str) -> None:
    text = (DOCS / "architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / above).glob("*/__init__.py")]
    modules = [path.stem for path in (ROOT / above).glob("*.py") if not path.stem.startswith("_")] if above == "ckpt" else []
    picture = re.findall(r"^ (\S.*?)(?:  {8,}|$)", text.partition("## Rooms")[2].partition("## Save")[0], re.MULTILINE)
    named = {part for path in [*re.findall(r"`((?:\w+/)*\w+)`", text), *" ".join(picture).split()] for part in path.split("/")}
    assert rooms and [name for name in (*rooms, *modules) if name not in named] == []


def test_the_changelog_has_this_version_with_a_date() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]" and re.fullmatch(rf"\[{re.escape(ckpt.__version__)}\] - \d{{4}}-\d\d-\d\d", heads[1])


def test_the_recipes_lead_to_files() -> None:
    """Paths of CONTRIBUTING.md exist, and a name that it says is in one of them is."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    paths = re.findall(r"`((?:\w+/|\.github/)[\w./-]*)`", text)
    assert len(paths) > 40 and [path for path in paths if not (ROOT / path).exists()] == []
    names = re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)
    assert len(names) >= 6 and [name for name in names if not re.search(rf"\b{name[0]}\b", (ROOT / name[1]).read_text())] == []


# ------------------------------------------------------------------------------------------------------------ first screen


def rows_of(page: str, columns: int) -> list[list[str]]:
    """Cells of all table rows of a page that have so many columns, without emphasis."""
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == columns]


def test_the_ratios_of_the_readme_are_those_of_the_benchmarks() -> None:
    measured = {(row[0], row[1]): row[4] for row in rows_of((DOCS / "benchmarks.md").read_text(), 6)}
    head, _, *rows = rows_of((ROOT / "README.md").read_text(), 4)
    assert head[1:] == ["tmpfs", "ext4", "FUSE"]
    shown = {(row[0], place): ratio for row in rows for place, ratio in zip(head[1:], row[1:], strict=True)}
    assert len(rows) >= 5 and shown == {key: measured.get(key, "–") for key in shown}
    assert max(float(ratio) for ratio in shown.values() if ratio != "–") > 1, "show rows where we are worse, too"


def test_the_pictures_are_those_of_their_scripts() -> None:
    pictures = DOCS / "pictures"
    drawn = load_script("draw", pictures / "draw.py").picture()
    steady = load_script("draw_steady", pictures / "draw_steady.py").picture(json.loads((pictures / "steady.json").read_text()))
    assert [(pictures / name).read_text() for name in ("reshard.svg", "steady.svg")] == [drawn, steady], "run `make pictures`"


def test_the_recording_is_of_this_demo() -> None:
    """Its figures differ from run to run; what the demo says does not."""
    shown = [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", (DOCS / "pictures" / "demo.svg").read_text())]
    tree = ast.parse((ROOT / "examples" / "demo" / "run.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    heads = [text.strip("─ ") for text in shown if text.startswith("──")]
    assert len(heads) >= 6 and [head for head in heads if re.sub(r"(?<=step )\d.*", "", head) not in words] == []
    labels = {"trained", "killed", "left", "resumed", "losses", "verified", "took"}
    assert labels <= words and labels <= {text.split()[0] for text in shown[-9:] if text.split()}
    assert heads[-1] == "All checks passed" and any(text.startswith("SIGKILL to all 4 ranks in the save of step") for text in shown)


def test_the_recording_escapes_and_scrolls() -> None:
    record = load_script("record_demo", DOCS / "pictures" / "record_demo.py")
    lines = record.lines_of("\n".join(["── <head> ──", "loaded /tmp/ckpt-demo-x1/run/step-1 on 2 ranks", *["x" * 200] * 30]))
    picture = record.picture(lines)
    assert lines[1] == "loaded run/step-1 on 2 ranks" and len(lines[2]) == record.COLUMNS
    assert "&lt;head&gt;" in picture and f"steps({len(lines) - record.ROWS}, end)" in picture


# ---------------------------------------------------------------------------------------------------------------- messages


@cache
def strings_of_the_code() -> str:
    """All strings of the sources, with ``…`` for what an f-string fills in, a line each; and the errors of the system that are quoted."""
    found = ["No space left on device", "Permission denied", "Read-only file system"]
    for path in [p for room in ("ckpt", "formats", "io_backends", "converters") for p in (ROOT / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def is_said(message: str) -> bool:
    parts = message.strip("…").split("…")
    return re.search("[^\n]*?".join(map(re.escape, parts)), strings_of_the_code()) is not None


def quoted() -> list[str]:
    return re.findall(r"^### `([^`]+)`$", (DOCS / "failures.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert is_said(message)


def test_what_nobody_says_is_found() -> None:
    assert len(quoted()) >= 25
    assert not is_said("the flux capacitor of rank … is empty") and not is_said("parameter … of group … has many names")


def test_classes_of_errors_exist() -> None:
    names = {name for page in DOCS.rglob("*.md") for name in re.findall(r"`(\w+Error)`", page.read_text())}
    builtin = {"OSError", "FileNotFoundError", "RecursionError", "TypeError", "IndexError"}
    assert sorted(name for name in names - builtin if not hasattr(ckpt.errors, name)) == []


# --------------------------------------------------------------------------------------------------------------------- API


def test_the_pages_of_the_api_have_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_BUILDER", "c0ffee")
    module = load_script("generated_pages", DOCS / "generated_pages.py")
    assert [path for path, text in module.pages().items() if re.search("c0ffee| at 0x|" + re.escape(str(ROOT)), text)] == []
    listed = {name for _, _, _, names in module.MODULES for name in names}
    assert set(ckpt.__all__) - listed - {*ckpt.FACES, "CkptError", "__version__"} == set()
    for path, _, _, names in module.MODULES:
        assert [name for name in names if f"\n## {name}\n" not in module.pages()[path]] == []


def test_the_pages_of_the_api_are_plain_english() -> None:
    """Public docstrings and help texts, but for the interfaces of plug-ins."""
    pages, found = load_script("generated_pages", DOCS / "generated_pages.py").pages(), []
    for path in sorted(pages.keys() - {"api/io_backends.md", "api/formats.md", "api/converters.md"}):
        text = re.sub(r"```.*?```|`[^`]*`", "", pages[path], flags=re.DOTALL)
        for name in HEARD_IN_ERRORS:
            found += [f"{path}: {m[0]}" for m in re.finditer(rf".{{0,30}}\b(?:{RIDDLES[name]})\b.{{0,20}}", text)]
    assert found == []


def test_the_page_of_commands_has_every_option() -> None:
    module = load_script("generated_pages", DOCS / "generated_pages.py")
    page, seen = module.pages()["commands.md"], set()
    for name, command in module.leaf_commands():
        section = page.partition(f"\n## ckpt {name}\n")[2].partition("\n## ")[0]
        seen.add(name.split()[0])
        options = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
        general = {"--json", "-q", "--quiet", "-v", "--verbose", "--color"}
        assert "|---|---|\n\n" not in section, "a table without rows"
        assert "```sh\n" in section and [option for option in options - general if option not in section] == []
    assert seen == set(COMMANDS)
