"""``python -m ckpt.nodes.memory.running FOLDER``: becomes the daemon of a folder. ``--background`` returns when one listens.

    client ── starts ──► this ── forks ──► a session of its own ── forks ──► the daemon
                           │ ◄───────────────── "it listens" ───────────────────┘
                           └─ ends

So the daemon is no child of its first client, and in none of its process groups: killing those leaves it alone. Of several that start at
once, the one that locks the folder's file goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ckpt import settings
from ckpt.errors import BusyError, CkptError, DeadlineError

from . import connection
from .daemon import MemoryDaemon
from .remote import MemoryServer
from .store import MemoryStore

# How many bytes a daemon may hold, if nobody says: half of what the machine, or the container, has left.

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


START_SECONDS = 30.0

log = logging.getLogger("ckpt")
_LISTENS = b"1"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="ckpt-memory")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--budget", type=int)
    given = parser.parse_args()
    try:
        if given.background:
            start_in_background(given.folder, given.budget)
        else:
            serve(given.folder, given.budget)
    except CkptError as err:
        sys.exit(f"{type(err).__name__}: {err}")


def start_in_background(folder: Path, budget: int | None) -> None:
    """Return when a daemon listens; it goes on without this process."""
    connection.make_private(folder)
    ours, its = os.pipe()
    if os.fork():
        os.close(its)
        if os.read(ours, 1) != _LISTENS and not _listens(folder):
            raise DeadlineError("no memory daemon could be started", where=str(folder / connection.LOG), hint="look at that file")
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ours)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    out = os.open(folder / connection.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    for target, file in ((0, nothing), (1, out), (2, out)):
        os.dup2(file, target)

    def listens() -> None:
        os.write(its, _LISTENS)
        os.close(its)

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and not _listens(folder):  # else another one was first
        try:
            serve(folder, budget, listens)
        except BusyError:  # which is about to listen, or to end
            time.sleep(0.02)
        except CkptError as err:
            sys.exit(f"{type(err).__name__}: {err}")
        else:
            return


def _listens(folder: Path) -> bool:
    try:
        connection.connect_socket(folder, 1.0).close()
    except OSError:
        return False
    return True


def serve(folder: Path, budget: int | None, listens: Callable[[], object] = lambda: None) -> None:
    """Be the daemon, until it ends; ``listens`` is called when clients can connect."""
    connection.make_private(folder)
    lock = connection.open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(lock)
        raise BusyError("a memory daemon runs for this folder already", where=str(folder), hint="`ckpt memory status` shows it") from err
    given = connection.given_budget() if budget is None else budget
    connection.secret_of(folder, make=True)
    store = MemoryStore(default_budget() if given is None else given)
    server = _server(folder, store)
    listening = connection.listen_socket(folder)
    listens()
    _run(folder, listening, store, server)


def _server(folder: Path, store: MemoryStore) -> MemoryServer | None:
    """What listens for other machines from the start on, if ``CKPT_MEMORY_PORT`` says where."""
    port = settings.memory_port()
    return MemoryServer(store, connection.secret_of(folder), port) if port else None


def _run(folder: Path, listening: socket.socket, store: MemoryStore, server: MemoryServer | None) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft != hard else (soft, hard))
    daemon = MemoryDaemon(folder, listening, store, secret=connection.secret_of(folder), idle=settings.memory_idle(), server=server)

    def stop(signum: int, frame: FrameType | None) -> None:
        daemon.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    daemon.run()


if __name__ == "__main__":
    main()
