"""The leader's part of a save: it opens the checkpoint once the ranks' tables fit together, and commits it once their files are there.

    begin    rows of all ranks ──► tables joined, coverage proven ──► values joined ──► the storage is made ready ──► id   (OpenSave)
    commit   rows of all ranks ──► replicas compared ──► grids: which file has each chunk ──► index files ──►
             all data files there? ──► commit record, in one atomic operation                                          (RecordedSave)
    after    files of the checkpoint that was replaced, and of saves that were killed here before, are removed

What the index says of names, shapes and grids follows from the tables alone. So it is kept for the next save of the same state, which then
encodes only what has changed: digests and sizes of files (``Tables.index``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from ckpt import settings
from ckpt.catalog import Contents, DataFile, TensorEntry
from ckpt.errors import AccessError, CkptError, ConsistencyError, NamesError
from ckpt.formats.journal import CheckpointJournal, files_of, without_referred
from ckpt.formats.native.clearing import BaseFiles, check_no_link, clear
from ckpt.formats.native.commit import ANCHORS, APART, CODED, REFERENCED, Branches
from ckpt.formats.native.paths import data_number, id_of
from ckpt.formats.native.spans import write_spans
from ckpt.formats.native.writer import IndexCache, committed_id, new_id, read_record, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan import tree
from ckpt.plan.copies import MirrorPlacement
from ckpt.plan.tables import Joined, Table, join_tables, ranks_text
from ckpt.plan.values import join_values
from ckpt.text import parse_json

from .base import NO_REFERENCES, ReferenceRows, join_references
from .index_rows import chunks_apart, index_rows
from .replicas import compare_mirrors, compare_replicas

log = logging.getLogger("ckpt")

KEPT = 2
_GLOBS = "names are paths in the state, such as model.layers.0.lora_A.weight and optimizer.state.<parameter>.exp_avg; * matches dots too"


@dataclass(eq=False)
class Tables:
    """All ranks' tables joined; ``own`` are those of single ranks' tensors, by position. ``key`` is what they were made of, ``index`` what
    was encoded from them."""

    key: tuple[object, ...]
    joined: Joined
    own: Mapping[int, Table]
    index: dict[tuple[object, ...], tuple[tuple[TensorEntry, ...], IndexCache]] = field(default_factory=dict)
    references: dict[tuple[str, ...], ReferenceRows] = field(default_factory=dict)


class Values(NamedTuple):
    """What is not a tensor: the state of all ranks, and the values of single ranks by position and path."""

    state: tree.Node
    own: Mapping[int, Mapping[str, tree.Node]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Leader:
    """What the leader knows before any rank has said anything. ``known`` holds tables of earlier saves, and takes this one's. ``earlier``
    gives the id of a save elsewhere that this one comes after, if there is one; ``branches`` those that led to it. ``base``: name in the
    run and id of the checkpoint that ranks may refer to. ``reusable``: whether later saves may refer to this one. ``mirrors``: by which
    ranks write what others own, too."""

    call: Call
    backend: Backend
    known: list[Tables]
    merge_flat_shards: bool
    metrics: Mapping[str, float] | None = None
    earlier: Callable[[], str | None] | None = None
    branches: Callable[[], Branches] | None = None
    mirrors: MirrorPlacement | None = None
    base: tuple[str, str] | None = None
    reusable: bool = False

    def open(self, rows: Mapping[int, Row]) -> OpenSave:
        """Check that the ranks' tables and values make one checkpoint, and make ready to write it."""
        first = not self.known
        opened = self.open_tables(self._compared(rows), rows, first=first)
        key = opened.values_key
        if not any(cache.state is not None and cache.values == key for _, cache in opened.tables.index.values()):
            _ = opened.values  # they may contradict each other
        return opened

    def forecast(self, rows: Mapping[int, Row]) -> int:
        """Bytes of all tensors of the checkpoint that these tables and values make. Nothing is written."""
        check_no_link(self.backend)
        tables = self._compared(rows)
        _ = OpenSave(leader=self, id="", abilities=None, previous=None, tables=tables, rows=rows, first=True).values
        tensors = [*tables.joined.tensors.values(), *(t for table in tables.own.values() for t in table.tensors)]
        apart: int = sum(row.get("own_bytes", 0) for row in rows.values())
        return apart + sum(t.nbytes for t in tensors)

    def _compared(self, rows: Mapping[int, Row]) -> Tables:
        """The tables of all ranks, which were saved with the same options."""
        # Options decide where chunks are cut and who writes them. Ranks with different ones would write files that do
        # not fit together, so this is checked before anything else.
        by_options = grouped(rows, "options")
        if len(by_options) > 1:
            each = "; ".join(f"{options} on {ranks_text(ranks)}" for options, ranks in by_options)
            raise ConsistencyError(
                f"the ranks save with different options: {each}",
                hint="give merge_flat_shards=, codec=, only= and trainable= alike on every rank",
            )
        idle = set.intersection(*(set(row.get("idle", ())) for row in rows.values()))
        if idle:
            globs = ", ".join(map(repr, sorted(idle)))
            raise NamesError(f"only= has globs that no name of the state matches: {globs}", where=self.call.url, hint=_GLOBS)
        if all(row.get("nothing_trained", False) for row in rows.values()):
            text = "trainable=True leaves nothing that is trained: no parameter of the state requires a gradient"
            hint = "put the module itself into the state, not its state_dict(), and set requires_grad of what you train; or leave it out"
            raise NamesError(text, where=self.call.url, hint=hint)
        return self._join(rows)

    def open_tables(self, tables: Tables, rows: Mapping[int, Row], *, first: bool = True) -> OpenSave:
        """Make ready to save these tensors."""
        # All of this comes before any rank writes: whatever is wrong with the destination is an error on all ranks
        # while nothing has been written.
        check_no_link(self.backend)
        branches = self.branches() if self.branches is not None else ()
        self.backend.prepare()
        abilities = self.backend.abilities() if self.call.group.size > 1 else None
        previous = read_record(self.backend)
        earlier = self.earlier() if self.earlier is not None else None
        return OpenSave(
            leader=self,
            id=new_id(after=previous, later_than=max((id for id in (earlier, *(b.id for b in branches)) if id is not None), default=None)),
            branches=branches,
            abilities=abilities,
            previous=previous,
            tables=tables,
            rows=rows,
            first=first,
        )

    @property
    def positions(self) -> dict[int, int]:
        """Ranks as the format counts them."""
        return {rank: i for i, rank in enumerate(self.call.group.ranks)}

    def _join(self, rows: Mapping[int, Row]) -> Tables:
        """The tables of all ranks, joined; those of an earlier save if they are the same."""
        # Rows carry digests of tables, not tables. The leader asks for each different one once, and for none at all
        # if this set of digests is the one of an earlier save.
        shared = grouped_parts(rows)
        positions = self.positions
        own = {positions[rank]: row["own"] for rank, row in rows.items() if "own" in row}
        key = (
            tuple((digest, tuple(ranks)) for digest, ranks in shared.items()),
            tuple(own.items()),
            self.merge_flat_shards,
            settings.CHUNK,
            settings.UNDIVIDED,
        )
        # The last few joins are kept, moved to the end when used: a job that alternates between two states (a model
        # and its average) finds both again.
        for i, tables in enumerate(self.known):
            if tables.key == key:
                self.known.append(self.known.pop(i))
                return tables
        self.call.fetch_all([*shared, *own.values()])
        joined = join_tables(
            [(ranks, Table.from_bytes(self.call.fetch(d))) for d, ranks in shared.items()], merge_flat_shards=self.merge_flat_shards
        )
        tables = Tables(key, joined, {position: Table.from_bytes(self.call.fetch(d)) for position, d in own.items()})
        self.known[:] = [*self.known, tables][-KEPT:]
        return tables


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSave:
    """A save that may be written: its ranks agree, and its storage is ready. Nothing of it can be read yet."""

    leader: Leader
    id: str
    abilities: str | None
    """What the storage can do, for the other ranks, which then need not find out."""
    previous: bytes | None
    """The commit record that this save will replace."""
    tables: Tables
    rows: Mapping[int, Row]
    """What each rank has said of its state."""
    first: bool
    """Whether this is the first save of the job."""
    branches: Branches = ()
    """See ``CommitRecord``."""
    given: Values | None = None
    """The values of all ranks, if no rank left any."""

    def public(self) -> dict[str, Any]:
        """What every rank has to know."""
        return {"id": self.id, "storage": self.abilities}

    @property
    def values_key(self) -> tuple[object, ...]:
        """What the ranks' values follow from: digests, and who has them."""
        shared = tuple((digest, tuple(ranks)) for digest, ranks in grouped(self.rows, "state"))
        return shared, tuple((rank, row["values"]) for rank, row in self.rows.items() if "own" in row)

    @cached_property
    def values(self) -> Values:
        """The values of all ranks, joined. Fetched only where they are needed: most saves of a job have those of the one before."""
        if self.given is not None:
            return self.given
        call, positions = self.leader.call, self.leader.positions
        call.fetch_all(row[key] for row in self.rows.values() for key in ("state", "values") if key in row)
        state = join_values([(ranks, parse_json(call.fetch(d))) for d, ranks in grouped(self.rows, "state")])
        own = {positions[rank]: parse_json(call.fetch(row["values"])) for rank, row in self.rows.items() if "own" in row}
        return Values(state, own)

    def commit(self, rows: Mapping[int, Row]) -> RecordedSave:
        """Compare replicas, check what is there, write the index and the commit record."""
        call, backend, positions = self.leader.call, self.leader.backend, self.leader.positions
        # Everything that can fail comes before ``write_index``, whose last act is the commit. What follows the commit
        # (spans, removing what was replaced) may fail without harm and is only logged.
        if any(row["replicas"] for row in rows.values()):
            compare_replicas(call, rows)
        if self.leader.mirrors is not None:
            compare_mirrors(call, rows)
        call.fetch_all(row["own_blob"] for row in self.rows.values() if "own_blob" in row)  # one by one would take ranks times as long
        own_rows = {positions[rank]: self._own_row(row) for rank, row in self.rows.items() if "own_bytes" in row}
        files = [DataFile(path=p, size=s, header=h, digest=d, rank=positions[r]) for r, row in rows.items() for p, s, h, d in row["files"]]
        references = self._references(rows)
        with_128 = frozenset(rank for rank, row in rows.items() if "has_128" in row)
        entries, cache = self._index(files, own_rows, references, with_128, coded=any("coded" in row for row in rows.values()))
        key = self.values_key
        if cache.values != key:
            # Other values than in the last save: the cached JSON of the state is dropped, and the values are fetched
            # below.
            cache.values, cache.state = key, None
        values = self.values if cache.state is None else Values(None, {})
        contents = Contents(
            tensors=entries,
            files=(*files, *references.files),
            state=values.state,
            ranks=values.own,
            rows=own_rows,
            rows_bytes=sum(row.get("own_bytes", 0) for row in self.rows.values()),
        )
        call.heartbeat()
        coded = references.coded or any(row.get("coded") for row in rows.values())
        needed = {
            CODED: coded,
            APART: bool(contents.rows),
            REFERENCED: bool(references.files),
            ANCHORS: bool(references.anchors),
        }
        listed: list[str] = []
        base = self.leader.base if references.files else None
        referred = None if base is None else BaseFiles(*base, {file.path: file.size for file in references.files})
        record = write_index(
            CheckpointJournal(backend, id=self.id, previous=self.previous, base=referred),
            contents,
            world_size=call.group.size,
            features=tuple(feature for feature, is_needed in needed.items() if is_needed),
            cache=cache,
            metrics=self.leader.metrics,
            listed=listed,
            reusable=bool(with_128 or references.files or self.leader.reusable),
            branches=self.branches,
        )
        longest = max((f.size for f in files), default=0)
        return RecordedSave(opened=self, tensor_bytes=record.tensor_bytes, listed=tuple(listed), longest=longest)

    def _own_row(self, row: Row) -> bytes:
        """A rank's own tensors and values, as it encoded them for the index."""
        return row["own_row"].encode() if "own_row" in row else self.leader.call.fetch(row["own_blob"])

    def _references(self, rows: Mapping[int, Row]) -> ReferenceRows:
        """Chunks of all ranks that lie in other checkpoints; those of the save before if ranks refer to the same ones."""
        digests = tuple(dict.fromkeys(row["references"] for row in rows.values() if "references" in row))
        if not digests:
            return NO_REFERENCES
        if digests not in self.tables.references:
            self.leader.call.fetch_all(digests)
            self.tables.references.clear()
            self.tables.references[digests] = join_references(digests, map(self.leader.call.fetch, digests))
        return self.tables.references[digests]

    def _index(
        self, files: Sequence[DataFile], own_rows: Mapping[int, bytes], references: ReferenceRows, with_128: frozenset[int], *, coded: bool
    ) -> tuple[tuple[TensorEntry, ...], IndexCache]:
        """The rows of the index; those of the last save if files and tensors are the same but for names and digests."""
        ranks, index, mirrors = self.leader.call.group.ranks, self.tables.index, self.leader.mirrors
        apart = chunks_apart(files, own_rows, ranks, mirrors)
        placed = None if mirrors is None else (mirrors.text, tuple(data_number(f.path) for f in files))
        key = (coded, tuple(f.rank for f in files), apart, references.key, with_128, placed)
        if key not in index:
            index.clear()
            entries = index_rows(
                self.tables.joined,
                self.tables.own,
                files,
                apart,
                ranks,
                coded=coded,
                referred=references.chunks,
                anchors=references.anchors,
                with_128=with_128,
                mirrors=mirrors,
            )
            index[key] = entries, IndexCache()
        return index[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedSave:
    """A save whose commit record is there. ``listed``: everything that was in the storage then, if that was looked at; ``longest``: bytes
    of the largest data file."""

    opened: OpenSave
    tensor_bytes: int
    listed: Sequence[str]
    longest: int

    def public(self) -> dict[str, Any]:
        """What every rank has to know."""
        return {"id": self.opened.id, "tensor_bytes": self.tensor_bytes}

    def keep_spans(self, rows: Mapping[int, Row]) -> dict[int, float]:
        """Leave beside the index how long everything took; how many seconds each rank was busy. A failure here harms nothing."""
        leader = self.opened.leader
        try:
            return write_spans(leader.backend, self.opened.id, rows)
        except CkptError as err:
            log.warning("the spans of the save %s are not kept: %s", leader.call.url, err)
            return {}

    def remove_older(self) -> None:
        """Remove the files of the checkpoint that was replaced, and what older saves left here when they were killed.

        Nothing reaches them any more, so a failure here harms nothing. A save that still runs and began before this one has lost its files,
        but it could not commit either: the commit record is no longer the one that it would replace.
        """
        # Ids sort by time, so "older" is a comparison of strings. Newer ones are left alone: they belong to a save
        # that began after this one, from another job at the same URL.
        id, previous, backend = self.opened.id, self.opened.previous, self.opened.leader.backend
        try:
            replaced = files_of(backend, previous)
            stale, known = dict[str, list[str]](), set(replaced)
            for path in sorted(self.listed or (e.path for e in backend.list_prefix())):
                save = id_of(path)
                if save is not None and save < id and path not in known:
                    stale.setdefault(save, []).append(path)
            if stale:  # what others refer to is no orphan
                stale = {save: [*kept] for save, paths in stale.items() if (kept := without_referred(backend, paths))}
            if replaced:
                backend.delete_many(without_referred(backend, replaced))
            for save, paths in stale.items():
                clear(backend, save, "", paths, partial(committed_id, backend))
            if self.opened.first or self.longest > backend.io_hints.single_put_size:  # else no save of this job leaves any
                uploads = []
                with suppress(AccessError):  # to list them takes a right of its own, which few jobs have been given
                    uploads = [u for u in backend.pending_uploads() if (id_of(u.path) or id) < id]
                for upload in uploads:
                    backend.abort_upload(upload)
        except Exception as err:  # noqa: BLE001  the checkpoint is there, and nobody may be waiting any more
            log.warning("files of older saves stay behind in %s as orphans: %s", self.opened.leader.call.url, err)


def grouped(rows: Mapping[int, Row], key: str) -> list[tuple[str, list[int]]]:
    """Digest and ranks, for each different digest."""
    ranks_of: dict[str, list[int]] = {}
    for rank, row in rows.items():
        ranks_of.setdefault(row[key], []).append(rank)
    return list(ranks_of.items())


def grouped_parts(rows: Mapping[int, Row]) -> dict[str, list[int]]:
    """The ranks by digest, for each different part of the ranks' tables."""
    ranks_of: dict[str, list[int]] = {}
    for digests, ranks in grouped(rows, "table"):
        for digest in digests.split():
            ranks_of.setdefault(digest, []).extend(ranks)
    return ranks_of
