"""Who writes which bytes of files that all ranks of a job write together. Every rank computes the same, without talking. Pure. And what an
export is given and reports.

Where a storage takes any ranges, a rank writes what it has of a tensor at its place, if that is at least ``settings.WORTH_A_CALL``
bytes at a time or all in one; other tensors, such as those cut along rows, go through windows. A *window* is a range of a file that one
rank, its *aggregator*, puts together from what the others send it and writes at once. Where a storage takes whole parts only, all goes
through windows.

Invariants: windows and direct pieces tile the items of all files. What a rank keeps and sends in one round is at most ``budget`` bytes,
unless one window alone is more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ckpt import settings, units
from ckpt.catalog import CatalogDefaults, Extent, Grid, TensorEntry
from ckpt.converters.mapping.convention import Translation, check_translation
from ckpt.errors import UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.plan.layout.geometry import Box, IntArray, flat_to_boxes, row_major_strides, strided_blocks
from ckpt.plan.reads import overlapping_chunks
from ckpt.plan.tables import Joined
from ckpt.plan.views import LogicalTensor, ViewPiece, filled, within

from .selection import OutputTensor, SelectOptions
from .target import FileSegment, OutputFile, check_sizes

# The state of a running job as a catalog: what a save of it would store, and which rank has it.


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCatalog(CatalogDefaults):
    """See ``ckpt.catalog.Catalog``; ``owners`` has for each tensor the rank that gives each chunk, ``url`` is where it goes."""

    url: str
    backend: Backend
    tensors: Mapping[str, TensorEntry]
    owners: Mapping[str, IntArray]
    state: Any
    world_size: int
    format: str = "a running job"
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, joined: Joined, state: Any, *, url: str, backend: Backend, world_size: int) -> StateCatalog:
        """From the tables and values of all ranks, joined."""
        somewhere = np.zeros(1, dtype=np.int32)
        grids = {id(o): Grid(cuts=o.cuts, boxes=o.boxes, files=somewhere) for o in joined.assignments.values()}
        entries = {
            name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids[id(joined.assignments[name])])
            for name, t in joined.tensors.items()
        }
        owners = {name: assignments.owners for name, assignments in joined.assignments.items()}
        for name, target in joined.aliases.items():
            entries[name], owners[name] = replace(entries[target], name=name, alias=target), owners[target]
        return cls(url=url, backend=backend, tensors=entries, owners=owners, state=state, world_size=world_size)

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """Refused."""
        return self.extents_of([])

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """Refused."""
        raise UsageError("the tensors of a running job are in no file", where=self.url)


WINDOW = 8 << 20
"""Bytes of a window where the storage does not ask for a size."""

Way = Literal["ranges", "parts", "files"]
"""What a storage takes from several processes: any ranges of a file, whole parts of it, or whole files alone."""


class Move(NamedTuple):
    """What ``rank`` has of one box of a tensor: ``piece.box`` in the coordinates of the tensor as it is written."""

    rank: int
    piece: ViewPiece


class WriteWindow(NamedTuple):
    """The bytes ``[start, stop)`` of a file: ``segments`` of its items, and how many bytes of them each rank has. Who takes part asks
    ``WritePlanner.moves``: all moves of a large job would fill the memory."""

    file: int
    start: int
    stop: int
    segments: tuple[FileSegment, ...]
    sizes: Mapping[int, int]
    aggregator: int
    round: int


@dataclass(frozen=True, kw_only=True, eq=False)
class WritePlan:
    """``windows`` in the order of the files; ``direct`` are the numbers of file and item that need none; ``heads`` the rank that writes
    the header of each file, where it is in no window."""

    windows: tuple[WriteWindow, ...]
    direct: tuple[tuple[int, int], ...]
    heads: tuple[int | None, ...]

    @property
    def rounds(self) -> int:
        return max((w.round for w in self.windows), default=-1) + 1


class WritePlanner:
    """``tensors`` are those that are written, by name; ``ranks`` all that take part."""

    def __init__(
        self, catalog: StateCatalog, tensors: Mapping[str, OutputTensor], files: Sequence[OutputFile], ranks: Sequence[int]
    ) -> None:
        self.catalog = catalog
        self.tensors = tensors
        self.files = files
        self.ranks = ranks
        self._long: dict[object, bool] = {}

    def plan(self, way: Way, parts: Sequence[int], budget: int) -> WritePlan:
        """``parts`` has the size of a part for each file, where the storage wants whole parts."""
        # Two ways for an item. If what each rank has of it lies in the file in long runs, ranks write their parts
        # straight to their places (``direct``), and no byte goes through another rank. Everything else is assembled
        # in windows by an aggregator: two-phase I/O, as MPI-IO calls it.
        direct = [(f, i) for f, file in enumerate(self.files) for i in range(len(file.items)) if way == "ranges" and self.is_long(f, i)]
        skipped = set(direct)
        pacer = _Pacer(self.ranks, budget)
        windows = []
        for f, part in enumerate(parts):
            alone = self.ranks[f % len(self.ranks)] if way == "files" else None
            for start, stop, segments in self._cut(f, part or WINDOW, skipped, head=way != "ranges"):
                sizes: dict[int, int] = {}
                for segment in segments:
                    itemsize = self.files[f].items[segment.item].itemsize
                    for rank, _, box in self._owned(f, segment):
                        sizes[rank] = sizes.get(rank, 0) + box.numel * itemsize
                aggregator, round = pacer.place(stop - start, sizes, alone)
                windows.append(WriteWindow(f, start, stop, tuple(segments), sizes, aggregator, round))
        heads = tuple(self.ranks[f % len(self.ranks)] if way == "ranges" else None for f in range(len(self.files)))
        return WritePlan(windows=tuple(windows), direct=tuple(direct), heads=heads)

    def moves(self, f: int, segment: FileSegment) -> Iterator[Move]:
        """Who has what of a segment of a file, in an order that is the same everywhere."""
        return (Move(rank, within(piece, box)) for rank, piece, box in self._owned(f, segment))

    def _owned(self, f: int, segment: FileSegment) -> Iterator[tuple[int, ViewPiece, Box]]:
        """Rank, piece, and the box of its stored tensor that the rank has."""
        for piece in self.tensors[self.files[f].items[segment.item].name].view.overlapping(segment.box):
            owners = self.catalog.owners[piece.source]
            for copy in overlapping_chunks(self.catalog.tensors[piece.source].grid, piece.part):
                yield int(owners[copy.chunk]), piece, copy.box

    def direct_pieces(self, gathering: WritePlan, rank: int) -> Iterator[tuple[int, int, ViewPiece]]:
        """File, item and piece of all that ``rank`` writes by itself."""
        for f, i in gathering.direct:
            for piece in self.tensors[self.files[f].items[i].name].view.pieces:
                grid = self.catalog.tensors[piece.source].grid
                for chunk in np.flatnonzero(self.catalog.owners[piece.source] == rank).tolist():
                    common = grid.box(chunk).intersect(piece.part)
                    if common is not None:
                        yield f, i, within(piece, common)

    def _cut(self, number: int, part: int, skipped: set[tuple[int, int]], *, head: bool) -> Iterator[tuple[int, int, list[FileSegment]]]:
        """The ranges ``[n·part, (n+1)·part)`` of a file with what of items is in each; with ``head`` all of the file, header too."""
        file = self.files[number]
        by_range: dict[int, list[FileSegment]] = defaultdict(list)
        for i, item in enumerate(file.items):
            if (number, i) in skipped or not item.length:
                continue
            for n in range(item.offset // part, (item.offset + item.length - 1) // part + 1):
                first, last = max(item.offset, n * part), min(item.offset + item.length, (n + 1) * part)
                by_range[n] += _segments(i, item.box.shape, item.offset, item.itemsize, first, last)
        if head:
            for n in range(-(-file.size // part)):
                yield n * part, min((n + 1) * part, file.size), by_range[n]
            return
        for segments in by_range.values():
            yield segments[0].start, segments[-1].start + segments[-1].length, segments

    def is_long(self, f: int, i: int) -> bool:
        """Whether all that ranks have of an item lies there in long runs."""
        item = self.files[f].items[i]
        view = self.tensors[item.name].view
        grids = [self.catalog.tensors[p.source].grid for p in view.pieces]
        key = view.shape, item.itemsize, tuple((p.box, id(g), p.part, p.axes) for p, g in zip(view.pieces, grids, strict=True))
        if key not in self._long:
            single = len(view.pieces) == 1 and view.is_all_of(self.catalog.tensors[view.pieces[0].source].shape)
            cuts = grids[0].cuts if single else None
            if filled(view) != math.prod(view.shape):
                self._long[key] = False
            elif cuts is not None:
                self._long[key] = _shortest(view.shape, cuts, item.itemsize) >= settings.WORTH_A_CALL
            else:
                all_of_it = FileSegment(i, item.box, item.offset, item.length)
                self._long[key] = all(_is_long(view, m.piece, item.itemsize) for m in self.moves(f, all_of_it))
        return self._long[key]


def _segments(number: int, shape: Sequence[int], offset: int, itemsize: int, first: int, last: int) -> list[FileSegment]:
    """The bytes ``[first, last)`` of a file, which are an item's, as boxes that are contiguous in it."""
    at = first
    segments = []
    for box in flat_to_boxes(shape, (first - offset) // itemsize, (last - offset) // itemsize):
        segments.append(FileSegment(number, box, at, box.numel * itemsize))
        at += segments[-1].length
    return segments


def _shortest(shape: Sequence[int], cuts: Sequence[Sequence[int]], itemsize: int) -> float:
    """Bytes of the shortest run that a cell of a regular grid is made of; infinite if every cell is one run."""
    cut = [d for d, c in enumerate(cuts) if len(c) > 2]
    if not cut or all(int(np.diff(cuts[d]).max()) == 1 for d in range(cut[-1])):
        return math.inf
    return int(np.diff(cuts[cut[-1]]).min()) * row_major_strides(shape)[cut[-1]] * itemsize


def _is_long(view: LogicalTensor, piece: ViewPiece, itemsize: int) -> bool:
    blocks = strided_blocks(view.shape, piece.box)
    return blocks.runs == 1 or blocks.length * itemsize >= settings.WORTH_A_CALL


class _Pacer:
    """Chooses aggregators and rounds. A window is kept by a rank that has much of it, the one that has kept least so far; its round is the
    first in which all that take part still have room."""

    def __init__(self, ranks: Sequence[int], budget: int) -> None:
        self.budget = budget
        self.kept = dict.fromkeys(ranks, 0)
        self.at = dict.fromkeys(ranks, 0)
        self.used = dict.fromkeys(ranks, 0)

    def place(self, size: int, sizes: Mapping[int, int], alone: int | None) -> tuple[int, int]:
        """Keeper and round of a window of ``size`` bytes of which ranks have ``sizes``; ``alone`` is the only one that may keep it."""
        # The aggregator is one of the ranks that have at least half as much of the window as the one with most, so few bytes move; among
        # these the one that has assembled least, so the work is even. All ranks compute the same.
        most = max(sizes.values(), default=0)
        able = [r for r, n in sizes.items() if 2 * n >= most] or list(self.kept)
        aggregator = alone if alone is not None else min(able, key=lambda r: (self.kept[r], r))
        self.kept[aggregator] += size
        takes = {r: n for r, n in sizes.items() if r != aggregator} | {aggregator: size}
        # Rounds bound the memory: in one round a rank takes part in windows of at most ``budget`` bytes. A rank moves
        # on to a round with the window, and never back, so that all ranks make the exchanges in one order.
        round = max(self.at[r] for r in takes)
        while any(self.at[r] == round and self.used[r] and self.used[r] + n > self.budget for r, n in takes.items()):
            round += 1
        for r, n in takes.items():
            self.used[r] = n + (self.used[r] if self.at[r] == round else 0)
            self.at[r] = round
        return aggregator, round


# What an export is given, and what it reports.


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What an export did. ``tensor_bytes`` and ``file_bytes`` are all ranks'; ``rank_bytes`` are those of tensors that this rank wrote, in
    ``writes`` calls, and ``sent_bytes`` those that it sent to other ranks. ``left_out`` are tensors of which nothing was exported.
    ``seconds`` of wall time."""

    url: str
    files: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    file_bytes: int
    rank_bytes: int
    sent_bytes: int
    writes: int
    left_out: tuple[str, ...]
    seconds: float
    since: str | None = None
    """The export that this delta follows; None for a full one."""
    changed: int = 0
    """Elements that a delta has."""

    def __str__(self) -> str:
        kind = "exported" if self.since is None else f"exported the changes since {self.since}:"
        files = f"{units.size(self.tensor_bytes)} in {units.plural(len(self.files), 'file')}"
        return f"{kind} {files} to {self.url} in {units.duration(self.seconds)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions(SelectOptions):
    """What all ranks have to give alike; see ``export``."""

    translation: Translation | None
    shard_size: int | str | None
    overwrite: bool
    memory: int
    since: str | None
    anchor_every: int
    dequantize: bool
    check_replicas: bool

    def selection(self, numbers: Mapping[str, int]) -> SelectOptions:
        """What of the state is taken; ``numbers`` are those of the model's configuration."""
        return self if self.translation is None else replace(self, views=self.translation.views(numbers))

    def check(self) -> None:
        """Raise UsageError unless the arguments have their types and the numbers can be."""
        check_translation(self.translation)
        if self.root is not None and not isinstance(self.root, str):
            raise UsageError(f"root= is text or None, not {self.root!r}")
        check_sizes(memory=self.memory, shard_size=None if isinstance(self.shard_size, str) else self.shard_size)
        if self.memory < settings.LEAST_MEMORY:
            raise UsageError(f"{self.memory} bytes of memory are too few", hint=f"at least {settings.LEAST_MEMORY} (memory=)")
        settings.check_whole(self.anchor_every, "anchor_every", 1, "16; 1 writes full exports only")
