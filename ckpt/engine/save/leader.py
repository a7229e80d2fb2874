"""What the leading rank of a save does: checks that the ranks' tables make one checkpoint, compares replicas, writes the index, commits."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ckpt import tree
from ckpt.catalog import Contents, DataFile, TensorEntry
from ckpt.coordination.call import Call
from ckpt.coordination.rows import Row
from ckpt.errors import AccessError, CkptError, ConsistencyError, ReplicaError
from ckpt.formats.native.clearing import check_no_link, clear
from ckpt.formats.native.commit import APART, CODED
from ckpt.formats.native.paths import id_of
from ckpt.formats.native.spans import write_spans
from ckpt.formats.native.writer import Kept, committed_id, new_id, previous_files, read_record, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.plan import ownership
from ckpt.plan.ownership import Global, assign
from ckpt.plan.tables import Joined, Table, join_tables, ranks_text
from ckpt.plan.values import join_values

from .grids import Grids
from .plan import own_tensors

log = logging.getLogger("ckpt")

KEPT = 2


@dataclass(eq=False)
class Tables:
    """All ranks' tables joined; ``own`` are those of single ranks' tensors, by position. ``index`` is what was encoded from them."""

    said: tuple[object, ...]
    joined: Joined
    own: Mapping[int, Table]
    index: dict[tuple[object, ...], tuple[tuple[TensorEntry, ...], Kept]] = field(default_factory=dict)


class Values(NamedTuple):
    """What is not a tensor: the state of all ranks, and the values of single ranks by position and path."""

    state: tree.Node
    own: Mapping[int, Mapping[str, tree.Node]]


class Leader:
    """The leader's side of one save. ``known`` holds tables of earlier saves, and takes this one's. ``earlier`` gives the id of a save
    elsewhere that this one comes after, if there is one."""

    def __init__(
        self,
        call: Call,
        backend: Backend,
        known: list[Tables],
        *,
        merge: bool,
        metrics: Mapping[str, float] | None = None,
        earlier: Callable[[], str | None] | None = None,
    ) -> None:
        self.call = call
        self.backend = backend
        self.known = known
        self.merge = merge
        self.metrics = metrics
        self.earlier = earlier
        self.previous: bytes | None = None
        self.abilities: str | None = None
        self.tables: Tables | None = None
        self._begun: dict[int, Row] = {}
        self._values: Values | None = None
        self._listed: list[str] = []
        self._first, self._longest = not known, 0

    # ---- begin

    def check(self, rows: dict[int, Row]) -> Row:
        """The ranks' tables and values make one checkpoint.

        Raises:
            ConsistencyError, CoverageError: they do not.
            StorageError: nothing can be written here.
        """
        self._check_options(rows)
        id = self.start(self._tables(rows))
        self._begun = rows
        kept = self.tables.index.values() if self.tables is not None else ()
        if not any(k.state is not None and k.values == self._said() for _, k in kept):
            self.values()  # they may contradict each other
        return {"id": id, "storage": self.abilities}

    def start(self, tables: Tables) -> str:
        """Make ready to save these tensors; the id of the save.

        Raises:
            ConflictError: the URL is a symbolic link.
            StorageError: nothing can be written here.
        """
        check_no_link(self.backend)
        self.backend.prepare()
        self.abilities = self.backend.abilities() if self.call.group.size > 1 else None
        self.previous = read_record(self.backend)
        self.tables = tables
        return new_id(after=self.previous, later_than=self.earlier() if self.earlier is not None else None)

    def give(self, state: tree.Node) -> None:
        """Values that no rank left in the store."""
        self._values = Values(state, {})

    def _positions(self) -> dict[int, int]:
        """Ranks as the format counts them."""
        return {rank: i for i, rank in enumerate(self.call.group.ranks)}

    def _said(self) -> tuple[object, ...]:
        """What the ranks' values follow from."""
        shared = tuple((digest, tuple(ranks)) for digest, ranks in grouped(self._begun, "state"))
        return shared, tuple((rank, row["values"]) for rank, row in self._begun.items() if "own" in row)

    def values(self) -> Values:
        """The values of all ranks, joined.

        Raises:
            ConsistencyError: ranks disagree.
        """
        if self._values is None:
            self.call.fetch_all(row[key] for row in self._begun.values() for key in ("state", "values") if key in row)
            state = join_values([(ranks, json.loads(self.call.fetch(d))) for d, ranks in grouped(self._begun, "state")])
            positions = self._positions()
            own = {positions[rank]: json.loads(self.call.fetch(row["values"])) for rank, row in self._begun.items() if "own" in row}
            self._values = Values(state, own)
        return self._values

    def _check_options(self, rows: Mapping[int, Row]) -> None:
        by_options = grouped(rows, "options")
        if len(by_options) > 1:
            told = "; ".join(f"{options} on {ranks_text(ranks)}" for options, ranks in by_options)
            raise ConsistencyError(f"the ranks save with different options: {told}", hint="give merge= and codec= alike on every rank")

    def _tables(self, rows: dict[int, Row]) -> Tables:
        shared: dict[str, list[int]] = {}
        for digests, ranks in grouped(rows, "table"):
            for digest in digests.split():
                shared.setdefault(digest, []).extend(ranks)
        positions = self._positions()
        own = {positions[rank]: row["own"] for rank, row in rows.items() if "own" in row}
        said = (
            tuple((digest, tuple(ranks)) for digest, ranks in shared.items()),
            tuple(own.items()),
            self.merge,
            ownership.MAX_CHUNK,
            ownership.SMALL,
        )
        for i, tables in enumerate(self.known):
            if tables.said == said:
                self.known.append(self.known.pop(i))
                return tables
        self.call.fetch_all([*shared, *own.values()])
        joined = join_tables([(ranks, Table.from_bytes(self.call.fetch(d))) for d, ranks in shared.items()], merge=self.merge)
        found = Tables(said, joined, {position: Table.from_bytes(self.call.fetch(d)) for position, d in own.items()})
        self.known[:] = [*self.known, found][-KEPT:]
        return found

    # ---- commit

    def commit(self, id: str, rows: dict[int, Row]) -> Row:
        """Compare replicas, check what is there, write the index and the commit record.

        Raises:
            ReplicaError: replicas differ.
            StorageError: the storage failed, or does not have what the ranks wrote.
        """
        self.compare_replicas(rows)
        self.call.fetch_all(row["own_blob"] for row in self._begun.values() if "own_blob" in row)  # one by one, ranks times as long
        positions = self._positions()
        files = [DataFile(path=p, size=s, header=h, digest=d, rank=positions[r]) for r, row in rows.items() for p, s, h, d in row["files"]]
        entries, kept = self.entries(files, coded=any("coded" in row for row in rows.values()))
        if kept.values != self._said():
            kept.values, kept.state = self._said(), None
        values = self.values() if kept.state is None else Values(None, {})
        contents = Contents(
            tensors=entries,
            files=tuple(files),
            state=values.state,
            ranks=values.own,
            rows={positions[rank]: self._own_row(row) for rank, row in self._begun.items() if "own_bytes" in row},
            rows_bytes=sum(row.get("own_bytes", 0) for row in self._begun.values()),
        )
        self._longest = max((f.size for f in files), default=0)
        self.call.heartbeat()
        features = (*((CODED,) if any(row.get("coded") for row in rows.values()) else ()), *((APART,) if contents.rows else ()))
        record = write_index(
            self.backend,
            contents,
            id=id,
            world_size=self.call.group.size,
            previous=self.previous,
            features=features,
            kept=kept,
            metrics=self.metrics,
            listed=self._listed,
        )
        return {"id": id, "tensor_bytes": record.tensor_bytes}

    def _own_row(self, row: Row) -> bytes:
        """What a rank has of its own, as it made it for the index."""
        return row["own_row"].encode() if "own_row" in row else self.call.fetch(row["own_blob"])

    def compare_replicas(self, rows: dict[int, Row]) -> None:
        sets: dict[str, dict[str, list[int]]] = {}
        for rank, row in rows.items():
            for ranks, digest in row["replicas"].items():
                sets.setdefault(ranks, {}).setdefault(digest, []).append(rank)
        problems = []
        self.call.fetch_all(digest for by_digest in sets.values() if len(by_digest) > 1 for digest in by_digest)
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

    def entries(self, files: Sequence[DataFile], *, coded: bool) -> tuple[tuple[TensorEntry, ...], Kept]:
        """The rows of the index; those of the last save if files and tensors are the same but for names and digests."""
        assert self.tables is not None
        apart = self._apart(files)
        key = (coded, tuple(f.rank for f in files), apart)
        if key not in self.tables.index:
            self.tables.index.clear()
            self.tables.index[key] = (self._entries(self.tables, files, apart, coded=coded), Kept())
        return self.tables.index[key]

    def _apart(self, files: Sequence[DataFile]) -> tuple[Global, ...]:
        """Tensors of the rows of ranks that wrote several files: which file has a chunk depends on all that its rank wrote."""
        many = [position for position, count in Counter(f.rank for f in files).items() if count > 1]
        found = []
        for rank in (self.call.group.ranks[position] for position in many):
            row = self._begun.get(rank, {})
            if "own_bytes" in row:
                found += own_tensors(self._own_row(row), rank)
        return tuple(found)

    def _entries(self, tables: Tables, files: Sequence[DataFile], apart: Sequence[Global], *, coded: bool) -> tuple[TensorEntry, ...]:
        tensors, owned = dict(tables.joined.tensors), dict(tables.joined.owned)
        rank_of: dict[str, int] = {}
        for rank, table in tables.own.items():
            for t in table.tensors:
                tensors[t.name], rank_of[t.name] = t, rank
            owned |= assign(table.tensors)
        grids = Grids(files, owned | assign(apart), tensors | {t.name: t for t in apart}, self.call.group.ranks, coded=coded)
        entries = {
            name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids.of(name), rank=rank_of.get(name))
            for name, t in tensors.items()
        }
        aliases = tables.joined.aliases | {n: to for table in tables.own.values() for n, to in table.aliases.items()}
        for name, target in aliases.items():
            entries[name] = replace(entries[target], name=name, alias=target)
        return tuple(entries[n] for n in sorted(entries))

    # ---- after

    def keep_spans(self, id: str, rows: Mapping[int, Row]) -> dict[int, float]:
        """Leave beside the index how long everything took; how many seconds each rank was busy. A failure here harms nothing."""
        try:
            return write_spans(self.backend, id, rows)
        except CkptError as err:
            log.warning("the spans of the save %s are not kept: %s", self.call.url, err)
            return {}

    def remove_older(self, id: str) -> None:
        """Remove the files of the checkpoint that was replaced, and what older saves left here when they were killed.

        Nothing reaches them any more, so a failure here harms nothing. A save that still runs and began before this one has lost its files,
        but it could not commit either: the commit record is no longer the one that it would replace.
        """
        try:
            replaced = set(previous_files(self.backend, self.previous)) if self.previous is not None else set()
            stale: dict[str, list[str]] = {}
            for path in sorted(self._listed or (e.path for e in self.backend.list_prefix())):
                save = id_of(path)
                if save is not None and save < id and path not in replaced:
                    stale.setdefault(save, []).append(path)
            for path in sorted(replaced):
                self.backend.delete(path)
            for save, paths in stale.items():
                clear(self.backend, save, "", paths, partial(committed_id, self.backend))
            if self._first or self._longest > self.backend.io_hints.single_put_size:  # else no save of this job leaves any
                self._forget_uploads(id)
        except CkptError as err:
            log.warning("files of older saves stay behind in %s as orphans: %s", self.call.url, err)

    def _forget_uploads(self, id: str) -> None:
        uploads = []
        with suppress(AccessError):  # to list them takes a right of its own, which few jobs have been given
            uploads = [u for u in self.backend.pending_uploads() if (id_of(u.path) or id) < id]
        for upload in uploads:
            self.backend.abort_upload(upload)


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
