"""The script that counts the sources counts right; test_house.py has the limits of what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house

LONG = "def long():\n" + "    pass\n" * 70


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "ckpt/__init__.py": "from . import a, b\n",
        "ckpt/a.py": "# why\nfrom . import b\ndef _once(found): pass\ndef f(): return _once(1)\n",
        "ckpt/b.py": "if TYPE_CHECKING:\n    from .a import f\nclass Twice: ...\nassert f is not None\n",
        "cli/__init__.py": "",
        "cli/run.py": f"class Twice: ...\n{LONG}def many({', '.join(f'p{n}' for n in range(13))}): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in house.BESIDE[1:]:
        (tmp_path / folder).mkdir()
    (tmp_path / "ckpt" / "cli").symlink_to("../cli")
    return tmp_path


def test_each_figure(checkout: Path) -> None:
    files = house.sources(checkout)
    assert {source.module for source in files} == {"ckpt.cli", "ckpt.cli.run", "ckpt", "ckpt.a", "ckpt.b"}
    figures = house.figures(files, checkout)
    expected = {
        "files": 5,
        "loose files in ckpt/": 3,
        "widest folder": "ckpt",
        "groups of files in a circle": 1,  # a → b → a, though only type checkers see the second arrow
        "class names used twice": 1,
        "functions over 60 lines": 1,
        "parameters, most": 13,
        "private functions used once, %": 100.0,
        "assert … is not None": 1,
        "vague names": 1,
    }
    assert {name: figures[name] for name in expected} == expected
    assert house.rooms(files)["ckpt.cli"][0] == 2
    assert "ckpt/a.py:3: vague name: found" in list(house.debts(files, checkout))


def test_circles() -> None:
    assert house.circles({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == [{"b", "d"}]
    assert house.circles({"a": {"b", "c"}, "b": {"c"}}) == []
