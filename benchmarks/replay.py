"""A save and a restart of thousands of ranks, *simulated*: ``python -m benchmarks.replay``.

1. Small saves and loads are recorded on 2, 4 and 8 real ranks, with few and many tensors, few and many bytes: of the leader (rank 0) and of
   another rank the CPU seconds (the least of the repetitions: other work makes them larger, never smaller), and counts: requests to the
   storage, bytes to it and from it, messages through the busiest process of the job, and bytes that ranks send each other.
2. Each is fitted as a sum of named costs (``NAMES``) on 2 and 4 ranks. The 8 ranks are left out: they say how far the sum is off.
   More ranks than cores slow each other down, also those of *raw*, which pays nothing for other ranks: its error is the machine's.
3. The sums are played for many ranks. A ``Storage`` that is declared turns them into seconds: nothing overlaps, the slowest rank counts.

CPU seconds, counts and bytes are measured; no wall time is. So another machine or its load change seconds by the declaration alone.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import inf
from multiprocessing import get_context
from typing import Any

import click
import numpy as np

from .measure import cpu_seconds
from .places import Place, machine, size_of
from .pool import Pool, Rank
from .report import aligned

NAMES = ("call", "tensor", "byte", "rank", "rank×tensor")
"""What a cost is paid for: once; for each tensor, for each byte of a rank; for each rank, for each tensor of each rank."""
SEEN, UNSEEN, MANY = (2, 4), 8, 1024
"""Ranks of the traces that are fitted and that are left out; and of jobs whose leader is real, and played by one process (``played``,
``played_dcp``): they are fitted, too, since what a leader pays for one more rank is lost in the noise of four."""
PLAYED = (8, 64, 1024, 16_384)
CONTESTANTS = ("ckpt", "dcp", "torch_checkpointing", "raw")
OF_RANKS = 2
"""The last so many of ``NAMES`` grow with the ranks."""
TOTALS = ("stored", "served", "sent")
COUNTS = ("requests", "stored", "served", "sent")
"""``requests`` of the busiest rank, bytes ``stored`` or read by all, messages ``served`` by the busiest process, bytes ``sent`` in them."""
MB = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is saved: ``ranks``, each with a shard of ``tensors`` tensors that takes ``nbytes``."""

    ranks: int
    tensors: int
    nbytes: int

    @property
    def features(self) -> tuple[float, ...]:
        """How often each of ``NAMES`` is paid for."""
        return 1.0, self.tensors, self.nbytes, self.ranks, self.ranks * self.tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What is declared. ``host`` and ``total``: bytes a second of each host and of all; ``latency``: seconds of a request; ``message``:
    seconds of the job's busiest process for a message; ``wire``: bytes a second that it takes."""

    host: float
    total: float
    latency: float
    ranks_per_host: int
    message: float
    wire: float

    def seconds(self, load: Load, figures: Mapping[str, float]) -> float:
        """Of a save or a load whose parts follow each other."""
        moved = figures["stored"]
        on_host = moved / load.ranks * min(load.ranks, self.ranks_per_host)
        transfer = max(on_host / self.host, moved / self.total)
        control = figures["served"] * self.message + figures["sent"] / self.wire
        return max(figures["leader"], figures["member"]) + figures["requests"] * self.latency + control + transfer


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One operation of a contestant, recorded: of the leader and the busiest other rank CPU seconds, and ``COUNTS``."""

    contestant: str
    operation: str
    load: Load
    leader: float
    member: float
    requests: float
    stored: float
    served: float
    sent: float


FIGURES = ("leader", "member", *COUNTS)
CERTAIN = 3.0
"""A cost that grows with the ranks has to be so many standard errors large: times thousands of ranks, noise would be all that is seen."""


@dataclass(frozen=True)
class Fit:
    """Named costs of one figure: ``costs`` by ``NAMES``, and the covariance of them. Of ``TOTALS`` for each rank."""

    costs: np.ndarray[Any, np.dtype[np.float64]]
    covariance: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, loads: Sequence[Load], values: Sequence[float], *, alone: bool = False) -> Fit:
        """Least squares of relative errors, of those costs that say the most for their number (BIC). None may be negative, and those that
        grow with the ranks have to be ``CERTAIN``. ``alone``: there are none of these, since ranks pay nothing for each other."""
        wanted, count = np.array(values, float), len(NAMES)
        costs, covariance, best = np.zeros(count), np.zeros((count, count)), inf
        if not wanted.any():
            return cls(costs, covariance)
        weights = 1 / np.maximum(wanted, wanted.max() / 1e3)
        features = np.array([load.features for load in loads], float)
        scale = features.max(axis=0)
        rows, goal = features / scale * weights[:, None], wanted * weights
        free = range(count - OF_RANKS * alone)
        for kept in (list(some) for size in range(1, len(free) + 1) for some in combinations(free, size)):
            solved = np.linalg.lstsq(rows[:, kept], goal, rcond=None)[0]
            left = float(np.sum((goal - rows[:, kept] @ solved) ** 2))
            errors = np.linalg.pinv(rows[:, kept].T @ rows[:, kept]) * left / max(1, len(loads) - len(kept))
            least = [CERTAIN * (i >= count - OF_RANKS) * np.sqrt(errors[n, n]) for n, i in enumerate(kept)]
            score = len(loads) * np.log(left / len(loads) + 1e-12) + len(kept) * np.log(len(loads))
            if score < best and (solved > least).all():
                best, costs, covariance = score, np.zeros(count), np.zeros((count, count))
                costs[kept] = solved / scale[kept]
                covariance[np.ix_(kept, kept)] = errors / np.outer(scale[kept], scale[kept])
        return cls(costs, covariance)

    def at(self, load: Load) -> float:
        return float(self.costs @ load.features)

    def spread(self, load: Load) -> float:
        """Two standard errors of what the samples say of this load."""
        features = np.array(load.features)
        return 2 * float(np.sqrt(max(0.0, features @ self.covariance @ features)))


def fitted(traces: Sequence[Trace], more: Sequence[Trace] = ()) -> dict[str, Fit]:
    """Of the traces of one operation of one contestant, and ``more``, of which some figures are None."""
    alone = {figure: figure == "served" or not any(trace.served for trace in traces) for figure in FIGURES}
    alone["member"] |= all(trace.operation == "save" for trace in traces)  # what the leader sends it does not grow with the ranks
    fits = {}
    for figure in FIGURES:
        known = [*traces, *(trace for trace in more if getattr(trace, figure) is not None)]
        values = [getattr(trace, figure) / (trace.load.ranks if figure in TOTALS else 1) for trace in known]
        fits[figure] = Fit.of([trace.load for trace in known], values, alone=alone[figure])
    return fits


def predicted(fits: Mapping[str, Fit], load: Load) -> dict[str, float]:
    """All figures of a load."""
    return {figure: fit.at(load) * (load.ranks if figure in TOTALS else 1) for figure, fit in fits.items()}


def residuals(fits: Mapping[str, Fit], unseen: Sequence[Trace]) -> dict[str, float]:
    """How far what is predicted for loads that were left out is off, the mean of them: 0.1 is a tenth too much."""
    pairs = [(predicted(fits, trace.load), trace) for trace in unseen]
    return {f: float(np.mean([said[f] / real - 1 if (real := getattr(trace, f)) else said[f] for said, trace in pairs])) for f in FIGURES}


# ------------------------------------------------------------------------------------------------------------ on the ranks


@dataclass(eq=False)
class Counter:
    """Counts what this process asks of a job's store, of torch's collectives, and of the files below ``directory``."""

    directory: str | None = None
    collectives: int = 0
    sent: int = 0

    def __post_init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()
        self.touched: set[tuple[str, str]] = set()

    def begin(self, directory: str) -> None:
        self.directory, self.collectives, self.sent = directory, 0, 0
        self.asked.clear()
        self.touched.clear()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Files opened, renamed, listed, made and removed; one that is opened again counts once."""
        if self.directory is not None and event.partition(".")[0] in ("open", "os"):
            self.touched |= {
                (event, str(a)) for a in arguments[:2] if isinstance(a, str | os.PathLike) and str(a).startswith(self.directory)
            }

    def watch(self) -> None:
        """From now on, as long as the process lives."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import Store

        for name in ("set", "get", "add", "check", "append", "multi_get", "multi_set", "compare_set", "wait"):
            setattr(Store, name, self._message(name, getattr(Store, name)))
        for name in ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object"):
            setattr(dist, name, self._collective(getattr(dist, name)))
        sys.addaudithook(self.audit)

    def _message(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Any, keys: Any, *values: Any) -> Any:
            if self.directory is not None and not any(sign in str(keys) for sign in ("/beats/", "/sign", "/failed")):
                self.asked.add((name, str(keys)))  # a question that is asked again and again counts once
                self.sent += sum(len(value) for value in values if isinstance(value, bytes | str))
            return method(store, keys, *values)

        return counted

    def _collective(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self.directory is not None:
                self.collectives += 1
                self.sent += len(pickle.dumps(arguments[0] if arguments else next(iter(named.values()))))
            return call(*arguments, **named)

        return counted


COUNTER = Counter()


def settle(rank: Rank) -> None:
    """Before anything is saved: stores keep the methods that they have then."""
    del rank
    COUNTER.watch()


def record(rank: Rank, *, operation: Any, contestant: str, directory: str, count: bool) -> dict[str, float]:
    """One operation, counted, or its CPU seconds."""
    from . import tasks

    counter = COUNTER
    if count:
        counter.begin(directory)
    cost = tasks.run(rank, operation=operation, contestant=contestant, directory=directory, check=contestant != "raw")
    counter.directory = None
    if not count:
        return {"cpu": cost.cpu, "read": cost.read}
    return {
        "requests": len(counter.touched),
        "asked": len(counter.asked),
        "collectives": counter.collectives,
        "sent": counter.sent,
    }


# ---------------------------------------------------------------------------------------------------------------- the run

LOADS = tuple((tensors, nbytes) for tensors in (64, 256) for nbytes in (2 * MB, 32 * MB))


def traces_of(ranks: int, contestants: Sequence[str], place: Place, repeat: int) -> list[Trace]:
    """All small saves and loads on so many ranks, contestants in turn."""
    from . import tasks
    from .scenarios import turns
    from .states import Recipe

    traces: list[Trace] = []
    with Pool(ranks) as pool:
        pool.run(settle, on=ranks)
        for tensors, nbytes in LOADS:
            load = Load(ranks=ranks, tensors=tensors, nbytes=nbytes)
            recipe = Recipe(kind="equal", ranks=ranks, size=ranks * nbytes, tensors=tensors)
            pool.run(tasks.prepare, on=ranks, recipe=recipe)
            got: dict[tuple[str, str], list[Any]] = {}
            for repetition, contestant in turns(contestants, repeat):
                directory = place.fresh(contestant)
                for operation in ("save", "load"):
                    arguments = {"operation": operation, "contestant": contestant, "directory": directory, "count": repetition == 0}
                    got.setdefault((contestant, operation), []).append(pool.run(record, on=ranks, **arguments))
                if repetition == 0:
                    got[contestant, "save"][0][0]["stored"] = size_of(directory)
                place.fresh(contestant)
            traces += [trace_of(contestant, operation, load, rows) for (contestant, operation), rows in got.items()]
    return traces


def trace_of(contestant: str, operation: str, load: Load, rows: Sequence[Sequence[Mapping[str, float]]]) -> Trace:
    """Of what each rank recorded in each repetition; in the first one it counted."""
    counted, timed = rows[0], rows[1:]
    least = [min(row[rank]["cpu"] for row in timed) for rank in range(load.ranks)]
    asked = sum(one.get("asked", 0) for one in counted)
    return Trace(
        contestant=contestant,
        operation=operation,
        load=load,
        leader=least[0],
        member=max(least[1:]),
        requests=max(one.get("requests", 0) for one in counted),
        stored=sum(min(row[rank].get("read", inf) for row in timed) for rank in range(load.ranks))
        if operation == "load"
        else counted[0].get("stored", 0),
        served=asked + counted[0].get("collectives", 0) * load.ranks,
        sent=sum(one.get("sent", 0) for one in counted),
    )


def played(directory: str, ranks: int, tensors: int) -> list[Trace]:
    """ckpt's calls as one of two processes of ``ranks`` that are played by one; what they move but not what they store."""
    from .scale_calls import Calls

    calls = Calls(ranks, f"{directory}-{tensors}", tensors=tensors)
    calls.save()
    traces = []
    for operation in ("save", "load"):
        made = min((getattr(calls, operation)() for _ in range(4)), key=lambda one: float(one.cpu))
        load = Load(ranks=ranks, tensors=tensors, nbytes=tensors * 32)
        known: dict[str, Any] = {"leader": made.cpu, "requests": None, "stored": None}
        known["member"] = made.cpu / 2 if operation == "load" else None  # the leader of a save does more than others
        known |= {key: both[0] + (ranks - 1) * both[1] for key, both in (("served", made.messages), ("sent", made.put))}
        traces.append(Trace(contestant="ckpt", operation=operation, load=load, **known))
    calls.close()
    return traces


