"""A toy run of reinforcement learning whose two jobs are killed at random moments, by how they save: ``python -m tests.joint.campaign``.

The trainer asks the rollouts for batches of prompts that are finished. Each way is the smallest copy of a logic, with nothing else of it:

* alone: each job saves for itself, and goes on from its newest.
* verl: ``fully_async_policy`` of 0.8.0.dev (b178a3c). The trainer saves, the rollouter saves the position of its dataloader, and a tracker
  names the step. Its source says that samples in flight are lost.
* nemo-rl: async GRPO (7ea279a), before pull request 3599, which mends it. Policy, dataloader and then the replay buffer go into a directory
  that is renamed.
* ckpt: two members of one run, with ``ckpt.training.Inflight``.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.policies import Latest
from ckpt.training import Inflight
from tests.distributed.ranks import fork_server

PROMPTS, BATCH, EVERY, GOING, BUFFER = 12_000, 4, 3, 8, 16
STEP = 0.003
WAYS = ("alone", "verl", "nemo-rl", "ckpt")
MEMBERS = ("trainer", "rollouts")


class Pipe:
    """To the other job: this one ends with it, at once."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def send(self, words: Any) -> None:
        self._or_end(lambda: self._end.send(words))

    def recv(self) -> Any:
        return self._or_end(self._end.recv)

    def poll(self, seconds: float) -> bool:
        return bool(self._or_end(lambda: self._end.poll(seconds)))

    @staticmethod
    def _or_end(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError):
            os._exit(0)


class Dataloader:
    """Knows how many prompts it has handed out, and not what becomes of them."""

    def __init__(self) -> None:
        self.position = 0

    def take(self) -> int | None:
        self.position += 1
        return self.position - 1 if self.position <= PROMPTS else None


class Rollouts:
    """Prompts that end in any order, and wait in a buffer until the trainer takes them."""

    def __init__(self, take: Callable[[], int | None], seed: int) -> None:
        self.buffer: list[int] = []
        self._take, self._going, self._chance = take, list[int](), random.Random(seed)

    def go_on(self) -> None:
        while len(self._going) < GOING and (prompt := self._take()) is not None:
            self._going.append(prompt)
        if self._going and len(self.buffer) < BUFFER:
            self.buffer.append(self._going.pop(self._chance.randrange(len(self._going))))

    def batch(self) -> list[int] | None:
        """Prompts to train on; none yet; or None: all are used."""
        full = len(self.buffer) >= BATCH or not self._going
        batch = self.buffer[:BATCH] if full else []
        del self.buffer[: len(batch)]
        return batch if batch or self._going else None


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, f"{path}.part")
    time.sleep(STEP)  # it takes as long as a step
    os.replace(f"{path}.part", path)


def newest(root: Path, prefix: str) -> int:
    return max(
        (int(path.name.removeprefix(prefix)) for path in root.glob(f"{prefix}[0-9]*") if path.suffix != ".part"),
        default=0,
    )


def newest_common(way: str, root: Path) -> int:
    """The step that the files of others name: a tracker, or a directory that was renamed."""
    tracker = root / "latest_checkpointed_iteration.txt"
    return newest(root, "step_") if way == "nemo-rl" else int(tracker.read_text()) if tracker.exists() else 0


def trainer(way: str, root: Path, end: Connection, log: Path, out: Path) -> None:
    other = Pipe(end)
    used = torch.zeros(PROMPTS, dtype=torch.uint8)

    def ask(*words: Any) -> Any:
        other.send(words)
        return other.recv()

    with ExitStack() as stack:
        if way == "ckpt":
            options: dict[str, Any] = {
                "keep": Latest(2),
                "job": ckpt.Job(timeout=60),
                "alerts": False,
            }
            c = stack.enter_context(ckpt.Checkpointer(str(root), member=ckpt.Member("trainer", of=MEMBERS), **options))
            n = c.restore({"used": used}) or 0
        else:
            n = newest(root, "trainer_") if way == "alone" else newest_common(way, root)
            of_step = {
                "alone": f"trainer_{n}",
                "verl": f"global_step_{n}/actor",
                "nemo-rl": f"step_{n}/policy",
            }
            if n:
                used = torch.load(root / of_step[way], weights_only=True)
        log.write_text(f"{n}\n")
        while (batch := ask("batch")) is not None:
            if not batch:
                continue
            time.sleep(STEP)
            used[batch] += 1
            n += 1
            ask("used", batch)
            if n % EVERY:
                continue
            if way == "alone":
                write(root / f"trainer_{n}", used)
                ask("alone", n)
            elif way == "verl":
                write(root / f"global_step_{n}/actor", used)
                ask("dataloader", f"global_step_{n}/data.pt")
                (root / "latest_checkpointed_iteration.txt").write_text(str(n))
            elif way == "nemo-rl":
                write(root / f"tmp_step_{n}/policy", used)
                ask("dataloader", f"tmp_step_{n}/train_dataloader.pt")
                ask("buffer", f"tmp_step_{n}/replay_buffer.pt")
                os.rename(root / f"tmp_step_{n}", root / f"step_{n}")
            else:
                c.save(n, {"used": used})
                ask("ckpt", n)
    write(out, used)
    other.send(("end",))


