"""The group of ranks that save and load together, found from torch.distributed, or from the variables of a launcher.

Control goes through the job's key-value store only: no collective that training could interleave with.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.errors import DeadlineError, UsageError
from ckpt.text import parse_json

from .call import Call
from .channel import longest_pause
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

    @contextmanager
    def fails_together(self, kind: str, url: str) -> Iterator[None]:
        """What may keep one rank from the call that all make next (a mistake in its arguments, an earlier save that failed): its error ends
        the call on all ranks; each has made one call then, and the next one finds them in step. The block itself makes no call."""
        try:
            yield
        except BaseException as err:
            self.call(kind, url, settings.DEFAULT_TIMEOUT).fail("options", err)
            raise

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
            position = self.position
            links = LivenessLinks(position, self.ranks, call.timeout, store=self.store.host, on_death=on_death)
            try:
                # In the leader's word, where the heads are would go to every rank; each needs one of them.
                if where := links.where():
                    self.store.set(f"liveness/{position}", json.dumps(where).encode())
                secret = call.agree({}, lambda rows: secrets.token_hex(16))
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
    if not getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():
        _warned.append(size)
        log.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialized: this process saves alone, as if it were the only one; "
            "call torch.distributed.init_process_group() first",
            size,
        )


_warned: list[str] = []
_groups: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()
_alone = threading.local()
"""The group of a thread that saves and loads without torch.distributed: threads do so independently of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ranks that call a save or a load together, and how each of them works: ``job=ckpt.Job(timeout=60)``.

    Args:
        process_group: the ranks that take part, if not all.
        timeout: seconds without a sign of life after which a rank counts as dead (``CKPT_TIMEOUT``, 600).
        threads: threads that each rank reads or writes with (``CKPT_THREADS``; its share of the cores, at most 4).
    """

    process_group: ProcessGroup | None = None
    timeout: float | None = None
    threads: int | None = None

    @classmethod
    def of(cls, job: object) -> Job:
        """What a caller gives as ``job=``; None: the defaults."""
        if job is None:
            return cls()
        if not isinstance(job, cls):
            raise UsageError(f"job= is a ckpt.Job, not {job!r}", hint="job=ckpt.Job(process_group=group, timeout=60)")
        return job


def current_group(process_group: ProcessGroup | None = None) -> Group:
    """The group of ``process_group``, of torch.distributed's world, or of this process alone if torch.distributed is not in use."""
    return group_of(Job(process_group=process_group))


def group_of(job: object) -> Group:
    """The same for what a caller gives as ``job=``. What is no Job counts as all ranks: ``Job.of`` refuses it where they hear of it."""
    process_group = job.process_group if isinstance(job, Job) else None
    dist: Any = sys.modules.get("torch.distributed")  # whoever uses it has imported it
    in_use = getattr(dist, "is_initialized", bool)()
    if process_group is not None and not (in_use and isinstance(process_group, dist.ProcessGroup)):
        if in_use and process_group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group gives it to ranks outside
            raise UsageError(f"rank {dist.get_rank()} is not in the process group")
        raise UsageError(
            f"process_group= is a group of ranks that torch.distributed knows, not {process_group!r}",
            hint="process_group=dist.new_group(ranks), or mesh.get_group(), after init_process_group; None for all ranks",
        )
    if not in_use:
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


def group_of_one() -> ProcessGroup | None:
    """A process group of this rank alone, which no other rank has to hear of; None where torch.distributed is not in use."""
    dist: Any = sys.modules.get("torch.distributed")
    if not getattr(dist, "is_initialized", bool)():
        return None
    group: ProcessGroup = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return group


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
    alone = "`--no-distributed` runs the command in one process"
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
        alone="`--no-distributed` runs the command in one process",
    )


def first_host(nodes: str) -> str:
    """The first machine of a Slurm list: ``gpu[003-017,20],login1`` gives ``gpu003``."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


# How all ranks of a job come to save after the same step when only one of them knows why: a clock, or a signal.
#
#     rank 0, leads    ends step 41: due ── proposes 41, waits ──── answers: 41, 44, 43 ── fixes 44 ── goes on, saves after 44
#     rank 1           has ended step 43 ── answers 44 ── ends step 44, waits ──────────────────────── sees 44, saves after 44
#     rank 2           has ended step 42 ── answers 43 ── ends step 43, waits ──────────── sees 44 ── goes on, saves after 44
#
# A thread on each rank looks into the job's store now and then, at one key, so a training step costs no message. The leader proposes a
# step; every rank answers with the first step after which it can save, and waits from the proposed step on; the leader then fixes the
# first step that no rank has passed. Looks go on for as long as the job does, and the store has one thread for all of its ranks: the more
# ranks, the longer the pauses. Where that is long the leader proposes a step that the job comes to only when all ranks know of it.
# Invariant: no rank saves after a proposed step before it is fixed, so all save after the same one. A rank that has ended its loop
# answers that it never can, and then nothing more is fixed.


PAUSE = 0.1
"""Seconds between two looks of a rank into the store, at least."""
LOOKS = 2500
"""Looks a second of all ranks together, at most. At 20 µs each they take a twentieth of the store's thread."""
NEVER = 1 << 62
"""A step that no job comes to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Why a save is due; ``final``: because the job will be stopped."""

    reason: str
    final: bool = False


