"""The machine that a benchmark ran on, in words and numbers. Linux."""

from __future__ import annotations

import os
import platform
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores, memory in bytes, kernel and Python."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _field(path: str, name: str) -> str | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        found = (line.partition(":")[2].strip() for line in file if line.partition(":")[0].strip() == name)
        return next(found, None)
