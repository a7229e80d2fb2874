"""The scenario ``scale``, the job's store: what one collective call costs its leader and its server, by the number of ranks.

*played*: a leader over a TCPStore of another process; the rows of all other ranks are put there as they put them. *clients*: ranks that all
have a connection of their own and run the whole protocol, as threads of a few processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.concurrency import gc_paused
from ckpt.net.call import Call
from ckpt.net.channel import ControlChannel
from ckpt.net.group import Group
from ckpt.net.store import Connection, KeyValues, Store
from ckpt.telemetry.spans import Spans

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell

PLAYED = (1024, 4096, 16_384)
CLIENTS, PROCESSES = 1024, 4
MACHINE = 8
"""Ranks of one machine."""
MOST_CALLS = 3
"""Calls of the leader for each machine and save."""
SPANS = 64


class Served:
    """A store in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port: int = ours.recv()

    def cpu(self) -> float:
        """CPU seconds of the server's process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(1e6)


@contextmanager
def served() -> Iterator[Served]:
    server = Served()
    try:
        yield server
    finally:
        server.end()


class Counted(KeyValues):
    """A client that counts what it asks the store."""

    def __init__(self, store: Any) -> None:
        super().__init__(_Counting(store))

    @property
    def calls(self) -> int:
        return int(self._store.calls)


class _Counting:
    def __init__(self, store: Any) -> None:
        self._inner, self.calls = store, 0
        self.underlying_store = store

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        if name == "has_extended_api":
            return inner

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return inner(*arguments)

        return counted


def client(port: int) -> tuple[Store, Callable[[], int]]:
    """A rank's connection, and how much it has asked."""
    from torch.distributed import TCPStore

    counted: list[Counted] = []

    def connect(sockets: list[Any]) -> KeyValues:
        counted.append(Counted(TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)))
        return counted[0]

    store = Store(Connection(connect, f"127.0.0.1:{port}", "127.0.0.1"))
    return store, lambda: counted[0].calls if counted else 0


def rows(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank says at the beginning of a save and at its end."""
    spans = Spans(limit=SPANS)
    for i in range(SPANS):
        spans.add(f"phase-{i % 9}", 100.0 + i, 100.25 + i + rank / 1000, 1 << 20)
    begin = {"table": "1" * 32, "state": "2" * 32, "options": "merge_flat_shards=True codec=None"}
    write = {"files": [[f"data/rank-{rank:08}.safetensors", 123_456_789 + rank, 98_765, f"{rank:032x}"]], "replicas": {"0": "3" * 32}}
    return begin, {**write, "spans": spans.to_json()}


def save(call: Call, *, said: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The phases of a save."""
    for phase, row in zip(("begin", "write"), said, strict=True):
        call.map_reduce(phase, lambda row=row: row, len)  # type: ignore[misc]


def played(ranks: int) -> dict[str, float]:
    """A leader's first save and a later one, where the other ranks are always there before it."""
    with served() as server:
        store, calls = client(server.port)
        others, _ = client(server.port)
        group = Group(0, tuple(range(ranks)), store)
        found: dict[str, float] = {}
        for name in ("first", "later"):
            call = group.call("save", "run/step", 600.0)
            channels = [ControlChannel(others, call.number, rank, ranks, lambda key: None) for rank in range(1, ranks)]
            for turn in range(2):
                for rank, channel in enumerate(channels, 1):
                    channel.turn = turn + 1
                    message = {"kind": "save", "url": "run/step", "row": rows(rank)[turn], "offers": []}
                    channel.post(json.dumps(message).encode())
                    channel.confirm()
            others.check(["all of it has come"])
            asked, before, of_server, said = calls(), cpu_seconds(), server.cpu(), rows(0)
            with gc_paused():
                save(call, said=said)
                call.drain()
            found |= {f"{name} save, CPU s": cpu_seconds() - before, f"{name} save, calls": calls() - asked}
            found |= {f"{name} save, server's CPU s": server.cpu() - of_server}
        return found


def _clients(port: int, ranks: int, mine: range, pipe: Any) -> None:
    """A process with many ranks: two saves on each."""
    connections = [client(port) for _ in mine]
    groups = [Group(rank, tuple(range(ranks)), store) for rank, (store, _) in zip(mine, connections, strict=True)]
    for store, _ in connections:
        store.check(["connected"])
    pipe.send("connected")
    for _ in range(2):
        pipe.recv()
        asked, before = [calls() for _, calls in connections], cpu_seconds()

        def work(group: Group) -> None:
            call = group.call("save", "run/step", 600.0)
            save(call, said=rows(group.rank))
            call.drain()

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send((cpu_seconds() - before, [calls() - n for (_, calls), n in zip(connections, asked, strict=True)]))


def clients(ranks: int, processes: int) -> dict[str, float]:
    """All ranks real: two saves, of which the second is measured."""
    context = multiprocessing.get_context("spawn")
    with served() as server:
        shares = [range(1), *(range(1 + i * (ranks - 1) // processes, 1 + (i + 1) * (ranks - 1) // processes) for i in range(processes))]
        pipes = []
        for share in shares:
            ours, theirs = context.Pipe()
            context.Process(target=_clients, args=(server.port, ranks, share, theirs), daemon=True).start()
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        found: dict[str, float] = {}
        for _ in range(2):
            before, began = server.cpu(), time.perf_counter()
            for pipe in pipes:
                pipe.send("go")
            results = [pipe.recv() for pipe in pipes]
            others = [calls for _, counts in results[1:] for calls in counts]
            found = {
                "wall s": time.perf_counter() - began,
                "leader's CPU s": results[0][0],
                "leader's calls": results[0][1][0],
                "calls of another rank": sum(others) / len(others),
                "server's CPU s": server.cpu() - before,
            }
        return found


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """At most ``settings.scale_ranks`` ranks. ``pool`` and ``place`` are not used: the ranks are played, or threads."""
    sizes = tuple(dict.fromkeys(min(ranks, settings.scale_ranks) for ranks in PLAYED))
    real_ranks = min(CLIENTS, settings.scale_ranks)
    del pool, place
    table: dict[int, dict[str, float]] = {}
    for ranks in sizes:
        table[ranks] = played(ranks)
        tell(f"scale, store: leader of {ranks:,}: " + ", ".join(f"{k} {v:.3g}" for k, v in table[ranks].items()))
    real = clients(real_ranks, PROCESSES)
    tell(f"scale, store: {real_ranks:,} clients: " + ", ".join(f"{k} {v:.3g}" for k, v in real.items()))
    most = table[sizes[-1]]
    return [
        Finding(
            scenario="scale",
            title="the leader of a job and its store",
            columns=("", *(f"{ranks:,} ranks" for ranks in sizes)),
            rows=[(key, *(f"{table[ranks][key]:.3g}" for ranks in sizes)) for key in most],
            figures={str(ranks): found for ranks, found in table.items()},
            checks=(
                at_most(
                    f"leader's CPU of a first and a later save of {sizes[-1]:,}",
                    most["first save, CPU s"] + most["later save, CPU s"],
                    1.0,
                    "s",
                ),
                at_most("leader's calls for each machine and save", most["later save, calls"] / (sizes[-1] / MACHINE), MOST_CALLS),
            ),
        ),
        Finding(
            scenario="scale",
            title=f"a save of {real_ranks:,} real clients",
            columns=("", "ckpt"),
            rows=[(key, f"{value:.3g}") for key, value in real.items()],
            figures=real,
            checks=(at_most("leader's calls for each machine and save", real["leader's calls"] / (real_ranks / MACHINE), MOST_CALLS),),
        ),
    ]
