"""The documentation: guides run, links lead somewhere, quoted messages are in the code, docs/api.md is that of the docstrings."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import ckpt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"])


@pytest.mark.parametrize("guide", sorted((DOCS / "guides").glob("*.md")), ids=lambda path: path.stem)
def test_the_blocks_of_a_guide_run(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(guide), "exec"), names)


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


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [p.name for p in DOCS.rglob("*.md") if f"({p.relative_to(DOCS)})" not in index] == ["README.md"]


@pytest.mark.parametrize("above", ["ckpt", "ckpt/engine", "converters"])
def test_the_architecture_names_every_room(above: str) -> None:
    text = (DOCS / "architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / above).glob("*/__init__.py")]
    modules = [path.stem for path in (ROOT / above).glob("*.py") if not path.stem.startswith("_")] if above == "ckpt" else []
    named = {part for path in re.findall(r"`((?:\w+/)*\w+)`", text) for part in path.split("/")}
    assert rooms and [name for name in (*rooms, *modules) if name not in named] == []


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
    return re.findall(r"^### `([^`]+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(message: str) -> None:
    assert is_said(message)


def test_what_nobody_says_is_found() -> None:
    assert len(quoted()) >= 25
    assert not is_said("the flux capacitor of rank … is empty") and not is_said("parameter … of group … has many names")


def test_classes_in_troubleshooting_exist() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert [name for name in set(re.findall(r"`(\w+Error)`", text)) if not hasattr(ckpt.errors, name)] == []


# --------------------------------------------------------------------------------------------------------------------- API


def test_the_api_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("build_api", DOCS / "build_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.page()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == text, "run `make api`"
    listed = {name for _, _, names in module.SECTIONS for name in names}
    assert set(ckpt.__all__) - listed - {"errors", "policies", "CkptError", "__version__"} == set()
