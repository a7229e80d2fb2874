"""``make incidents``: each script of this folder, or those whose names are given, such as ``lightning_21813``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*_[0-9]*.py"))}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in SCRIPTS]:
        sys.exit(f"error: there is no incident {unknown[0]}; there are {', '.join(SCRIPTS)}")
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}  # what packages warn of when they are imported
    return max(subprocess.run([sys.executable, str(SCRIPTS[name])], env=quiet, check=False).returncode for name in names or SCRIPTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
