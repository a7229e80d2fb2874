"""The leader's part of a save: it opens the checkpoint once the ranks' tables fit together, and commits it once their files are there.

    begin    rows of all ranks ──► tables joined, coverage proven ──► values joined ──► the storage is made ready ──► id
    commit   rows of all ranks ──► replicas compared ──► grids: which file has each chunk ──► index files ──►
             all data files there? ──► commit record, in one atomic operation
    after    files of the checkpoint that was replaced, and of saves that were killed here before, are removed

What the index says of names, shapes and grids follows from the tables alone. So it is kept for the next save of the same state, which then
encodes only what has changed: digests and sizes of files (``Tables.index``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from ckpt import settings
from ckpt.catalog import Contents, DataFile, TensorEntry
from ckpt.concurrency import waiting_once
from ckpt.errors import AccessError, ConsistencyError, StateError
from ckpt.formats.native.clearing import BaseFiles, check_no_link, check_no_run, clear, referred_files
from ckpt.formats.native.commit import ANCHORS, APART, CODED, REFERENCED, Branches, id_replaced, new_id, read_record
from ckpt.formats.native.datafile import name_problem
from ckpt.formats.native.index import IndexCache
from ckpt.formats.native.paths import data_number, id_of
from ckpt.formats.native.writer import CheckpointJournal, committed_id, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import is_file_system
from ckpt.net.call import Call, grouped, grouped_parts
from ckpt.net.channel import Row
from ckpt.plan import tree
from ckpt.plan.tables import Joined, Table, join_tables, ranks_text
from ckpt.plan.values import join_values
from ckpt.text import parse_json

from .base import NO_REFERENCES, ReferenceRows, join_references
from .index_rows import Chunking, chunks_apart, index_rows
from .options import SaveOptions, check_part, compare_mirrors
from .replicas import compare_replicas

log = logging.getLogger("ckpt")

_STEP = re.compile(r"(?:global_?)?(?:step|iter|iteration|checkpoint|ckpt)[-_=]?[0-9]+", re.IGNORECASE)
KEPT = 2


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


@dataclass(kw_only=True, eq=False)
class Leader:
    """The leader of one save. ``known`` holds tables of earlier saves, and takes this one's."""

    call: Call
    backend: Backend
    options: SaveOptions
    known: list[Tables]
    id: str = ""
    """Of the save, once it is open."""
    previous: bytes | None = None
    """The commit record that this save replaces."""
    replaced: str | None = None
    """The id in it, if it can be read."""
    branches: Branches = ()
    """See ``CommitRecord``."""
    first: bool = True
    """Whether this is the first save of the job."""
    tensor_bytes: int = 0
    """Of the checkpoint, once it is committed."""
    listed: list[str] = field(default_factory=list)
    """Everything that was in the storage then, if that was looked at."""
    longest: int = 0
    """Bytes of the largest data file."""
    _rows: Mapping[int, Row] = field(default_factory=dict)
    """What each rank has said of its state, in their order."""
    _values_key: tuple[object, ...] = ()
    """What the ranks' values follow from: digests, and who has them."""

    def open(self, rows: Mapping[int, Row]) -> Row:
        """Check that the ranks' tables and values make one checkpoint, and make ready to write it. Gives what every rank has to know."""
        self.first = not self.known
        self.open_tables(self.join(rows), rows)
        if not any(cache.state is not None and cache.values == self._values_key for _, cache in self._tables.index.values()):
            _ = self.values  # they may contradict each other
        # What the storage can do, for the other ranks, which then need not find out.
        return {"id": self.id, "storage": self.backend.abilities() if self.call.group.size > 1 else None}

    def join(self, rows: Mapping[int, Row]) -> Tables:
        """The tables of all ranks, which were saved with the same options, joined; those of an earlier save if they are the same."""
        # Options decide where chunks are cut and who writes them. Ranks with different ones would write files that do
        # not fit together, so this is checked before anything else.
        by_options = grouped(rows, "options")
        if len(by_options) > 1:
            each = "; ".join(f"{options} on {ranks_text(ranks)}" for options, ranks in by_options)
            raise ConsistencyError(
                f"the ranks save with different options: {each}",
                hint="give merge_flat_shards=, codec=, reuse=, only= and trainable= alike on every rank",
            )
        if "idle" in next(iter(rows.values())):
            check_part(self.call, rows.values())
        self._rows = rows
        own = {position: row["own"] for position, row in enumerate(rows.values()) if "own" in row}
        self._values_key = (
            tuple((digest, tuple(ranks)) for digest, ranks in grouped(rows, "state")),
            tuple((rank, row["values"]) for rank, row in rows.items() if "own" in row),
        )
        # Rows carry digests of tables, not tables. The leader asks for each different one once, and for none at all
        # if this set of digests is the one of an earlier save.
        shared, merge = grouped_parts(rows), self.options.merge_flat_shards
        made_of = tuple((digest, tuple(ranks)) for digest, ranks in shared.items()), tuple(own.items())
        key = (*made_of, merge, settings.CHUNK, settings.UNDIVIDED)
        # The last few joins are kept, moved to the end when used: a job that alternates between two states (a model
        # and its average) finds both again.
        for i, tables in enumerate(self.known):
            if tables.key == key:
                self.known.append(self.known.pop(i))
                return tables
        self.call.fetch_all([*shared, *own.values()])
        joined = join_tables([(ranks, Table.from_bytes(self.call.fetch(d))) for d, ranks in shared.items()], merge_flat_shards=merge)
        tables = Tables(key, joined, {position: Table.from_bytes(self.call.fetch(d)) for position, d in own.items()})
        # What has bytes is looked at by whoever writes them; aliases and empty tensors have none.
        names = {*joined.tensors, *joined.aliases}.union(*(chain(t.aliases, (s.name for s in t.tensors)) for t in tables.own.values()))
        problem = next(filter(None, map(name_problem, names)), None)
        if problem is not None:
            raise StateError(problem, hint="rename the tensor")
        self.known[:] = [*self.known, tables][-KEPT:]
        return tables

    def open_tables(self, tables: Tables, rows: Mapping[int, Row]) -> None:
        """Make ready to save these tensors."""
        # All of this comes before any rank writes: whatever is wrong with the destination is an error on all ranks
        # while nothing has been written.
        self._tables, self._rows = tables, rows
        check_no_link(self.backend)
        if self.options.branches is not None:
            self.branches = self.options.branches()
        self.backend.prepare()
        self.previous = read_record(self.backend)
        first, url = self.previous is None and self.options.branches is None, self.backend.url
        # On an object store a look is a request, which what is named as a step does without.
        if first and (is_file_system(url) or not _STEP.fullmatch(url.rpartition("/")[2])):
            check_no_run(self.backend)
        self.replaced = id_replaced(self.previous, self.call.url)
        earlier = None if self.options.earlier is None else self.options.earlier(self.replaced)
        self.id = new_id(self.replaced, earlier, *(b.id for b in self.branches))

    @cached_property
    def values(self) -> Values:
        """The values of all ranks, joined. Fetched only where they are needed: most saves of a job have those of the one before."""
        call = self.call
        call.fetch_all(row[key] for row in self._rows.values() for key in ("state", "values") if key in row)
        state = join_values([(ranks, parse_json(call.fetch(d))) for d, ranks in grouped(self._rows, "state")])
        own = {position: parse_json(call.fetch(row["values"])) for position, row in enumerate(self._rows.values()) if "own" in row}
        return Values(state, own)

    def commit(self, rows: Mapping[int, Row], given: Values | None = None) -> None:
        """Compare replicas, check what is there, write the index and the commit record. ``given``: the values, where ranks left none."""
        # Everything that can fail comes before ``write_index``, whose last act is the commit. What follows the commit
        # (spans, removing what was replaced) may fail without harm and is only logged.
        call, mirrors = self.call, self.options.mirrors
        if any(row["replicas"] for row in rows.values()):
            compare_replicas(call, rows)
        if mirrors is not None:
            compare_mirrors(call, rows)
        positions = {rank: i for i, rank in enumerate(call.group.ranks)}  # ranks as the format counts them
        files = [DataFile(path=p, size=s, header=h, digest=d, rank=positions[r]) for r, row in rows.items() for p, s, h, d in row["files"]]
        apart = {position: row for position, row in enumerate(self._rows.values()) if "own_bytes" in row}
        referring = tuple(dict.fromkeys(row["references"] for row in rows.values() if "references" in row))
        how = Chunking(
            coded=any("coded" in row for row in rows.values()),
            references=self._references(referring) if referring else NO_REFERENCES,
            with_128=frozenset(rank for rank, row in rows.items() if "has_128" in row),
            mirrors=mirrors,
        )
        own_rows = self._own_rows(apart) if apart else {}
        entries, cache = self._index(files, own_rows, how)
        if cache.values != self._values_key:
            # Other values than in the last save: the cached JSON of the state is dropped, and the values are fetched below.
            cache.values, cache.state = self._values_key, None
        values = Values(None, {}) if cache.state is not None else self.values if given is None else given
        references = how.references
        contents = Contents(
            tensors=entries,
            files=(*files, *references.files),
            state=values.state,
            ranks=values.own,
            rows=own_rows,
            rows_bytes=sum(row["own_bytes"] for row in apart.values()),
        )
        call.heartbeat()
        needed = {
            CODED: references.coded or any(row.get("coded") for row in rows.values()),
            APART: bool(own_rows),
            REFERENCED: bool(references.files),
            ANCHORS: bool(references.anchors),
        }
        base: BaseFiles | None = None
        if references.files:
            name, id = self._rows[call.group.rank]["base"]
            base = BaseFiles(name, id, {file.path: file.size for file in references.files})
        record = write_index(
            CheckpointJournal(self.backend, id=self.id, previous=self.previous, base=base),
            contents,
            world_size=call.group.size,
            features=tuple(feature for feature, is_needed in needed.items() if is_needed),
            cache=cache,
            metrics=self.options.metrics,
            listed=self.listed,
            reusable=bool(how.with_128 or references.files or self.options.reusable),
            branches=self.branches,
        )
        self.tensor_bytes, self.longest = record.tensor_bytes, max((f.size for f in files), default=0)

    def _own_rows(self, apart: Mapping[int, Row]) -> dict[int, bytes]:
        """Ranks' own tensors and values, as they encoded them for the index."""
        self.call.fetch_all(row["own_blob"] for row in apart.values() if "own_blob" in row)  # one by one would take ranks times as long
        return {at: row["own_row"].encode() if "own_row" in row else self.call.fetch(row["own_blob"]) for at, row in apart.items()}

    def _references(self, digests: tuple[str, ...]) -> ReferenceRows:
        """Chunks of all ranks that lie in other checkpoints; those of the save before if ranks refer to the same ones."""
        known = self._tables.references
        if digests not in known:
            self.call.fetch_all(digests)
            known.clear()
            known[digests] = join_references(digests, map(self.call.fetch, digests))
        return known[digests]

    def _index(self, files: Sequence[DataFile], own_rows: Mapping[int, bytes], how: Chunking) -> tuple[tuple[TensorEntry, ...], IndexCache]:
        """The rows of the index; those of the last save if files and tensors are the same but for names and digests."""
        tables, index, ranks = self._tables, self._tables.index, self.call.group.ranks
        apart = chunks_apart(files, own_rows, ranks, how.mirrors) if own_rows else ()
        dealt = None if how.mirrors is None else (how.mirrors.text, tuple(data_number(f.path) for f in files))
        key = (tuple(f.rank for f in files), apart, how.coded, how.with_128, how.references.key, dealt)
        if key not in index:
            index.clear()
            index[key] = index_rows(tables.joined, tables.own, files, apart, ranks, how), IndexCache()
        return index[key]

    @waiting_once()
    def remove_older(self) -> None:
        """Remove the files of the checkpoint that was replaced, and what older saves left here when they were killed.

        Nothing reaches them any more, so a failure here harms nothing. A save that still runs and began before this one has lost its files,
        but it could not commit either: the commit record is no longer the one that it would replace.
        """
        # Ids sort by time, so "older" is a comparison of strings. Newer ones are left alone: they belong to a save
        # that began after this one, from another job at the same URL.
        id, backend = self.id, self.backend
        try:
            older = dict[str, list[str]]()
            listed = self.listed or [e.path for e in backend.list_prefix()]
            if not any(path.startswith("data/") for path in listed):
                # A directory that is a link is listed by its own name alone: what is in it stays, and the log says so.
                listed = [*listed, *(e.path for e in backend.list_prefix("data/"))]
            for path in sorted(listed):
                save = id_of(path)
                if save is not None and save < id:
                    older.setdefault(save, []).append(path)
            if older:  # what others refer to has to stay
                referrers = referred_files(backend)
                if referrers.by_path or referrers.unknown:
                    older = {save: kept for save, paths in older.items() if (kept := [path for path in paths if not referrers.of(path)])}
            replaced = older.pop(self.replaced, None) if self.replaced is not None else None
            if replaced:
                backend.delete_many(replaced[::-1])  # the index first: what is in data/ may have to stay
            for save, paths in older.items():
                clear(backend, save, "", paths, partial(committed_id, backend))
            if self.first or self.longest > backend.io_hints.single_put_size:  # else no save of this job leaves any
                uploads = []
                with suppress(AccessError):  # to list them takes a right of its own, which few jobs have been given
                    uploads = [u for u in backend.pending_uploads() if (id_of(u.path) or id) < id]
                for upload in uploads:
                    backend.abort_upload(upload)
        except Exception as err:  # noqa: BLE001  the checkpoint is there, and nobody may be waiting any more
            log.warning("files of older saves stay behind in %s as orphans: %s", self.call.url, err)
