"""A daemon for tests: its own folder, and the end of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import CkptError
from ckpt.memory import client


@contextmanager
def daemon_in(folder: Path) -> Iterator[client.MemoryClient]:
    """A daemon of its own for the block, which ``CKPT_MEMORY_DIR`` leads to."""
    before = os.environ.get("CKPT_MEMORY_DIR")
    os.environ["CKPT_MEMORY_DIR"] = str(folder)
    try:
        yield client.connect()
    finally:
        with suppress(CkptError):  # it may be dead already
            client.connect(start=False, folder=folder).stop()
        if before is None:
            os.environ.pop("CKPT_MEMORY_DIR", None)
        else:
            os.environ["CKPT_MEMORY_DIR"] = before