def rollouts(way: str, root: Path, end: Connection, log: Path, seed: int) -> None:
    other = Pipe(end)
    loader, work = Dataloader(), Inflight(range(PROMPTS))

    def from_inflight() -> int | None:
        ticket = work.take()
        return None if ticket is None else ticket.item

    rolls = Rollouts(from_inflight if way == "ckpt" else loader.take, seed)
    with ExitStack() as stack:
        if way == "ckpt":
            options: dict[str, Any] = {"job": ckpt.Job(timeout=60), "alerts": False}
            c = stack.enter_context(ckpt.Checkpointer(str(root), member=ckpt.Member("rollouts", of=MEMBERS), **options))
            state: dict[str, Any] = {"work": work, "buffer": rolls.buffer}
            n = c.restore(state) or 0
            rolls.buffer = state["buffer"]
            work.keep(rolls.buffer)
        else:
            n = newest(root, "rollouts_") if way == "alone" else newest_common(way, root)
            if n and way == "alone":
                loader.position, rolls.buffer = torch.load(root / f"rollouts_{n}", weights_only=True)
            elif n and way == "verl":
                loader.position = torch.load(root / f"global_step_{n}/data.pt", weights_only=True)
            elif n:
                loader.position = torch.load(root / f"step_{n}/train_dataloader.pt", weights_only=True)
                rolls.buffer = torch.load(root / f"step_{n}/replay_buffer.pt", weights_only=True)
        log.write_text(f"{n}\n")
        while True:
            rolls.go_on()
            if not other.poll(0.0005):
                continue
            match other.recv():
                case ("batch",):
                    other.send(rolls.batch())
                    continue
                case ("used", numbers):
                    if way == "ckpt":
                        work.finish(numbers)
                case ("alone", step):
                    write(root / f"rollouts_{step}", [loader.position, rolls.buffer])
                case ("dataloader", path):
                    write(root / path, loader.position)
                case ("buffer", path):
                    write(root / path, rolls.buffer)
                case ("ckpt", step):
                    c.save(step, {"work": work, "buffer": rolls.buffer})
                case _:
                    return  # the trainer has used all
            other.send(None)


def lives(way: str, kills: int, seed: int, folder: Path) -> Iterator[list[int]]:
    """The steps that the members went on from, once for each life; none if they cannot. The last life ends by itself."""
    context, chance, out = fork_server(), random.Random(seed), folder / "out"
    (folder / "run").mkdir()
    tracker = folder / "run" / "latest_checkpointed_iteration.txt"
    for life in range(10**6):
        if tracker.exists() and not tracker.read_text():  # killed while it was written: a person mends it
            tracker.write_text(str(max(int(path.parent.name.removeprefix("global_step_")) for path in tracker.parent.glob("*/data.pt"))))
            yield []
        logs = [folder / f"{name}-{life}" for name in MEMBERS]
        ours, theirs = context.Pipe()
        jobs = [
            context.Process(target=trainer, args=(way, folder / "run", ours, logs[0], out)),
            context.Process(
                target=rollouts,
                args=(way, folder / "run", theirs, logs[1], seed + life),
            ),
        ]
        for job in jobs:
            job.start()
        ours.close()
        theirs.close()
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs) and all(job.is_alive() for job in jobs):
            time.sleep(0.005)
        chance.shuffle(jobs)
        jobs[0].join(chance.uniform(0.02, 0.25) if life < kills else 300)
        ended = out.exists()
        for job in jobs:
            if ended:
                job.join(60)
            with suppress(ProcessLookupError):
                job.kill()
            job.join()
            if job.exitcode not in (0, -9) and job is jobs[0]:
                raise RuntimeError(f"{way}: a job failed by itself")
        yield [int(log.read_text()) for log in logs]
        if ended:
            return


def campaign(way: str, kills: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        resumed = list(lives(way, kills, seed, Path(folder)))
        used = torch.load(Path(folder) / "out", weights_only=True)
    return {
        "way": way,
        "kills": sum(map(bool, resumed)) - 1,
        "cannot resume": resumed.count([]),
        "disagree": sum(len(set(steps)) > 1 for steps in resumed),
        "lost": int((used == 0).sum()),
        "repeated": int((used > 1).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=WAYS, action="append")
    arguments = parser.parse_args()
    for way in arguments.way or WAYS:
        print(campaign(way, arguments.kills, arguments.seed), flush=True)


if __name__ == "__main__":
    main()
