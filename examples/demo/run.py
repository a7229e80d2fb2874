"""The demo: a training run is killed in the middle of a save and goes on with another number of ranks and another mesh, bit for bit.

1. ``train.py`` trains on 4 ranks, FSDP2 × tensor parallelism, and saves as it goes. While a save is writing, all ranks get SIGKILL.
2. It is started again on 2 ranks, FSDP2 alone: it goes on from the newest committed checkpoint, saves, and is started once more from that.
3. Another 2 ranks start from the same committed checkpoint and run straight through. The losses of 2 and 3 must be equal, every bit of them.
4. The ``ckpt`` command looks at what all that wrote, and verifies it.

Exit code 0 if everything held, 1 if not. Everything is written below a temporary directory, which is removed; ``--keep DIR`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import ckpt
from ckpt.runs import Step

HERE = Path(__file__).resolve().parent
PATIENCE = 300.0
"""Seconds after which a job counts as hung."""
DRIFT = 1e-3
"""How far losses may lie apart that were computed on different meshes: sums in another order round differently."""

Losses = dict[int, float]
"""Loss of each step."""


class DemoError(Exception):
    """Something did not happen as it must; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large the model is (arguments of train.py), and the steps between two saves."""

    model: tuple[str, ...]
    every: int


FULL = Scale(model=("--width", "256", "--layers", "6", "--context", "128", "--batch", "8"), every=15)
QUICK = Scale(model=("--width", "64", "--layers", "2", "--context", "32", "--batch", "4"), every=4)


# ----------------------------------------------------------------------------------------------------------------- processes


class Job:
    """The ranks of one training job. Whatever ends the ``with`` block, none of them is left after it.

    Rank 0 prints; what else the ranks say is in ``logs``, a file for each.
    """

    def __init__(self, name: str, ranks: int, arguments: Sequence[str], logs: Path) -> None:
        self.name = name
        self.logs = [logs / f"{name}-{rank}.txt" for rank in range(ranks)]
        self.arguments = [sys.executable, str(HERE / "train.py"), *arguments]
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.began = time.monotonic()

    def __enter__(self) -> Job:
        shared = {"WORLD_SIZE": str(len(self.logs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        shared |= {"GLOO_SOCKET_IFNAME": name for _, name in socket.if_nameindex() if name in ("lo", "lo0")}
        try:
            for rank, log in enumerate(self.logs):
                env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as file:
                    out = None if rank == 0 else file
                    self.ranks.append(subprocess.Popen(self.arguments, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=file))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL: no rank gets to say or to clean up anything."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait()

    def running(self) -> bool:
        """Whether any rank still runs.

        Raises:
            DemoError: a rank failed, or the job takes too long.
        """
        codes = [process.poll() for process in self.ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise DemoError(f"{self.name}: rank {failed} ended with code {codes[failed]}\n{tail(self.logs[failed])}")
        if time.monotonic() - self.began > PATIENCE:
            raise DemoError(f"{self.name}: not finished after {PATIENCE:g} s\n{tail(self.logs[0])}")
        return None in codes

    def finish(self) -> None:
        while self.running():
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


# ------------------------------------------------------------------------------------------------------------- what is there


def committed(run: Path) -> list[Step]:
    return [step for step in ckpt.list_steps(str(run)) if step.committed]


def bytes_in(checkpoint: Path) -> int:
    """Bytes that storage holds for the data files of a checkpoint, finished or not."""
    return sum(file.stat().st_blocks * 512 for file in (checkpoint / "data").glob("*.safetensors"))


def saving(run: Path) -> Path | None:
    """The checkpoint that is being written now: it has data files, but no commit record."""
    found = (d for d in sorted(run.glob("step-*")) if not (d / "checkpoint.json").exists())
    return next((d for d in found if any((d / "data").glob("*.safetensors"))), None)


def read_losses(log: Path) -> Losses:
    """The losses that train.py logged; a step that was run twice must have had the same loss twice."""
    losses: Losses = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        loss = float.fromhex(row["loss"])
        if losses.setdefault(row["step"], loss) != loss:
            raise DemoError(f"step {row['step']} was run twice in one job's log, with different losses: {log}")
    return losses


def differing(a: Losses, b: Losses) -> list[int]:
    """Steps whose losses are not the same number, or that only one of the two has."""
    return [step for step in sorted(a.keys() | b.keys()) if a.get(step) != b.get(step)]


# ---------------------------------------------------------------------------------------------------------------- the story


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """A save that was killed: its step, the bytes that it had written, the bytes of a whole one."""

    step: int
    written: int
    whole: int
    files: int


@dataclass(eq=False)
class Demo:
    """One run of the demo in ``work``; ``findings`` are the lines of the summary."""

    work: Path
    scale: Scale
    findings: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.work / "run"

    def job(self, name: str, ranks: int, *arguments: str) -> Job:
        losses = str(self.losses(name))
        return Job(name, ranks, [str(self.run), *self.scale.model, "--losses", losses, *arguments], self.work)

    def losses(self, name: str) -> Path:
        return self.work / f"losses-{name}.jsonl"

    def tell(self) -> None:
        killed = self.train_and_kill()
        start = committed(self.run)[-1]
        assert start.number is not None
        stop = start.number + 2 * self.scale.every
        self.resume(stop)
        self.run_straight(start, stop)
        self.judge(start.number, stop, killed)
        self.look(killed, start)

    def train_and_kill(self) -> Killed:
        """On 4 ranks, until SIGKILL in the middle of a save. If the save is committed before the signal arrives, once more with the next."""
        heading("Training on 4 ranks, FSDP2 × TP (2 × 2)")
        for attempt in range(5):
            every = str(self.scale.every)
            with self.job(f"train{attempt}", 4, "--tp", "2", "--save-every", every, "--steps", "1000000") as job:
                killed = self.kill_in_a_save(job)
            if committed(self.run)[-1].number != killed.step:
                print(f"SIGKILL to all 4 ranks in the save of step {killed.step}, {size(killed.written)} of {size(killed.whole)} written")
                self.ckpt("ls", "run")
                return killed
            print(f"SIGKILL to all 4 ranks, but step {killed.step} had just been committed: resuming to kill the next save")
        raise DemoError("five saves in a row were committed before the kill arrived")

    def kill_in_a_save(self, job: Job) -> Killed:
        """Wait for a save, with two committed before it, to have written a half; then kill."""
        while len(done := committed(self.run)) < 2:
            self.still(job)
            time.sleep(0.01)
        whole = bytes_in(Path(done[-1].url))
        while (now := saving(self.run)) is None or bytes_in(now) < whole / 2:
            self.still(job)
            time.sleep(0.0005)
        job.kill()
        return Killed(step=int(now.name.removeprefix("step-")), written=bytes_in(now), whole=whole, files=len(list((now / "data").iterdir())))

    def still(self, job: Job) -> None:
        if not job.running():
            raise DemoError(f"{job.name} ended before it could be killed")

    def resume(self, stop: int) -> None:
        """On 2 ranks from the newest committed checkpoint, and once more from the one that this saves half way."""
        every = self.scale.every
        for name, steps in (("resumed0", stop - every), ("resumed1", stop)):
            heading("Resuming on 2 ranks, FSDP2 alone" if name == "resumed0" else "The same again, from its own checkpoint")
            with self.job(name, 2, "--save-every", str(every), "--steps", str(steps)) as job:
                job.finish()

    def run_straight(self, start: Step, stop: int) -> None:
        heading("For comparison: 2 ranks from the same checkpoint, without a break")
        with self.job("straight", 2, "--source", start.url, "--save-every", "0", "--steps", str(stop)) as job:
            job.finish()
