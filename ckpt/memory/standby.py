"""Another program goes on in the daemon's place, and nothing is lost if it cannot.

    this program                        the new one, standing by               the new one, in this process
      │ starts, with all descriptors ────► │ loads; takes the objects over
      │ ◄───────────────────────── ready ──│
      │ exec ──────────────────────────────┼────────────────────────────────────► │ loads; takes the objects over
      │                                    │ ◄───────────────────────── taken ────│
      │                                    └─ ends

The daemon stays the same process, since a container, or a step of Slurm, ends with it. A program that does not come to *ready* changes
nothing: this one goes on. If the process ends before *taken*, the one that stands by sees its pipe closed, and serves.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import StorageError
from ckpt.text.json_reader import parse_json

from . import place
from .messages import Message, close_all
from .store import MemoryStore

TAKEN_OVER, STAND_BY, TAKEN = "--taken-over", "--stand-by", "--taken"
_READY_SECONDS = 30.0
_END_SECONDS = 5.0
_YES = b"1"


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What another program goes on with. ``files``: the descriptors that ``store`` names."""

    socket: int
    lock: int
    store: Message
    files: Sequence[int]

    def write(self) -> int:
        """A descriptor of a file that says so; it survives ``exec``."""
        state = os.memfd_create("ckpt-state")
        os.set_inheritable(state, True)
        os.pwrite(state, json.dumps({"socket": self.socket, "store": self.store, "lock": self.lock}).encode(), 0)
        return state

    @staticmethod
    def read(state: int) -> HandedOver:
        """In the new program: what the file says; none of the descriptors goes on to a third one."""
        with os.fdopen(state, "rb") as file:
            given = parse_json(file.read())
        files = MemoryStore.files_of(given["store"])
        for one in (given["socket"], given["lock"], *files):
            os.set_inheritable(one, False)
        return HandedOver(socket=given["socket"], lock=given["lock"], store=given["store"], files=files)


class Standby:
    """The new program, in a process of its own, which has all that this one has. ``taken``: the pipe that keeps it waiting."""

    def __init__(self, folder: Path, handed_over: HandedOver) -> None:
        """Start it, and wait until it could serve.

        Raises:
            StorageError: it could not; nothing has changed.
        """
        ready, its_ready = os.pipe()
        its_taken, self.taken = os.pipe()
        state = handed_over.write()
        passed = [handed_over.socket, handed_over.lock, *handed_over.files, state, its_ready, its_taken]
        arguments = [str(folder), TAKEN_OVER, str(state), STAND_BY, f"{its_ready},{its_taken}"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckpt.memory.running", *arguments], pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as err:
            close_all([ready, self.taken])
            raise _not_started(folder, str(err)) from err
        finally:  # so that the pipe ends with the process
            close_all([state, its_ready, its_taken])
        answers = select.poll()  # select() takes no descriptor above 1,023, and each object has two
        answers.register(ready, select.POLLIN)
        readable = answers.poll(1000 * _READY_SECONDS)
        is_ready = bool(readable) and os.read(ready, 1) == _YES
        os.close(ready)
        if not is_ready:
            os.close(self.taken)
            self._process.kill()
            self._process.wait()
            raise _not_started(folder, "the new program does not start" if readable else f"it was not ready after {_READY_SECONDS:g} s")

    def replace_this_program(self, folder: Path, handed_over: HandedOver) -> None:
        """Become the new program; does not return."""
        state = handed_over.write()
        for file in (handed_over.socket, handed_over.lock, *handed_over.files, self.taken):
            os.set_inheritable(file, True)
        arguments = [str(folder), TAKEN_OVER, str(state), TAKEN, f"{self.taken},{self._process.pid}"]
        os.execv(sys.executable, [sys.executable, "-m", "ckpt.memory.running", *arguments])


def tell_taken(given: str) -> None:
    """In the new program, which has taken everything: the other process need not stand by any more."""
    pipe, pid = map(int, given.split(","))
    with suppress(OSError):
        os.write(pipe, _YES)
    os.close(pipe)
    end = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.01)


def stand_by(given: str) -> bool:
    """In the new program, which could serve: wait. Whether this process is to serve, since the other one has ended."""
    ready, taken = map(int, given.split(","))
    os.write(ready, _YES)
    os.close(ready)
    serves = os.read(taken, 1) != _YES
    os.close(taken)
    return serves


def _not_started(folder: Path, why: str) -> StorageError:
    return StorageError(
        f"the daemon was not replaced: {why}",
        where=str(folder),
        hint=f"the daemon that runs goes on with all it holds; look at {folder / place.LOG}, and at the installation",
    )
