"""A save: agree, write, commit. Nothing is readable before the commit record is; what was committed before stays until then.

Two phases. *begin*: ranks collect their states, the leader checks that they make one checkpoint; nothing is written if they do not.
*write*: every rank writes its data files; the leader compares replicas, writes the index and commits.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpt import tree
from ckpt.adapters.collect import Collected, collect
from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.errors import CkptError, ReplicaError, StorageError
from ckpt.formats.native.datafile import plan_data_files
from ckpt.formats.native.paths import id_of
from ckpt.formats.native.writer import committed_id, new_id, previous_files, read_record, write_index
from ckpt.group import Call, Group, Row
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.ownership import Global, Owned, assign
from ckpt.plan.tables import Joined, Table, join_tables, ranks_text
from ckpt.plan.values import join_values
from ckpt.rules import Layout

from .writer import RankWriter, chunks_of, specs_of

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save did. ``tensor_bytes`` is the whole checkpoint's, ``rank_bytes`` what this rank wrote (headers included),
    ``seconds`` wall time."""

    url: str
    id: str
    tensor_bytes: int
    rank_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    layout: Layout | None
    timeout: float
    check_replicas: bool
    threads: int


def save_state(url: str, state: object, group: Group, options: SaveOptions) -> SaveReport:
    """Save; collective over ``group``."""
    began = time.perf_counter()
    save = _Save(group.call("save", url, options.timeout), options)
    found = save.run(state)
    seconds = time.perf_counter() - began
    if save.call.is_leader:
        log.info("saved %s: %d bytes of tensors from %d ranks in %.2f s", url, found["tensor_bytes"], group.size, seconds)
    return SaveReport(url=url, id=found["id"], tensor_bytes=found["tensor_bytes"], rank_bytes=save.rank_bytes, seconds=seconds)


