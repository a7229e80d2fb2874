"""A connection to the memory daemon of this machine, which is started if none runs. No torch."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from weakref import finalize

from ckpt import settings
from ckpt.concurrency.patience import patience
from ckpt.errors import AccessError, CkptError, FormatError, StorageError, error_from_json
from ckpt.transport.endpoints import EXHAUSTED, exhausted

from . import place
from .messages import PROTOCOL, Message, Packet, close_all, receive, send

TIMEOUT = 60.0
"""Seconds without an answer after which the daemon counts as dead; fewer in a call whose own deadline is shorter."""
_START_SECONDS = 40.0


class DaemonConnection:
    """A connection to the daemon. Questions are asked one at a time."""

    def __init__(self, sock: socket.socket, folder: Path, seconds: float) -> None:
        self._sock = sock
        self._folder = folder
        self._seconds = seconds
        self._close = finalize(self, sock.close)
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
        return _checked(packet)

    def is_open(self) -> bool:
        if self._sock.fileno() < 0:
            return False
        readable = select.poll()  # a socket with a timeout waits in recv, whatever its flags
        readable.register(self._sock, select.POLLIN)
        return not readable.poll(0)  # nothing is asked, so only the end can come

    def close(self) -> None:
        self._close()


def _checked(packet: Packet) -> tuple[Message, Sequence[int]]:
    if "error" in packet.message:
        close_all(packet.files)
        raise error_from_json(packet.message["error"])
    return packet.message, packet.files


def try_to_connect(folder: Path, seconds: float = TIMEOUT) -> DaemonConnection | None:
    """None if nobody listens. ``seconds``: within which it must answer first."""
    try:
        place.check_private(folder)
        sock = place.connect_socket(folder, min(seconds, patience.get()))
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
    for setting in (place.given_budget, settings.memory_port, settings.memory_idle):
        setting()
    place.make_private(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.memory.running", str(folder), "--background"],
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
    return f"look at {folder / place.LOG}, or start it in the foreground: `ckpt memory serve`"


def gone(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the memory daemon is gone: {why}",
        where=str(folder),
        hint="its memory is lost with it, unless it was replaced; save again, or load from storage",
    )
