"""What these tests share: the Megatron checkpoints, unpacked once, processes, and directories in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

SHM = "/dev/shm"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that can be: thousands of fsyncs on a disk take minutes."""
    with TemporaryDirectory(prefix="ckpt-", dir=SHM if os.path.isdir(SHM) else None) as path:
        yield Path(path)
