"""Reports in a real browser, headless Chromium; skipped where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt.formats.native.runlog import LogEntry, add_entry
from ckpt.io_backends.registry import open_backend
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
@pytest.mark.parametrize(("medium", "width"), [("screen", 390), ("screen", 1280), ("print", 703)])
def test_nothing_is_wider_than_screen_or_paper(tmp_path: Path, medium: str, width: int) -> None:
    """Paper: A4 less the margins of the report; its rules hold on the screen here, where a script can measure."""
    page = page_of(save(tmp_path / "s", many(80), arrays=layers(4)), price=2.0)
    if medium == "print":
        assert page.count("@media print") == 1
        page = page.replace("@media screen", "@media (width: 0)").replace("@media print", "@media all")
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


def title_after(act: str, page: str, place: Path) -> str:
    """What a script of the test gives as the title; ``seen`` names the elements of a selector that have a height."""
    seen = "const seen = (what) => [...document.querySelectorAll(what)].filter((e) => e.getClientRects().length).map((e) => e.id).join()"
    script = f"<script>{seen}; addEventListener('load', () => {{ {act} }})</script></body>"
    (place / "r.html").write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", script))
    dom = browser(place / "r.html", place, "--dump-dom", "--virtual-time-budget=3000")
    return parse(dom.replace("<!DOCTYPE html>", "")).all("title")[0].text


@needs_browser
def test_links_and_keys_choose_the_step_and_boxes_hide_runs(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in (10, 20, 30):
            save(tmp_path / run / f"step-{step}", {rank: row(("write", 0, step, 5)) for rank in range(3)})
    act = """
      const links = [...document.querySelectorAll('nav.steps a')], titles = [seen('.step')];
      const later = (action) => new Promise((done) => setTimeout(() => done(action()), 50));
      const press = (link, key) => link.dispatchEvent(new KeyboardEvent('keydown', {key}));
      const look = () => titles.push(seen('.step') + '=' + links.filter((l) => l.ariaCurrent).map((l) => l.hash));
      (async () => {
        for (const action of [() => press(links[2], 'ArrowLeft'), look, () => press(links[1], 'Home'), look,
                              () => { location.hash = '#step-20-rank-1'; }, look]) await later(action);
        document.title = titles.join('|');
      })();
    """
    chosen = title_after(act, page_of(tmp_path / "a"), tmp_path)
    assert chosen == "step-30|step-20=#step-20|step-10=#step-10|step-20=#step-20"
    entry = LogEntry(kind="save", at=1.7e9, rank=0, ranks=3, step=25, url=f"{tmp_path}/a/step-25", error="StorageError")
    add_entry(open_backend(str(tmp_path / "a")), entry)
    act = """
      const links = [...document.querySelectorAll('nav.steps a')], titles = [], says = document.querySelector("[role='status']");
      const later = (action) => new Promise((done) => setTimeout(() => done(action()), 50));
      const look = () => titles.push([seen('.step'), document.activeElement.hash ?? document.activeElement.id,
                                      document.querySelector(':target').id, says.textContent].join());
      (async () => {
        for (const action of [() => links[1].click(), look, () => document.querySelector("a[href='#failed']").click(), look,
                              () => { location.hash = '#step-25'; }, look]) await later(action);
        await later(() => { location.hash = '#step-110'; });
        await later(() => titles.push(`${seen('.step')},${says.textContent}`));
        document.title = titles.join('|');
      })();
    """
    clicked, failures, failed, nowhere = title_after(act, page_of(tmp_path / "a"), tmp_path).split("|")
    assert (clicked, failures, failed[-9:]) == ("step-20,#step-20,step-20,", "step-20,failed,step-20,", ",step-25,")
    assert nowhere == "step-30,This report has no #step-110: it shows the newest save."
    act = """
      const lines = () => [0, 1].map((i) => document.querySelector(`.chart .line.r${i}`).getClientRects().length);
      const before = lines();
      document.getElementById('run-1').click();
      document.title = [...before, ...lines()].join();
    """
    assert title_after(act, page_of(tmp_path / "a", tmp_path / "b"), tmp_path) == "1,1,1,0"


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_words_on_colours_can_be_read(tmp_path: Path, dark: bool) -> None:
    times = (3, 4, 7, 7, 10, 13, 16, 22, 35)  # their median is 10
    for step, seconds in enumerate(times, 1):
        rows = {rank: row(("write", 0, one, 5)) for rank, one in enumerate(times if seconds == 35 else (seconds, seconds))}
        save(tmp_path / f"step-{step}", rows)
    page = page_of(tmp_path)
    assert page.count("@media screen and (prefers-color-scheme:dark)") == 2
    page = page.replace("@media screen and (prefers-color-scheme:dark)", "@media all" if dark else "@media (width: 0)")
    act = """
      const light = (colour) => colour.match(/[0-9]+/g).slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
      const ratio = (e) => light(getComputedStyle(e).color) / light(getComputedStyle(e).backgroundColor);
      document.title = [...document.querySelectorAll('nav.steps a, .step.newest .heat tbody td')]
        .map((e) => `${e.className.slice(0, 2)}=${Math.max(ratio(e), 1 / ratio(e))}`).join();
    """
    ratios = [one.split("=") for one in title_after(act, page, tmp_path).split(",")]
    assert [level for level, _ in ratios] == ["h0", "h0", "h1", "h1", "h2", "h3", "h4", "h5", "h6"] * 2
    assert min(float(ratio) for _, ratio in ratios) >= 4.5, ratios


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
    title = title_after(act, page, tmp_path)
    mouse, touch, key, down, up = title.split("|")
    assert mouse == touch == "rank 77: write 9.000 s, 6.5 × the median"
    assert key == "rank 69: write 1.690 s, 1.2 × the median"
    counts = [float(text) for text in down.split(",")]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 2
    assert [float(text) for text in up.split(",")] == sorted(counts)
