"""The group of ranks that save and load together, found from torch.distributed, or from the variables of a launcher.

Control goes through the job's key-value store only: no collective that training could interleave with.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckpt.errors import DeadlineError, UsageError
from ckpt.text import parse_json

from .call import Call
from .liveness import LivenessLinks, Members
from .store import Store, group_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Group(Members):
    """The ranks of one process group, and the calls that they have made."""

    served: object = None
    """The job's own store. As long as it is referred to, its server runs, also after ``destroy_process_group``: a save may be going on."""
    own_stores: int = 0
    """How many parts of the store were set aside, for a Checkpointer's agreement on steps and the like."""

    def call(self, kind: str, url: str, timeout: float, *, overlaps: bool = False) -> Call:
        """Begin a collective call; every rank makes the same calls in the same order. ``overlaps``: an earlier one may go on in the
        background, on any rank."""
        self.calls += 1
        return Call(self, f"{self.calls}", kind, url, timeout, overlaps)

    def own_store(self) -> Store:
        """A part of the job's store that nobody else uses: the ranks of a group make them in the same order."""
        assert self.store is not None
        self.own_stores += 1
        return self.store.part(f"own/{self.own_stores}")

    def apart(self) -> Group:
        """The same ranks, for calls that go on beside those of this group. Made once for each purpose, by all ranks in the same order: what
        a call leaves in the store is deleted by the next one."""
        return Group(self.rank, self.ranks, self.own_store() if self.store is not None else None, self.served)

    def connect(self, call: Call, on_death: Callable[[int], None]) -> None:
        """Have the ranks notice at once when one of them dies, in this and all later calls; collective, a phase of ``call``."""
        if self.store is None:
            return
        with call.phase("connect"):
            position = self.ranks.index(self.rank)
            links = LivenessLinks(position, self.ranks, call.timeout, store=self.store.host, on_death=on_death)
            try:
                # In the leader's word, where the heads are would go to every rank; each needs one of them.
                if where := links.where():
                    self.store.set(f"liveness/{position}", json.dumps(where).encode())
                secret = call.lead({}, lambda rows: secrets.token_hex(16)) if call.is_leader else call.follow({})
                head = self.store.peek(f"liveness/{links.parent}")
                links.connect(bytes.fromhex(secret), parse_json(head) if head is not None else {"addresses": [], "network": ""})
            except BaseException:  # after Ctrl-C, too: no connection of half of the ranks stays open
                links.close()
                raise
            self.links = links


def warn_if_others_are_missing(group: Group) -> None:
    """Warn, once, of a launcher whose processes do not know each other: each of them would save alone, to the same place."""
    size = os.environ.get("WORLD_SIZE", "")
    if group.size > 1 or not size.isdecimal() or int(size) < 2 or "RANK" not in os.environ or _warned:
        return
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _warned.append(size)
        log.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialized: this process saves alone, as if it were the only one", size
        )


_warned: list[str] = []
_groups: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()
_alone = threading.local()
"""The group of a thread that saves and loads without torch.distributed: threads do so independently of each other."""


def current_group(process_group: ProcessGroup | None = None) -> Group:
    """The group of ``process_group``, of torch.distributed's world, or of this process alone if torch.distributed is not in use."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if not hasattr(_alone, "group"):
            _alone.group = Group(0, (0,))
        alone: Group = _alone.group
        return alone
    pg = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    ranks = tuple(dist.get_process_group_ranks(pg))
    rank = dist.get_rank()
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not in the process group {list(ranks)[:8]}")
    known = _groups.get(pg)
    if known is None and len(ranks) == 1:  # nobody to talk to
        known = _groups[pg] = Group(rank, ranks)
    if known is None:
        base = dist.distributed_c10d._get_default_store()
        known = _groups[pg] = Group(rank, ranks, group_store(base, pg.group_name, rank), base)
    return known


# The processes that a launcher started to do one thing together, without ``torch.distributed``: torchrun, srun, or whoever sets RANK,
# WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Torch is imported when they connect.

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
