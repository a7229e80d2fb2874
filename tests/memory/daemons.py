"""A daemon for tests: its own folder, and the end of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt.errors import CkptError
from ckpt.nodes import memory_client


@contextmanager
def daemon_in(folder: Path) -> Iterator[memory_client.MemoryClient]:
    """A daemon of its own for the block, which ``CKPT_MEMORY_DIR`` leads to."""
    before = os.environ.get("CKPT_MEMORY_DIR")
    os.environ["CKPT_MEMORY_DIR"] = str(folder)
    try:
        yield memory_client.connect()
    finally:
        with suppress(CkptError):  # it may be dead already
            memory_client.connect(start=False, folder=folder).stop()
        if before is None:
            os.environ.pop("CKPT_MEMORY_DIR", None)
        else:
            os.environ["CKPT_MEMORY_DIR"] = before


def flip_byte(daemon: memory_client.MemoryClient, path: str) -> None:
    """The last byte of an object changes in the memory of the daemon."""
    pid, opened = daemon.status()["pid"], daemon.get(path)
    wanted = os.fstat(opened.file).st_ino
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it may be open to read only, or closed meanwhile
            if os.stat(f"/proc/{pid}/fd/{name}").st_ino == wanted:
                with open(f"/proc/{pid}/fd/{name}", "r+b") as file:
                    file.seek(opened.known.size - 1)
                    (byte,) = file.read(1)
                    file.seek(opened.known.size - 1)
                    file.write(bytes([byte ^ 1]))
                return
    raise AssertionError(f"{path} is not open for writing in {pid}")
