"""Trainers and daemons that are killed or stopped at any moment of a save, a copy, a publication and a restore.

One run of two machines with copies, or of three with parity, lives on through all faults. What each life begins with tells whether the
one before lost anything: it is one step, whole, on all ranks, and none before the newest that a surviving copy, or parity, has. ``--slow``
does 40 kills of each; by hand ``python -m tests.memory.test_faults kill 200 7 3`` (or ``stop``; then a number of faults, a seed, and
``parity=``; FAULTS_TIMEOUT=30 on a busy machine).
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
from ckpt.nodes.memory_client import MemoryClient
from tests.distributed.ranks import Lost, Ranks
from tests.memory import faults
from tests.memory.daemons import daemon_in
from tests.memory.faults import Ending, Fault

MARGIN = 20.0
"""Seconds that a rank may be late on a busy machine."""


@dataclass(eq=False)
class Known:
    """What is safe, by the notes of the ranks: for each step the machines that have not lost their memory since. One that is durable
    takes all of them; one that is copied, or has parity, all but one."""

    machines: int
    begun: int = 0
    durable: dict[int, set[int]] = field(default_factory=dict)
    copied: dict[int, set[int]] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        for notes in (folder / f"notes{machine}" for machine in range(self.machines)):
            for line in notes.read_text().splitlines() if notes.exists() else []:
                what, step = line.split()
                if what == "begin":
                    self.begun = max(self.begun, int(step))
                else:
                    {"durable": self.durable, "copied": self.copied}[what].setdefault(int(step), set(range(self.machines)))
            notes.unlink(missing_ok=True)

    def lose(self, machine: int) -> None:
        """Its memory is gone."""
        for left in [*self.durable.values(), *self.copied.values()]:
            left.discard(machine)

    def restored(self, step: int | None) -> None:
        """A new life goes on from there: what comes after counts no more."""
        self.begun = step or 0
        for steps in (self.durable, self.copied):
            for n in [n for n in steps if n > self.begun]:
                del steps[n]

    def floor(self, root: int, without: int | None) -> int:
        """The newest step that must still be there, also ``without`` the memory of a machine. Memory keeps two steps, and one that was
        begun may have replaced the older one."""
        here = [n for n, left in self.durable.items() if len(left - {without}) == self.machines]
        here += [n for n, left in self.copied.items() if len(left - {without}) >= self.machines - 1]
        return max([root, *(n for n in here if n >= self.begun - 1)])


class Campaign:
    """A run and its machines, through many faults."""

    def __init__(self, folder: Path, daemons: list[MemoryClient], parity: int | None) -> None:
        self.folder = folder
        self.daemons = daemons
        self.parity = parity
        self.pids = [int(daemon.status()["pid"]) for daemon in daemons]
        """Asked before a fault: a daemon that is stopped does not say."""
        self.known = Known(len(daemons))
        self.ranks = Ranks(len(daemons))
        self.table: Counter[tuple[str, str, str]] = Counter()
        self.went_back = 0

    def go(self, fault: Fault | None, dim: int, steps: int = 4) -> None:
        """One life, which has to begin with all that must be there."""
        # A daemon may die before the life has restored anything.
        without = fault.machine if fault is not None and (fault.victim, fault.how) == ("daemon", "kill") else None
        floor = self.known.floor(newest_at(f"{self.folder}/root"), without)
        newest = self.known.begun
        given = str(self.folder), steps, dim, fault, self.parity
        endings = self.ranks.run(len(self.daemons), faults.life, *given, timeout=15 * faults.TIMEOUT, allow_death=True)
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
        happened = any((self.folder / f"daemon{m}.armed").exists() for m in range(len(self.daemons)))
        if fault is not None:
            if not happened:
                outcome = "ended before"
            elif fault.victim == "rank" and lost:
                outcome = "rank died, others told" if all(e.error for e in alive) else "rank died"
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
        for machine in range(len(self.daemons)):
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


def machines_of(parity: int | None) -> int:
    return 2 if parity is None else parity


def point(chance: random.Random, how: str, parity: int | None = None) -> Fault:
    """A victim, a moment or a phase."""
    victim = chance.choice(["rank", "daemon"])
    phases = {**faults.PHASES, **(faults.COPY_PHASES if parity is None else faults.PARITY_PHASES)}
    phase = chance.choice([*phases]) if chance.random() < 0.7 else ""
    return Fault(
        victim=victim,
        machine=chance.randrange(machines_of(parity)),
        how=how,
        phase=phase,
        nth=1 if phase in ("meet", "restore", "compute") else chance.randint(1, 6),
        seconds=chance.uniform(0, 2.5),
        resume=chance.choice([0.5, 1.5 * faults.TIMEOUT]),
        waits=chance.random() < 0.7,
    )


def campaign(folder: Path, points: list[Fault], parity: int | None = None) -> Campaign:
    with ExitStack() as stack:
        os.environ["CKPT_MEMORY_IDLE"] = "600"
        machines = range(machines_of(parity))
        it = Campaign(folder, [stack.enter_context(daemon_in(folder / f"daemon{m}")) for m in machines], parity)
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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("how", "count", "parity"), [("kill", 40, None), ("stop", 15, None), ("kill", 40, 3)])
def test_any_moment(tmp_path: Path, how: str, count: int, parity: int | None) -> None:
    chance = random.Random(count)
    campaign(tmp_path, [point(chance, how, parity) for _ in range(count)], parity)


def main() -> None:
    how, count = sys.argv[1], int(sys.argv[2])
    seed, parity = int(sys.argv[3]) if len(sys.argv) > 3 else 0, int(sys.argv[4]) if len(sys.argv) > 4 else None
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        done = campaign(Path(folder), [point(chance, how, parity) for _ in range(count)], parity)
    for (victim, phase, outcome), times in sorted(done.table.items()):
        print(f"{times:4} {how} {victim:6} {phase:10} {outcome}")
    print(f"{done.went_back} lives began more than one step before the newest that was begun; nothing that a copy had was lost")


if __name__ == "__main__":
    main()
