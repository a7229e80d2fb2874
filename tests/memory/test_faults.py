"""Trainers and daemons that are killed or stopped at any moment of a save, a copy, a publication and a restore.

One run of two machines lives on through all faults. What each life begins with tells whether the one before lost anything: it is one step,
whole, on all ranks, and none before the newest that a surviving copy has. ``--slow`` does 40 kills; by hand
``python -m tests.memory.test_faults kill 200 7`` (or ``stop``; then a number of faults and a seed; FAULTS_TIMEOUT=30 on a busy machine).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import ckpt
from ckpt.memory.client import MemoryClient
from tests.distributed.ranks import Lost, Ranks
from tests.memory import faults
from tests.memory.daemons import daemon_in
from tests.memory.faults import Ending, Fault

MACHINES = 2
MARGIN = 20.0
"""Seconds that a rank may be late on a busy machine."""


@dataclass(eq=False)
class Known:
    """What is safe, by the notes of the ranks. ``needs``: for each step the machines of which all, or one, must keep their memory."""

    begun: int = 0
    all_of: dict[int, set[int]] = field(default_factory=dict)
    one_of: dict[int, set[int]] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        for machine in range(MACHINES):
            for line in (folder / f"notes{machine}").read_text().splitlines() if (folder / f"notes{machine}").exists() else []:
                what, step = line.split()
                if what == "begin":
                    self.begun = max(self.begun, int(step))
                elif what == "durable":
                    self.all_of.setdefault(int(step), set(range(MACHINES)))
                else:
                    self.one_of[int(step)] = set(range(MACHINES))
            (folder / f"notes{machine}").unlink(missing_ok=True)

    def lose(self, machine: int) -> None:
        """Its memory is gone."""
        self.all_of = {n: needed for n, needed in self.all_of.items() if machine not in needed}
        self.one_of = {n: left for n, needed in self.one_of.items() if (left := needed - {machine})}

    def restored(self, step: int | None) -> None:
        """A new life goes on from there: what comes after counts no more."""
        self.begun = step or 0
        self.all_of = {n: needed for n, needed in self.all_of.items() if n <= self.begun}
        self.one_of = {n: needed for n, needed in self.one_of.items() if n <= self.begun}

    def floor(self, root: int, without: int | None) -> int:
        """The newest step that must still be there, also ``without`` the memory of a machine. Memory keeps two steps, and one that was
        begun may have replaced the older one."""
        here = [n for n, needed in self.all_of.items() if without not in needed] + [
            n for n, any_of in self.one_of.items() if any_of - {without}
        ]
        safe = [n for n in here if n >= self.begun - 1]
        return max([root, *safe])


class Campaign:
    """A run and its machines, through many faults."""

    def __init__(self, folder: Path, daemons: list[MemoryClient]) -> None:
        self.folder = folder
        self.daemons = daemons
        self.pids = [int(daemon.status()["pid"]) for daemon in daemons]
        """Asked before a fault: a daemon that is stopped does not say."""
        self.known = Known()
        self.ranks = Ranks(MACHINES)
        self.table: Counter[tuple[str, str, str]] = Counter()
        self.went_back = 0

    def go(self, fault: Fault | None, dim: int, steps: int = 4) -> None:
        """One life, which has to begin with all that must be there."""
        # A daemon may die before the life has restored anything.
        without = fault.machine if fault is not None and (fault.victim, fault.how) == ("daemon", "kill") else None
        floor = self.known.floor(newest_at(f"{self.folder}/root"), without)
        newest = self.known.begun
        endings = self.ranks.run(MACHINES, faults.life, str(self.folder), steps, dim, fault, timeout=15 * faults.TIMEOUT, allow_death=True)
        for pid in self.pids:  # the rank that was to wake its daemon may have ended first
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        killed = fault is not None and fault.victim == "rank" and fault.how == "kill"
        alive = [e for e in endings if isinstance(e, Ending)]
        lost = [e for e in endings if isinstance(e, Lost)]
        about = f"{fault}, at least {floor} of {newest}: {endings}"
        assert all(e.exitcode == -signal.SIGKILL and killed for e in lost) and len(lost) <= 1, about
        assert all(e.whole for e in alive), f"mixed or damaged. {about}"
        begun_with = {e.restored for e in alive if e.error is None or e.restored is not None}
        assert len(begun_with) <= 1, f"ranks differ. {about}"
        assert all(e.seconds < 6 * faults.TIMEOUT + MARGIN for e in alive), f"too late. {about}"
        happened = any((self.folder / f"daemon{m}.armed").exists() for m in range(MACHINES))
        if fault is not None:
            if not happened:
                outcome = "ended before"
            elif fault.victim == "rank" and lost:
                outcome = "rank died, other told" if all(e.error for e in alive) else "rank died"
            else:
                outcome = "told" if any(e.error for e in alive) else "not noticed"
            self.table[fault.victim, fault.phase or "any moment", outcome] += 1
        if begun_with:
            (start,) = begun_with
            assert (start or 0) >= floor, f"lost steps that a copy has. {about}"
            self.went_back += newest - (start or 0) > 1
            self.known.restored(start)
        self.known.read(self.folder)
        if fault is not None and happened:
            self.mend(fault)

    def mend(self, fault: Fault) -> None:
        """A daemon that was killed comes back empty; one that was stopped goes on."""
        for machine in range(MACHINES):
            (self.folder / f"daemon{machine}.armed").unlink(missing_ok=True)
        if fault.victim == "daemon" and fault.how == "kill":
            self.known.lose(fault.machine)
        for machine, daemon in enumerate(self.daemons):
            end = time.monotonic() + 20
            while True:
                daemon.reach(start=True)
                status = daemon.status()
                if not status["lent"]:
                    break
                assert time.monotonic() < end, f"{fault}: memory of a process that is gone stays lent: {status}"
                time.sleep(0.05)
            self.pids[machine] = int(status["pid"])

    def end(self) -> None:
        """A life without a fault brings everything back; after it nothing is left over, and nothing after a drop."""
        self.go(None, 0)
        assert newest_at(f"{self.folder}/root") == self.known.begun
        for daemon in self.daemons:
            committed = {k.path.split("/")[1] for k in daemon.list() if k.path.endswith("checkpoint.json")}
            left = [k for k in daemon.list() if k.path.split("/")[1] not in committed]
            # A rank that dies while the job meets leaves an empty file, of a name that `ckpt gc` knows.
            assert all(k.size == 0 and "/.prepare-" in k.path for k in left), f"orphans: {[k.path for k in left]}"
            assert len(committed) == 2
            daemon.drop("")
            status = daemon.status()
            assert not any(status[kind] for kind in ("objects", "lent", "dropped", "spare")), status


def newest_at(root: str) -> int:
    return max([s.number or 0 for s in ckpt.list_steps(root) if s.committed], default=0)


def point(chance: random.Random, how: str) -> Fault:
    """A victim, a moment or a phase."""
    victim = chance.choice(["rank", "daemon"])
    phase = chance.choice([*faults.PHASES]) if chance.random() < 0.7 else ""
    return Fault(
        victim=victim,
        machine=chance.randrange(MACHINES),
        how=how,
        phase=phase,
        nth=1 if phase in ("meet", "restore") else chance.randint(1, 6),
        seconds=chance.uniform(0, 2.5),
        resume=chance.choice([0.5, 1.5 * faults.TIMEOUT]),
        waits=chance.random() < 0.7,
    )


def campaign(folder: Path, points: list[Fault]) -> Campaign:
    with ExitStack() as stack:
        os.environ["CKPT_MEMORY_IDLE"] = "600"
        it = Campaign(folder, [stack.enter_context(daemon_in(folder / f"daemon{m}")) for m in range(MACHINES)])
        it.go(None, 0)
        for number, fault in enumerate(points):
            it.go(fault, number % 2)
            if __name__ == "__main__":
                print(f"{number + 1}: {fault.how} {fault.victim}{fault.machine} {fault.phase or f'{fault.seconds:.2f} s'}", flush=True)
        it.end()
        return it


@pytest.mark.alone
def test_a_few_kills(tmp_path: Path) -> None:
    """One of a trainer in the middle of a removal, which leaves files without a record, one of a daemon in the middle of a copy."""
    points = [Fault(victim="rank", machine=0, phase="retain", nth=3), Fault(victim="daemon", machine=1, phase="copy", nth=2)]
    assert sum(campaign(tmp_path, points).table.values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [("kill", 40), ("stop", 15)])
def test_any_moment(tmp_path: Path, how: str, count: int) -> None:
    chance = random.Random(count)
    campaign(tmp_path, [point(chance, how) for _ in range(count)])


def main() -> None:
    how, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        done = campaign(Path(folder), [point(chance, how) for _ in range(count)])
    for (victim, phase, outcome), times in sorted(done.table.items()):
        print(f"{times:4} {how} {victim:6} {phase:10} {outcome}")
    print(f"{done.went_back} lives began more than one step before the newest that was begun; nothing that a copy had was lost")


if __name__ == "__main__":
    main()