@dataclass(eq=False)
class StepAgreement:
    """One rank's end. ``asked``: some rank has been told that the job will be stopped."""

    group: Group
    store: Store
    timeout: float
    asked: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _seen: int = -1
    _seen_at: float = 0.0
    _step_seconds: float = 0.0
    """How long the last step took."""
    _number: int = 0
    _proposed: int | None = None
    _due: Due = Due(reason="")
    _fixed: int | None = None
    _asked: bool = False
    _answered: int = -1
    """The last number that this rank has answered."""
    _error: Exception | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.store = self.store.within(self.timeout)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="ckpt-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This rank's loop is over: no save after a later step waits for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        with suppress(DeadlineError):  # nobody asks any more
            self._answer(self._number, NEVER)

    def _answer(self, number: int, step: int) -> None:
        """Say after which step this rank can save, unless it has said so."""
        if self._answered < number:
            self._answered = number
            self.store.append(f"{number}/first", f"{step},".encode())

    def ask(self) -> None:
        """Tell the leader that this rank has had a notice. Costs a message, once."""
        if not self._asked:
            self._asked = True
            self.store.set("asked", b"1")

    @property
    def pending(self) -> bool:
        return self._proposed is not None

    def propose(self, step: int, due: Due) -> None:
        """Leader: the job is to save, after ``step`` or soon after it."""
        with self._lock:
            # In a large job ranks look into the store seldom. A step that comes before all have looked would make the
            # fast ranks wait in it, so the leader adds as many steps as the longest pause takes.
            if self._pause > PAUSE and self._step_seconds > 0:
                step += int((self._pause + longest_pause(self.group.size)) / self._step_seconds)
            self._proposed, self._due = step, due
        self.store.set(f"{self._number}/proposed", json.dumps([step, due.reason, due.final]).encode())

    def due(self, step: int) -> Due | None:
        """After ``step``: why all ranks save now, the same on all of them, or None. Waits if a step is proposed and not fixed yet."""
        with self._lock:
            now = time.monotonic()
            self._step_seconds, self._seen_at = now - self._seen_at if self._seen_at else 0.0, now
            self._seen = step
            if self._error is not None and self.store.silent:  # one that is gone may have ended with the job
                raise self._error
            if self._proposed is None or step < self._proposed:
                return None
            if not self._lock.wait_for(lambda: self._fixed is not None or self._error is not None, self.timeout):
                raise DeadlineError(f"the ranks have not agreed when to save within {self.timeout:g} s", hint="look whether a rank hangs")
            if self._error is not None:
                raise self._error
            if self._fixed is None or step < self._fixed:
                return None
            self._proposed = self._fixed = None
            self._number += 1
            return self._due

    # ---- the thread

    @property
    def _pause(self) -> float:
        """Seconds between two looks of a rank where nothing is proposed."""
        return max(PAUSE, self.group.size / LOOKS)

    def _watch(self) -> None:
        leads = self.group.rank == self.group.leader  # it alone looks for what it decides on, and often
        look = self._lead if leads else self._follow
        soon = PAUSE if leads else max(PAUSE, longest_pause(self.group.size))
        while not self._stop.wait(soon if leads or self._proposed is not None else self._pause):
            try:
                look()
            except DeadlineError as err:
                log.warning("no save can be agreed on any more, nor a notice that the job will be stopped be passed on: %s", err)
                with self._lock:
                    self._error = err
                    self._lock.notify_all()
                return

    def _follow(self) -> None:
        with self._lock:
            number, proposed, fixed = self._number, self._proposed, self._fixed
        if proposed is None:
            if (data := self.store.peek(f"{number}/proposed")) is not None:
                step, reason, final = parse_json(data)
                with self._lock:
                    self._proposed, self._due = step, Due(reason=reason, final=final)
                    first = self._seen + 1  # it has passed the last step that it has seen; the leader waits at the one that it proposes
                self._answer(number, first)
        elif fixed is None and (data := self.store.peek(f"{number}/fixed")) is not None:
            self._fix(int(data))

    def _lead(self) -> None:
        """Once every rank has answered, fix the step."""
        # What was said about the one before, all have read.
        with self._lock:
            number, proposed, fixed = self._number, self._proposed, self._fixed
        if not self.asked.is_set() and self.store.peek("asked") is not None:
            self.asked.set()
        if proposed is not None and fixed is None:
            self._answer(number, proposed)
            (answers,) = self.store.appended([f"{number}/first"])
            steps = [int(step) for step in answers.split(b",")[:-1]]
            if len(steps) == self.group.size:
                self.store.set(f"{number}/fixed", str(max(steps)).encode())
                self._fix(max(steps))
                self.store.delete_later(f"{number - 1}/{name}" for name in ("proposed", "first", "fixed"))

    def _fix(self, step: int) -> None:
        with self._lock:  # which is not held while the store is asked: a step of training waits for it
            self._fixed = step
            self._lock.notify_all()
