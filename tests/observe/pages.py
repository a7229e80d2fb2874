"""A report as an HTML parser sees it, and in a browser where there is one."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckpt.runs.report.content import Setting, build_report
from ckpt.runs.report.html import render

_VOID = {"meta", "br", "col", "input"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@dataclass
class Element:
    """One element: its text is that of all below it."""

    name: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def all(self, name: str) -> list[Element]:
        """Elements of this name, in the order of the page."""
        below = [e for c in self.children if isinstance(c, Element) for e in c.all(name)]
        return [self, *below] if self.name == name else below

    def everything(self) -> list[Element]:
        return [self, *(e for c in self.children if isinstance(c, Element) for e in c.everything())]


def page_of(*urls: Path, **setting: Any) -> str:
    """The report on these URLs."""
    return render(build_report([str(url) for url in urls], Setting(**setting)))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> ends <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")


def parse(page: str) -> Element:
    """The page; each end tag has to be that of the element that is open."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root


def browser(page: Path | str, place: Path, *options: str) -> str:
    """What Chromium prints about a page."""
    assert CHROMIUM is not None
    profile = place / "profile"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    command = [CHROMIUM, *flags, f"--user-data-dir={profile}", *options, page if isinstance(page, str) else page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout
