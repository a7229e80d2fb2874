"""Runs a function on several ranks: one process each, with a gloo process group, a deadline, and stacks of what hangs.

Every rank of every run is a process of its own, forked from a server that has imported torch and made the calls whose first time takes
long (``first_calls.py``). So no run sees caches or groups of an earlier one, a rank may die in any way, and a run still starts in a
fraction of a second.

    def square(base):                      # a top-level function: it is found again by its module and name
        return dist.get_rank() ** base

    def test_square(ranks):                # the fixture below, for all tests
        assert ranks.run(3, square, 2) == [0, 1, 4]
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

PRELOAD = (
    "pytest",
    "hypothesis.strategies",
    "click.testing",
    "numpy.ma",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.parallel",
    "torch.optim.adamw",
    "torch._dynamo",
    "torch.utils.data.graph_settings",
    "torchdata.stateful_dataloader",
    "pyarrow.ipc",
    "safetensors.torch",
    "fsspec",
    "zstandard",
    "encodings.idna",
    "ckpt.api",
    "ckpt.cli.main",
    "ckpt.converters.selected_state",
    "ckpt.formats.deltas",
    "ckpt.formats.safetensors",
    "ckpt.training.data",
    "ckpt.engine.dry_run_load",
    "ckpt.engine.forecast",
    "ckpt.engine.load.load",
    "ckpt.engine.save.background",
    "ckpt.engine.save.save",
    "ckpt.engine.verify",
    "ckpt.converters.live_export",
    "ckpt.runs.reporter",
    "ckpt.formats.registry",
    "ckpt.live",
    "ckpt.live.pull",
    "ckpt.live.server",
    "ckpt.live.sink",
    "ckpt.live.source",
    "ckpt.runs.checkpointer",
    "tests.distributed.ranks",
    "tests.live.jobs",
    "tests.memory.daemons",
    "tests.distributed.first_calls",
)
"""Imported once, in the server that ranks are forked from. A test sees that all can be: a fork server passes over what cannot."""

GRACE = 15.0
"""Seconds that the other ranks get to end by themselves once one has failed."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank that gave no result. One of: ``error`` (it raised), ``exitcode`` (it died; negative: by this signal), ``hung`` (it
    was killed at the deadline; ``text`` has its stacks)."""

    rank: int
    error: BaseException | None = None
    exitcode: int | None = None
    hung: bool = False
    text: str = ""

    def __str__(self) -> str:
        how = "hung" if self.hung else "raised" if self.error is not None else f"died with exit code {self.exitcode}"
        return f"---- rank {self.rank} {how}\n{self.text}"


class RanksFailedError(AssertionError):
    """Ranks raised, died or hung; the message has all tracebacks and stacks."""

    def __init__(self, lost: list[Lost]) -> None:
        super().__init__("\n".join(str(x) for x in lost))
        self.lost = lost


def fork_server() -> Any:
    """How processes are forked from the one server that this process has, whoever asks for it first."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with _environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def in_process(function: Callable[..., Any], *args: Any) -> tuple[Any, connection.Connection]:
    """A process that runs ``function(pipe, *args)``, and the other end of its pipe."""
    context = fork_server()
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *args), daemon=True)
    process.start()
    there.close()
    return process, here


