"""Runs a job uninterrupted, interrupted and resumed, on the ranks of this machine, and compares what these runs have noted.

    uninterrupted   1 ────────── at ────── at + after
    interrupted     1 ────────── at, saves, ends at once          compared up to here: does the job repeat itself?
    resumed         restores     at ────── at + after             once for each number of ranks

The job needs no change: it saves and restores by a :class:`ckpt.Checkpointer`, which heeds ``CKPT_PROVE`` (``witness``) and has its
checkpoints in a folder of the proof meanwhile. Jobs are scripts under torchrun, or functions, in processes forked from a server that has
imported torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ckpt.errors import GroupError, NotFoundError, UsageError
from ckpt.settings import check_whole

from .comparison import Notes, Reference, ResumeReport

Job: TypeAlias = "Callable[[], object] | Sequence[str] | str | os.PathLike[str]"
"""A function of the top level of a module, or a script with its arguments."""
_LOG, _TAIL = "log", 2000
"""Where the processes of a run print to, and how many characters of that are shown if one fails."""
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",
    "pyarrow.ipc",
    "ckpt.runs.checkpointer",
    "ckpt.testing.witness",
]


def assert_resumes(job: Job, *, at: int, worlds: Sequence[int] = (1,), after: int = 10, **options: Any) -> ResumeReport:
    """:func:`prove` that a job resumes exactly after step ``at``.

    Raises:
        AssertionError: it does not. The text names the first difference, and what usually causes it.
        UsageError, GroupError: as :func:`prove`.
    """
    report = prove(job, at=at, worlds=worlds, after=after, **options)
    if not report.exact:
        raise AssertionError(str(report))
    return report


def prove(
    job: Job,
    *,
    at: int,
    worlds: Sequence[int] = (1,),
    after: int = 10,
    tolerance: float = 1e-4,
    timeout: float = 600.0,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> ResumeReport:
    """Run a job uninterrupted and resumed, and compare batches, learning rates, random generators, parameters, optimizer states and losses.

    Args:
        job: a script for torchrun, or a list of one and its arguments; or a function that can be imported. Either makes a
            ``ckpt.Checkpointer``, calls ``restore``, and ``step`` or ``save`` with the number of each step. On several ranks it finds the
            variables of torchrun.
        at: the step that is saved, and resumed from.
        worlds: numbers of ranks. The first one runs uninterrupted and saves; it and all others resume: the first bit for bit, the others
            the same batches, and numbers to rounding.
        after: how many steps are compared after ``at``.
        tolerance: relative, of numbers on another number of ranks.
        timeout: seconds for each run.
        folder: where the runs have their checkpoints and notes, which stay there; by default a temporary one.
        progress: called for each run that begins.

    Raises:
        UsageError: the job does not come to step ``at``, or does not restore; or it notes no number that other ranks could compare.
        NotFoundError: there is no such script.
        GroupError: a process of a run failed, or a run took longer than ``timeout``.
    """
    check_whole(at, "at=", 1)
    check_whole(after, "after=", 1)
    sizes = tuple(worlds)
    for size in sizes or (None,):
        check_whole(size, "worlds= has numbers of ranks: each", 1, "worlds=(1, 2)")
    with _folder(folder) as root:
        runs = _Runs(job, root, timeout, progress)
        uninterrupted = runs.run("uninterrupted", sizes[0], until=at + after)
        if at not in uninterrupted.steps or max(uninterrupted.steps) <= at:
            steps = uninterrupted.steps
            there = f"its steps are {min(steps)} to {max(steps)}" if steps else "it notes no step"
            hint = "call Checkpointer.step(n, state) after each step, or choose an earlier step to resume from"
            raise UsageError(f"the job has no step after {at}: {there}", hint=hint)
        if set(sizes) != {sizes[0]} and not uninterrupted.has_numbers:
            hint = 'step(n, state, metrics={"loss": loss}), or ckpt.testing.observe("loss", loss)'
            raise UsageError("on other numbers of ranks numbers are compared, and the job notes none", hint=hint)
        begun = runs.run("interrupted", sizes[0], until=at, saves=True)
        reference = Reference(uninterrupted, begun, at)
        outcomes = [uninterrupted.outcome("uninterrupted"), reference.repeats(begun)]
        if not outcomes[-1].differences:
            for size in dict.fromkeys(sizes):
                resumed = runs.run("resumed", size, until=at + after, saved=True)
                outcomes.append(reference.compare(resumed, tolerance))
                if at not in resumed.restored or min(resumed.steps, default=0) <= at:
                    goes_on = f"restores {sorted(resumed.restored) or 'nothing'} and goes on with step {min(resumed.steps, default=None)}"
                    hint = "call Checkpointer.restore(state) before the loop, and begin after the step that it gives"
                    raise UsageError(f"the job {goes_on}, not with {at + 1}", hint=hint)
        return ResumeReport(at=at, runs=tuple(outcomes), unrepeatable=tuple(sorted(f"{k} {n}" for k, n in reference.unrepeatable)))


@contextmanager
def _folder(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="ckpt-prove-") as path:
            yield Path(path)
        return
    root = Path(given)
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise UsageError("the folder of a proof must be empty", where=str(root), hint="name a new one")
    yield root.resolve()


class _Runs:
    """The runs of one proof, one after the other."""

    def __init__(self, job: Job, root: Path, timeout: float, progress: Callable[[str], object]) -> None:
        self._job, self._root, self._timeout, self._progress = job, root, timeout, progress
        if not callable(job):
            command = [str(job)] if isinstance(job, str | os.PathLike) else [str(part) for part in job]
            if not command or not Path(command[0]).is_file():
                raise NotFoundError("there is no such script", where=command[0] if command else None, hint="give the path of a Python file")
            self._command = command

    def run(self, name: str, ranks: int, *, until: int, saves: bool = False, saved: bool = False) -> Notes:
        """One run; ``saved``: it finds what the interrupted one has saved, each time anew."""
        from .witness import ROOTS, Plan

        folder = self._root / (f"{name}-{ranks}" if saved else name)
        Plan(until=until, saves=saves, ranks=ranks).write(folder)
        if saved:
            shutil.copytree(self._root / "interrupted" / ROOTS, folder / ROOTS, copy_function=os.link)
        self._progress(f"{name} on {ranks} {'rank' if ranks == 1 else 'ranks'}, to step {until}")
        end = time.monotonic() + self._timeout
        ended = self._processes(folder, ranks, end) if callable(self._job) else self._torchrun(folder, ranks, end)
        if ended != 0:
            log = (folder / _LOG).read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            how = f"took more than {self._timeout:g} s" if ended is None else f"failed with exit code {ended}"
            raise GroupError(f"the {name} run on {ranks} ranks {how}; its last lines:\n{log}", where=str(folder))
        return Notes.read(folder, ranks)

    def _torchrun(self, folder: Path, ranks: int, end: float) -> int | None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *self._command]
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(
                command, env={**os.environ, "CKPT_PROVE": str(folder)}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
                    try:
                        process.wait(60)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait(60)

    def _processes(self, folder: Path, ranks: int, end: float) -> int | None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        shared = {"CKPT_PROVE": str(folder), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                env = {**shared, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(context.Process(target=_call, args=(self._job, env, str(folder / _LOG))))
                processes[-1].start()
            while alive := [process for process in processes if process.is_alive()]:
                if any(process.exitcode for process in processes):  # the others would wait for it
                    break
                if time.monotonic() > end:
                    return None
                alive[0].join(0.05)
            return next((process.exitcode for process in processes if process.exitcode), 0)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _call(job: Callable[[], object], env: Mapping[str, str], log: str) -> None:
    """One rank of a job that is a function."""
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    np.random.seed()  # not the state of the server, which all runs would share
    job()


__all__ = ["assert_resumes", "prove"]
