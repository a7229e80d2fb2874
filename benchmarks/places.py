"""Where a benchmark runs: a directory of its own on each file system, removed afterwards, and the machine. Linux."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(eq=False)
class Place:
    """A temporary directory below ``parent``; a context manager."""

    parent: str
    path: str = ""

    @property
    def filesystem(self) -> str:
        """Type of the file system, such as ``tmpfs`` or ``ext4``."""
        return filesystem_of(self.parent)

    @property
    def label(self) -> str:
        return f"{self.parent} ({self.filesystem})"

    def __enter__(self) -> Place:
        self.path = tempfile.mkdtemp(prefix="ckpt-bench-", dir=self.parent)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def fresh(self, name: str) -> str:
        """A path in it where nothing is."""
        path = os.path.join(self.path, name.replace(" ", "-"))
        shutil.rmtree(path, ignore_errors=True)
        return path

    def cool(self, directory: str) -> None:
        """Drop the files below ``directory`` from the page cache. In tmpfs, where the page cache is the storage, nothing happens."""
        for folder, _, names in os.walk(directory):
            for name in names:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                try:
                    os.fsync(fd)  # only clean pages are dropped
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)

    def free(self) -> int:
        """Bytes free."""
        return shutil.disk_usage(self.parent).free


def filesystem_of(path: str) -> str:
    """The type of the file system that has ``path``, by the mount point that is nearest above it."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    with open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, point, fstype, *_ = line.split(" ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, fstype
    return kind


def size_of(directory: str) -> int:
    """Bytes in all files below ``directory``."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel and Python."""
    return {
        "processor": _field_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _field_of(path: str, name: str) -> str | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        found = (line.partition(":")[2].strip() for line in file if line.partition(":")[0].strip() == name)
        return next(found, None)
