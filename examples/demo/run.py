"""The demo: a training run is killed in the middle of a save and resumes on another number of ranks and another mesh, bit for bit.

1. ``train.py`` trains on 4 ranks, FSDP2 × tensor parallelism, and saves as it goes. While a save is writing, all ranks get SIGKILL.
2. It is started again on 2 ranks, FSDP2 alone: it resumes from the newest committed checkpoint, saves, and is started once more
   from that.
3. Another 2 ranks start from the same committed checkpoint and run straight through. The losses of 2 and 3 must be equal, bit for bit.
4. The ``ckpt`` command inspects and verifies the checkpoints.

Exit code 0 if all checks passed, 1 if not. It writes below a temporary directory, which it removes; ``--keep DIR`` keeps it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import ckpt
from ckpt.runs.step_listing import Step

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


FULL = Scale(model=("--width", "256", "--layers", "6", "--context", "64", "--batch", "8"), every=10)
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
        shared = {"WORLD_SIZE": str(len(self.logs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["GLOO_SOCKET_IFNAME"] = loopback()  # else gloo looks up the host's name, which may lead nowhere
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


def loopback() -> str:
    """The name of the network interface of 127.0.0.1."""
    return "lo0" if sys.platform == "darwin" else "lo"


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
        if not math.isfinite(loss):
            raise DemoError(f"the loss of step {row['step']} is {loss}: {log}")
        if losses.setdefault(row["step"], loss) != loss:
            raise DemoError(f"step {row['step']} was run twice in one job's log, with different losses: {log}")
    return losses


# ---------------------------------------------------------------------------------------------------------------- the story


@dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """A save that was killed: its step, the bytes that it had written, and those of a whole one."""

    step: int
    written: int
    whole: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the losses say of ``steps``: those whose losses are not equal or not there; how many the killed run had done too, and how
    far its losses lie apart."""

    steps: range
    differing: list[int]
    overlap: int
    drift: float

    @property
    def holds(self) -> bool:
        return len(self.steps) > 0 and not self.differing and self.overlap > 0 and self.drift <= DRIFT


