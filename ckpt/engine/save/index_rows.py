"""The rows of an index: each tensor's dtype, shape and stored grid, from the ranks' joined tables and the files that they wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpt.catalog import DataFile, Grid, TensorEntry
from ckpt.formats.native.datafile import CodedFiles, plan_data_files
from ckpt.formats.native.paths import data_number
from ckpt.plan.layout.geometry import IntArray
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.tables import Joined, Table

from .base import NO_REFERENCES, ReferenceRows
from .plan import NO_ID, chunks_of, mirrored_groups, own_tensors, specs_of

if TYPE_CHECKING:
    from ckpt.plan.copies import MirrorPlacement

# The stored grids of a checkpoint: which data file has each chunk.

Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]
"""For each chunk, in which of its rank's files it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunking:
    """What decides, besides tables, which file has a chunk. ``coded``: whether chunks may be coded; ``with_128``: ranks whose headers have
    digests of 128 bits; ``references``: chunks in other checkpoints; ``mirrors``: by which each rank's chunks are dealt out to files."""

    coded: bool = False
    with_128: AbstractSet[int] = frozenset()
    references: ReferenceRows = NO_REFERENCES
    mirrors: MirrorPlacement | None = None


class Grids:
    """Stored grids with files in place of ranks; tensors cut alike, whose chunks are in the same files, share one."""

    def __init__(
        self,
        files: Sequence[DataFile],
        assignments: Mapping[str, ChunkAssignment],
        tensors: Mapping[str, TensorSpec],
        ranks: Sequence[int],
        how: Chunking,
    ) -> None:
        self.with_128 = how.with_128
        self.assignments = assignments
        self.tensors = tensors
        self.first: dict[int, int] = {}
        self.many: dict[int, int] = {}
        self.positions = {rank: i for i, rank in enumerate(ranks)}
        for row, f in enumerate(files):
            rank = ranks[f.rank]
            self.first.setdefault(rank, row)
            self.many[rank] = self.many.get(rank, 0) + 1
        self.referred = _rows_elsewhere(how.references.chunks, len(files))
        self.anchors = _rows_elsewhere(how.references.anchors, len(files))
        self.by_rank = np.full(max(ranks, default=0) + 1, -1, dtype=np.int32)
        for rank, row in self.first.items():
            self.by_rank[rank] = row
        self.made: dict[object, Grid] = {}
        split = [rank for rank, n in self.many.items() if n > 1]
        if how.mirrors is not None:
            self.numbers = self._mirrored(files, how.mirrors)
        else:
            self.numbers = (self._coded() if how.coded else self._split(split)) if split else {}

    def of(self, name: str) -> Grid:
        assignment, numbers = self.assignments[name], self.numbers.get(name)
        referred, anchored = self.referred.get(name), self.anchors.get(name)
        key = (
            id(assignment),
            None if numbers is None or not numbers.any() else numbers.tobytes(),
            *(None if at is None else tuple(a.tobytes() for a in at) for at in (referred, anchored)),
        )
        grid = self.made.get(key)
        if grid is None:
            files: Numbers = self.by_rank[assignment.owners] if numbers is None else self.by_rank[assignment.owners] + numbers
            if referred is not None:
                files[referred[0]] = referred[1]
            files = files[:1] if len(files) and (files == files[0]).all() else files
            anchors: Numbers | None = None
            if anchored is not None:
                anchors = np.full(len(assignment.owners), -1, dtype=np.int32)
                anchors[anchored[0]] = anchored[1]
            grid = self.made[key] = Grid(cuts=assignment.cuts, boxes=assignment.boxes, files=files, anchors=anchors)
        return grid

    def _coded(self) -> dict[str, Numbers]:
        """Which chunks share a file where some may be coded follows from their sizes, in the order in which every rank lists its chunks."""
        # All ranks are followed at once, tensor by tensor: of each tensor first what every rank writes first, then
        # what each writes next. To plan every rank again, as it planned itself, would take ranks times tensors, and
        # to look for its chunks in each grid ranks² of them.
        files = CodedFiles(len(self.by_rank))
        rounds: dict[int, list[IntArray]] = {}
        sizes: dict[tuple[int, int], IntArray] = {}
        file_of = {}
        for name in sorted(self.assignments):
            assignment, itemsize = self.assignments[name], self.tensors[name].dtype.itemsize
            if id(assignment) not in rounds:
                rounds[id(assignment)] = _rounds(assignment.owners)
            key = id(assignment), itemsize
            if key not in sizes:
                shapes = assignment.all_boxes()[1]
                sizes[key] = shapes.prod(axis=1, dtype=np.int64) * itemsize
            numbers: Numbers = np.zeros(len(assignment.owners), dtype=np.int32)
            for each in rounds[id(assignment)]:
                chunks = each[~np.isin(each, self.referred[name][0])] if name in self.referred else each
                numbers[chunks] = files.put(assignment.owners[chunks], sizes[key][chunks])
            file_of[name] = numbers
        return file_of

    def _mirrored(self, files: Sequence[DataFile], mirrors: MirrorPlacement) -> dict[str, Numbers]:
        """Names of files say which mirrors the chunks in them have, and those of a chunk follow from its assignment: both are one sorted
        key of rank and code."""
        ranks = list(self.positions)
        width = 1 + max((mirrors.parse_number(data_number(f.path))[0] for f in files), default=0)
        keys = np.zeros(len(files), dtype=np.int64)
        several: set[int] = set()
        for row, f in enumerate(files):
            code, part = mirrors.parse_number(data_number(f.path))
            keys[row] = ranks[f.rank] * width + code
            if part:
                several.add(ranks[f.rank])
        order = np.argsort(keys, kind="stable")
        of_assignment: dict[int, Numbers] = {}
        file_of: dict[str, Numbers] = {}
        for name, o in self.assignments.items():
            if id(o) not in of_assignment:
                rows = order[np.searchsorted(keys[order], o.owners * width + mirrors.codes(o))]
                of_assignment[id(o)] = (rows - self.by_rank[o.owners]).astype(np.int32)
            file_of[name] = of_assignment[id(o)]
        for rank in several:  # headers too long for one file, which are few: its plan is made again
            number = 0
            for group in mirrored_groups(self.assignments, mirrors, rank, own=True).values():
                for plan in plan_data_files(specs_of(group, self.tensors), id=NO_ID, rank=self.positions[rank]):
                    for c in group[plan.first : plan.first + len(plan)]:
                        if file_of[c.name] is of_assignment[id(self.assignments[c.name])]:
                            file_of[c.name] = file_of[c.name].copy()
                        file_of[c.name][c.number] = number
                    number += 1
        return file_of

    def _split(self, ranks: Sequence[int]) -> dict[str, Numbers]:
        """For ranks whose headers are too long for one file, which are few: each one's own plan, made again."""
        file_of: dict[str, Numbers] = {name: np.zeros(len(o.owners), dtype=np.int32) for name, o in self.assignments.items()}
        referred = {(name, number) for name, (numbers, _) in self.referred.items() for number in numbers.tolist()}
        for rank in ranks:
            chunks = [c for c in chunks_of(self.assignments, rank) if (c.name, c.number) not in referred]
            specs, has_128 = specs_of(chunks, self.tensors), rank in self.with_128
            for n, plan in enumerate(plan_data_files(specs, id=NO_ID, rank=self.positions[rank], has_128=has_128)):
                for c in chunks[plan.first : plan.first + len(plan)]:
                    file_of[c.name][c.number] = n
        return file_of


