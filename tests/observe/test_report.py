"""Reports: their figures are those of the spans, whatever names say is text, and equal saves give equal pages."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.formats.native.runlog import LogEntry, add_entry
from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.plan.layout.mesh import Mesh
from ckpt.runs.report.areas import squarify
from ckpt.runs.report.content import Setting, build_report
from ckpt.runs.report.history import read_history, spread_evenly
from ckpt.runs.report.html import render
from ckpt.runs.report.summary import kinds_of
from ckpt.telemetry.spans import Row
from tests.cli.checkpoints import flip
from tests.observe.pages import Element, page_of, parse
from tests.observe.saves import EIGHT, MIB, layers, many, row, save


def busy_of(rows: Mapping[int, Row]) -> dict[tuple[int, str], int]:
    """Microseconds by rank and phase, added up from the columns."""
    sums: Counter[tuple[int, str]] = Counter()
    for rank, one in rows.items():
        for phase, _, _, duration, _ in zip(*one["spans"], strict=True):
            sums[rank, one["phases"][phase]] += duration
    return dict(sums)


def heat_table(page: Element, number: int = 0) -> dict[tuple[str, str], int]:
    """Row and column → microseconds, of the heat map that is a table."""
    table = [t for t in page.all("table") if "heat" in t.classes][number]
    heads = [th.text for th in table.all("thead")[0].all("th")]
    return {
        (tr.all("th")[0].text, head): int(td.attributes["data-v"] or "")
        for tr in table.all("tbody")[0].all("tr")
        for head, td in zip(heads[1:], tr.all("td"), strict=True)
    }


# --------------------------------------------------------------------------------------------------------------- figures


def test_the_heat_map_of_few_ranks_has_the_sums_of_the_spans(tmp_path: Path) -> None:
    rows = many(40)
    del rows[9]
    rows[11] = row(("write", 0, 1, 5), ("write", 2, 2.5, 5))
    page = parse(page_of(save(tmp_path, rows)))
    expected = {(f"rank {rank}", phase): busy_of(rows).get((rank, phase), -1) for rank in range(40) for phase in EIGHT}
    assert heat_table(page) == expected
    assert "No spans were kept of 1 rank of 40." in page.text


def test_the_heat_map_of_many_ranks_has_the_sums_of_the_spans(tmp_path: Path) -> None:
    rows = many(1024)
    text = page_of(save(tmp_path, rows), ranks_per_host=8)
    page = parse(text)
    data = json.loads(page.all("script")[0].text)
    assert data["rows"] == 8
    found = {(rank, one["phase"]): busy for one in data["phases"] for rank, busy in enumerate(one["busy"])}
    assert found == busy_of(rows)
    strips = [svg for svg in page.all("svg") if "strip" in svg.classes]
    assert [svg.attributes["viewbox"] for svg in strips] == ["0 0 128 8"] * 2
    longest = max(one["spans"][2][-1] + one["spans"][3][-1] for one in rows.values())
    uneven = [one for one in data["phases"] if set(levels(one["busy"], 8, longest).values()) != {"h2"}]
    assert [one["phase"] for one in uneven] == ["write", "sync"]
    for one, strip in zip(uneven, strips, strict=True):
        assert strip.attributes["data-strip"] == str(data["phases"].index(one))
        assert drawn(strip) == levels(one["busy"], rows=8, longest=longest)
    assert len(text.encode()) < 300_000


def drawn(strip: Element) -> dict[tuple[int, int], str]:
    """Column and row → level, from the rectangles."""
    cells: dict[tuple[int, int], str] = {}
    for path in strip.all("path"):
        for x, y, width, back in re.findall(r"M(\d+) (\d+)h(\d+)v1H(\d+)z", path.attributes["d"] or ""):
            assert x == back
            for column in range(int(x), int(x) + int(width)):
                assert (column, int(y)) not in cells
                cells[column, int(y)] = path.classes[0]
    return cells


def levels(busy: list[int], rows: int, longest: int) -> dict[tuple[int, int], str]:
    """What docs/observing.md says of colours, by numpy: less than 2 % of the save is no difference."""
    values, middle = np.array(busy), np.median(busy)
    found = np.digitize(values / middle, [0.5, 0.8, 1.25, 1.5, 2, 3])
    found[np.abs(values - middle) < longest / 50] = 2
    return {(rank // rows, rank % rows): f"h{level}" for rank, level in enumerate(found.tolist())}


def test_rows_of_hosts_and_mesh_dimensions_are_medians(tmp_path: Path) -> None:
    rows = {rank: row(("write", 0, 1 + rank, 5)) for rank in range(12)}
    page = parse(page_of(save(tmp_path, rows), ranks_per_host=4, mesh=Mesh.of({"pp": 3, "tp": 4})))
    assert heat_table(page, 1) == {("host 0", "write"): 3_000_000, ("host 1", "write"): 7_000_000, ("host 2", "write"): 11_000_000}
    assert heat_table(page, 2) == {("pp 0", "write"): 3_000_000, ("pp 1", "write"): 7_000_000, ("pp 2", "write"): 11_000_000}
    assert heat_table(page, 3) == {(f"tp {i}", "write"): (5 + i) * 1_000_000 for i in range(4)}


def test_a_mesh_is_that_of_the_newest_save(tmp_path: Path) -> None:
    for step, ranks in ((1, 4), (2, 8)):
        save(tmp_path / f"step-{step}", {rank: row(("write", 0, 1, MIB)) for rank in range(ranks)})
    four, eight = build_report([str(tmp_path)], Setting(mesh=Mesh.of({"dp": 2, "tp": 4}))).steps
    assert [[group.title for group in step.groups] for step in (four, eight)] == [[], ["dp", "tp"]]
    assert four.notes == ("This save has 4 ranks, and the mesh 8.",) and eight.notes == ()


def test_kinds_and_layers_add_up(tmp_path: Path) -> None:
    arrays = layers()
    url = save(tmp_path, {0: row(("write", 0, 1, 5))}, arrays=arrays)
    report = build_report([str(url)], Setting())
    assert report.detail is not None
    by_kind = {kind.kind: kind.bytes for kind in report.detail.kinds}
    model = sum(a.nbytes for name, a in arrays.items() if name.startswith("model."))
    values = by_kind.pop("values")
    assert values == next(url.glob("index-*/state.json")).stat().st_size
    expected = {
        "model": model,
        "optimizer: exp_avg": model,
        "optimizer: exp_avg_sq": model,
        "data": 40_000,
        "random numbers": 816,
        "other": 396,
    }
    assert by_kind == expected
    by_layer: Counter[str] = Counter()
    for layer in report.detail.layers:
        by_layer[layer.kind] += layer.bytes
    assert by_layer == {"model": model, "optimizer": 2 * model, "data": 40_000, "random numbers": 816, "other": 396}
    assert ("optimizer", "model.layers.3") in {(layer.kind, layer.layer) for layer in report.detail.layers}


def test_no_tensors_have_no_kinds() -> None:
    assert kinds_of([], 0) == ((), ())


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=40), st.floats(0.3, 4))
def test_a_tree_map_tiles_its_area(sizes: list[float], aspect: float) -> None:
    shares = sorted((size / sum(sizes) for size in sizes), reverse=True)
    rects = squarify(shares, (0.0, 0.0, 1.0, 1.0), aspect)
    assert [width * height for _, _, width, height in rects] == pytest.approx(shares, rel=1e-4, abs=1e-7)
    for x, y, width, height in rects:
        assert x >= -1e-6 and x + width <= 1 + 1e-6 and y >= -1e-6 and y + height <= 1 + 1e-6
    for i, (x, y, width, height) in enumerate(rects):
        for u, v, wide, high in rects[:i]:
            assert min(x + width, u + wide) - max(x, u) <= 1e-6 or min(y + height, v + high) - max(y, v) <= 1e-6


def test_bars_of_a_lane_hold_all_spans_in_order(tmp_path: Path) -> None:
    spans = [("write", i / 1000, i / 1000 + 0.0004, 10) if i % 3 else ("hash", i / 1000, i / 1000 + 0.0009, 0) for i in range(4000)]
    report = build_report([str(save(tmp_path, {0: row(*spans)}))], Setting())
    assert report.detail is not None
    (lane,) = report.detail.times.lanes
    assert len(lane.bars) <= 100
    assert all(a.start <= b.start for a, b in pairwise(lane.bars))


def test_cost_is_blocked_time_of_all_ranks(tmp_path: Path) -> None:
    page = parse(page_of(save(tmp_path, {rank: row(("write", 0, 30 + rank, 5)) for rank in range(100)}), price=3.6, currency="€"))
    tiles = {tile.all("span")[0].text: tile.all("b")[0].text for tile in page.all("div") if "tile" in tile.classes}
    assert tiles["cost of blocking"] == "€12.90"  # 129 s × 100 ranks / 3600 × 3.6
    assert (tiles["durable after"], tiles["training blocked"], tiles["ranks"]) == ("129 s", "129 s", "100")


def test_a_save_in_the_background_blocks_as_long_as_its_caller_worked(tmp_path: Path) -> None:
    spans = row(
        ("collect", 0, 0.5, 0), ("capture", 1, 2, 9), ("plan", 0.5, 0.75, 0), ("write", 2, 9, 9), threads=("MainThread", "ckpt-save")
    )
    (saved,) = build_report([str(save(tmp_path, {0: spans}))], Setting()).series[0].saves
    assert saved.summary is not None
    assert (saved.summary.background, saved.summary.blocked) == (True, 0.75)


# ---------------------------------------------------------------------------------------------------------------- advice


def advice_of(*urls: Path, **setting: Any) -> str:
    report = build_report([str(url) for url in urls], Setting(**setting))
    assert report.detail is not None
    return "\n".join(f"{advice.what} {advice.why}" for advice in report.detail.advice)


def test_nothing_remarkable_gives_no_advice(tmp_path: Path) -> None:
    assert advice_of(save(tmp_path, {rank: row(("write", 0, 0.8, MIB), ("sync", 0.8, 0.9, 0)) for rank in range(4)})) == ""


def test_a_slow_host_is_named_as_what_its_ranks_share(tmp_path: Path) -> None:
    url = save(tmp_path, {rank: row(("write", 0, 30 if rank // 4 == 2 else 10, MIB)) for rank in range(16)})
    text = advice_of(url, ranks_per_host=4)
    assert "Look at host 2: nearly all of these ranks are slow" in text
    assert "All 16 ranks wait for the last one, rank 8: about 20.0 s of this save." in text
    assert "Save in the background" in text
    assert "host 2" not in advice_of(url)
    rows = {rank: row(("write", 0, 40 if rank == 1 else 30 if rank // 4 == 2 else 10, MIB)) for rank in range(16)}
    report = build_report([str(save(tmp_path / "two", rows))], Setting(ranks_per_host=4))
    assert report.detail is not None
    one, host = report.detail.advice[:2]
    assert (one.what, one.why[:54]) == ("Look at rank 1.", "All 16 ranks wait for the last one, rank 1: about 30.0")
    assert host.what.startswith("Look at host 2:")
    assert host.why == "The slowest of them, rank 8, works 30.0 s; the median is 10.0 s."


def test_saves_that_become_slower(tmp_path: Path) -> None:
    for run, grows in (("small", 0.05), ("large", 0.5)):
        for step in range(9):
            save(tmp_path / run / f"step-{step}", {0: row(("write", 0, 0.2 + step * grows, MIB))})
    assert "The last 3 saves took 3.70 s (median), the first 3 took 0.700 s." in advice_of(tmp_path / "large")
    assert "slower" not in advice_of(tmp_path / "small")  # 0.250 s, then 0.550 s: the bar of steps has one colour too
    bars = [[link.classes[0] for link in parse(page_of(tmp_path / run)).all("nav")[0].all("a")] for run in ("small", "large")]
    assert bars == [["h2"] * 9, ["h0", "h0", "h1", "h2", "h2", "h2", "h3", "h4", "h4"]]


def test_a_run_of_57_saves_names_its_failures_and_the_rank_that_is_slow_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(1, 58):
        rows = {k: row(("collect", 0, 0.82 if n % 9 == 0 and k == 3 else 0.02, 0), ("write", 1, 1.3, MIB)) for k in range(4)}
        save(tmp_path / f"step-{n * 10}", rows)
    for step in (135, 305, 425):
        entry = LogEntry(kind="save", at=1.7e9 + step, rank=0, ranks=4, step=step, url=f"{tmp_path}/step-{step}", error="StorageError")
        add_entry(open_backend(str(tmp_path)), entry)
    page = parse(page_of(tmp_path))
    tile = next(e for e in page.everything() if "tile" in e.classes)
    assert [child.text for child in tile.children if isinstance(child, Element)] == ["failed saves", "3", "at steps 135, 305, 425"]
    (failed,) = [e for e in page.everything() if f"#{e.attributes.get('id')}" == tile.all("a")[0].attributes["href"]]
    assert [tr.attributes.get("id") for tr in failed.all("tr")] == [None, "step-425", "step-305", "step-135"]
    assert failed.all("h2")[0].text == "Saves that failed" and "The fastest, the median, the slowest and the newest save." in page.text
    charts = [svg for svg in page.all("svg") if "chart" in svg.classes]
    for chart in charts:
        marks = {line.text.partition(":")[0]: line.attributes["x1"] for line in chart.all("line") if "failed" in line.classes}
        assert marks == {f"step {s}": f"{100 * (0.01 + 0.98 * (s - 10) / 560):.2f}%" for s in (135, 305, 425)}
    assert [[label.text for label in chart.all("text")] for chart in charts] == [
        ["1.30 s", "0"],
        ["280 B/s", "0"],
        ["364 B", "0"],
        ["1", "0"],
    ]
    (table,) = [t for t in page.all("table") if "run" in t.classes]
    assert [cell.text for cell in table.all("tbody")[0].everything() if cell.name in ("th", "td")] == [
        "rank 3",
        "slowest in 6 of 57 saves",
        "collect",
        "4.80",
        "step 540",
    ]
    (link,) = table.all("a")
    (target,) = [e for e in page.everything() if f"#{e.attributes.get('id')}" == link.attributes["href"]]
    assert [cell.text for cell in target.everything() if cell.name in ("th", "td")] == ["rank 3", "0.820", "0.300"]
    steps = {e.attributes["id"]: e for e in page.everything() if "step" in e.classes}
    assert [link.attributes["href"] for link in page.all("nav")[0].all("a")] == [f"#{name}" for name in steps]
    for number, (name, step) in enumerate(steps.items(), 1):
        assert (name, step.classes[1:]) == (f"step-{number * 10}", ["newest"] if number == 57 else [])
        busy = {(f"rank {k}", "collect"): 820_000 if number % 9 == 0 and k == 3 else 20_000 for k in range(4)}
        assert heat_table(step) == busy | {(f"rank {k}", "write"): 300_000 for k in range(4)}
    assert "It was the slowest in 6 of 57 saves, mostly in collect: 4.80\u00a0s in all." in page.text
    panel = next(e for e in page.everything() if "panel" in e.classes)
    assert "median 1.30 s · p95 1.30 s" in panel.text
    monkeypatch.setattr("ckpt.runs.report.content.PAGE", 57 * 8_000 + 25_000)
    short = parse(page_of(tmp_path))
    whole = [e.attributes["id"] for e in short.everything() if "step" in e.classes and "Threads over time" in e.text]
    assert whole == ["step-550", "step-560", "step-570"]  # all are equally slow
    assert "Ranks and threads of 54 saves, the fastest ones, are left out" in short.text
    assert short.text.count("Phases of step") == short.text.count("not in this page") + 3 == 57


def test_runs_lie_over_each_other_in_one_colour_each(tmp_path: Path) -> None:
    a, b, dark = tmp_path / "<x>" / "a", tmp_path / '"y' / "a", tmp_path / "dark"
    for step in (10, 20, 30):
        save(a / f"step-{step}", {0: row(("write", 0, step / 10, MIB))})
        save(b / f"step-{step}", {0: row(("write", 0, 1, MIB), ("sync", 1, 1.5, MIB))})
    save(dark / "step-1", None)
    add_entry(open_backend(str(b)), LogEntry(kind="save", at=1.7e9, rank=0, ranks=1, step=25, url=f"{b}/step-25", error="StorageError"))
    text = page_of(a, b)
    assert text == page_of(a, b) != page_of(b, a)
    page = parse(text)
    assert_runs_nothing(page)
    for chart in (svg for svg in page.all("svg") if "chart" in svg.classes):
        assert {kind: label for e in chart.all("svg") if "end" in e.classes for kind, label in [(e.classes[1], e.all("text")[0].text)]} == {
            "r0": "<x>/a",
            "r1": '"y/a',
        }
        assert [path.classes for path in chart.all("path")] == [["line", "r0"], ["line", "r1"]]
        assert [line.classes for line in chart.all("line") if "rule" not in line.classes] == [["failed", "r1"]]
    assert [box.attributes["id"] for box in page.all("input")] == ["run-0", "run-1"]
    (table,) = [t for t in page.all("table") if "figures" in t.classes]
    figures = {tr.all("th")[0].text: [td.text for td in tr.all("td")] for tr in table.all("tbody")[0].all("tr")}
    assert figures["failed saves"] == ["0", "1"]
    assert figures["durable after, median"] == figures["training blocked, median"] == ["2.00 s", "1.50 s"]
    assert figures["durable after, p95"] == ["3.00 s", "1.50 s"]
    assert figures["sync, median"] == ["", "0.500 s"]
    for urls, error in (
        ((a, dark), f"no save of this run has spans ({dark})"),
        ((a, b / "step-10"), f"a run and a checkpoint cannot be compared ({a})"),
    ):
        with pytest.raises(UsageError, match=re.escape(error)):
            page_of(*urls)


def test_checkpoints_of_one_name_are_told_apart(tmp_path: Path) -> None:
    urls = [save(tmp_path / run / name, {0: row(("write", 0, 1, MIB))}) for run in ("a", "b") for name in ("final", "step-1")]
    heads = [[th.text for th in parse(page_of(*some)).all("thead")[-1].all("th")][1:] for some in (urls[:2], urls[::2], urls[1::2], urls)]
    same = [["a/final", "b/final"], ["a/step-1", "b/step-1"]]
    assert heads == [["final", "step 1"], *same, ["a/final", "a/step-1", "b/final", "b/step-1"]]


@pytest.mark.parametrize("ranks", [8, 64, 320])
def test_a_step_takes_no_more_of_the_page_than_planned(tmp_path: Path, ranks: int) -> None:
    random = np.random.default_rng(ranks)
    names = [f"phase-{i}" for i in range(10)]
    rows = {k: row(*[(name, i, i + random.uniform(0.01, 0.99), MIB) for i, name in enumerate(names * 8)]) for k in range(ranks)}
    url = str(save(tmp_path, rows))
    report = build_report([url], Setting(ranks_per_host=4))
    assert report.detail is not None
    step = render(report).partition('<div class="step newest"')[2].partition("<h2>Stored in")[0]
    assert len(step.encode()) <= report.detail.page_bytes < 3 * len(step.encode())


def test_the_verdict_blames_no_phase_that_the_heat_map_shows_as_even(tmp_path: Path) -> None:
    """Two phases of 0.04 s more each make a straggler, and neither differs enough for a colour."""
    rows = {k: row(("collect", 0, 0.042 if k == 1 else 0.002, 0), ("capture", 1, 1.042 if k == 1 else 1.002, 0)) for k in range(4)}
    page = parse(page_of(save(tmp_path, rows)))
    levels = {td.classes[0] for t in page.all("table") if "heat" in t.classes for td in t.all("tbody")[0].all("td")}
    assert levels == {"h2"}
    assert "Rank 1 is a little slower in several phases, in none by 0.050\u00a0s" in page.text  # not broken at the end of a line


def test_gaps_and_slow_sync(tmp_path: Path) -> None:
    text = advice_of(save(tmp_path, {0: row(("write", 0, 0.2, MIB), ("sync", 0.4, 0.9, MIB))}))
    assert "No phase covers 0.200 s of rank 0 (22 % of the save)." in text
    assert "spends 0.500 s of 0.900 s in sync" in text


# ------------------------------------------------------------------------------------------------- damaged, hostile, old


HOSTILE = st.one_of(
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "'-alert(1)-'",
            "</title></style></script><h1>",
            "<!--",
            "]]>",
            "&lt;b&gt;&#60;",
            "javascript:alert(1)",
            "\u202etxt.exe",
            "\x1b[2J\r\n",
            "a" * 4000,
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=60),
)


def structure(page: Element) -> list[tuple[str, tuple[str, ...]]]:
    return [(e.name, tuple(e.attributes)) for e in page.everything()]


@settings(max_examples=40)
@given(names=st.lists(HOSTILE, min_size=3, max_size=3), thread=HOSTILE)
def test_names_are_text_whatever_they_say(tmp_path_factory: pytest.TempPathFactory, names: list[str], thread: str) -> None:
    clean = "".join(c if c.isprintable() else "?" for c in thread)[:64] or "t"
    pages = []
    for labels, name in ((["a", "b", "c"], "t"), (names, clean)):
        # Names are after a number, so that all of them are one layer in both pages, and a parameter's state is one.
        arrays = {f"model.{i}.{label}": np.zeros((4, 4), np.float32) for i, label in enumerate(labels)}
        arrays |= {f"{label}{i}": np.zeros((64, 4), np.int32) for i, label in enumerate(labels) if "." not in label}
        url = save(tmp_path_factory.mktemp("save") / "x", {0: row(("write", 0, 1, 5), threads=(name,))}, arrays=arrays)
        pages.append(parse(page_of(url)))
    benign, hostile = pages
    assert {name for name, _ in structure(hostile)} <= {name for name, _ in structure(benign)} | {"text"}
    assert_runs_nothing(hostile)


def assert_runs_nothing(page: Element) -> None:
    """No element and no attribute that loads or runs anything but the script of the page, which the policy names by its digest."""
    for element in page.everything():
        assert element.name not in ("img", "iframe", "object", "embed", "link", "base", "form", "foreignobject", "use", "image")
        assert not [key for key in element.attributes if key.startswith("on") or key in ("src", "xlink:href", "style", "srcdoc")]
        assert re.fullmatch(r"#[\w-]+", element.attributes.get("href") or "#a")
    (policy,) = [m.attributes["content"] or "" for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    codes = [*page.all("style"), *(s for s in page.all("script") if s.attributes.get("type") != "application/json")]
    assert len(codes) == 2
    for code in codes:
        assert f"'sha256-{b64encode(hashlib.sha256(code.text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_a_url_is_text_too(tmp_path: Path) -> None:
    url = save(tmp_path / "<b onclick=alert(1)>&step-1", {0: row(("write", 0, 1, 5))})
    page = parse(page_of(url, url))
    assert_runs_nothing(page)
    assert "<b onclick=alert(1)>&step-1" in page.text


def test_absurd_numbers(tmp_path: Path) -> None:
    rows = {0: row(("write", 0, 1, 5)), 1: row(("sync", -4e9, 4e9, (1 << 63) - 1), began=2.4e11), 2: row(("x-1", 0, 0, 0), began=0.0)}
    page = parse(page_of(save(tmp_path, rows)))
    assert_runs_nothing(page)
    assert "their clocks are too far apart" in page.text
    assert not re.search(r"\b(nan|inf)\b", page.text)


def test_damaged_and_missing_spans_give_a_report_that_says_so(tmp_path: Path) -> None:
    good = save(tmp_path / "step-1", {0: row(("write", 0, 1, 5))})
    bad, none = save(tmp_path / "step-2", {0: row(("write", 0, 1, 5))}), save(tmp_path / "step-3", None)
    (path,) = bad.glob("index-*/spans.json")
    path.write_bytes(path.read_bytes()[:90])
    flip(next(good.glob("index-*/tensors.arrow")), 60)
    text = parse(page_of(good, bad, none)).text
    assert f"{bad}: the file of spans is damaged: its digest is wrong" in text
    assert f"{none}: no spans were kept with this checkpoint" in text
    assert "What the save consists of is not known" in text
    alone = parse(page_of(none))
    assert "No save here has spans" in alone.text
    assert_runs_nothing(alone)


def test_ranks_that_only_waited(tmp_path: Path) -> None:
    parse(page_of(save(tmp_path, {rank: row(("agree", 1, 1, 0)) for rank in range(2)})))


@pytest.mark.parametrize("ranks", [1, 64, 65, 300, 2049, 5000])
def test_any_number_of_ranks_has_a_cell(tmp_path: Path, ranks: int) -> None:
    rows = {rank: row(("write", 0, 5 if rank == ranks - 1 else 1, 5)) for rank in range(ranks)}
    report = build_report([str(save(tmp_path, rows, ranks=ranks))], Setting())
    assert report.detail is not None
    groups = report.detail.heat.groups
    assert [rank for group in groups for rank in group] == list(range(ranks))
    assert len(groups) <= 4096
    cells = [cell for cell in report.detail.heat.rows["write"] if cell is not None]
    assert ranks == 1 or cells[-1].level == 6


# ------------------------------------------------------------------------------------------------------------------ page


def test_equal_saves_give_equal_pages(tmp_path: Path) -> None:
    url = save(tmp_path, many(100), arrays=layers(3))
    assert page_of(url) == page_of(url)
    code = (
        "import sys; from ckpt.runs.report.html import render; from ckpt.runs.report.content import Setting, build_report\n"
        "print(render(build_report([sys.argv[1]], Setting())), end='')"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code, str(url)], capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert outputs == {page_of(url).encode()}


def test_a_large_save_takes_little_time_and_no_torch(tmp_path: Path) -> None:
    url = save(tmp_path / "large", many(1024))
    code = "import sys; from ckpt.cli.main import cli; sys.exit = print; cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    times = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", code, "report", str(url), "-o", str(tmp_path / "r.html")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.splitlines() == ["0", "False"]
    print(f"{min(times):.2f} s of CPU time")
    assert min(times) < 2  # 0.7 s on a machine of its own


# --------------------------------------------------------------------------- Reading the saves of a run: which, in what order, and how few.


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_every_number_once_and_each_beginning_spread(count: int) -> None:
    order = list(spread_evenly(count))
    assert sorted(order) == list(range(count))
    for some in (3, 9, 100):
        if count > some:
            chosen = sorted(order[:some])
            gaps = [b - a for a, b in pairwise(chosen)]
            assert (chosen[0], chosen[-1]) == (0, count - 1)
            assert max(gaps) <= 2 * min(gaps) + 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Forty saves: the first one, copied. Ten more directories have names that look like steps."""
    first = save(tmp_path / "one", {0: row(("write", 0, 1, 5)), 1: row(("write", 0, 2, 5))})
    root = tmp_path / "run"
    for step in range(40):
        shutil.copytree(first, root / f"step-{step}")
    for step in range(40, 50):
        (root / f"step-{step}").mkdir()
    (root / "logs").mkdir()
    return root


