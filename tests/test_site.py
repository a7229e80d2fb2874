"""The documentation as a site: it builds in strict mode, every page is in its navigation and its search, and it needs no other server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.observe.pages import browser, needs_browser
from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(target)]  # with --quiet, --strict counts no warning
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text()
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


def test_every_page_can_be_searched_for(site: Path) -> None:
    found = {entry["location"].partition("#")[0] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    pages = {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")} - {"README.html"}
    assert (pages | {"commands.html", "api/ckpt.html", "api/errors.html"}) - found == set()


def test_every_page_is_in_the_navigation(site: Path) -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {"commands.md"}
    start = (site / "index.html").read_text()
    assert [page for page in listed if page != "README.md" and page.replace(".md", ".html") not in start] == []


def test_the_start_page_and_the_navigation_have_the_same_guides() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("  - How-to:")[2].partition("  - Training loop:")[0]
    groups = re.split(r"^ {6}- (.+):$", navigation, flags=re.MULTILINE)[1:]
    nav = {name: re.findall(r"guides/[\w-]+\.md", text) for name, text in zip(groups[::2], groups[1::2], strict=True)}
    how_to = (DOCS / "README.md").read_text().partition("## How-to")[2].partition("\n## ")[0]
    start = re.split(r"^\* ([\w ]+):", how_to, flags=re.MULTILINE)[1:]
    assert nav == {name: re.findall(r"guides/[\w-]+\.md", text) for name, text in zip(start[::2], start[1::2], strict=True)}


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in ("index.html", "guides/preemption.html"):
        assert re.findall(r'<(?:script|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//[^"]*"', (site / page).read_text()) == []


@needs_browser
def test_a_search_finds_pages_from_files(site: Path, tmp_path: Path) -> None:
    url = f"{(site / 'guides' / 'preemption.html').as_uri()}?q=retention"
    links = re.findall(
        r'<a href="([^"]*)"[^>]* class="md-search-result__link"', browser(url, tmp_path, "--dump-dom", "--virtual-time-budget=8000")
    )
    assert any(link.startswith(f"{site.as_uri()}/policies.html") for link in links), links


@needs_browser
def test_a_search_finds_pages_over_http(site: Path, tmp_path: Path) -> None:
    """A clock that runs ahead does not wait for a worker: the page loads until the search in its frame has found something."""
    found = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/found":
                found.set()
            elif self.path == "/wait":
                found.wait(60)
            super().do_GET()

        def log_message(self, *_: object) -> None: ...

    look = """
      const page = () => document.querySelector('iframe').contentDocument;
      const look = () => [...page().querySelectorAll('a.md-search-result__link')].map((a) => a.href);
      const again = setInterval(() => {
        if (!look().length) return;
        clearInterval(again);
        document.title = look().join(' ');
        fetch('/found');
      }, 100);
    """
    frame = "<iframe width=1280 height=800 src='guides/preemption.html?q=retention'></iframe><img src=/wait>"
    (site / "probe.html").write_text(f"<!DOCTYPE html><title></title>{frame}<script>{look}</script>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = f"http://127.0.0.1:{server.server_port}"
        title = browser(f"{start}/probe.html", tmp_path, "--dump-dom").partition("<title>")[2].partition("</title>")[0]
        server.shutdown()
    assert any(link.startswith(f"{start}/policies.html") for link in title.split()), title


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load_script("site_hooks", DOCS / "site_hooks.py")


def test_links_out_of_the_pages_lead_to_the_repository(hooks: ModuleType) -> None:
    text = "[a](../examples/README.md#demo) [b](async.md#errors) [c](#here) [d](https://e.org/x)\n```\n[e](../README.md)\n```\n[f](../tests/fuzz)"
    assert hooks.outward(text, "failures.md", "https://r") == (
        "[a](https://r/blob/main/examples/README.md#demo) [b](async.md#errors) [c](#here) [d](https://e.org/x)\n"
        "```\n[e](../README.md)\n```\n[f](https://r/tree/main/tests/fuzz)"
    )
    assert (
        hooks.outward("[a](../async.md) [b](../../README.md)", "guides/x.md", "https://r")
        == "[a](../async.md) [b](https://r/blob/main/README.md)"
    )
    assert hooks.repository().startswith("https://")
