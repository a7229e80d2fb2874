"""For mkdocs: a link from a page to a file outside of docs/ becomes a link to that file in the repository.

The pages are written to be read in the repository, where ``../examples/README.md`` leads somewhere; on the site it would not. The
repository's address stands in pyproject.toml and nowhere else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def repository() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"])


def outward(markdown: str, page: str, base: str) -> str:
    """The text of ``page`` (a path below docs/) with links that leave docs/ made absolute. Code keeps what it has."""

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        path = normpath(str(PurePosixPath("docs", page).parent / target)) if target else ""
        if "://" in target or not path or path.startswith("docs/"):
            return match[0]
        folder = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({base}/{folder}/main/{path}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", link, part) for part in parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return outward(markdown, page.file.src_uri, repository())
