"""Where a benchmark runs: a directory of its own on each file system or in a bucket, removed afterwards, and the machine. Linux."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from ckpt.io_backends import open_backend


@dataclass(eq=False)
class Place:
    """A temporary directory below ``parent``, which may be ``s3://bucket/prefix``; a context manager."""

    parent: str
    path: str = ""

    @property
    def filesystem(self) -> str:
        """Type of the file system, such as ``tmpfs`` or ``ext4``."""
        if self.remote:
            return "object store"
        return subprocess.check_output(["findmnt", "-nvo", "FSTYPE", "-T", self.parent], text=True).strip()

    @property
    def remote(self) -> bool:
        return "://" in self.parent

    @property
    def label(self) -> str:
        return f"{self.parent} ({self.filesystem})"

    def __enter__(self) -> Place:
        self.path = f"{self.parent}/{uuid4()}" if self.remote else tempfile.mkdtemp(prefix="ckpt-bench-", dir=self.parent)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear(self.path)

    def fresh(self, name: str) -> str:
        """A path in it where nothing is."""
        path = os.path.join(self.path, name.replace(" ", "-"))
        self._clear(path)
        return path

    def _clear(self, path: str) -> None:
        if self.remote:
            backend = open_backend(path)
            backend.delete_many([entry.path for entry in backend.list_prefix()])
        shutil.rmtree(path, ignore_errors=True)

    def cool(self, directory: str) -> None:
        """Drop the files below ``directory`` from the page cache. In tmpfs, where the page cache is the storage, nothing happens."""
        for path in filter(Path.is_file, Path(directory).rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only clean pages are dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self) -> int:
        """Bytes free; nobody knows of a bucket."""
        return 1 << 60 if self.remote else shutil.disk_usage(self.parent).free


def size_of(directory: str) -> int:
    """Bytes in all files below ``directory``."""
    return sum(entry.size for entry in open_backend(directory).list_prefix())


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel and Python."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
