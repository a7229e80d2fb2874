"""What the ranks of ``test_faults.py`` do: go on from what memory has, save every step there, and meet with one fault.

Each rank notes in a file what it knows to be safe, before it goes on: ``begin n``, ``durable n``, ``copied n``.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.errors import CkptError
from ckpt.nodes import memory_client, memory_connection
from ckpt.nodes.copies import SpreadFiles
from ckpt.policies import EverySteps, Latest
from ckpt.runs.node_tier import SpreadTier

TIMEOUT = float(os.environ.get("FAULTS_TIMEOUT", "6"))
"""Seconds without a sign of life, of the daemon, too; a campaign on a busy machine needs more."""
ROWS = 96

PHASES = {
    "capture": ("ckpt.nodes.memory_client:MemoryClient", "lend"),
    "seal": ("ckpt.nodes.memory_client:Loan", "put"),
    "commit": ("ckpt.nodes.backend:SpreadBackend", "put_if"),
    "publish": ("ckpt.engine.copy:Transfer", "copy"),
    "published": ("ckpt.engine.copy:Transfer", "commit"),
    "retain": ("ckpt.nodes.backend:SpreadBackend", "delete"),
    "meet": ("ckpt.nodes.rendezvous", "own_node"),
    "restore": ("ckpt.nodes.backend:SpreadBackend", "read_hashed"),
}
"""Name of a phase → module, or module and class, and the function with which it begins."""
COPY_PHASES = {
    "copy": ("ckpt.nodes.copies:NodeCopier", "_copy"),
    "arrive": ("ckpt.nodes.file_server:ArrivingFile", "commit"),
}
PARITY_PHASES = {
    "parity": ("ckpt.nodes.copies:NodeCopier", "_make"),
    "xor": ("ckpt.nodes.parity", "run_tasks"),
    "record": ("ckpt.nodes.parity:ParityRecord", "encode"),
    "compute": ("ckpt.nodes.parity:ParitySource", "_compute"),
}
ALL_PHASES = {**PHASES, **COPY_PHASES, **PARITY_PHASES}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``victim``: ``rank`` or ``daemon``, of ``machine``. ``how``: kill, or stop for ``resume`` seconds. It happens when the rank of
    ``machine`` begins ``phase`` for the ``nth`` time, or after so many ``seconds``. ``waits``: the loop waits for copies at each step."""

    victim: str
    machine: int
    how: str = "kill"
    phase: str = ""
    nth: int = 1
    seconds: float = 0.0
    resume: float = 1.0
    waits: bool = True


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended. ``restored``: the step that it began with; ``whole``: whether all of the state was of that step."""

    restored: int | None
    whole: bool
    error: str | None = None
    seconds: float = 0.0


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(ROWS, 400, generator=torch.Generator().manual_seed(n))


def state_of(n: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(whole_of(n), mesh, [Shard(dim)], src_data_rank=None), "b": torch.full((9,), float(n)), "n": n}


def is_whole(state: dict[str, Any], n: int, dim: int) -> bool:
    """Without a word to other ranks: compared with what this rank should have."""
    mine, wanted = state["w"], state_of(n, dim)["w"]
    assert isinstance(mine, DTensor)
    return state["n"] == n and torch.equal(mine.to_local(), wanted.to_local()) and torch.equal(state["b"], torch.full((9,), float(n)))


def life(folder: str, steps: int, dim: int, fault: Fault | None, parity: int | None = None) -> Ending:
    """Go on, and save ``steps`` more, with a copy or with parity."""
    machine = dist.get_rank()
    socket.gethostname = lambda: f"machine{machine}"
    os.environ["CKPT_MEMORY_DIR"] = f"{folder}/daemon{machine}"
    memory_connection.TIMEOUT = TIMEOUT
    began = time.monotonic()
    restored, whole, error = None, True, None
    with Path(folder, f"notes{machine}").open("a") as notes:

        def note(text: str) -> None:
            print(text, file=notes, flush=True)

        if fault is not None and fault.machine == machine:
            arm(fault, memory_client.connect().status()["pid"])
        try:
            saves = {"save": EverySteps(3), "keep": Latest(2), "job": ckpt.Job(timeout=TIMEOUT), "publish_timeout": 1.0}
            with ckpt.Checkpointer(f"{folder}/root", memory=ckpt.Memory(parity=parity), **saves) as c:  # type: ignore[arg-type]
                state = state_of(-1, dim)
                restored = c.restore(state)
                whole = restored is None or is_whole(state, restored, dim)
                for n in range((restored or 0) + 1, (restored or 0) + 1 + steps):
                    note(f"begin {n}")
                    c.step(n, state_of(n, dim))
                    assert c.handle is not None
                    c.handle.result()
                    note(f"durable {n}")
                    if fault is None or fault.waits:
                        assert c._tiers.spread is not None
                        if wait_for_copies(c._tiers.spread, n):
                            note(f"copied {n}")
        except CkptError as err:
            error = f"{type(err).__name__}: {err}"
    return Ending(restored=restored, whole=whole, error=error, seconds=time.monotonic() - began)


def wait_for_copies(tier: SpreadTier, n: int) -> bool:
    """Whether step ``n`` has all of its copies, or its parity. If not, all ranks know; but for a machine that has lost its memory."""
    began = time.monotonic()
    uncopied = tier.finish()
    too_late = time.monotonic() - began >= TIMEOUT
    if uncopied:
        return False
    files = SpreadFiles.of(f"{tier.url}/step-{n:08}", tier.nodes)
    known = files.is_complete or files.is_lost or too_late
    known = known or len(set().union(*files.sizes.values())) < dist.get_world_size()  # a daemon was killed after the copy and is empty
    assert known, f"step {n} lacks copies, and nobody says so: {files.sizes} {files.parity}"
    return files.is_complete


def arm(fault: Fault, daemon: int) -> None:
    """Let it happen later."""
    pid = os.getpid() if fault.victim == "rank" else daemon

    def happen() -> None:
        Path(os.environ["CKPT_MEMORY_DIR"] + ".armed").write_text(f"{time.monotonic()}")
        if fault.how == "kill":
            os.kill(pid, signal.SIGKILL)
            return
        if pid == os.getpid():  # nobody in this process could wake it
            waker = os.fork()
            if not waker:
                time.sleep(fault.resume)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
        else:
            threading.Timer(fault.resume, os.kill, (pid, signal.SIGCONT)).start()
        os.kill(pid, signal.SIGSTOP)

    if not fault.phase:
        timer = threading.Timer(fault.seconds, happen)
        timer.daemon = True
        timer.start()
        return
    where, name = ALL_PHASES[fault.phase]
    module, _, cls = where.partition(":")
    owner = getattr(importlib.import_module(module), cls) if cls else importlib.import_module(module)
    setattr(owner, name, _happening(getattr(owner, name), fault.nth, happen))


def _happening(function: Callable[..., Any], nth: int, happen: Callable[[], None]) -> Callable[..., Any]:
    left = [nth]

    def begin(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            happen()
        return function(*args, **options)

    return begin
