"""Messages between the daemon and the processes of its machine: JSON, and open files, in one packet each; what is said of an object;
the folder that a daemon is found by, and the connection to it, which starts one if none runs. No torch.

A packet is whole or not there, so nothing has to be put together. JSON of more than ``_INLINE`` bytes goes in an anonymous file of its own.
Nothing that comes is unpickled, and every length is compared with a limit before memory is asked for.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt import settings
from ckpt.concurrency import patience, when_dropped
from ckpt.errors import AccessError, CkptError, FormatError, StorageError, UsageError, error_from_json
from ckpt.net.endpoints import EXHAUSTED, close_when_forked, exhausted
from ckpt.text import parse_object
from ckpt.units import parse_size

PROTOCOL = 1
"""Version of the messages. ``hello``, ``status`` and ``stop`` stay what they are in all of them."""
_INLINE = 60 * settings.KIB
_MOST = 256 * settings.MIB
_MOST_FILES = 4
_HERE, _IN_FILE = b"j", b"f"

Message = dict[str, Any]


@dataclass(frozen=True)
class Packet:
    """A message, and the files that came with it; whoever receives it closes them."""

    message: Message
    files: Sequence[int]


def send(sock: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and ``files``, which stay open here."""
    text = json.dumps(message).encode()
    if len(text) <= _INLINE:
        socket.send_fds(sock, [_HERE, text], list(files))
        return
    carrier = os.memfd_create("ckpt-message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(carrier), "wb") as file:
            file.write(text)
        socket.send_fds(sock, [_IN_FILE], [carrier, *files])
    finally:
        os.close(carrier)


def receive(sock: socket.socket) -> Packet | None:
    """The next message; None if the other end has closed."""
    data, files, flags, _ = socket.recv_fds(sock, _INLINE + 1, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            return None
        if flags & socket.MSG_TRUNC:
            raise FormatError("a message that is too long")
        if flags & socket.MSG_CTRUNC:  # the kernel gives fewer files than were sent where this process can open no more
            raise exhausted("no descriptor for a file of the memory daemon can be made", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        text = data[1:]
        if data[:1] == _IN_FILE and files:
            carrier, *files = files
            with os.fdopen(carrier, "rb"):
                if os.fstat(carrier).st_size > _MOST:
                    raise FormatError("a message that is too long")
                text = os.pread(carrier, _MOST, 0)
        try:
            message = parse_object(text)
        except ValueError as err:
            raise FormatError(f"a message that cannot be read: {err}") from err
        passed, files = files, []
        return Packet(message, passed)
    finally:
        close_all(files)


def close_all(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


# What the daemon says of an object, and where its files are.


@dataclass(frozen=True, slots=True, order=True)
class MemoryObject:
    """An object in the memory of a machine."""

    path: str
    size: int
    """Bytes."""
    version: str
    """Another one for each object that was ever put."""
    modified: float
    """When it was put: seconds since 1970 by the machine's clock."""

    def row(self) -> list[Any]:
        # The third was a digest. It keeps its place, so that daemons and clients that still have one understand these rows.
        return [self.path, self.size, None, self.version, self.modified]

    @classmethod
    def of(cls, row: Any) -> MemoryObject:
        path, size, _, version, modified = row
        return cls(str(path), int(size), str(version), float(modified))


class OpenObject:
    """An object of this machine's memory, to be read for as long as this lives: its memory is not used again before."""

    def __init__(self, known: MemoryObject, file: int) -> None:
        self.known = known
        self.file = file
        self.close = when_dropped(self, os.close, file)


# The folder of a daemon: its socket, its lock and its secret, for this account alone.

_SOCKET, _LOCK, _SECRET = "socket", "lock", "secret"
LOG = "log"


def folder() -> Path:
    """Where this process looks for its daemon: ``CKPT_MEMORY_DIR``, or a folder of the account."""
    given = settings.variable("CKPT_MEMORY_DIR") or None
    if given is not None:
        return Path(given).absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "ckpt-memory" if runtime else Path(tempfile.gettempdir()) / f"ckpt-memory-{os.getuid()}"


def given_budget() -> int | None:
    """The bytes of ``CKPT_MEMORY_BUDGET``, if it is set."""
    text = settings.variable("CKPT_MEMORY_BUDGET") or None
    try:
        return None if text is None else parse_size(text)
    except UsageError as err:
        raise UsageError(err.message, where="CKPT_MEMORY_BUDGET") from err


def make_private(path: Path) -> None:
    """Make the folder, unless it is there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise AccessError(f"no folder for the memory daemon can be made: {err}", where=str(path), hint="set CKPT_MEMORY_DIR") from err
    check_private(path)


def check_private(path: Path, hint: str | None = None) -> None:
    seen = path.lstat()
    if hint is None:
        own = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid()
        hint = f"{'run `chmod 700` on it' if own else 'remove it'}, or choose another one, and start again"
    if stat.S_ISLNK(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise AccessError(
            f"others than this account can reach it (owner {seen.st_uid}, mode {stat.S_IMODE(seen.st_mode):o})", where=str(path), hint=hint
        )


def write_private(path: Path, text: str) -> None:
    """Make or replace a file that this account alone can read; others see all of it, or what was there before."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    beside.replace(path)


def connect_socket(path: Path, timeout: float) -> socket.socket:
    """A connection to the daemon of a folder."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    close_when_forked(sock)  # else what a process has borrowed goes back when its last child has ended, not with it
    sock.settimeout(timeout)
    try:
        with _short_name(path) as short:
            sock.connect(f"{short}/{_SOCKET}")
    except BaseException:
        sock.close()
        raise
    return sock


def listen_socket(path: Path) -> socket.socket:
    """Listen as the daemon of a folder, whose lock this process has."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short_name(path) as short:
        beside = f"{_SOCKET}.{os.getpid()}"
        sock.bind(f"{short}/{beside}")
        os.chmod(path / beside, 0o600)
        sock.listen(256)
        os.replace(path / beside, path / _SOCKET)  # of a daemon that died there may be a socket that nobody listens at
    return sock


def is_ours(path: Path, inode: int | None) -> bool:
    """Whether the socket of the folder is still the one that had this inode."""
    return inode is not None and socket_inode(path) == inode


def socket_inode(path: Path) -> int | None:
    try:
        return os.stat(path / _SOCKET).st_ino
    except OSError:
        return None


def forget_socket(path: Path) -> None:
    """The daemon ends."""
    (path / _SOCKET).unlink(missing_ok=True)


def open_lock(path: Path) -> int:
    """A descriptor of the file that the one daemon of a folder has locked."""
    return os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def secret_of(path: Path, *, make: bool = False) -> str:
    """What peers of the daemon prove to each other that they know: ``CKPT_MEMORY_SECRET``, or what the folder's file has."""
    given = settings.variable("CKPT_MEMORY_SECRET") or None
    if given is not None:
        return given
    file = path / _SECRET
    if make and not file.exists():
        write_private(file, secrets.token_hex(32))
    try:
        check_private(file)
        return file.read_text()
    except FileNotFoundError as err:
        raise AccessError(
            "no secret is known for the memory of that machine", where=str(file), hint="set CKPT_MEMORY_SECRET, the same on all machines"
        ) from err


@contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A short name of a folder: the name of a socket has room for about a hundred characters."""
    file = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


TIMEOUT = 60.0
"""Seconds without an answer after which the daemon counts as dead; fewer in a call whose own deadline is shorter."""
_START_SECONDS = 40.0


class DaemonConnection:
    """A connection to the daemon. Questions are asked one at a time."""

    def __init__(self, sock: socket.socket, folder: Path, seconds: float) -> None:
        self._sock = sock
        self._folder = folder
        self._seconds = seconds
        self._close = when_dropped(self, sock.close)
        answer, files = self.ask({"ask": "hello", "protocol": PROTOCOL})
        self._seconds = TIMEOUT
        if answer.get("protocol") != PROTOCOL or not files:
            close_all(files)
            raise FormatError(
                f"the memory daemon is of release {answer.get('release')} and speaks version {answer.get('protocol')} of the protocol, "
                f"this release {PROTOCOL}",
                where=str(folder),
                hint="end it with `ckpt memory stop --all`, which loses what it holds; or set CKPT_MEMORY_DIR to have another one",
            )
        self._id = str(answer["id"])
        with os.fdopen(files[0], "rb") as file:
            self._changes = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def changes(self) -> tuple[str, int]:
        return self._id, struct.unpack("<Q", self._changes[:8])[0]

    def ask(self, question: Message) -> tuple[Message, Sequence[int]]:
        seconds = min(TIMEOUT, self._seconds, patience.get())
        try:
            self._sock.settimeout(seconds)
            send(self._sock, question)
            packet = receive(self._sock)
        except TimeoutError as err:
            self.close()
            raise StorageError(
                f"the memory daemon has not answered for {seconds:g} s",
                where=str(self._folder),
                hint="look whether it is stopped (`ps`); end it, and start again",
            ) from err
        except OSError as err:
            self.close()
            raise gone(self._folder, str(err)) from err
        if packet is None:
            self.close()
            raise gone(self._folder, "it has closed the connection")
        if "error" in packet.message:
            close_all(packet.files)
            raise error_from_json(packet.message["error"])
        return packet.message, packet.files

    def is_open(self) -> bool:
        if self._sock.fileno() < 0:
            return False
        readable = select.poll()  # a socket with a timeout waits in recv, whatever its flags
        readable.register(self._sock, select.POLLIN)
        return not readable.poll(0)  # nothing is asked, so only the end can come

    def close(self) -> None:
        self._close()


def try_to_connect(folder: Path, seconds: float = TIMEOUT) -> DaemonConnection | None:
    """None if nobody listens. ``seconds``: within which it must answer first."""
    try:
        check_private(folder)
        sock = connect_socket(folder, min(seconds, patience.get()))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except CkptError:
        raise
    except PermissionError as err:
        raise AccessError(f"this memory is another account's: {err}", where=str(folder), hint="see CKPT_MEMORY_DIR") from err
    except OSError as err:
        if err.errno in EXHAUSTED:
            raise exhausted("no connection to the memory daemon can be made", err) from err
        raise gone(folder, str(err)) from err
    try:
        return DaemonConnection(sock, folder, seconds)
    except BaseException:
        sock.close()
        raise


def start_daemon(folder: Path) -> None:
    """Start a daemon, which is no child of this process."""
    for setting in (given_budget, settings.memory_port, settings.memory_idle):
        setting()
    make_private(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.nodes.memory_daemon", str(folder), "--background"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise StorageError(f"no memory daemon could be started: {err}", where=str(folder), hint=_look_at_log(folder)) from err
    if done.returncode:
        raise StorageError(
            f"no memory daemon could be started: {done.stderr.decode(errors='replace').strip()}",
            where=str(folder),
            hint=_look_at_log(folder),
        )


def _look_at_log(folder: Path) -> str:
    return f"look at {folder / LOG}, or start it in the foreground: `ckpt memory serve`"


def gone(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the memory daemon is gone: {why}",
        where=str(folder),
        hint="its memory is lost with it, unless it was replaced; save again, or load from storage",
    )
