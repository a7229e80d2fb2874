"""File systems that are soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    """A new directory with a file system of this size: ``"256k"``, ``"5m"``. The test is skipped without the right to mount."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
