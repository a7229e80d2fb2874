"""An environment for each scenario: its packages from the registry, over those of the environment that runs this, whose torch it shares."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tests.distributed.ranks import ROOT

CACHE = ROOT / ".trainers"


class UnavailableError(Exception):
    """The packages cannot be had here; the message says why."""


def interpreter(name: str, packages: Sequence[str], alone: Sequence[str] = (), without: Sequence[str] = ()) -> Path:
    """A Python that has ``packages``, each ``name==version``; they are installed into ``.trainers/<name>`` if this one lacks them. Those of
    ``alone`` are installed without their dependencies, such as another torch. ``without`` are dependencies that are removed again.

    Raises:
        UnavailableError: pip cannot install them.
    """
    if all(_installed(package) for package in (*packages, *alone)):
        return Path(sys.executable)
    folder = CACHE / name
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([*packages, *alone, *without, sys.version])
    if done.exists() and done.read_text() == wanted:
        return python
    # No pip and no setuptools of its own: older ones would hide those below. What is below counts as installed, torch above all.
    _ran(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "below.pth").write_text("\n".join({sysconfig.get_path("purelib"), str(ROOT)}))
    (folder / "same.txt").write_text(f"torch=={metadata.version('torch')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "-q", "--disable-pip-version-check"]
    _ran(*pip, "install", "--no-build-isolation", "-c", str(folder / "same.txt"), *packages)
    if alone:
        _ran(*pip, "install", "--no-deps", *alone)
    if without:
        _ran(*pip, "uninstall", "-y", *without)
    done.write_text(wanted)
    return python


def _installed(package: str) -> bool:
    name, _, version = package.partition("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


def _ran(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise UnavailableError(f"{' '.join(command)}: {err}") from err
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if re.search("error", line, re.IGNORECASE)]
        raise UnavailableError(f"{' '.join(command)}: {' '.join(lines)[-500:]}")
