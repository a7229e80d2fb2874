"""What the ranks of ``test_faults.py`` do: a source publishes a second version, an engine of two ranks and one of one rank take it, and
something happens to one process or to some byte. Each rank says how its call ended, when, and which version its tensors are."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, TornError
from ckpt.live import Sink, Source
from ckpt.live.wire import Channel

TIMEOUT = 4.0
"""Of sources and sinks: seconds without a sign of life."""
PATIENCE = 60.0
COUNT, ROWS, COLUMNS = 12, 512, 512
SECRET = "of these tests"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``victim``: job ("source", "pair" or "single") and rank. ``how``: "kill" or "stop", after so many ``seconds`` of the second push; or
    "segment", "wire": a byte that flips there. ``copies``: each rank of the source has everything, else half of it. ``shared``: sinks
    may read the memory of processes of their machine."""

    victim: tuple[str, int]
    how: str = "kill"
    seconds: float = 0.0
    copies: bool = False
    shared: bool = True
    switch: str = "double"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended: ``content`` is the version that each of its tensors is, 0 for none and -1 for a mix in it."""

    at: float
    content: tuple[int, ...] = ()
    version: int | None = None
    torn: bool = False
    error: CkptError | None = None

    @property
    def whole(self) -> int | None:
        """The version that all tensors are; None if they are not of one."""
        return self.content[0] if len(set(self.content)) == 1 and self.content[0] > 0 else None


def values(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a version, whole."""
    pattern = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    for number in range(COUNT):
        yield f"w{number:02}", pattern + 1000 * version + number


def source(folder: str, fault: Fault) -> Ending:
    rank = dist.get_rank()
    layout = None if fault.copies else ckpt.Layout({"dp": 2}, [("*", ckpt.Shard(0, "dp"))])
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    state = {name: (t if fault.copies else t[half]).clone() for name, t in values(1)}
    with Source("tcp://127.0.0.1:0/faults", state, layout=layout, secret=SECRET, timeout=TIMEOUT) as it:
        if rank == 0:
            _leave(folder, "address", it.address)
        it.publish(1, capture="eager").result()
        for name in ("pair-0", "pair-1", "single-0"):
            _await(folder, name)
        for name, tensor in values(2):
            state[name].copy_(tensor if fault.copies else tensor[half])
        if rank == 0:
            _leave(folder, "go")
        _arm(folder, fault, "source")
        try:
            it.publish(2, capture="eager").result()
            if fault.how == "segment" and fault.victim == ("source", rank):
                _flip_in_memory(2)
            _leave(folder, f"published-{rank}")
            _await_ends(folder, fault)
        except CkptError as err:
            return Ending(at=time.monotonic(), error=err)
    return Ending(at=time.monotonic())


def sink(folder: str, name: str, fault: Fault) -> Ending:
    """Take the first version, then the second while the fault happens."""
    os.environ["CKPT_LIVE_LOCAL"] = "on" if fault.shared else "off"
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = slice(rank * COLUMNS // count, (rank + 1) * COLUMNS // count)
    state = {name: torch.zeros(ROWS, COLUMNS // count) for name, _ in values(0)}
    layout = ckpt.Layout({"tp": count}, [("*", ckpt.Shard(1, "tp"))])
    switch: Any = fault.switch
    with Sink(_await(folder, "address"), state, layout=layout, switch=switch, secret=SECRET, timeout=TIMEOUT) as it:
        first = it.take(timeout=PATIENCE)
        _leave(folder, f"{name}-{rank}")
        _await(folder, "go")
        if fault.how == "segment":  # after the source has sealed it, before anybody maps it
            _await(folder, f"published-{fault.victim[1]}")
        _arm(folder, fault, name)
        error = None
        with _flipping(fault, name):
            try:
                it.take(newer_than=first, timeout=2 * TIMEOUT)
            except CkptError as err:
                error = err
        at = time.monotonic()
        content = tuple(_version_of(t, n, part) for n, t in state.items())
        try:
            version, torn = it.version, False
        except TornError:
            version, torn = None, True
        _leave(folder, f"end-{name}-{rank}")
        return Ending(at=at, content=content, version=None if version is None else version.step, torn=torn, error=error)


def _version_of(tensor: torch.Tensor, name: str, part: slice) -> int:
    """The version that all elements are; -1: they are of several, or of none."""
    for version in (1, 2):
        if torch.equal(tensor, dict(values(version))[name][:, part]):
            return version
    return 0 if not tensor.any() else -1


# ------------------------------------------------------------------------------------------------------------- faults


def _arm(folder: str, fault: Fault, job: str) -> None:
    """Have the kernel kill or stop this process in a moment, if it is the victim."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if fault.victim != (job, rank) or fault.how not in ("kill", "stop"):
        return
    _leave(folder, "armed", f"{time.monotonic() + fault.seconds}")
    if fault.how == "kill":
        signal.setitimer(signal.ITIMER_REAL, max(fault.seconds, 1e-6))  # nobody handles SIGALRM: the process ends wherever it is
        return
    me = os.getpid()
    if os.fork() == 0:  # stops its parent, and ends it when the others have had their time
        time.sleep(fault.seconds)
        os.kill(me, signal.SIGSTOP)
        time.sleep(3 * TIMEOUT)
        os.kill(me, signal.SIGKILL)
        os._exit(0)


@contextmanager
def _flipping(fault: Fault, job: str) -> Iterator[None]:
    """Flip one bit of a piece on the way into the victim, before it looks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if fault.victim != (job, rank) or fault.how != "wire":
        yield
        return
    inner, flipped = Channel.receive_into, []

    def receive_into(channel: Channel, view: memoryview) -> None:
        inner(channel, view)
        if len(view) > 100_000 and not flipped:
            view[len(view) // 2] ^= 4
            flipped.append(view.nbytes)

    Channel.receive_into = receive_into  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.receive_into = inner  # type: ignore[method-assign]


def _flip_in_memory(version: int) -> None:
    """Flip a bit of the first tensor, in its lower half, in the memory that this process has published: find it by its bytes."""
    wanted = (np.arange(64, dtype=np.float32) + ROWS * 3 // 4 * COLUMNS + 1000 * version).tobytes()
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        at = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*memfd:", line)
        if at is None:
            continue
        start, end = int(at[1], 16), int(at[2], 16)
        data = (ctypes.c_ubyte * (end - start)).from_address(start)
        place = bytes(data).find(wanted)
        if place < 0:
            continue
        page = (start + place) // mmap.PAGESIZE * mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        data[place + 5] ^= 4
        return
    raise AssertionError("the version is in no memory of this process")


# ------------------------------------------------------------------------------------------------- what jobs tell each other


def _leave(folder: str, name: str, text: str = "") -> None:
    part = Path(folder, f".{name}-{os.getpid()}")
    part.write_text(text)
    part.rename(Path(folder, name))


def _await(folder: str, name: str, seconds: float = PATIENCE) -> str:
    end = time.monotonic() + seconds
    while not (path := Path(folder, name)).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{name} does not come")
        time.sleep(0.005)
    return path.read_text()


def _await_ends(folder: str, fault: Fault) -> None:
    """Stay until all sinks that can have ended their take."""
    for name in ("pair-0", "pair-1", "single-0"):
        if name != f"{fault.victim[0]}-{fault.victim[1]}":
            _await(folder, f"end-{name}")