def played_dcp(directory: str, ranks: int, tensors: int) -> list[Trace]:
    """What DCP's leader does with the plans of ``ranks`` and every rank with the metadata, without the local plans and without bytes."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata, planner, storage
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    def item(rank: int, number: int) -> planner.WriteItem:
        chunk = metadata.ChunkStorageMetadata(torch.Size((rank, 0)), torch.Size((1, 16)))
        data = planner.TensorWriteData(chunk, metadata.TensorProperties(dtype=torch.float32), torch.Size((ranks, 16)))
        index = metadata.MetadataIndex(f"model.t{number:04d}", chunk.offsets)
        return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)

    def result(rank: int, at: int, index: metadata.MetadataIndex) -> storage.WriteResult:
        return storage.WriteResult(index, 64, filesystem._StorageInfo(f"__{rank}_0.distcp", 64 * at, 64))

    names = {f"model.t{number:04d}": ("model", f"t{number:04d}") for number in range(tensors)}
    plans = [planner.SavePlan([item(rank, n) for n in range(tensors)], planner_data=names) for rank in range(ranks)]
    sent = [pickle.dumps(plan) for plan in plans]
    writer, load = filesystem.FileSystemWriter(directory), Load(ranks=ranks, tensors=tensors, nbytes=64 * tensors)
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(3):
        began = cpu_seconds()
        final, whole = DefaultSavePlanner().create_global_plan([pickle.loads(plan) for plan in sent])
        spent = cpu_seconds() - began
        results = [[result(rank, at, item.index) for at, item in enumerate(plan.items)] for rank, plan in enumerate(final)]
        began = cpu_seconds()
        os.makedirs(directory, exist_ok=True)
        writer.finish(whole, results)
        written = cpu_seconds()
        filesystem.FileSystemReader(directory).read_metadata()
        seconds["load"].append(cpu_seconds() - written)
        seconds["save"].append(spent + written - began)
    unknown: dict[str, Any] = dict.fromkeys(COUNTS)
    least = {operation: min(found) for operation, found in seconds.items()}
    return [
        Trace(contestant="dcp", operation="save", load=load, leader=least["save"], **unknown | {"member": None}),
        Trace(contestant="dcp", operation="load", load=load, leader=least["load"], **unknown | {"member": least["load"]}),
    ]


PLAYS = ((played, MANY, (8, 256)), (played_dcp, MANY // 8, (8, 256)))
"""Ranks, and numbers of tensors. With more ranks DCP takes minutes."""


def fits_of(traces: Sequence[Trace], contestant: str, operation: str) -> tuple[dict[str, Fit], dict[str, float]]:
    """The named costs of one operation, and how far they are off at the ranks that were left out."""
    mine = [t for t in traces if (t.contestant, t.operation) == (contestant, operation)]
    fits = fitted([t for t in mine if t.load.ranks in SEEN], [t for t in mine if t.load.ranks > UNSEEN])
    return fits, residuals(fits, [t for t in mine if t.load.ranks == UNSEEN])


def simulated(fits: Mapping[str, Mapping[str, Fit]], tiers: Mapping[str, Storage], job: Load) -> list[dict[str, Any]]:
    """What a contestant needs for a job of each size of ``PLAYED``, simulated."""
    rows = []
    for ranks in PLAYED:
        load = replace(job, ranks=ranks)
        save, restart = (predicted(fits[operation], load) for operation in ("save", "load"))
        total = ranks * job.nbytes
        seconds = tiers["storage"].seconds(load, save)
        row = {"ranks": ranks, "save": seconds, "rate": total / seconds / 1e9, "stored": save["stored"] / total}
        row |= {f"restart, {tier}": storage.seconds(load, restart) for tier, storage in tiers.items()}
        row |= {"requests": save["requests"], "leader": save["leader"], "spread": fits["save"]["leader"].spread(load)}
        rows.append(row | {"cpu": (save["leader"] + (ranks - 1) * save["member"]) / total * 1e9})
    return rows


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=os.path.dirname(__file__), capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


COLUMNS = ("save", "rate", "cpu", "leader", "spread", "stored", "requests")


def text_of(document: Mapping[str, Any]) -> list[str]:
    """Inputs, named costs, residuals, and the simulated rows."""
    lines = [f"{document['command']}, commit {document['commit']}, {document['machine']}", "", "declared"]
    lines += [f"  {tier}: {', '.join(f'{key} {value:g}' for key, value in given.items())}" for tier, given in document["tiers"].items()]
    lines += [f"  job: {document['job']}", ""]
    head = ("", "figure", *NAMES, f"off at {UNSEEN} ranks")
    costs = [
        (name, figure, *(f"{cost:.3g}" for cost in found), f"{document['residuals'][name][figure]:+.0%}")
        for name, figures in document["costs"].items()
        for figure, found in figures.items()
    ]
    lines += [
        "measured: named costs, CPU seconds, counts and bytes",
        *aligned([head, *costs]),
        "",
        "simulated: seconds, GB/s, CPU s per GB",
    ]
    tiers = [f"restart, {tier}" for tier in document["tiers"]]
    rows = [("", "ranks", *COLUMNS, *tiers)]
    for name, played_rows in document["rows"].items():
        rows += [(name, f"{row['ranks']:,}", *(f"{row[key]:.3g}" for key in (*COLUMNS, *tiers))) for row in played_rows]
    return [*lines, *aligned(rows)]


@click.command(context_settings={"show_default": True})
@click.option("--repeat", type=click.IntRange(1), default=5, help="Repetitions that are timed, after one that is counted.")
@click.option("--dir", "directory", default="/dev/shm", type=click.Path(exists=True, file_okay=False), help="Where the small saves go.")
@click.option("--gb", default=1.0, help="GB of each rank of the job that is played.")
@click.option("--tensors", default=1000, help="Tensors of the job that is played.")
@click.option("--ranks-per-host", default=8)
@click.option("--host", default=10.0, help="GB/s of the storage for each host.")
@click.option("--total", default=200.0, help="GB/s of the storage for all hosts.")
@click.option("--latency", default=5.0, help="Milliseconds of a request to the storage.")
@click.option("--local", default=6.0, help="GB/s of the disks of a host.")
@click.option("--memory", default=20.0, help="GB/s of the memory of a host.")
@click.option("--message", default=20.0, help="Microseconds of the busiest process for a message.")
@click.option("--wire", default=1.0, help="GB/s of its network.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, writable=True), help="Write all figures and traces to this file.")
def main(*, directory: str, repeat: int, gb: float, tensors: int, json_path: str | None, **given: Any) -> None:
    """Record small saves, fit their costs, and play them for many ranks through a storage that is declared."""
    control = {"ranks_per_host": given["ranks_per_host"], "message": given["message"] / 1e6, "wire": given["wire"] * 1e9}
    tiers = {
        "memory": Storage(host=given["memory"] * 1e9, total=inf, latency=1e-6, **control),
        "node-local": Storage(host=given["local"] * 1e9, total=inf, latency=1e-4, **control),
        "storage": Storage(host=given["host"] * 1e9, total=given["total"] * 1e9, latency=given["latency"] / 1e3, **control),
    }
    job = Load(ranks=1, tensors=tensors, nbytes=int(gb * 1e9))
    document = replay(directory, repeat, tiers, job)
    click.echo("\n".join(text_of(document)))
    if json_path is not None:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


def replay(directory: str, repeat: int, tiers: Mapping[str, Storage], job: Load) -> dict[str, Any]:
    """Record, fit and play; all of it as plain data."""
    from .contestants import CONTESTANTS as KNOWN

    contestants = [name for name in CONTESTANTS if name in KNOWN]
    with Place(directory) as place:
        traces = [trace for ranks in (*SEEN, UNSEEN) for trace in traces_of(ranks, contestants, place, repeat)]
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            for play, ranks, some in PLAYS:
                traces += [trace for n in some for trace in process.submit(play, place.fresh("played"), ranks, n).result()]
    fits: dict[str, dict[str, dict[str, Fit]]] = {}
    off: dict[str, dict[str, float]] = {}
    for contestant in contestants:
        for operation in ("save", "load"):
            found, off[f"{contestant} {operation}"] = fits_of(traces, contestant, operation)
            fits.setdefault(contestant, {})[operation] = found
    return {
        "command": " ".join(["python -m benchmarks.replay", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "tiers": {tier: asdict(storage) for tier, storage in tiers.items()},
        "job": asdict(job),
        "costs": {f"{c} {o}": {f: fit.costs.tolist() for f, fit in fs.items()} for c, ops in fits.items() for o, fs in ops.items()},
        "residuals": off,
        "rows": {contestant: simulated(found, tiers, job) for contestant, found in fits.items()},
        "traces": [asdict(trace) for trace in traces],
    }


if __name__ == "__main__":
    main()
