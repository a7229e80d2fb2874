"""``make incidents``: each script of this folder, or those whose names are given, such as ``lightning_21813``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*_[0-9]*.py"))}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in SCRIPTS]:
        sys.exit(f"error: there is no incident {unknown[0]}; there are {', '.join(SCRIPTS)}")
    return max(play(SCRIPTS[name]) for name in names or SCRIPTS)


def play(script: Path) -> int:
    """What packages warn of when they are imported is shown only if the script fails."""
    done = subprocess.run([sys.executable, str(script)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
