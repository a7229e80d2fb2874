"""Copies on a file system whose files share extents: every byte is compared, and few are written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError
from ckpt.io_backends.conformance.reading import everything
from ckpt.io_backends.registry import open_backend
from tests.cli.checkpoints import write_checkpoint

SIZE = 40 << 20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mkfs.xfs") is None, reason="mounts a file of XFS: needs root and mkfs.xfs"
)


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """An empty file system that shares extents."""
    image, mount = tmp_path / "xfs.img", tmp_path / "xfs"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    for command in (["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{command[0]}: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def free(place: Path) -> int:
    os.sync()
    status = os.statvfs(place)
    return status.f_bfree * status.f_frsize


def test_a_copy_shares_its_bytes_and_is_compared(xfs: Path) -> None:
    write_checkpoint(str(xfs / "a"), {"x": np.random.default_rng(0).integers(0, 1 << 60, (SIZE // 8,))}, ranks=1)
    before = free(xfs)
    report = copy_checkpoint(xfs / "a", xfs / "b")
    assert report.committed and report.uncompared_bytes == 0
    assert before - free(xfs) < SIZE / 10
    assert everything(open_backend(str(xfs / "b"))) == everything(open_backend(str(xfs / "a")))
    assert not verify(str(xfs / "b")).problems
    (file,) = (xfs / "a" / "data").iterdir()
    with file.open("r+b") as damaged:
        damaged.seek(SIZE // 2)
        damaged.write(b"damage")
    assert not verify(str(xfs / "b")).problems, "what is shared is no longer so once a file changes"
    with pytest.raises(CorruptError):
        copy_checkpoint(xfs / "a", xfs / "c")
    assert not list((xfs / "c").rglob("*.safetensors"))
