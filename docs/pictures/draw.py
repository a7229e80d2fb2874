"""Draws docs/pictures/reshard.svg: ranks → boxes of a global tensor → other ranks. ``python docs/pictures/draw.py``, or ``make pictures``.

One matrix of 12 × 12 cells. On the left a 2 × 2 mesh saves it: four ranks hold a quarter each. In the middle lie the stored boxes. On the
right three ranks load rows of it. A cell keeps its colour all the way, so the right side shows which stored boxes each rank reads.
"""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).with_name("reshard.svg")
SIDE = 12
CELL = 15
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # told apart by people who do not see all colours, on light and dark

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .title { font-weight: 600; }
  .cell { stroke: #ffffff; stroke-width: 1; }
  .rank { fill: none; stroke: #1f2328; stroke-width: 2; }
  .arrow { stroke: #59636e; stroke-width: 2; fill: none; marker-end: url(#head); }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .cell { stroke: #0d1117; } .rank { stroke: #f0f6fc; }
    .arrow { stroke: #9198a1; } .head { fill: #9198a1; }
  }
"""


def quarter(row: int, column: int) -> int:
    """The saving rank that holds a cell, which is also the stored box that it lies in."""
    return 2 * (row >= SIDE // 2) + (column >= SIDE // 2)


def cells(x: float, y: float, rows: range, columns: range) -> str:
    """A block of the matrix with its upper left corner at (x, y)."""
    return "\n".join(
        f'<rect class="cell" x="{x + CELL * (c - columns.start)}" y="{y + CELL * (r - rows.start)}" width="{CELL}" height="{CELL}"'
        f' fill="{COLOURS[quarter(r, c)]}"/>'
        for r in rows
        for c in columns
    )


def frame(x: float, y: float, rows: int, columns: int, label: str) -> str:
    outline = f'<rect class="rank" x="{x - 2}" y="{y - 2}" width="{CELL * columns + 4}" height="{CELL * rows + 4}" rx="3"/>'
    return f'{outline}\n<text class="small" x="{x}" y="{y - 8}">{label}</text>'


def saving_ranks(x: float, y: float) -> list[str]:
    half, gap = SIDE // 2, 34
    parts = []
    for rank in range(4):
        down, right = divmod(rank, 2)
        left, top = x + right * (half * CELL + gap), y + down * (half * CELL + gap)
        rows, columns = range(down * half, (down + 1) * half), range(right * half, (right + 1) * half)
        parts += [cells(left, top, rows, columns), frame(left, top, half, half, f"rank {rank}")]
    return parts


def loading_ranks(x: float, y: float) -> list[str]:
    share, gap = SIDE // 3, 32
    parts = []
    for rank in range(3):
        top = y + rank * (share * CELL + gap)
        parts += [cells(x, top, range(rank * share, (rank + 1) * share), range(SIDE)), frame(x, top, share, SIDE, f"rank {rank}")]
    return parts


def arrow(x: float, y: float, length: float, label: str) -> str:
    line = f'<path class="arrow" d="M {x} {y} h {length - 8}"/>'
    return f'{line}\n<text class="title" x="{x + length / 2 - 6}" y="{y - 12}" text-anchor="middle">{label}</text>'


def picture() -> str:
    """The whole file. The same text each time, so a test compares it with what is checked in."""
    width, height = 860, 320
    matrix = CELL * SIDE
    heads = ((30, "4 ranks save (2 × 2 mesh)"), (375, "the checkpoint: 4 boxes"), (665, "3 ranks load (rows)"))
    body = [
        *(f'<text class="title" x="{x}" y="24">{label}</text>' for x, label in heads),
        *saving_ranks(30, 64),
        arrow(262, 166, 96, "ckpt.save"),
        cells(375, 76, range(SIDE), range(SIDE)),
        frame(375, 76, SIDE, SIDE, "one global tensor"),
        arrow(572, 166, 80, "ckpt.load"),
        *loading_ranks(665, 64),
        f'<text class="small" x="375" y="{76 + matrix + 26}">each box: dtype, offset, digest</text>',
        '<text class="small" x="30" y="310">Each rank writes what it holds, and reads the stored boxes that its own part overlaps.</text>',
    ]
    marker = '<marker id="head" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
    label = (
        "Four ranks of a two by two mesh save quarters of a matrix as boxes; three ranks load rows of it, each from the boxes it overlaps."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n<style>{STYLE}</style>\n'
        f'<defs>{marker}<path class="head" d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(picture(), encoding="utf-8")