class _Save:
    def __init__(self, call: Call, options: SaveOptions) -> None:
        self.call = call
        self.options = options
        self.rank = call.group.rank
        self.rank_bytes = 0
        self.collected: Collected | None = None
        self.tables: tuple[Table, Table] | None = None
        self.backend: Backend | None = None
        self.previous: bytes | None = None
        self.joined: Joined | None = None
        self.state: tree.Node = None
        self.own: dict[int, tuple[Table, Mapping[str, tree.Node]]] = {}

    def run(self, state: object) -> Row:
        begin = self.call.agree("begin", lambda: self.begin(state), self.check)
        writer = self.writer(begin["id"])
        try:
            found = self.call.agree("write", lambda: self.write(writer), lambda rows: self.commit(begin["id"], rows))
        except BaseException:
            # A leader that is slow, not dead, may commit later: files that it counts on must stay.
            if not self.call.undecided and not self.is_committed(begin["id"]):
                writer.discard()
            raise
        if self.call.is_leader:
            self.remove_older(begin["id"])
        return found

    # ---- begin

    def begin(self, state: object) -> Row:
        """Every rank: collect, and leave tables and values for the leader."""
        group = self.call.group
        self.backend = open_backend(self.call.url)
        self.collected = collect(state, rank=group.rank, ranks=group.ranks, layout=self.options.layout)
        self.tables = shared, own = split_own(self.collected)
        row = {"table": self.call.share(shared.to_bytes()), "state": self.call.share(tree.text(self.collected.state).encode())}
        if self.collected.own:
            row["own"] = self.call.share(own.to_bytes())
            row["values"] = self.call.share(json.dumps(self.collected.own).encode())
        return row

    def check(self, rows: dict[int, Row]) -> Row:
        """Leader: the ranks' tables and values make one checkpoint."""
        assert self.backend is not None
        self.backend.prepare()
        self.previous = read_record(self.backend)
        tables = [(ranks, Table.from_bytes(self.call.fetch(d))) for d, ranks in grouped(rows, "table")]
        self.joined = join_tables(tables)
        self.state = join_values([(ranks, json.loads(self.call.fetch(d))) for d, ranks in grouped(rows, "state")])
        for rank, row in rows.items():
            if "own" in row:
                self.own[self.call.group.ranks.index(rank)] = (
                    Table.from_bytes(self.call.fetch(row["own"])),
                    json.loads(self.call.fetch(row["values"])),
                )
        return {"id": new_id(after=self.previous)}

    # ---- write

    def writer(self, id: str) -> RankWriter:
        assert self.collected is not None and self.backend is not None and self.tables is not None
        shared, own = self.tables
        return RankWriter(
            backend=self.backend,
            tensors=self.collected.placer.tensors,
            owned=assign(shared.tensors) | assign(own.tensors),
            rank=self.rank,
            position=self.call.group.ranks.index(self.rank),
            id=id,
            threads=self.options.threads,
            beat=self.call.beat,
            alive_while=self.call.alive_while,
            check_replicas=self.options.check_replicas and self.call.group.size > 1,
        )

    def write(self, writer: RankWriter) -> Row:
        written = writer.run()
        self.rank_bytes = sum(f.size for f in written.files)
        replicas = {ranks: self.call.share(json.dumps(digests).encode()) for ranks, digests in written.replicas.items()}
        return {"files": [[f.path, f.size, f.header, f.digest] for f in written.files], "replicas": replicas}

    def commit(self, id: str, rows: dict[int, Row]) -> Row:
        """Leader: compare replicas, check what is there, write the index and the commit record."""
        assert self.backend is not None
        self.compare_replicas(rows)
        positions = {rank: i for i, rank in enumerate(self.call.group.ranks)}
        files = [DataFile(path=p, size=s, header=h, digest=d, rank=positions[r]) for r, row in rows.items() for p, s, h, d in row["files"]]
        check_files(self.backend, files, id)
        contents = self.contents(files, id)
        self.call.beat()
        record = write_index(self.backend, contents, id=id, world_size=self.call.group.size, previous=self.previous)
        return {"id": id, "tensor_bytes": record.tensor_bytes}

    def compare_replicas(self, rows: dict[int, Row]) -> None:
        sets: dict[str, dict[str, list[int]]] = {}
        for rank, row in rows.items():
            for ranks, digest in row["replicas"].items():
                sets.setdefault(ranks, {}).setdefault(digest, []).append(rank)
        problems = []
        for by_digest in sets.values():
            if len(by_digest) > 1:
                problems += replica_problems([(ranks, json.loads(self.call.fetch(d))) for d, ranks in by_digest.items()])
        if problems:
            raise ReplicaError(
                "replicas differ: " + "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else ""),
                where=self.call.url,
                hint="parts of larger tensors need layout= with a rule for each (docs/layouts.md), and values that are meant to differ "
                "go into ckpt.PerRank; real replicas drift apart by unsynchronised gradients or buffers, or bad memory",
            )

    # ---- the index

    def contents(self, files: Sequence[DataFile], id: str) -> Contents:
        assert self.joined is not None
        tensors, owned = dict(self.joined.tensors), dict(self.joined.owned)
        rank_of: dict[str, int] = {}
        for rank, (table, _) in self.own.items():
            for t in table.tensors:
                tensors[t.name], rank_of[t.name] = t, rank
            owned |= assign(table.tensors)
        grids = _Grids(files, owned, tensors, id, self.call.group.ranks)
        entries = {
            name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids.of(name), rank=rank_of.get(name))
            for name, t in tensors.items()
        }
        aliases = self.joined.aliases | {n: to for table, _ in self.own.values() for n, to in table.aliases.items()}
        for name, target in aliases.items():
            entries[name] = replace(entries[target], name=name, alias=target)
        values = {rank: nodes for rank, (_, nodes) in self.own.items()}
        return Contents(tensors=tuple(entries[n] for n in sorted(entries)), files=tuple(files), state=self.state, ranks=values)

    # ---- after

    def is_committed(self, id: str) -> bool:
        """Whether this save's record is the committed one after all: then its files must stay."""
        assert self.backend is not None
        try:
            return committed_id(self.backend) == id
        except CkptError:
            return True  # the storage cannot say; debris is better than loss

    def remove_older(self, id: str) -> None:
        """Remove the files of the checkpoint that was replaced, and what older saves left here when they were killed.

        Nothing reaches them any more, so a failure here harms nothing. A save that still runs and began before this one has lost its files,
        but it could not commit either: the commit record is no longer the one that it would replace.
        """
        assert self.backend is not None
        try:
            paths = set(previous_files(self.backend, self.previous)) if self.previous is not None else set()
            paths |= {e.path for e in self.backend.list() if (id_of(e.path) or id) < id}
            for path in sorted(paths):
                self.backend.delete(path)
        except CkptError as err:
            log.warning("files of older saves stay behind in %s as debris: %s", self.call.url, err)


