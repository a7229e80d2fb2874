"""Rows of the scenario ``scale`` about a save: what one rank plans and what the leader does, for jobs of tens of thousands of ranks.

One process plays the ranks, with the code that ``ckpt.save`` runs. Between the ranks is a dictionary in place of the job's store, and the
storage only says that the data files are there. So no figure has the store or the storage in it.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import xxhash

from ckpt.concurrency import gc_paused
from ckpt.dtypes import dtype
from ckpt.engine.save.leader import Leader, Tables
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.plan import APART, Plans, WriteOptions
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord
from ckpt.formats.native.paths import RANK_ROWS, SPANS, index_path
from ckpt.formats.native.ranks import OwnTensor, encode_row, encode_tensors
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.protocol import ObjectMeta
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Table
from ckpt.state.collect import Collected
from ckpt.telemetry.spans import Spans

from . import scale_jobs
from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scale_jobs import Job
from .scenarios import Settings, Tell

STATE = json.dumps({"step": 1000}).encode()
PHASES = ("collect", "plan", "write", "hash", "sync")


def collected(tensors: Sequence[TensorSpec]) -> Collected:
    """What the planner looks at of a state that was walked."""
    shard_table = SimpleNamespace(tensors={t.name: SimpleNamespace(info=t) for t in tensors}, aliases={}, own=frozenset())
    return cast(Collected, SimpleNamespace(shard_table=shard_table))


def plan(job: Job) -> dict[str, float]:
    """CPU seconds of the plan of a rank in the middle, and of the plan of its next save; bytes of its table, and its chunks."""
    rank, tensors = job.middle
    state, plans = collected(tensors), Plans()
    how = WriteOptions(rank=rank, position=rank, merge_flat_shards=True)
    began = cpu_seconds()
    made = plans.plan(state, how)
    first = cpu_seconds()
    plans.plan(state, how)
    if plans.hits != 1:
        raise ValueError("the second plan is not the first one")
    again = cpu_seconds()
    table = sum(map(len, made.shared))
    return {"tensors": len(tensors), "first": first - began, "second": again - first, "table": table, "chunks": len(made.chunks)}


class Storage(InProcessBackend):
    """Has data files of any size without their bytes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.pretended: list[ObjectMeta] = []

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        yield from (entry for entry in self.pretended if entry.path.startswith(prefix))
        yield from super().list_prefix(prefix)


