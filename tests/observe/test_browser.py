"""Reports in a real browser, headless Chromium; skipped where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.observe.pages import browser, needs_browser, page_of, parse
from tests.observe.saves import layers, many, row, save


@needs_browser
def test_a_browser_runs_our_script_and_no_other(tmp_path: Path) -> None:
    """The script marks tables that can be sorted; another, as of somebody who got past the escaping, is stopped by the policy."""
    page = page_of(save(tmp_path / "s", many(80)))
    assert '"sortable live' not in page
    hostile = page.replace("</main>", "</main><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">")
    (tmp_path / "r.html").write_text(hostile)
    found = browser(tmp_path / "r.html", tmp_path, "--dump-dom")
    assert 'class="sortable phases live"' in found
    assert "<title>pwned</title>" not in found


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    page = page_of(save(tmp_path / "s", many(80), arrays=layers(4)), price=2.0)
    probe = "document.title = 'measured ' + document.documentElement.scrollWidth"
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    frame = f"<iframe width={width} height=900 src=r.html></iframe>"  # headless windows are 500 wide at least
    (tmp_path / "r.html").write_text(
        open_page.replace("</body>", f"<script>{probe}; parent.document.title = document.title</script></body>")
    )
    (tmp_path / "f.html").write_text(f"<!DOCTYPE html><body>{frame}")
    found = browser(tmp_path / "f.html", tmp_path, "--allow-file-access-from-files", "--dump-dom", "--virtual-time-budget=3000")
    measured = re.search(r"<title>measured (\d+)</title>", found)
    assert measured is not None
    assert int(measured[1]) <= width


@needs_browser
def test_tables_sort_and_the_heat_map_tells_the_rank_below_the_pointer(tmp_path: Path) -> None:
    rows = {rank: row(("write", 0, 9 if rank == 77 else 1 + rank / 100, 5)) for rank in range(80)}
    page = page_of(save(tmp_path / "s", rows, arrays=layers(2)))
    act = """
      const strip = document.querySelector('svg.strip'), box = strip.getBoundingClientRect();
      const at = {clientX: box.left + box.width * 9.5 / 10, clientY: box.top + box.height * 5.5 / 8};  // column 9, row 5: rank 77
      const words = () => document.getElementById('tip').textContent;
      const tips = ['pointermove', 'pointerdown'].map((name) => {
        document.getElementById('tip').textContent = '';
        strip.dispatchEvent(new PointerEvent(name, {...at, pointerType: name === 'pointerdown' ? 'touch' : 'mouse'}));
        return words();
      });
      strip.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));
      tips.push(words());
      const table = [...document.querySelectorAll('table.live')].find((t) => t.tHead.textContent.startsWith('kind'));
      const values = () => [...table.tBodies[0].rows].map((r) => r.cells[3].dataset.v).join();
      const head = table.tHead.rows[0].cells[3];
      head.click();
      const clicked = values();
      head.dispatchEvent(new KeyboardEvent('keydown', {key: ' '}));
      document.title = [...tips, clicked, values()].join('|');
    """
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", f"<script>{act}</script></body>")
    (tmp_path / "r.html").write_text(open_page)
    title = parse(browser(tmp_path / "r.html", tmp_path, "--dump-dom").replace("<!DOCTYPE html>", "")).all("title")[0].text
    mouse, touch, key, down, up = title.split("|")
    assert mouse == touch == "rank 77: write 9.000 s, 6.5 × the median"
    assert key == "rank 69: write 1.690 s, 1.2 × the median"
    counts = [float(text) for text in down.split(",")]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 2
    assert [float(text) for text in up.split(",")] == sorted(counts)
