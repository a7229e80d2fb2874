"""What ``pyproject.toml`` cannot say: the description on a package index. Everything else is there.

The README is written to be read in the repository, where ``docs/format.md`` leads somewhere. On a package index such links would be
dead, so they are made absolute when the package is built.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)]+)\)")


def absolute_links(readme: str, repository: str) -> str:
    """A page of the repository's root with its relative links leading into ``repository``, a URL; images to the bytes themselves."""
    return LINK.sub(lambda m: f"{m['image']}{m['text']}({repository}/{'raw' if m['image'] else 'blob'}/main/{m['path']})", readme)


def repository() -> str:
    # Not tomllib: Python 3.10 has none, and nothing else is needed to build.
    line = re.search(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if line is None:
        raise ValueError("pyproject.toml names no Repository among its URLs")
    return line[1]


setup(
    long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), repository()),
    long_description_content_type="text/markdown",
)