class Followers:
    """All ranks of a job, as their rows: the leader's side of the group."""

    def __init__(self, job: Job, *, own: int = 0) -> None:
        """``own``: tensors that each rank has of its own (the states of random number generators), besides some values."""
        self.blobs: dict[str, bytes] = {}
        self.call = cast(
            Call,
            SimpleNamespace(
                group=SimpleNamespace(ranks=tuple(range(job.ranks)), size=job.ranks),
                fetch=self.blobs.__getitem__,
                fetch_all=lambda digests: [self.blobs[digest] for digest in digests],
                heartbeat=lambda: None,
                url="inprocess://scale",
            ),
        )
        self.own = own
        self.tables = {id(kind): self._table(kind) for _, kind in job.kinds}
        self.begun: dict[int, Row] = dict(
            sorted((rank, self._begin(rank, self.tables[id(kind)])) for ranks, kind in job.kinds for rank in ranks)
        )

    def share(self, data: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(data)
        self.blobs[digest] = data
        return digest

    def _table(self, kind: Callable[[], list[TensorSpec]]) -> str:
        return " ".join(self.share(part.to_bytes()) for part in Table(tensors=tuple(kind()), aliases={}).parts())

    def _begin(self, rank: int, table: str) -> Row:
        row: Row = {"table": table, "state": self.share(STATE), "options": "merge_flat_shards=True codec=None"}
        if self.own:
            mine, values = own_table(rank, self.own), own_values(rank, self.own)
            if self.call.group.size > APART:
                tensors = [OwnTensor(t.name, t.dtype, t.shape, tuple((0, n) for n in t.shape), [0]) for t in mine.tensors]
                row["own_row"] = encode_row(encode_tensors(tensors, {}), values).decode()
                row["own_bytes"] = sum(t.nbytes for t in mine.tensors)
            else:
                row |= {"own": self.share(mine.to_bytes()), "values": self.share(json.dumps(values).encode())}
        return row

    def written(self, id: str, save: int, *, spans: int) -> dict[int, Row]:
        """The rows of the phase in which data files are written; sizes and digests differ from save to save."""
        rows: dict[int, Row] = {}
        for rank in self.begun:
            digest = xxhash.xxh3_128_hexdigest(f"{save} {rank}".encode())
            size = 1 << 24 | int(digest[:6], 16)
            rows[rank] = {"files": [[f"data/{id}-{rank:05}.safetensors", size, 49152, digest]], "replicas": {}}
            rows[rank]["spans"] = spans_of(rank, spans)
        return rows


def own_table(rank: int, count: int) -> Table:
    """Tensors of one rank alone."""
    layout = TensorLayout(Mesh.flat((rank,)))
    names = [f"rng.{i}@rank{rank}" for i in range(count)]
    return Table(tensors=tuple(TensorSpec(name, dtype("uint8"), (5056,), layout) for name in names), aliases={})


def own_values(rank: int, count: int) -> dict[str, Any]:
    """Values of one rank alone, as nodes."""
    states = {f"g{i}": {"$tensor": f"rng.{i}@rank{rank}"} for i in range(count)}
    return {"rng": states | {"python": ["3.11", rank, "x" * 400]}}


def spans_of(rank: int, count: int) -> Row:
    """A row as a rank sends it that wrote ``count`` chunks."""
    spans = Spans(limit=count)
    for i in range(count):
        spans.add(PHASES[i % len(PHASES)], spans._zero + i * 0.01, spans._zero + (i + 1) * 0.01 + rank % 97 * 1e-4, 1 << 20)
    return spans.to_json()


def lead(job: Job, *, own: int = 0, spans: int = 64) -> dict[str, float]:
    """CPU seconds of the leader in the first two saves of a job, and bytes of the index."""
    followers, known = Followers(job, own=own), cast("list[Tables]", [])
    found: dict[str, float] = {"tables": sum(len(data) for data in followers.blobs.values())}
    for save in range(2):
        InProcessBackend.reset()
        storage = Storage("inprocess://scale")
        leader = Leader(call=followers.call, backend=storage, options=SaveOptions.of({}), known=known)
        with gc_paused():  # as a save does
            began = cpu_seconds()
            leader.open(followers.begun)
            found[f"check_{save}"] = cpu_seconds() - began
            rows = followers.written(leader.id, save, spans=spans)
            storage.pretended = [ObjectMeta(path, size) for row in rows.values() for path, size, _, _ in row["files"]]
            began = cpu_seconds()
            leader.commit(rows)
            found[f"commit_{save}"] = cpu_seconds() - began
            began = cpu_seconds()
            write_spans(storage, leader.id, {rank: row["spans"] for rank, row in rows.items()})
            found[f"spans_{save}"] = cpu_seconds() - began
            found["spans_bytes"] = InProcessBackend("inprocess://scale").size(index_path(leader.id, SPANS))
        found[f"all_{save}"] = sum(found[f"{what}_{save}"] for what in ("check", "commit", "spans"))
        record = CommitRecord.from_bytes(InProcessBackend("inprocess://scale").read(COMMIT_PATH), COMMIT_PATH)
        found["index"] = sum(f.size for name, f in record.index.items() if name != RANK_ROWS)
        found["rows"] = record.index[RANK_ROWS].size if RANK_ROWS in record.index else 0
    InProcessBackend.reset()
    return found


# ----------------------------------------------------------------------------------------------------------------- the rows


RANK = {"FSDP2": scale_jobs.fsdp, "HSDP": scale_jobs.hsdp, "flat": scale_jobs.zero, "3-D": scale_jobs.three_d}
EXPERTS = {"EP64": scale_jobs.experts, "all experts": scale_jobs.every_expert}
OWN = 3
"""Tensors that each rank has of its own: the states of its random number generators."""
RANK_MOST, FAR_MOST, LEADER_MOST, LATER_MOST, EXPERTS_MOST, ALL_MOST, OWN_MOST, OWN_INDEX = 1.0, 2.5, 5.0, 1.0, 10.0, 2.0, 1.0, 3e6
SPANS_MOST, SPANS_FILE = 0.5, 5e6
"""The marks, at ``MARKED`` ranks: CPU seconds, and bytes of the index and of the file of spans."""
MARKED = 16_384


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """A rank's plan and a leader's save at a sixteenth, a quarter and all of ``settings.scale_ranks``; plans at four times as many too."""
    del place
    ranks, layers = settings.scale_ranks, settings.scale_layers
    sizes = sorted({max(n, 128) for n in (ranks // 16, ranks // 4, ranks)})

    def measured(what: str, kind: str, n: int, **more: int) -> dict[str, float]:
        found: dict[str, float] = pool.run(measure, on=1, what=what, kind=kind, ranks=n, layers=layers, **more)[0]
        tell(f"scale: {what} {kind} {n:,} ranks: " + ", ".join(f"{k} {v:,.3g}" for k, v in found.items()))
        return found

    far = [*sizes, 4 * sizes[-1]]
    plans = {kind: {n: measured("plan", kind, n) for n in far} for kind in RANK}
    plans["all experts"] = {n: measured("plan", "all experts", n) for n in sizes}
    leads = {kind: {n: measured("lead", kind, n) for n in sizes} for kind in ("3-D", "EP64")}
    own = {n: measured("lead", "FSDP2", n, own=OWN) for n in sizes}
    without = {n: measured("lead", "FSDP2", n) for n in sizes}
    return [_plans(plans, ranks), _leads(leads, own, without, ranks)]


def measure(rank: Rank, *, what: str, kind: str, ranks: int, layers: int, own: int = 0) -> dict[str, float]:
    """One measurement in a process that knows nothing of the job yet: its mesh has a name of its own."""
    del rank
    job = (RANK | EXPERTS)[kind](ranks, layers or (scale_jobs.LAYERS if kind in RANK else scale_jobs.MOE_LAYERS), f"-{time.time_ns()}")
    found = plan(job) if what == "plan" else lead(job, own=own)
    return found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _plans(plans: Mapping[str, Mapping[int, Mapping[str, float]]], ranks: int) -> Finding:
    rows, checks = [], []
    for kind, by_ranks in plans.items():
        for n, found in by_ranks.items():
            seconds = f"{found['first']:.2f}", f"{1000 * found['second']:.1f}"
            rows.append((kind, f"{n:,}", f"{found['tensors']:,}", *seconds, f"{found['table']:,}", f"{found['peak_mb']:.0f}"))
        if ranks == MARKED:
            most = RANK_MOST if kind in RANK else ALL_MOST
            checks.append(at_most(f"a rank's first plan, {kind}, {ranks:,} ranks", by_ranks[ranks]["first"], most, "CPU s"))
    if ranks == MARKED:
        checks.append(at_most(f"a rank's first plan, FSDP2, {4 * ranks:,} ranks", plans["FSDP2"][4 * ranks]["first"], FAR_MOST, "CPU s"))
    columns = ("job", "ranks", "tensors", "first plan, CPU s", "second, ms", "table, bytes", "process, MB")
    figures = {kind: {str(n): dict(found) for n, found in by_ranks.items()} for kind, by_ranks in plans.items()}
    return Finding(scenario="scale", title="the plan of one rank of a save", columns=columns, rows=rows, figures=figures, checks=checks)


def _leads(
    leads: Mapping[str, Mapping[int, Mapping[str, float]]],
    own: Mapping[int, Mapping[str, float]],
    without: Mapping[int, Mapping[str, float]],
    ranks: int,
) -> Finding:
    named = {**leads, "FSDP2": without, f"FSDP2 and {OWN} tensors of each rank's own": own}
    rows, checks = [], []
    for kind, by_ranks in named.items():
        for n, found in by_ranks.items():
            seconds = (f"{found[f'{what}_{save}']:.2f}" for save in (0, 1) for what in ("check", "commit", "spans"))
            rows.append((kind, f"{n:,}", *seconds, f"{found['tables']:,.0f}", f"{found['index']:,.0f}", f"{found['peak_mb']:.0f}"))
    if ranks == MARKED:
        three, experts = leads["3-D"][ranks], leads["EP64"][ranks]
        more = own[ranks]["check_0"] + own[ranks]["commit_0"] - without[ranks]["check_0"] - without[ranks]["commit_0"]
        checks += [
            at_most(f"the leader's first save, 3-D, {ranks:,} ranks", three["all_0"], LEADER_MOST, "CPU s"),
            at_most(f"the leader's next save, 3-D, {ranks:,} ranks", three["all_1"], LATER_MOST, "CPU s"),
            at_most(f"the leader's spans, 3-D, {ranks:,} ranks", max(three["spans_0"], three["spans_1"]), SPANS_MOST, "CPU s"),
            at_most(f"file of spans, 3-D, {ranks:,} ranks", three["spans_bytes"], SPANS_FILE, "bytes"),
            at_most(f"the leader's first check, EP64, {ranks:,} ranks", experts["check_0"], EXPERTS_MOST, "CPU s"),
            at_most(f"values of each rank's own, {ranks:,} ranks: more of the leader", more, OWN_MOST, "CPU s"),
            at_most(f"values of each rank's own, {ranks:,} ranks: index that every reader opens", own[ranks]["index"], OWN_INDEX, "bytes"),
        ]
    columns = ("job", "ranks", "check", "commit", "spans", "2nd check", "commit", "spans", "told, bytes", "index, bytes", "process, MB")
    figures = {kind: {str(n): dict(found) for n, found in by_ranks.items()} for kind, by_ranks in named.items()}
    return Finding(
        scenario="scale",
        title="the leader of a save, CPU s of its first save and of the next one",
        columns=columns,
        rows=rows,
        figures=figures,
        checks=checks,
        notes=(
            "What the ranks tell is in memory: reading it from the job's store is not in these figures.",
            f"Every reader opens so much of the index. Rows of ranks are {own[ranks]['rows']:,.0f} bytes more; a rank reads its own.",
        ),
    )