class Ranks:
    """Runs functions on up to ``size`` ranks."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._context = fork_server()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        allow_death: bool = False,
        await_stopped: bool = True,
        process_group: bool = True,
        store_on_rank0: bool = False,
    ) -> list[Any]:
        """Call ``function(*args)`` on ``world_size`` ranks and return what it returned on each.

        Args:
            function: a top-level function; it and ``args`` are pickled, as is what it returns.
            timeout: seconds for the whole run. Ranks that are not done then are killed, and their stacks are in the error.
            allow_death: put a :class:`Lost` in the place of the result of a rank that raised, died or hung. The others then have the
                whole ``timeout`` to find out for themselves.
            await_stopped: False ends the run when all ranks are done but those that a signal has stopped, and nobody lets go on.
            process_group: False leaves torch.distributed alone.
            store_on_rank0: the job's TCPStore lives in rank 0 and dies with it, not in this process.

        Raises:
            RanksFailedError: a rank raised, died or hung, and ``allow_death`` is False.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be between 1 and {self.size}, not {world_size}")
        job = pickle.dumps((function, args))
        found = self._run(world_size, job, timeout, allow_death, await_stopped, process_group, store_on_rank0)
        lost = [x for x in found if isinstance(x, Lost)]
        if not allow_death and any(_is_crash_of_gloo(x) for x in lost):
            print("a rank crashed inside torch.distributed; once more:", *lost, sep="\n", file=sys.stderr)
            found = self._run(world_size, job, timeout, allow_death, await_stopped, process_group, store_on_rank0)
            lost = [x for x in found if isinstance(x, Lost)]
        if lost and not allow_death:
            raise RanksFailedError(lost)
        return found

    def run_in_turn(
        self, world_size: int, calls: Sequence[tuple[Any, ...]], *, timeout: float = 120.0, process_group: bool = True
    ) -> list[list[Any]]:
        """Make several calls, each ``(function, *args)``, one after the other on the same ranks, where torch needs to prepare for them only
        once; gives the results of each call, by rank.

        Raises:
            RanksFailedError: as for :meth:`run`.
        """
        by_rank = self.run(world_size, in_turn, list(calls), timeout=timeout, process_group=process_group)
        return [list(results) for results in zip(*by_rank, strict=True)]

    def _run(
        self,
        world_size: int,
        job: bytes,
        timeout: float,
        allow_death: bool,
        await_stopped: bool,
        process_group: bool,
        store_on_rank0: bool,
    ) -> list[Any]:
        run = _Run(Path(tempfile.mkdtemp(prefix="ranks-")), world_size, timeout, allow_death, await_stopped)
        store = None
        if process_group and not store_on_rank0:
            store = _serve_store()
            (run.folder / "port").write_text(str(store.port))
        try:
            where = _Where(run.folder, world_size, timeout, process_group, store_on_rank0, os.getpid())
            run.start(self._context, where, job)
            return run.wait()
        finally:
            run.kill()
            shutil.rmtree(run.folder, ignore_errors=True)
            del store  # serves until here


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on up to 8 ranks: ``ranks.run(world_size, function, *args)``."""
    return Ranks(8)


def at_once(check: Callable[..., None], cases: Iterable[tuple[Any, ...]]) -> None:
    """``check`` each case, a few beside each other: of those that mostly wait for a deadline."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda case: check(*case), cases))


def _is_crash_of_gloo(lost: Lost) -> bool:
    """torch 2.13 with gloo now and then aborts in one of its own collectives, or when one of its threads ends late. A crash that
    this code caused would come again in the second run."""
    return lost.exitcode in (-6, -11) and "torch/distributed" in lost.text