def _rows_elsewhere(chunks: Mapping[str, Mapping[int, int]], own: int) -> dict[str, tuple[IntArray, Numbers]]:
    """Numbers of chunks, and the rows of files that come after ``own`` ones."""
    return {
        name: (np.array(list(rows), dtype=np.int64), np.array(list(rows.values()), dtype=np.int32) + own) for name, rows in chunks.items()
    }


def _rounds(owners: IntArray) -> list[IntArray]:
    """Chunks in groups in which each rank has one at most: the first of each, the second of each, …"""
    order = np.argsort(owners, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(owners[order]) != 0))
    nth = np.arange(len(owners)) - np.repeat(begins, np.diff(np.append(begins, len(owners))))
    by_round = np.argsort(nth, kind="stable")
    return list(np.split(order[by_round], np.flatnonzero(np.diff(nth[by_round])) + 1))


def chunks_apart(
    files: Sequence[DataFile], own_rows: Mapping[int, bytes], ranks: Sequence[int], mirrors: MirrorPlacement | None = None
) -> tuple[TensorSpec, ...]:
    """Tensors of the rows of ranks that wrote several files: which file has a chunk depends on all that its rank wrote. Not so where
    ``mirrors`` decide it, unless the chunks with the same mirrors take several files. ``own_rows`` by position."""
    if mirrors is None:
        several = [position for position, count in Counter(f.rank for f in files).items() if count > 1]
    else:
        several = sorted({f.rank for f in files if mirrors.parse_number(data_number(f.path))[1]})
    return tuple(t for position in several if position in own_rows for t in own_tensors(own_rows[position], ranks[position]))


def index_rows(
    joined: Joined, own: Mapping[int, Table], files: Sequence[DataFile], apart: Sequence[TensorSpec], ranks: Sequence[int], how: Chunking
) -> tuple[TensorEntry, ...]:
    """The entries of all tensors by name. ``own``: tables of single ranks' tensors by position; ``apart``: see ``chunks_apart``."""
    tensors, assignments = dict(joined.tensors), dict(joined.assignments)
    rank_of: dict[str, int] = {}
    for rank, table in own.items():
        for t in table.tensors:
            tensors[t.name], rank_of[t.name] = t, rank
        assignments |= assign(table.tensors)
    grids = Grids(files, assignments | assign(apart), tensors | {t.name: t for t in apart}, ranks, how)
    entries = {
        name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids.of(name), rank=rank_of.get(name))
        for name, t in tensors.items()
    }
    aliases = joined.aliases | {n: to for table in own.values() for n, to in table.aliases.items()}
    for name, target in aliases.items():
        entries[name] = replace(entries[target], name=name, alias=target)
    return tuple(entries[n] for n in sorted(entries))