class Demo:
    """One run of the demo, with all that it writes below ``work``."""

    def __init__(self, work: Path, scale: Scale) -> None:
        self.work = work
        self.run = work / "run"
        self.scale = scale
        self.began = time.monotonic()

    def tell(self) -> bool:
        """The whole story and its summary; whether everything held."""
        killed = self.train_and_kill()
        start = committed(self.run)[-1]
        assert start.number is not None
        stop = start.number + 2 * self.scale.every
        self.resume(stop)
        self.run_straight(start, stop)
        verdict = self.compare(range(start.number + 1, stop + 1))
        verified = self.look(stop)
        heading("All checks passed" if verdict.holds and verified else "A CHECK FAILED")
        for label, text in self.summary(killed, start.number, verdict):
            print(f"  {label:<10}{text}")
        print(f"  {'verified':<10}{self.stored()}: " + ("every byte matches its digest" if verified else "DAMAGED"))
        print(f"  {'took':<10}{time.monotonic() - self.began:.0f} s")
        return verdict.holds and verified

    def train_and_kill(self) -> Killed:
        """On 4 ranks, until SIGKILL in the middle of a save. If it is committed before the signal arrives, once more, in the next one."""
        for attempt in range(5):
            heading("4 ranks, FSDP2 × tensor parallelism (2 × 2)")
            with self.job(f"trained-{attempt}", 4, "--tp", "2", "--save-every", str(self.scale.every), "--steps", "1000000") as job:
                killed = self.kill_in_a_save(job)
            if committed(self.run)[-1].number != killed.step:
                print(f"SIGKILL to all 4 ranks in the save of step {killed.step}: {size(killed.written)} of {size(killed.whole)} written")
                self.ckpt("ls", "run")
                return killed
            print(f"SIGKILL to all 4 ranks, but step {killed.step} had just committed: trying again in the next save")
        raise DemoError("five saves in a row were committed before the kill arrived")

    def kill_in_a_save(self, job: Job) -> Killed:
        """Wait for a save, with two committed before it, to have written half of its bytes; then kill."""
        while len(done := committed(self.run)) < 2:
            self.still_running(job)
            time.sleep(0.01)
        whole = bytes_in(Path(done[-1].url))
        while (now := saving(self.run)) is None or bytes_in(now) < whole / 2:
            self.still_running(job)
            time.sleep(0.0005)
        job.kill()
        return Killed(step=int(now.name.removeprefix("step-")), written=bytes_in(now), whole=whole)

    def still_running(self, job: Job) -> None:
        if not job.running():
            raise DemoError(f"{job.name} ended before it could be killed")

    def resume(self, stop: int) -> None:
        """On 2 ranks from the newest committed checkpoint, and once more from the one that this saves half way."""
        every = self.scale.every
        for name, title, steps in (
            ("resumed-0", "2 ranks, FSDP2 alone, from the newest committed checkpoint", stop - every),
            ("resumed-1", "Once more, from the checkpoint that these ranks saved", stop),
        ):
            heading(title)
            with self.job(name, 2, "--save-every", str(every), "--steps", str(steps)) as job:
                job.finish()

    def run_straight(self, start: Step, stop: int) -> None:
        heading(f"For comparison: 2 ranks from step {start.number}, without interruption")
        with self.job("straight", 2, "--source", start.url, "--save-every", "0", "--steps", str(stop)) as job:
            job.finish()

    def job(self, name: str, ranks: int, *arguments: str) -> Job:
        return Job(name, ranks, [str(self.run), *self.scale.model, "--losses", str(self.work / f"{name}.losses"), *arguments], self.work)

    # ---- what came of it

    def losses(self, name: str) -> Losses:
        """Of all jobs whose names begin so."""
        return {step: loss for log in sorted(self.work.glob(f"{name}*.losses")) for step, loss in read_losses(log).items()}

    def compare(self, steps: range) -> Verdict:
        trained, resumed, straight = self.losses("trained"), self.losses("resumed"), self.losses("straight")
        overlap = [step for step in steps if step in trained and step in resumed]
        return Verdict(
            steps=steps,
            differing=[step for step in steps if step not in resumed or resumed[step] != straight.get(step)],
            overlap=len(overlap),
            drift=max((abs(trained[step] - resumed[step]) for step in overlap), default=0.0),
        )

    def look(self, stop: int) -> bool:
        """Inspect and verify with the command line; whether all that is committed is whole."""
        heading("The checkpoints")
        self.ckpt("inspect", f"run/step-{stop:08d}", "model.blocks.0.*")
        whole = [self.ckpt("verify", f"run/{Path(step.url).name}") for step in committed(self.run)]
        return all(whole)

    def ckpt(self, *arguments: str) -> bool:
        """Run the ``ckpt`` command for everybody to see; whether its exit code is 0."""
        print(f"$ ckpt {' '.join(arguments)}", flush=True)
        command = "from ckpt.cli.start import main; main()"  # what the installed script does
        return subprocess.run([sys.executable, "-c", command, *arguments], cwd=self.work, check=False).returncode == 0

    def stored(self) -> str:
        steps = committed(self.run)
        return f"{len(steps)} checkpoints, {size(sum(step.tensor_bytes or 0 for step in steps))}"

    def summary(self, killed: Killed, start: int, verdict: Verdict) -> list[tuple[str, str]]:
        trained, steps, gone = self.losses("trained"), verdict.steps, killed.step
        there = " and ".join(str(step.number) for step in committed(self.run) if step.number is not None and step.number <= start)
        equal = f"{len(steps) - len(verdict.differing)} of {len(steps)} steps ({steps[0]} to {steps[-1]})"
        return [
            ("trained", f"4 ranks, FSDP2 × TP (2 × 2), AdamW: loss {trained[1]:.2f} → {trained[gone]:.2f} in {gone} steps"),
            (
                "killed",
                f"SIGKILL to all in the save of step {gone}: {size(killed.written)} of {size(killed.whole)} written, no commit record",
            ),
            ("left", f"steps {there} committed; the files of step {gone} are ignored"),
            ("resumed", f"2 ranks, FSDP2 (2), from step {start}; again from step {gone}, which they saved"),
            ("losses", f"{equal} equal to an uninterrupted run's, bit for bit"),
            ("", f"{verdict.overlap} steps that the killed run had completed on 4 ranks: at most {verdict.drift:.1e} apart"),
        ]


def size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 96 - len(text)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a training run in the middle of a save, resume it elsewhere, compare the losses.")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write into this new directory and leave it there")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the ranks write to it too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank is left behind
    if args.keep is not None:
        args.keep.mkdir(parents=True)
    work = (args.keep or Path(tempfile.mkdtemp(prefix="ckpt-demo-"))).resolve()
    try:
        return 0 if Demo(work, QUICK if args.quick else FULL).tell() else 1
    except DemoError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
