"""The daemon: one loop that answers the processes of its machine, and threads for other machines where somebody asked for them.

A connection is that of one process, or lends one object: what was lent goes back when it ends. No answer waits for anything, so one loop is
enough; a client that does not take its answer is dropped.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ckpt import settings
from ckpt.errors import AccessError, BusyError, CkptError, DeadlineError, FormatError, UsageError, error_to_json
from ckpt.settings import __version__

from . import memory_connection as place
from .file_server import NodeServer
from .memory_connection import PROTOCOL, Message, close_all, receive, send
from .memory_remote import serve_objects
from .memory_store import Lent, MemoryStore

_TICK = 2.0
_PAUSE = 0.01
"""Seconds after a client that could not be accepted: where files have run out, the next try would come at once."""
_PEER = struct.Struct("3i")

log = logging.getLogger("ckpt")

Answer = tuple[Message, list[int]]
"""A message, and the files that go with it."""


@dataclass(eq=False)
class ClientConnection:
    sock: socket.socket
    greeted: bool = False
    lent: Lent | None = None


class MemoryDaemon:
    """Serves ``store`` at the socket of ``folder``, which it listens at already."""

    def __init__(
        self, folder: Path, listening: socket.socket, store: MemoryStore, *, secret: str, idle: float, server: NodeServer | None
    ) -> None:
        """``server``: for other machines, if it listens for them yet."""
        self._folder = folder
        self._listening = listening
        self._store = store
        self._secret = secret
        self._idle = idle
        self._selector = selectors.DefaultSelector()
        self._connections: set[ClientConnection] = set()
        self._server = server
        self._began = self._used = time.monotonic()
        self._ending = False
        self._inode = place.socket_inode(folder)

    def stop(self) -> None:
        """End soon; for handlers of signals."""
        self._ending = True

    def run(self) -> None:
        """Serve until somebody says ``stop``, or nothing happens for long."""
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        ticked, freeing = time.monotonic(), False
        while not self._ending:
            for key, _ in self._selector.select(0 if freeing else _TICK):
                if key.data is None:
                    self._accept()
                else:
                    self._talk(key.data)
            freeing = self._store.free_some()
            if time.monotonic() - ticked > _TICK:
                ticked = time.monotonic()
                self._store.tend()
                if self._connections or self._server:
                    self._used = time.monotonic()
                if not place.is_ours(self._folder, self._inode) and not self._connections:
                    log.warning("the memory daemon ends: its folder is gone, and nobody can reach it")
                    self._ending = True
                elif self._store.is_empty() and time.monotonic() - self._used > self._idle:
                    self._ending = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            self._close(connection)
        if place.is_ours(self._folder, self._inode):
            place.forget_socket(self._folder)
        self._listening.close()
        self._store.close()

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # of that connection alone, which tries again; or too many files, and then it waits at the socket
            time.sleep(_PAUSE)
            return
        with suppress(OSError):
            sock.setblocking(False)
            _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.getuid():
                with suppress(OSError):
                    other = AccessError("this memory is another account's", hint="each account has its own daemon: see CKPT_MEMORY_DIR")
                    send(sock, {"error": error_to_json(other)})
                sock.close()
                return
            connection = ClientConnection(sock)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _talk(self, connection: ClientConnection) -> None:
        try:
            packet = receive(connection.sock)
            if packet is None:
                self._close(connection)
                return
            close_all(packet.files)  # nobody has to send any
            answer, files = self._answer_or_error(connection, packet.message)
            try:
                send(connection.sock, answer, files)
            finally:
                close_all(files)
        except BlockingIOError:
            log.warning("a client that does not take its answer is dropped")
            self._close(connection)
        except (OSError, CkptError) as err:
            log.debug("memory: a client is served no longer: %s", err)
            self._close(connection)

    def _answer_or_error(self, connection: ClientConnection, asked: Message) -> Answer:
        try:
            return self._answer(connection, asked)
        except CkptError as err:
            return {"error": error_to_json(err)}, []
        except (KeyError, TypeError, ValueError) as err:
            return {"error": error_to_json(FormatError(f"a question that cannot be read: {err!r}"))}, []
        except Exception as err:  # whatever one client asks, the objects of the others stay
            log.exception("a question could not be answered")
            return {"error": error_to_json(CkptError(f"the memory daemon could not answer: {err!r}", hint="please report this"))}, []

    def _close(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._used = time.monotonic()
        if connection.lent is not None:
            self._store.take_back(connection.lent)

    def _answer(self, connection: ClientConnection, asked: Message) -> Answer:
        what, store = str(asked.get("ask")), self._store
        match what if connection.greeted or what in ("hello", "status", "stop") else None:
            case "hello":
                connection.greeted = asked.get("protocol") == PROTOCOL
                changes = [os.open(f"/proc/self/fd/{store.changes}", os.O_RDONLY | os.O_CLOEXEC)] if connection.greeted else []
                return {"protocol": PROTOCOL, "release": __version__, "pid": os.getpid(), "id": store.id}, changes
            case "status":
                return self._status(), []
            case "stop":
                self._ending = True
                return {"pid": os.getpid()}, []
            case "lend":
                if connection.lent is not None:
                    raise UsageError("this connection has borrowed memory already", hint="use another connection")
                size = int(asked["size"])
                if size < 0:
                    raise UsageError(f"an object of {size} bytes", hint="a size is not negative")
                lent = connection.lent = store.lend(size)
                return {"capacity": lent.capacity, "fresh": lent.fresh}, [os.dup(lent.file)]
            case "put":
                if connection.lent is None:
                    raise UsageError("this connection has borrowed no memory", hint="please report this")
                known = store.put(connection.lent, str(asked["path"]))
                connection.lent = None
                return {"object": known.row()}, []
            case "give_back":
                if connection.lent is not None:
                    store.take_back(connection.lent)
                    connection.lent = None
                return {}, []
            case "put_bytes":
                expected = None if asked["expected"] is None else b64decode(asked["expected"], validate=True)
                return {"object": store.put_bytes(str(asked["path"]), b64decode(asked["data"], validate=True), expected).row()}, []
            case "get":
                known, file = store.open(str(asked["path"]))
                return {"object": known.row()}, [file]
            case "stat":
                return {"object": store.stat(str(asked["path"])).row()}, []
            case "list":
                return {"objects": [known.row() for known in store.list(str(asked["prefix"]))]}, []
            case "delete":
                return {"deleted": store.delete(str(asked["path"]))}, []
            case "drop":
                return {"bytes": store.drop(str(asked["prefix"]))}, []
            case "address":
                if self._server is None:
                    self._server = serve_objects(store, self._secret)
                return {"addresses": [list(address) for address in self._server.addresses]}, []
        raise FormatError(f"a question that this release does not know: {what!r}", hint="use one release of ckpt on this machine")

    def _status(self) -> Message:
        server = self._server
        return {
            **self._store.usage(),
            "pid": os.getpid(),
            "release": __version__,
            "protocol": PROTOCOL,
            "folder": str(self._folder),
            "seconds": time.monotonic() - self._began,
            "clients": len(self._connections) - 1,
            "addresses": [list(address) for address in server.addresses] if server is not None else [],
            "peers": len(server) if server is not None else 0,
        }


# ``python -m ckpt.nodes.memory_daemon FOLDER``: becomes the daemon of a folder. ``--background`` returns when one listens.
#
#     client ── starts ──► this ── forks ──► a session of its own ── forks ──► the daemon
#                            │ ◄───────────────── "it listens" ───────────────────┘
#                            └─ ends
#
# So the daemon is no child of its first client, and in none of its process groups: killing those leaves it alone. Of several that start at
# once, the one that locks the folder's file goes on.

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
    place.make_private(folder)
    ours, its = os.pipe()
    if os.fork():
        os.close(its)
        if os.read(ours, 1) != _LISTENS and not _listens(folder):
            raise DeadlineError("no memory daemon could be started", where=str(folder / place.LOG), hint="look at that file")
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ours)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    out = os.open(folder / place.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
        place.connect_socket(folder, 1.0).close()
    except OSError:
        return False
    return True


def serve(folder: Path, budget: int | None, listens: Callable[[], object] = lambda: None) -> None:
    """Be the daemon, until it ends; ``listens`` is called when clients can connect."""
    place.make_private(folder)
    lock = place.open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(lock)
        raise BusyError("a memory daemon runs for this folder already", where=str(folder), hint="`ckpt memory status` shows it") from err
    given = place.given_budget() if budget is None else budget
    place.secret_of(folder, make=True)
    store = MemoryStore(default_budget() if given is None else given)
    port, secret = settings.memory_port(), place.secret_of(folder)
    server = serve_objects(store, secret, port) if port else None  # from the start on only if CKPT_MEMORY_PORT says where
    listening = place.listen_socket(folder)
    listens()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft != hard else (soft, hard))
    daemon = MemoryDaemon(folder, listening, store, secret=secret, idle=settings.memory_idle(), server=server)

    def stop(signum: int, frame: FrameType | None) -> None:
        daemon.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    daemon.run()


if __name__ == "__main__":
    main()
