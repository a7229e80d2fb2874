"""What the ranks of ``test_faults.py`` do: a source publishes a second version, an engine of two ranks and one of one rank take it, and
something happens to one process or to some byte. Each rank says how its call ended, when, and which version its tensors are. With relays
there is a twin of the small engine, and each of the two may take from the other."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import CkptError, TornError
from ckpt.live import Publication, Sink, Source
from ckpt.net.wire import Channel

TIMEOUT = 4.0
"""Of sources and sinks: seconds without a sign of life."""
PATIENCE = 60.0
COUNT, ROWS, COLUMNS = 12, 512, 512
SECRET = "of these tests"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``victim``: job ("source", "pair", "single" or "twin") and rank. ``how``: "kill" or "stop", after so many ``seconds`` of the second
    push, or where it comes to ``phase``; or "segment", "wire": a byte that flips there. Who is stopped goes on after ``resume`` seconds,
    or never. ``copies``: each rank of the source has everything, else half of it. ``shared``: sinks may read the memory of processes of
    their machine. ``relay``: sinks pass on what they take. ``sparse``: few elements change."""

    victim: tuple[str, int]
    how: str = "kill"
    seconds: float = 0.0
    copies: bool = False
    shared: bool = True
    switch: str = "double"
    phase: str = ""
    resume: float = 0.0
    relay: bool = False
    delta: bool = False
    lazy: bool = False
    sparse: bool = False

    @property
    def jobs(self) -> dict[str, int]:
        """How many ranks each job has."""
        return {"source": 2, "pair": 2, "single": 1, **({"twin": 1} if self.relay else {})}

    @property
    def sinks(self) -> list[str]:
        """All ranks that take, as jobs and ranks."""
        return [f"{job}-{rank}" for job, size in self.jobs.items() if job != "source" for rank in range(size)]


