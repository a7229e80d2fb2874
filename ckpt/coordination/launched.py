"""The processes that a launcher started to do one thing together, without ``torch.distributed``: torchrun, srun, or whoever sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Torch is imported when they connect.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ckpt.errors import DeadlineError, UsageError

from .group import Group
from .store import group_store

_PORTS = range(20_000, 30_000)
"""Where the first process of a Slurm step listens, unless MASTER_PORT says: the step's number decides, so that all know it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedProcesses:
    """This process and those that were started with it. ``serves``: this process serves the store at ``host`` and ``port``; otherwise the
    launcher or another process does. ``attempt`` tells the processes of a restart from those before it. ``alone`` says how a user runs
    the command in one process."""

    rank: int
    size: int
    host: str
    port: int
    serves: bool
    attempt: str
    alone: str

    def connect(self, timeout: float) -> Group:
        """The group of these processes; waits until the store is there, at most ``timeout`` seconds."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address = f"{self.host}:{self.port}"
        try:
            base = TCPStore(self.host, self.port, is_master=self.serves, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as err:
            doing = "cannot be served here" if self.serves else f"has not answered within {timeout:g} s"
            hint = f"start all {self.size} processes, with a MASTER_ADDR and MASTER_PORT that all reach; {self.alone}"
            raise DeadlineError(f"the store of the {self.size} processes at {address} {doing}", hint=hint) from err
        return Group(self.rank, tuple(range(self.size)), group_store(base, f"offline/{self.attempt}", self.rank), base)


def launched(environ: Mapping[str, str] = os.environ, *, apart: bool = False) -> LaunchedProcesses | None:
    """The processes that the environment tells of; None if this one was started alone. ``apart``: or if it does not say where they meet."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        meets = bool(environ.get("MASTER_ADDR")) and environ.get("MASTER_PORT", "").isdecimal()
        return None if apart and not meets else _of_variables(environ)
    if "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _of_slurm(environ)
    return None


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """RANK and WORLD_SIZE, or 0 of 1."""
    rank, world = environ.get("RANK", "0"), environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise UsageError(f"RANK={rank} is not a rank of WORLD_SIZE={world}", hint="unset both, or start with torchrun")
    return int(rank), int(world)


def _of_variables(environ: Mapping[str, str]) -> LaunchedProcesses | None:
    rank, size = rank_and_size(environ)
    if size == 1:
        return None
    alone = "`--alone` runs the command in one process"
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        text = f"WORLD_SIZE={size}, but MASTER_ADDR and MASTER_PORT do not say where the processes meet"
        raise UsageError(text, hint=f"start with torchrun, or set both; {alone}")
    return LaunchedProcesses(
        rank=rank,
        size=size,
        host=host,
        port=int(port),
        serves=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        alone=alone,
    )


def _of_slurm(environ: Mapping[str, str]) -> LaunchedProcesses:
    """A step of ``srun``. A batch script has no step of its own: what runs in it without ``srun`` is alone."""
    rank, size = environ.get("SLURM_PROCID", ""), environ["SLURM_STEP_NUM_TASKS"]
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and nodes):
        text = f"SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={size} and SLURM_STEP_NODELIST={nodes} are no process of a step"
        raise UsageError(text, hint="start with srun, or unset SLURM_STEP_ID")
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    port = environ.get("MASTER_PORT", "")
    return LaunchedProcesses(
        rank=int(rank),
        size=int(size),
        host=environ.get("MASTER_ADDR") or first_host(nodes),
        port=int(port) if port.isdecimal() else _PORTS[sum(31 * int(n) for n in re.findall(r"\d+", step)) % len(_PORTS)],
        serves=int(rank) == 0,
        attempt=f"{step}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        alone="`--alone` runs the command in one process",
    )


def first_host(nodes: str) -> str:
    """The first machine of a Slurm list: ``gpu[003-017,20],login1`` gives ``gpu003``."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
