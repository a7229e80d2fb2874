"""How many bytes a daemon may hold, if nobody says: half of what the machine, or the container, has left."""

from __future__ import annotations

from pathlib import Path

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


def default_budget() -> int:
    """Half of the memory that is available now, to the machine and to the control groups of this process."""
    return min([_available(), *_left_in_groups()]) // 2


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 1 << 62


def _left_in_groups() -> list[int]:
    """What each limited control group of this process, and each above it, has left."""
    left: list[int] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = _V2, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = _V1, "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != base and base not in folder.parents:
                break
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < 1 << 60:
                left.append(max(0, most - used))
    return left


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, not for us to read, or "max"
        return None