def test_all_of_a_short_run(run: Path) -> None:
    history = read_history(str(run))
    assert [saved.step for saved in history.saves] == list(range(40))
    assert (history.candidates, history.left_out) == (40, 0)
    assert {saved.summary.seconds for saved in history.saves if saved.summary} == {2.0}
    assert not any(saved.tables for saved in history.saves)


def test_a_long_run_is_sampled_with_few_reads(run: Path) -> None:
    for step in range(40, 50):
        shutil.copytree(run / "step-0", run / f"step-{step}", dirs_exist_ok=True)
    process = FaultyProcess()
    with wrap_backends(lambda inner: FaultyBackend(inner, process=process)):
        history = read_history(str(run), limit=5)
    assert [saved.step for saved in history.saves] == [0, 12, 24, 36, 49]
    assert (history.candidates, history.left_out) == (50, 45)
    assert process.operations <= 6 * 5 + 2  # it does not look at the 45 others


def test_large_spans_end_the_reading_sooner(tmp_path: Path) -> None:
    first = save(tmp_path / "one", many(40))
    for step in range(70):
        shutil.copytree(first, tmp_path / "run" / f"step-{step}")
    size = next(first.glob("index-*/spans.json")).stat().st_size
    assert [len(read_history(str(tmp_path / "run"), most_bytes=n * size).saves) for n in (1, 2, 20, 999)] == [1, 2, 20, 70]


def test_the_newest_save_that_ended_is_always_read(run: Path) -> None:
    for step in range(40, 44):
        shutil.copytree(run / "step-0", run / f"step-{step}", dirs_exist_ok=True)
    for step in range(44, 50):
        (run / f"step-{step}" / "data").mkdir()
        (run / f"step-{step}" / "data" / f"{16 * 'a'}-00000.safetensors").write_text("")
    steps = [(saved.step, saved.summary is not None) for saved in read_history(str(run), limit=9).saves]
    assert steps == [(0, True), (24, True), (43, True), *((step, False) for step in range(44, 50))]


def test_what_is_wrong_with_one_save_is_kept_beside_it(run: Path) -> None:
    (run / "step-3" / "checkpoint.json").write_text("{")
    next((run / "step-4").glob("index-*/spans.json")).write_text('{"digest":"')
    next((run / "step-5").glob("index-*/spans.json")).unlink()
    problems = {saved.step: saved.problem for saved in read_history(str(run)).saves if saved.problem}
    assert sorted(problems) == [3, 4, 5]
    assert "commit record" in problems[3]
    assert problems[4] == "the file of spans is damaged: its digest is wrong"
    assert problems[5] == "no spans were kept with this checkpoint"