PHASES = {
    "capture": ("ckpt.live.source", "capture_image"),
    "seal": ("ckpt.live.source", "seal_image"),
    "complete": ("ckpt.live.registry:VersionLeader", "complete"),
    "answer": ("ckpt.live.registry:VersionRegistry", "_newest"),
    "digests": ("ckpt.live.pieces:BoxDigests", "of_piece"),
    "serve": ("ckpt.live.server:PieceServer", "_answer"),
    "find": ("ckpt.live.sink:Sink", "_find"),
    "match": ("ckpt.live.sink", "match_take"),
    "plan": ("ckpt.live.sink", "plan_take"),
    "stage": ("ckpt.live.sink", "stage_take"),
    "relay": ("ckpt.live.relay:RelayedVersion", "add"),
    "relayed": ("ckpt.live.relay:RelayedVersion", "views"),
    "switch": ("ckpt.live.sink", "switch_take"),
    "place": ("ckpt.live.filling:Filling", "place"),
}
"""Name of a phase → module, or module and class, and the function with which it begins."""
SOURCE_PHASES = ("capture", "seal", "complete", "answer", "digests", "serve")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended: ``content`` is the version that each of its tensors is, 0 for none and -1 for a mix in it."""

    at: float
    content: tuple[int, ...] = ()
    version: int | None = None
    torn: bool = False
    error: CkptError | None = None
    leaked: tuple[str, ...] = ()
    """Shared memory that this process has still open or mapped when all is closed."""

    @property
    def whole(self) -> int | None:
        """The version that all tensors are; None if they are not of one."""
        return self.content[0] if len(set(self.content)) == 1 and self.content[0] > 0 else None


def values(version: int, sparse: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a version, whole; ``sparse``: versions differ in few elements of each column and row."""
    pattern = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    for number in range(COUNT):
        if not sparse:
            yield f"w{number:02}", pattern + 1000 * version + number
            continue
        whole = pattern + number
        whole.view(-1)[:: COLUMNS // 16 + 1] += 1000 * version
        yield f"w{number:02}", whole


def source(folder: str, fault: Fault) -> Ending:
    gc.freeze()  # the search at the end looks at what this run has made, and not at all of torch
    rank = dist.get_rank()
    layout = None if fault.copies else ckpt.Layout({"dp": 2}, [("*", ckpt.Shard(0, "dp"))])
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    state = {name: (t if fault.copies else t[half]).clone() for name, t in values(1, fault.sparse)}
    with Source("tcp://127.0.0.1:0/faults", state, layout=layout, delta=fault.delta, secret=SECRET, job=ckpt.Job(timeout=TIMEOUT)) as it:
        if rank == 0:
            _leave(folder, "address", it.address)
        it.publish(1, capture="eager").result()
        for name in fault.sinks:
            _await(folder, name)
        for name, tensor in values(2, fault.sparse):
            state[name].copy_(tensor if fault.copies else tensor[half])
        if rank == 0:
            _leave(folder, "go")
        _arm(folder, fault, "source")
        error: CkptError | None = None
        publication: Publication | None = None
        try:
            publication = it.publish(2, capture="lazy" if fault.lazy else "eager")
            publication.fence()
            for tensor in state.values():  # as an optimizer's step does
                tensor.fill_(-1)
            publication.result()
            if fault.how == "segment" and fault.victim == ("source", rank):
                _flip_in_memory(2)
            _leave(folder, f"published-{rank}")
            _await_ends(folder, fault)
        except CkptError as err:
            error = _alone(err)
        at = time.monotonic()
    del it, publication
    gc.collect()
    return Ending(at=at, error=error, leaked=_shared_memory())


def sink(folder: str, name: str, fault: Fault) -> Ending:
    """Take the first version, then the second while the fault happens."""
    gc.freeze()
    os.environ["CKPT_LIVE_LOCAL"] = "on" if fault.shared else "off"
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = slice(rank * COLUMNS // count, (rank + 1) * COLUMNS // count)
    state = {name: torch.zeros(ROWS, COLUMNS // count) for name, _ in values(0, fault.sparse)}
    layout = ckpt.Layout({"tp": count}, [("*", ckpt.Shard(1, "tp"))])
    switch: Any = fault.switch
    relay = fault.relay and switch == "double"
    with Sink(
        _await(folder, "address"), state, layout=layout, switch=switch, relay=relay, secret=SECRET, job=ckpt.Job(timeout=TIMEOUT)
    ) as it:
        first = it.take(timeout=PATIENCE)
        _leave(folder, f"{name}-{rank}")
        _await(folder, "go")
        if fault.how == "segment":  # after the source has sealed it, before anybody maps it
            _await(folder, f"published-{fault.victim[1]}")
        _arm(folder, fault, name)
        error: CkptError | None = None
        with _flipping(fault, name):
            try:
                it.take(newer_than=first, timeout=2 * TIMEOUT)
            except CkptError as err:
                error = _alone(err)
        at = time.monotonic()
        content = tuple(_version_of(t, n, part, fault.sparse) for n, t in state.items())
        try:
            version, torn = it.version, False
        except TornError:
            version, torn = None, True
        _leave(folder, f"end-{name}-{rank}")
        _await_others(folder, name, fault)
    del it
    gc.collect()
    step = None if version is None else version.step
    return Ending(at=at, content=content, version=step, torn=torn, error=error, leaked=_shared_memory())


def _alone(error: CkptError) -> CkptError:
    """An error without the frames that it came through, which keep what they worked with."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _shared_memory() -> tuple[str, ...]:
    """What this process has open or mapped of memory that ckpt shares between processes."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(file))
    links += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return tuple(link for link in links if "memfd:ckpt" in link)


def _version_of(tensor: torch.Tensor, name: str, part: slice, sparse: bool) -> int:
    """The version that all elements are; -1: they are of several, or of none."""
    for version in (1, 2):
        if torch.equal(tensor, dict(values(version, sparse))[name][:, part]):
            return version
    return 0 if not tensor.any() else -1


# ------------------------------------------------------------------------------------------------------------- faults


def _arm(folder: str, fault: Fault, job: str) -> None:
    """Have the kernel kill or stop this process in a moment, if it is the victim."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if fault.victim != (job, rank) or fault.how not in ("kill", "stop"):
        return
    _leave(folder, "armed", f"{time.monotonic() + fault.seconds}")
    if fault.phase:
        _arm_phase(fault)
        return
    if fault.how == "kill":
        signal.setitimer(signal.ITIMER_REAL, max(fault.seconds, 1e-6))  # nobody handles SIGALRM: the process ends wherever it is
        return
    _stop(fault)


def _stop(fault: Fault) -> None:
    """A child stops this process in a moment, and lets it go on, or ends it when the others have had their time."""
    me = os.getpid()
    if os.fork() == 0:
        with suppress(ProcessLookupError):
            time.sleep(fault.seconds)
            os.kill(me, signal.SIGSTOP)
            time.sleep(fault.resume or 3 * TIMEOUT)
            os.kill(me, signal.SIGCONT if fault.resume else signal.SIGKILL)
        os._exit(0)


def _arm_phase(fault: Fault) -> None:
    """The process ends, or stops, where it comes to a phase."""
    where, name = PHASES[fault.phase]
    module, _, kind = where.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, kind) if kind else owner
    inner, struck = getattr(owner, name), []

    def strike(*args: Any, **options: Any) -> Any:
        if not struck:
            struck.append(True)
            if fault.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            _stop(fault)
        return inner(*args, **options)

    setattr(owner, name, strike)


@contextmanager
def _flipping(fault: Fault, job: str) -> Iterator[None]:
    """Flip one bit of a piece on the way into the victim, before it looks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if fault.victim != (job, rank) or fault.how != "wire":
        yield
        return
    inner, flipped = Channel.receive_into, []

    def receive_into(channel: Channel, view: memoryview, *, stranger: bool = False) -> None:
        inner(channel, view, stranger=stranger)
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
    for line in Path("/proc/self/maps").read_text().splitlines():
        at = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.*memfd:", line)
        if at is None:
            continue
        start, end = int(at[1], 16), int(at[2], 16)
        data = (ctypes.c_ubyte * (end - start)).from_address(start)
        place = bytes(data).find(wanted)
        if place < 0:
            continue
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
    for name in fault.sinks:
        if name != f"{fault.victim[0]}-{fault.victim[1]}" or fault.resume:
            _await(folder, f"end-{name}")


def _await_others(folder: str, own: str, fault: Fault) -> None:
    """A relay stays until the sinks that may take from it have ended their take."""
    for name in fault.sinks if fault.relay else ():
        job = name.rpartition("-")[0]
        if job != own and (fault.victim[0] != job or fault.resume):
            _await(folder, f"end-{name}")
