"""These tests are about disks: direct writes, clones, what is synced when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a disk, where pytest's own may be in memory."""
    with TemporaryDirectory(prefix="ckpt-", ignore_cleanup_errors=True) as path:
        yield Path(path)
