"""For mkdocs: adds the generated pages, and makes links that leave docs/ lead to the repository.

The pages are written to be read in the repository, where ``../examples/README.md`` leads somewhere; on the site it would not. The
repository's address stands in pyproject.toml and nowhere else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import generated_pages  # noqa: E402

import ckpt  # noqa: E402


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


def on_config(config: Any) -> Any:
    """Fill what only the code knows into mkdocs.yml: the pages of the API, the version, the repository."""
    api = [path for path in generated_pages.pages() if path.startswith("api/")]
    config.nav = [
        {"API": api} if "API" in entry else {"Repository": repository()} if "Repository" in entry else entry for entry in config.nav
    ]
    config.site_name = f"ckpt {ckpt.__version__}"
    config.copyright = f"ckpt {ckpt.__version__} · Apache-2.0"
    return config


def on_files(files: Any, *, config: Any) -> Any:
    for path, text in generated_pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page. A search finds pages that explain before those that list."""
    if page.file.generated_by:
        page.meta["search"] = {"boost": 0.3}
    return outward(markdown, page.file.src_uri, repository())