@dataclass(eq=False)
class _Run:
    """One run, seen from the process that started it. Ranks leave results, logs and stacks as files in ``folder``."""

    folder: Path
    world_size: int
    timeout: float
    allow_death: bool
    await_stopped: bool
    processes: list[Any] = field(default_factory=list)

    def start(self, context: Any, where: _Where, job: bytes) -> None:
        for rank in range(self.world_size):
            process = context.Process(target=_rank_main, args=(where, rank, job), daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        while alive := [p for p in self.processes if p.exitcode is None]:
            if alive == self.processes[:1]:
                (self.folder / "over").touch()
            left = deadline - time.monotonic()
            if left <= 0 or (not self.await_stopped and all(map(_is_stopped, alive))):
                break
            connection.wait([p.sentinel for p in alive], min(left, 0.5))
            failed = any(not (self.folder / f"{r}.result").exists() for r, p in enumerate(self.processes) if p.exitcode is not None)
            if (failed or self._raised()) and not self.allow_death:
                deadline = min(deadline, time.monotonic() + GRACE)
        hanging = [r for r, p in enumerate(self.processes) if p.exitcode is None and not self._has_result(r)]
        self._dump_stacks(hanging)
        return [self._result(rank, rank in hanging) for rank in range(self.world_size)]

    def _has_result(self, rank: int) -> bool:
        return (self.folder / f"{rank}.result").exists()

    def _raised(self) -> bool:
        return any((self.folder / f"{rank}.raised").exists() for rank in range(self.world_size))

    def _dump_stacks(self, hanging: list[int]) -> None:
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if hanging:
            time.sleep(0.5)

    def _result(self, rank: int, hung: bool) -> Any:
        if self._has_result(rank):
            found = pickle.loads((self.folder / f"{rank}.result").read_bytes())
            return found if not isinstance(found, Lost) else Lost(rank=rank, error=found.error, text=found.text + self._tail(rank, "log"))
        text = self._tail(rank, "stacks") + self._tail(rank, "log")
        return Lost(rank=rank, hung=hung, exitcode=None if hung else self.processes[rank].exitcode, text=text)

    def _tail(self, rank: int, kind: str) -> str:
        path = self.folder / f"{rank}.{kind}"
        text = path.read_text(errors="replace")[-8000:] if path.exists() else ""
        return f"[{kind}]\n{text}\n" if text.strip() else ""

    def kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join(10)
            process.close()


def _is_stopped(process: Any) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


def _serve_store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ------------------------------------------------------------------------------------------------------------ in a rank


@dataclass(frozen=True)
class _Where:
    folder: Path
    world_size: int
    timeout: float
    process_group: bool
    store_on_rank0: bool
    parent: int


def _rank_main(where: _Where, rank: int, job: bytes) -> None:
    _prepare(where, rank)
    try:
        found: Any = _call(where, rank, job)
        data = pickle.dumps(found)
    except BaseException as err:  # noqa: BLE001  the process that runs the tests gets it
        found = Lost(rank=rank, error=_picklable(err), text=traceback.format_exc())
        data = pickle.dumps(found)
        (where.folder / f"{rank}.raised").touch()
    part = where.folder / f"{rank}.part"
    part.write_bytes(data)
    part.rename(where.folder / f"{rank}.result")
    if where.store_on_rank0 and rank == 0:
        _await(where.folder / "over")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # groups of ranks that failed cannot always be taken down in order


def in_turn(calls: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for function, *args in calls]


def _prepare(where: _Where, rank: int) -> None:
    """Output and stacks go to files; what the shell that started the tests has set does not count."""
    import torch

    log = os.open(where.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=(where.folder / f"{rank}.stacks").open("w"), all_threads=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for name in [n for n in os.environ if n.startswith("CKPT_")]:
        del os.environ[name]
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


def _end_with(server: int) -> None:
    """End when the server does, which ends when the tests are over or interrupted."""
    while os.getppid() == server:
        time.sleep(1)
    os._exit(1)


def _call(where: _Where, rank: int, job: bytes) -> Any:
    function, args = pickle.loads(job)
    if not where.process_group:
        return function(*args)
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=where.timeout)
    dist.init_process_group("gloo", store=_store(where, rank), rank=rank, world_size=where.world_size, timeout=timeout)
    dist.barrier()  # a rank that ends at once would break the connections that others are still making
    found = function(*args)
    dist.destroy_process_group()
    return found


def _store(where: _Where, rank: int) -> Any:
    from torch.distributed import TCPStore

    port = where.folder / "port"
    if where.store_on_rank0 and rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = where.folder / "port.part"
        part.write_text(str(store.port))
        part.rename(port)
        return store
    _await(port)
    return TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _picklable(err: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:  # noqa: BLE001  an exception with a constructor of its own: its text stands for it
        return RuntimeError(f"{type(err).__name__}: {err}")
    return err
