"""Draws docs/pictures/steady.svg: what the processes of a job have during thousands of saves. ``python docs/pictures/draw_steady.py``, or
``make pictures``.

The figures are in steady.json beside it. ``draw_steady.py RESULTS`` takes them from what ``python -m benchmarks --only steady --json
RESULTS`` has written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("steady.svg")
FIGURES = Path(__file__).with_name("steady.json")
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
PANELS = (
    ("resident", "resident memory, MB", 1e6),
    ("descriptors", "file descriptors", 1.0),
    ("threads", "threads", 1.0),
    ("cpu", "CPU of a save, all ranks, ms", 1e-3),
)
WIDTH, HEIGHT, GAP, LEFT, TOP = 350, 110, 60, 56, 64

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .small { fill: #59636e; }
  .title { font-weight: 600; }
  .rule { stroke: #d1d9e0; stroke-width: 1; }
  .line { fill: none; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .rule { stroke: #3d444d; }
  }
"""

Figures = dict[str, dict[str, list[float]]]
"""By the way of saving: after how many saves was looked, and what the rank that had most had then."""


def figures_of(results: dict[str, Any]) -> Figures:
    (found,) = (finding["figures"] for finding in results["findings"] if finding["scenario"] == "steady")
    digits = {what: 4 if what == "cpu" else None for what in ("saves", *(name for name, _, _ in PANELS))}
    return {way: {what: [round(value, n) for value in mine[what]] for what, n in digits.items()} for way, mine in found.items()}


def panel(x: float, y: float, name: str, title: str, scale: float, figures: Figures) -> list[str]:
    """From zero, so that what looks flat is flat."""
    top = max(max(mine[name]) for mine in figures.values()) / scale
    last = max(mine["saves"][-1] for mine in figures.values())
    parts = [f'<text class="title" x="{x}" y="{y - 10}">{title}</text>']
    for value, at in ((top, y), (0.0, y + HEIGHT)):
        parts.append(f'<line class="rule" x1="{x}" x2="{x + WIDTH}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="small" x="{x - 8}" y="{at + 4}" text-anchor="end">{value:,.0f}</text>')
    for (_, mine), colour in zip(figures.items(), COLOURS, strict=True):
        points = (
            f"{x + WIDTH * at / last:.1f},{y + HEIGHT * (1 - value / scale / top):.1f}"
            for at, value in zip(mine["saves"], mine[name], strict=True)
        )
        parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(points)}"/>')
    parts.append(f'<text class="small" x="{x + WIDTH}" y="{y + HEIGHT + 18}" text-anchor="end">{last:,.0f} saves</text>')
    return parts


def picture(figures: Figures) -> str:
    """The whole file. The same text each time, so a test compares it with what is checked in."""
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + 2 * (HEIGHT + GAP)
    body, x = [], LEFT
    for way, colour in zip(figures, COLOURS, strict=True):
        body += [f'<rect x="{x}" y="16" width="12" height="12" rx="2" fill="{colour}"/>', f'<text x="{x + 18}" y="26">{way}</text>']
        x += 48 + 7 * len(way)
    for number, (name, title, scale) in enumerate(PANELS):
        down, right = divmod(number, 2)
        body += panel(LEFT + right * (WIDTH + GAP), TOP + down * (HEIGHT + GAP), name, title, scale, figures)
    label = (
        "Resident memory, file descriptors, threads and processor time of a save stay level over thousands of saves, in each way of saving."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n<style>{STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        FIGURES.write_text(json.dumps(figures_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n", encoding="utf-8")
    TARGET.write_text(picture(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")
