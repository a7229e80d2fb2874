"""Items in flight are handed out again after a crash, and each is finished exactly once in the result."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import ckpt
from ckpt.errors import StateError, UsageError
from ckpt.policies import Latest
from ckpt.training import Batches, Inflight, ResumableLoader, Ticket
from tests.data.datasets import Queue
from tests.distributed.ranks import fork_server

PROMPTS, ROUNDS, BATCH = 20, 40, 4


class Crash(Exception):
    """The process is gone."""


class Rollouts:
    """A toy: rollouts end in any order, some fail, and finished ones wait in a replay buffer, staler or less stale."""

    def __init__(self, chance: random.Random) -> None:
        self.work = Inflight([n % PROMPTS for n in range(PROMPTS * ROUNDS)])
        self.buffer: list[dict[str, int]] = []
        self._chance, self._going = chance, list[Any]()

    def restored(self) -> None:
        self.work.keep(one["number"] for one in self.buffer)

    def go_on(self) -> bool:
        """One event; False: nothing is left to do."""
        while len(self._going) < 6 and (ticket := self.work.take()) is not None:
            self._going.append(ticket)
        if not self._going:
            return False
        ticket = self._going.pop(self._chance.randrange(len(self._going)))
        if self._chance.random() < 0.1:
            self.work.give_back([ticket.number])
        else:
            self.buffer.append({"number": ticket.number, "prompt": ticket.item, "reward": self._chance.randrange(9)})
        return True

    def batch(self, size: int = BATCH) -> list[dict[str, int]]:
        """Rollouts to train on, which leave the buffer."""
        chosen = self._chance.sample(range(len(self.buffer)), min(size, len(self.buffer)))
        batch = [self.buffer[i] for i in chosen]
        self.buffer[:] = [one for i, one in enumerate(self.buffer) if i not in chosen]
        return batch


def life(root: str, chance: random.Random, crash: Callable[[], None]) -> list[int]:
    """Train until all prompts are used, or the crash; how often each prompt was used."""
    rollouts = Rollouts(chance)
    state: dict[str, Any] = {"work": rollouts.work, "buffer": rollouts.buffer, "used": [0] * PROMPTS}
    with ckpt.Checkpointer(root, keep=Latest(1), alerts=False) as c:
        n = c.restore(state) or 0
        rollouts.restored()
        going = True
        while going or rollouts.buffer:
            crash()
            going = rollouts.go_on()
            if len(rollouts.buffer) < 2 * BATCH and going:  # the others wait
                continue
            batch = rollouts.batch()
            crash()
            for one in batch:
                state["used"][one["prompt"]] += 1
            rollouts.work.finish(one["number"] for one in batch)
            n += 1
            if n % 2 == 0:
                c.save(n, state)
    return list(state["used"])


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_after_fifty_crashes_each_prompt_is_used_as_often(seed: int, tmp_path: Path) -> None:
    chance, crashes, used = random.Random(seed), 0, None
    while used is None:
        left = iter(range(chance.randrange(1, 36) if crashes < 50 else 10**6))

        def crash(left: Any = left) -> None:
            if next(left, None) is None:
                raise Crash

        try:
            used = life(str(tmp_path / "run"), chance, crash)
        except Crash:
            crashes += 1
    assert crashes == 50 and used == [ROUNDS] * PROMPTS


def test_what_is_not_finished_is_handed_out_again() -> None:
    work = Inflight("abcdef")
    first, second, third = (work.take() for _ in range(3))
    assert first is not None and second is not None and third is not None
    work.finish([second.number])
    work.give_back([first.number])
    with pytest.raises(UsageError, match="item 1 is not in flight"):
        work.finish([1])
    with pytest.raises(UsageError, match="twice"):
        work.finish([0, 0])
    again = Inflight("abcdef")
    again.load_state_dict(work.state_dict())
    assert (len(work), len(again)) == (2, 2)
    again.keep([2])
    assert [(t.number, t.item) for t in iter(again.take, None)] == [(0, "a"), (3, "d"), (4, "e"), (5, "f")]
    late = Inflight("abcdef")
    late.load_state_dict(work.state_dict())
    late.finish([0])  # a rollout that came in after all, while its item waited to be handed out again
    assert [t.item for t in iter(late.take, None)] == ["c", "d", "e", "f"]
    with pytest.raises(StateError, match="another source"):
        Inflight("abc").load_state_dict(work.state_dict())
    with pytest.raises(UsageError, match="a sequence"):
        Inflight(iter("abc"))
    work.finish([0])  # a rollout that was given up has ended all the same
    assert work.take() == Ticket(number=3, item="d")


def test_a_source_with_a_state_and_the_state_as_of_a_step() -> None:
    work = Inflight(Queue(range(6)))
    for _ in range(4):
        work.take()
    work.finish([0], step=1)
    work.finish([1, 2], step=2)
    then, now = Inflight(Queue(range(6))), Inflight(Queue(range(6)))
    then.load_state_dict(work.as_of(1).state_dict())
    now.load_state_dict(work.as_of(2).state_dict())
    assert [t.item for t in iter(then.take, None)] == [1, 2, 3, 4, 5]
    assert [t.item for t in iter(now.take, None)] == [3, 4, 5]


def test_a_loader_counts_what_was_used() -> None:
    def make() -> ResumableLoader[Any]:
        return ResumableLoader(DataLoader(range(10), batch_sampler=Batches(10, size=2, order="as-is")), counts="used")  # type: ignore[arg-type]

    loader, ahead, seen = make(), deque[list[int]](), []
    for batch in loader:
        ahead.append(batch.tolist())
        if len(ahead) > 2:
            seen += ahead.popleft()
            loader.used()
        if len(seen) == 4:
            break
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert (seen, loader.taken, resumed.taken) == ([0, 1, 2, 3], 4, 4)
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9]]
    assert [batch.tolist() for batch in loader] == [[8, 9]]  # the loop that was left had got more
    for _ in range(3):
        resumed.used()
    with pytest.raises(UsageError, match="counts already"):
        resumed.used()


# ---- two jobs, of which one hands out and the other uses, killed at any moment


def trainer(root: str, other: Connection, out: str) -> None:
    state: dict[str, Any] = {"used": [0] * PROMPTS}
    with ckpt.Checkpointer(root, member=ckpt.Member("trainer", of=("trainer", "rollouts")), job=ckpt.Job(timeout=60)) as c:
        n = c.restore(state) or 0
        while batch := other.recv():
            n += 1
            for one in batch:
                state["used"][one["prompt"]] += 1
            other.send((n, [one["number"] for one in batch]))
            if n % 3 == 0:
                c.save(n, state)
        c.save(n + 1, state)
        c.wait()
    Path(out).write_text(" ".join(map(str, state["used"])))


def rollouts(root: str, other: Connection, seed: int) -> None:
    """It is one batch ahead: what the trainer has used lately is known when the next batch is on its way."""
    rolls, n = Rollouts(random.Random(seed)), 0
    state: dict[str, Any] = {"work": rolls.work, "buffer": rolls.buffer}
    with ckpt.Checkpointer(root, member=ckpt.Member("rollouts", of=("trainer", "rollouts")), job=ckpt.Job(timeout=60)) as c:
        c.restore(state)
        rolls.restored()
        sent = 0
        going = True
        while going or rolls.buffer or sent:
            going = rolls.go_on()
            if (going and len(rolls.buffer) >= 2 * BATCH) or (not going and rolls.buffer):
                other.send(rolls.batch())
                sent += 1
            if sent > 1 or (not going and sent):
                n, numbers = other.recv()
                sent -= 1
                rolls.work.finish(numbers, step=n)
                if n % 3 == 0:
                    c.save(n, {**state, "work": rolls.work.as_of(n)})
        other.send([])
        c.save(n + 1, state)
        c.wait()


@pytest.mark.slow
def test_two_jobs_that_are_killed_use_each_prompt_as_often(tmp_path: Path) -> None:
    context, chance, kills = fork_server(), random.Random(3), 0
    out = tmp_path / "out"
    while not out.exists():
        ours, theirs = context.Pipe()
        arguments = [(trainer, (str(tmp_path / "run"), ours, str(out))), (rollouts, (str(tmp_path / "run"), theirs, kills))]
        jobs = [context.Process(target=target, args=args) for target, args in arguments]
        for job in jobs:
            job.start()
        ours.close()
        theirs.close()
        victim = chance.choice(jobs)
        victim.join(chance.uniform(0.3, 4.0) if kills < 50 else 300)
        if victim.exitcode is None:
            kills += 1
            victim.kill()
            victim.join()
        for job in jobs:
            job.join(1.0 if victim.exitcode == -signal.SIGKILL else 300)
            job.kill()
            job.join()
    print(f"{kills} kills")
    assert out.read_text().split() == [str(ROUNDS)] * PROMPTS