class _Grids:
    """Stored grids with files in place of ranks; tensors cut alike share one."""

    def __init__(
        self, files: Sequence[DataFile], owned: Mapping[str, Owned], tensors: Mapping[str, Global], id: str, ranks: Sequence[int]
    ) -> None:
        self.owned = owned
        self.tensors = tensors
        self.id = id
        self.first: dict[int, int] = {}
        self.many: dict[int, int] = {}
        self.positions = {rank: i for i, rank in enumerate(ranks)}
        for row, f in enumerate(files):
            rank = ranks[f.rank]
            self.first.setdefault(rank, row)
            self.many[rank] = self.many.get(rank, 0) + 1
        self.by_rank = np.full(max(self.first, default=0) + 1, -1, dtype=np.int32)
        for rank, row in self.first.items():
            self.by_rank[rank] = row
        self.made: dict[int, Grid] = {}
        self.split = {rank: self._split(rank) for rank, n in self.many.items() if n > 1}

    def of(self, name: str) -> Grid:
        owned = self.owned[name]
        if self.split:
            return Grid(cuts=owned.cuts, boxes=owned.boxes, files=self._files(name))
        if id(owned) not in self.made:
            self.made[id(owned)] = Grid(cuts=owned.cuts, boxes=owned.boxes, files=self._files(name))
        return self.made[id(owned)]

    def _files(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        owners = self.owned[name].owners
        files: np.ndarray[tuple[int], np.dtype[np.int32]] = self.by_rank[owners]
        for rank, later in self.split.items():
            for chunk in np.flatnonzero(owners == rank).tolist():
                files[chunk] += later[name, chunk]
        return files[:1] if len(files) and (files == files[0]).all() else files

    def _split(self, rank: int) -> dict[tuple[str, int], int]:
        """For a rank with several files: in which of them each of its chunks is. It is the rank's own plan, made again."""
        chunks = chunks_of(self.owned, rank)
        plans = plan_data_files(specs_of(chunks, self.tensors), id=self.id, rank=self.positions[rank])
        return {(c.name, c.number): n for n, plan in enumerate(plans) for c in chunks[plan.first : plan.first + len(plan)]}


def split_own(collected: Collected) -> tuple[Table, Table]:
    """The table of tensors that other ranks know too, and that of this rank's own."""
    own, tensors, aliases = collected.placer.own, collected.placer.tensors, collected.placer.aliases
    return (
        Table(
            tensors=tuple(t.info for n, t in tensors.items() if n not in own), aliases={n: t for n, t in aliases.items() if n not in own}
        ),
        Table(tensors=tuple(t.info for n, t in tensors.items() if n in own), aliases={n: t for n, t in aliases.items() if n in own}),
    )


def grouped(rows: Mapping[int, Row], key: str) -> list[tuple[str, list[int]]]:
    """Digest and ranks, for each different digest."""
    found: dict[str, list[int]] = {}
    for rank, row in rows.items():
        found.setdefault(row[key], []).append(rank)
    return list(found.items())


def replica_problems(variants: Sequence[tuple[list[int], Mapping[str, str]]]) -> list[str]:
    """Name the tensors that differ, and who has what."""
    problems = []
    for name in sorted({n for _, digests in variants for n in digests}):
        by_digest: dict[str | None, list[int]] = {}
        for ranks, digests in variants:
            by_digest.setdefault(digests.get(name), []).extend(ranks)
        if len(by_digest) > 1:
            problems.append(f"tensor {name}: " + " ≠ ".join(ranks_text(ranks) for ranks in by_digest.values()))
    return problems


def check_files(backend: Backend, files: Sequence[DataFile], id: str) -> None:
    """Every file that the ranks wrote is where the leader sees it, whole."""
    there = {e.path: e.size for e in backend.list(f"data/{id}-")}
    lost = [f for f in files if there.get(f.path) != f.size]
    if lost:
        raise StorageError(
            f"{len(lost)} of {len(files)} data files are not there, or not whole, as the leading rank sees it; the first is {lost[0].path} "
            f"of rank {lost[0].rank}: {there.get(lost[0].path, 'no')} of {lost[0].size} bytes",
            where=backend.url,
            hint="the URL must be on storage that all ranks share",
        )
