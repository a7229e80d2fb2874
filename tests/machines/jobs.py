"""Jobs on a bed: one process for each rank, in the namespaces of its host, with torch.distributed over gloo.

Ranks are forked from a server that has imported torch once (tests/distributed/ranks.py). What a rank's function returns or raises comes
back as a file, with the time: the clock ``time.monotonic`` is the same on all hosts.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.distributed.ranks import fork_server
from tests.machines import work
from tests.machines.bed import Bed

_PORTS = count(29500)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A rank waits when it comes to ``phase`` (work.PHASES), until the job is told to go on."""

    rank: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank's function ended, and when (``time.monotonic``)."""

    at: float
    value: Any = None
    error: BaseException | None = None
    text: str = ""


@dataclass(frozen=True)
class _Where:
    folder: Path
    host: int
    """Process 1 of its host."""
    rank: int
    environment: Mapping[str, str]
    stop: Stop | None


class Job:
    """One rank for each entry of ``hosts``. The job's store is served by rank 0, or with ``store`` by a process of its own on that host, as
    torchrun does. Ranks find it under ``master``, by default the name of its host."""

    def __init__(
        self,
        bed: Bed,
        function: Callable[..., Any],
        *args: Any,
        hosts: Sequence[int],
        store: int | None = None,
        master: str | None = None,
        stop: Stop | None = None,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.bed = bed
        self.hosts = tuple(hosts)
        self.stop = stop
        number = next(_PORTS)
        self.folder = bed.folder / f"job-{number}"
        self.folder.mkdir()
        self._context = fork_server()
        self._processes: dict[int, Any] = {}
        common = {
            "MASTER_ADDR": master or bed.hosts[self.hosts[0] if store is None else store].name,
            "MASTER_PORT": str(number),
            "WORLD_SIZE": str(len(hosts)),
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        if store is not None:
            self._start(-1, store, common, _serve)
            self.await_file("-1.up")
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        for rank, host in enumerate(hosts):
            local = {"RANK": str(rank), "LOCAL_RANK": str(hosts[:rank].count(host)), "LOCAL_WORLD_SIZE": str(hosts.count(host))}
            self._start(rank, host, {**common, **local}, function, *args)

    def _start(self, rank: int, host: int, environment: Mapping[str, str], function: Callable[..., Any], *args: Any) -> None:
        where = _Where(self.folder, self.bed.pid(host), rank, environment, self.stop if self.stop and self.stop.rank == rank else None)
        process = self._context.Process(target=_on_host, args=(where, pickle.dumps((function, args))), daemon=True)
        process.start()
        self._processes[rank] = process

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()  # the rank below it, too
        for process in self._processes.values():
            process.join(10)
            process.close()

    def reach(self) -> None:
        """Wait until the rank that is to stop has come to its phase."""
        assert self.stop is not None
        self.await_file(f"{self.stop.rank}.there")

    def go_on(self) -> None:
        (self.folder / "go").touch()

    def wait(self, seconds: float, ranks: Sequence[int] | None = None) -> dict[int, Outcome]:
        """How these ranks ended, all by default; those that have not within so many seconds are left out."""
        wanted = range(len(self.hosts)) if ranks is None else ranks
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all((self.folder / f"{r}.result").exists() for r in wanted):
            time.sleep(0.02)
        return {r: pickle.loads(path.read_bytes()) for r in wanted if (path := self.folder / f"{r}.result").exists()}

    def results(self, seconds: float = 60.0) -> list[Any]:
        """What all ranks returned."""
        ended = self.wait(seconds)
        missing = [r for r in range(len(self.hosts)) if r not in ended]
        failed = [f"---- rank {r}\n{o.text}" for r, o in ended.items() if o.error is not None]
        assert not missing and not failed, "\n".join([*(f"---- rank {r} has not ended\n{self.log(r)}" for r in missing), *failed])
        return [ended[r].value for r in sorted(ended)]

    def log(self, rank: int) -> str:
        """What a rank has printed; of one that hangs, where it does."""
        if self._processes[rank].is_alive():
            self._processes[rank].terminate()
            time.sleep(0.5)
        return (self.folder / f"{rank}.log").read_text(errors="replace")[-6000:]

    def await_file(self, name: str, seconds: float = 60.0) -> None:
        """Wait until a rank has left a file of this name in the job's folder, where its ranks begin."""
        end = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert time.monotonic() < end, "\n".join([f"{name} is not there", *(self.log(r) for r in self._processes)])
            time.sleep(0.01)


def _serve() -> None:
    """The process that serves the job's store and is no rank."""
    from torch.distributed import TCPStore

    # no address but the port counts where it is served
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    (Path.cwd() / "-1.up").touch()
    while store is not None:
        time.sleep(1000)


# ------------------------------------------------------------------------------------------------------------ on a host


def _on_host(where: _Where, job: bytes) -> None:
    """Go to the host, and fork the rank there: a process keeps the process ids that it was born with."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    spaces = [os.open(f"/proc/{where.host}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    rank = os.fork()
    if rank == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _rank(where, job)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(rank, signal.SIGUSR1))  # asked where it hangs
    os.waitpid(rank, 0)
    os._exit(0)


def _rank(where: _Where, job: bytes) -> None:
    log = os.open(where.folder / f"{where.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(where.folder)
    for name in [n for n in os.environ if n.startswith("CKPT_")]:
        del os.environ[name]
    os.environ.update(where.environment)
    try:
        function, args = pickle.loads(job)
        outcome = Outcome(at=0.0, value=function(*args) if where.rank < 0 else _in_group(where, function, args))
    except BaseException as err:  # noqa: BLE001  the process that runs the tests gets it
        outcome = Outcome(at=time.monotonic(), error=err, text=traceback.format_exc())
        traceback.print_exc()
    else:
        outcome = Outcome(at=time.monotonic(), value=outcome.value)
    part = where.folder / f"{where.rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(where.folder / f"{where.rank}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    if where.rank == 0:  # it may serve the store, and others may still want it
        end = time.monotonic() + 30
        while time.monotonic() < end and len(list(where.folder.glob("*.result"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
    os._exit(0)  # groups of ranks that failed cannot always be taken down in order


def _in_group(where: _Where, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dist.barrier()  # a rank that ends at once would break the connections that others are still making
    if where.stop is not None:
        work.stop_at(where.stop.phase, where.folder, where.stop.rank)
    return function(*args)
