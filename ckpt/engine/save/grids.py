"""The stored grids of a checkpoint: which data file has each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ckpt.catalog import DataFile, Grid
from ckpt.formats.native.datafiles.datafile import CodedFiles, plan_data_files
from ckpt.layout.geometry import IntArray
from ckpt.plan.ownership import ChunkAssignment, TensorSpec

from .plan import NO_ID, chunks_of, specs_of

_NONE: Mapping[str, Mapping[int, int]] = {}
Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]
"""For each chunk, in which of its rank's files it is."""


class Grids:
    """Stored grids with files in place of ranks; tensors cut alike, whose chunks are in the same files, share one."""

    def __init__(
        self,
        files: Sequence[DataFile],
        assignments: Mapping[str, ChunkAssignment],
        tensors: Mapping[str, TensorSpec],
        ranks: Sequence[int],
        *,
        coded: bool,
        referred: Mapping[str, Mapping[int, int]] = _NONE,
        with_128: AbstractSet[int] = frozenset(),
    ) -> None:
        """``referred``: name → number of a chunk → how far after the last of ``files`` the one is that has it already. ``with_128``: ranks
        whose headers have digests of 128 bits."""
        self.with_128 = with_128
        self.assignments = assignments
        self.tensors = tensors
        self.first: dict[int, int] = {}
        self.many: dict[int, int] = {}
        self.positions = {rank: i for i, rank in enumerate(ranks)}
        for row, f in enumerate(files):
            rank = ranks[f.rank]
            self.first.setdefault(rank, row)
            self.many[rank] = self.many.get(rank, 0) + 1
        self.referred = {
            name: (np.array(list(chunks), dtype=np.int64), np.array(list(chunks.values()), dtype=np.int32) + len(files))
            for name, chunks in referred.items()
        }
        self.by_rank = np.full(max(ranks, default=0) + 1, -1, dtype=np.int32)
        for rank, row in self.first.items():
            self.by_rank[rank] = row
        self.made: dict[object, Grid] = {}
        split = [rank for rank, n in self.many.items() if n > 1]
        self.numbers = (self._coded() if coded else self._split(split)) if split else {}

    def of(self, name: str) -> Grid:
        assignment, numbers, referred = self.assignments[name], self.numbers.get(name), self.referred.get(name)
        key = (
            id(assignment),
            None if numbers is None or not numbers.any() else numbers.tobytes(),
            None if referred is None else tuple(a.tobytes() for a in referred),
        )
        grid = self.made.get(key)
        if grid is None:
            files: Numbers = self.by_rank[assignment.owners] if numbers is None else self.by_rank[assignment.owners] + numbers
            if referred is not None:
                files[referred[0]] = referred[1]
            files = files[:1] if len(files) and (files == files[0]).all() else files
            grid = self.made[key] = Grid(cuts=assignment.cuts, boxes=assignment.boxes, files=files)
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


def _rounds(owners: IntArray) -> list[IntArray]:
    """Chunks in groups in which each rank has one at most: the first of each, the second of each, …"""
    order = np.argsort(owners, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(owners[order]) != 0))
    nth = np.arange(len(owners)) - np.repeat(begins, np.diff(np.append(begins, len(owners))))
    by_round = np.argsort(nth, kind="stable")
    return list(np.split(order[by_round], np.flatnonzero(np.diff(nth[by_round])) + 1))
