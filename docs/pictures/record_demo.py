"""Records ``make demo`` as an animated terminal: docs/pictures/demo.svg. ``make pictures``, or ``python docs/pictures/record_demo.py``.

It runs the demo and keeps what it prints. ``--transcript FILE`` takes the output of an earlier run instead. The lines are real; the pace is
not: a run takes one to two minutes, the picture 20 seconds. Readers who prefer less motion see the end of the recording at once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "demo.svg"
DEMO = HERE.parent.parent / "examples" / "demo" / "run.py"
ROWS, COLUMNS, LINE, LEFT = 24, 104, 18, 14
SECONDS = 20.0

STYLE = """
  .screen { fill: #0d1117; }
  text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #e6edf3; white-space: pre; }
  .head { fill: #79c0ff; font-weight: bold; } .command { fill: #7ee787; } .kill { fill: #ff7b72; }
"""


def lines_of(transcript: str) -> list[str]:
    """What is shown: no temporary directories, no line wider than the screen."""
    text = re.sub(r"\S*/ckpt-demo-\w+/", "", transcript).strip("\n")
    return [line.rstrip()[:COLUMNS] for line in text.split("\n")]


def kind(line: str) -> str:
    if line.startswith("──"):
        return ' class="head"'
    if line.startswith("$ "):
        return ' class="command"'
    return ' class="kill"' if line.startswith("SIGKILL") else ""


def picture(lines: list[str]) -> str:
    """One text element a line. Each appears in its turn, and once the screen is full, each line moves all of them up by one."""
    pause = SECONDS / len(lines)
    scrolled = max(0, len(lines) - ROWS)
    start, total = ROWS * pause, scrolled * pause
    motion = [
        "@keyframes appear { from { opacity: 0; } to { opacity: 1; } }",
        f"@keyframes scroll {{ to {{ transform: translateY(-{scrolled * LINE}px); }} }}",
        "text { animation: appear 1ms both; }",
        f".lines {{ animation: scroll {total:.2f}s steps({max(1, scrolled)}, end) {start:.2f}s both; }}",
        "@media (prefers-reduced-motion: reduce) {",
        f"  text {{ animation: none; }} .lines {{ animation: none; transform: translateY(-{scrolled * LINE}px); }}",
        "}",
    ]
    texts = [
        f'<text{kind(line)} x="{LEFT}" y="{LINE * (n + 1) + 4}" style="animation-delay:{n * pause:.2f}s">{escape(line)}</text>'
        for n, line in enumerate(lines)
    ]
    width, height = LEFT * 2 + 8 * COLUMNS, LINE * (ROWS + 1)
    label = "Recording of make demo: four ranks train and are killed in a save; two ranks resume from the newest committed checkpoint."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}  " + "\n  ".join(motion) + "\n</style>\n"
        f'<rect class="screen" width="{width}" height="{height}" rx="8"/>\n'
        f'<svg y="2" width="{width}" height="{height - 8}"><g class="lines">\n' + "\n".join(texts) + "\n</g></svg>\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transcript", type=Path, help="the output of an earlier run")
    transcript = parser.parse_args().transcript
    if transcript is None:
        text = subprocess.run([sys.executable, str(DEMO)], check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        text = transcript.read_text(encoding="utf-8")
    TARGET.write_text(picture(lines_of(text)), encoding="utf-8")


if __name__ == "__main__":
    main()
