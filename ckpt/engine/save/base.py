"""References to an earlier checkpoint: which chunks of a save are in its base, what differences are made from, and how the leader writes
both down."""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

from ckpt.catalog import Catalog, DataFile, Extent, TensorEntry, job_tensors
from ckpt.concurrency import run_tasks
from ckpt.engine.digest_reader import ChunkName, DigestReader
from ckpt.errors import CkptError, ConflictError, FormatError, UsageError
from ckpt.formats.native.catalog import NativeCatalog, open_native
from ckpt.formats.native.codecs import CODECS, WITHOUT_ANCHOR
from ckpt.formats.native.datafile import DataFilePlan, chunk_key, coded_key
from ckpt.formats.native.paths import RunBackend, check_not_replaced, reference_to, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.text import parse_json

from .plan import Chunk, RankPlan

# The chunks of a base, the checkpoint of the same run that a save may refer to: as this process remembers them, or as it reads them.
#
#     this process saved it, and this rank's chunks are cut as they were then? ──yes──► RememberedBase   no read
#                  │ no
#     a load has just opened it? ──yes──► OpenedBase   headers of the files that are asked about, read by threads
#                  │ no
#     its index is opened ──────────────► OpenedBase   by one rank for all, if no rank knows the base
#
# Nobody looks here whether the base is still what it was. Whoever commits does (``formats.native.clearing``): references are published only
# where the record of the base is there, with the id by which all ranks know it, and each file that is referred to.

REMEMBERED = 3
"""Saves that a job remembers: two states that are saved in turns need one each, besides the one that was just made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBase:
    """The checkpoint whose chunks a save may refer to, a neighbour in the same run. ``id``: only that save of it counts. Not ``required``:
    if it cannot be read, everything is written. ``catalog``: as a load has just opened it."""

    url: str
    id: str | None = None
    required: bool = True
    catalog: NativeCatalog | None = None


class Referable(NamedTuple):
    """A chunk of a base that has an XXH3-128, which is that of its bytes before coding. ``file`` has it; its path is one for neighbours."""

    digest: str
    file: DataFile
    coded: bool


class ChunkPlace(NamedTuple):
    """Where a base has a chunk that is no difference itself. Paths are those for neighbours."""

    extent: Extent
    file: DataFile


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenChunks:
    """What one rank has written of a save. Numbers are those of the plan that it wrote by."""

    files: Sequence[DataFile]
    layouts: Sequence[tuple[int, DataFilePlan]]
    """Of each file: number of its first chunk, and where each is."""
    digests: Sequence[int]
    """XXH3-64 of each chunk as it is stored."""
    strong_digests: Mapping[int, str]
    """XXH3-128 of some before coding."""
    codecs: Mapping[int, str] = field(default_factory=dict)
    """Of those that are coded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RememberedBase:
    """A save of this process: the chunks of one rank, which it wrote or referred to. It answers for the same chunks alone: see ``fits``."""

    url: str
    run: str
    """The run, to be compared."""
    name: str
    id: str
    plan: RankPlan
    """What was left of the rank's plan when that was written."""
    written: WrittenChunks
    referred: Mapping[int, tuple[Referable, ChunkPlace]]
    """By their numbers in the whole plan."""

    @property
    def reusable(self) -> bool:
        return True

    @cached_property
    def source(self) -> RunBackend:
        return RunBackend(open_backend(self.url))

    def fits(self, plan: RankPlan) -> bool:
        """Whether a plan has the same chunks with the same numbers."""
        return self.plan.key.same_chunks(plan.key)

    def has_any(self, plan: RankPlan) -> bool:
        """Whether it has a tensor of this state."""
        return True

    def unmatched(self, plan: RankPlan, number: int) -> str | None:
        """See ``OpenedBase``: it was as it should be."""
        return None

    def shared(self, plan: RankPlan, numbers: Sequence[int], threads: int) -> dict[int, Referable]:
        """See ``OpenedBase``."""
        referable = {}
        for number in numbers:
            if number in self.referred:
                referable[number] = self.referred[number][0]
                continue
            at = self._places.get(number, -1)
            digest, codec = self.written.strong_digests.get(at), self.written.codecs.get(at)
            if digest is not None and codec not in WITHOUT_ANCHOR and not plan.assignments[plan.chunks[number].name].alone:
                referable[number] = Referable(digest, self._files[self._file(at)], codec is not None)
        return referable

    def whole(self, plan: RankPlan, number: int) -> ChunkPlace | None:
        """See ``OpenedBase``."""
        name, number = plan.chunks[number].name, plan.whole_number(number)
        if number in self.referred:
            return self.referred[number][1]
        at = self._places.get(number)
        codec = None if at is None else self.written.codecs.get(at)
        if at is None or codec in WITHOUT_ANCHOR or name in plan.key.own or plan.assignments[name].alone:
            return None
        number_of_file = self._file(at)
        (first, layout), file = self.written.layouts[number_of_file], self._files[number_of_file]
        offset, length = int(layout.offsets[at - first]), int(layout.lengths[at - first])
        return ChunkPlace(Extent(file.path, offset, length, f"{self.written.digests[at]:016x}", codec), file)

    @cached_property
    def _places(self) -> Mapping[int, int]:
        """Numbers in the plan that was written, by those in the whole one."""
        return {self.plan.whole_number(at): at for at in range(len(self.plan.chunks))}

    @cached_property
    def _files(self) -> Sequence[DataFile]:
        return [replace(file, path=reference_to(file.path, self.name)) for file in self.written.files]

    def _file(self, at: int) -> int:
        return bisect_right(self.written.layouts, at, key=lambda layout: layout[0]) - 1


class OpenedBase:
    """A base whose index is open."""

    def __init__(self, base: SaveBase, here: Backend, catalog: Catalog) -> None:
        """``here``: where it is."""
        if not isinstance(catalog, NativeCatalog):
            raise FormatError("a virtual checkpoint has no data files to refer to", where=base.url, hint="name another step as reuse=")
        if base.id is not None and catalog.record.id != base.id:
            raise ConflictError("another save has replaced what reuse= names", where=base.url, hint="save without reuse=, or name this one")
        self.url = here.url
        self.name = split_url(here)[1]
        self.id = catalog.record.id
        self.reusable = catalog.record.reusable
        self.source = RunBackend(here)
        self._catalog = catalog
        self._tensors = job_tensors(catalog)
        self._numbers: dict[int, dict[tuple[object, ...], int]] = {}
        self._rows: dict[int, DataFile] = {}

    def has_any(self, plan: RankPlan) -> bool:
        """Whether it has a tensor of this state."""
        return any(self._entry(plan, n) is not None for n in range(len(plan.chunks)))

    def shared(self, plan: RankPlan, numbers: Sequence[int], threads: int) -> dict[int, Referable]:
        """Of these chunks of a plan those that it has, with the same name, box and dtype, and with an XXH3-128. Headers are read by so many
        threads."""
        places = {n: (e, c) for n in numbers if (e := self._entry(plan, n)) is not None and (c := self._number(e, plan, n)) is not None}
        rows = {entry.grid.file(chunk) for entry, chunk in places.values()}
        run_tasks([partial(self._read_header, row) for row in sorted(rows)], threads, "ckpt-base")
        referable = {}
        for number, (entry, chunk) in places.items():
            spec, row = plan.specs[number], entry.grid.file(chunk)
            digests = self._catalog.header(row).strong_digests
            keys = [chunk_key(spec.name, spec.box, spec.shape, spec.dtype)]
            if self._catalog.coded:  # a difference is not referred to: it would need its anchor's file besides
                keys += [coded_key(spec.name, spec.box, spec.shape, codec) for codec in CODECS if codec not in WITHOUT_ANCHOR]
            for i, key in enumerate(keys):
                if key in digests:
                    referable[number] = Referable(digests[key], self._row(row), i > 0)
                    break
        return referable

    def unmatched(self, plan: RankPlan, number: int) -> str | None:
        """Why nobody can say whether it has a chunk that is not among ``shared``, if that is not as it should be: it has no such tensor, or
        what was trained then stays as it is now."""
        entry = self._entry(plan, number)
        if entry is None or plan.assignments[entry.name].alone:
            return None
        if self._number(entry, plan, number) is None:
            return "it cuts them into other chunks, since its layout or number of ranks is another; the next save can refer to these"
        return None if self.reusable else "it was saved without reuse=True; the next save can refer to these"

    def whole(self, plan: RankPlan, number: int) -> ChunkPlace | None:
        """The chunk of this name, box and dtype; None if it has none, or has it as a difference. Any thread may ask."""
        entry = self._entry(plan, number)
        chunk = self._number(entry, plan, number) if entry is not None else None
        if entry is None or chunk is None:
            return None
        extent, file = self._catalog.extents(entry, [chunk])[0], self._row(entry.grid.file(chunk))
        return None if extent.anchor is not None else ChunkPlace(extent._replace(path=file.path), file)

    def _read_header(self, row: int) -> None:
        self._catalog.header(row)

    def _entry(self, plan: RankPlan, number: int) -> TensorEntry | None:
        """Its tensor of this name, dtype and shape; None if it has none."""
        spec = plan.specs[number]
        entry = self._tensors.get(spec.name)
        return entry if entry is not None and entry.alias is None and (entry.dtype, entry.shape) == (spec.dtype, spec.shape) else None

    def _number(self, entry: TensorEntry, plan: RankPlan, number: int) -> int | None:
        """Number of the chunk with the same box. None of those of ranks that state their own boxes: to the leader, which is told of a
        reference by number, they have other numbers."""
        name, own, box = plan.chunks[number]
        if plan.assignments[name].alone:
            return None
        grid, cuts = entry.grid, plan.assignments[name].cuts
        if cuts is not None and grid.cuts is not None and [*map(tuple, cuts)] == [*map(tuple, grid.cuts)]:
            return own
        if id(grid) not in self._numbers:
            offsets, shapes = grid.all_boxes()
            boxes = zip(map(tuple, offsets.tolist()), map(tuple, shapes.tolist()), strict=True)
            self._numbers[id(grid)] = {at: i for i, at in enumerate(boxes)}
        return self._numbers[id(grid)].get((box.offset, box.shape))

    def _row(self, row: int) -> DataFile:
        if row not in self._rows:
            file = self._catalog.files[row]
            self._rows[row] = replace(file, path=reference_to(file.path, self.name))
        return self._rows[row]


Base: TypeAlias = RememberedBase | OpenedBase


def find_base(
    base: SaveBase, plan: RankPlan, backend: Backend, remembered: Sequence[RememberedBase], open_together: Callable[[str], Catalog]
) -> Base:
    """The base of a save with this plan. ``backend``: where it is saved; ``remembered``: what this process saved before; ``open_together``
    opens a checkpoint on all ranks."""
    here = open_backend(base.url)
    (run, name), (own_run, own_name) = split_url(here), split_url(backend)
    elsewhere = real_url(run) != real_url(own_run)
    own = [r for r in remembered if (r.run, r.name) == (real_url(run), name) and base.id in (None, r.id)]
    is_link = not own and here.link() is not None
    if elsewhere or name == own_name or is_link:
        what = f"does not lie in {own_run}" if elsewhere else "is a link" if is_link else "is what this save replaces"
        hint = "name another step of the same run as reuse="
        if elsewhere:
            hint = f"copy it into {own_run} first (`ckpt cp`) and name the copy, or save the part that changes: trainable=True"
        raise UsageError(f"the earlier checkpoint {base.url} {what}", where=backend.url, hint=hint)
    if own and own[-1].fits(plan):
        return own[-1]
    if base.catalog is not None:
        return OpenedBase(base, here, base.catalog)
    # The other ranks may have the state that they had then, and need nothing: so this one opens the base alone.
    return OpenedBase(base, here, open_native(here) if own else open_together(base.url))


# What chunks of a save are stored as differences from: the same chunks of the base, where these are stored whole (docs/format.md §15).
#
#     chunk to be written ──► the base has name, box, dtype and shape? ──no──► written as without a base
#                                  │ yes, and its chunk is no difference itself
#                             read it, check its digest ──► XOR, byte planes ──► more than 10 % smaller? ──no──► written as without a base
#                                                                                    │ yes
#                                                             the difference, and a row for the file that has the anchor
#
# Reads are of the storage and of one chunk a thread: to keep the anchor in memory would take as much memory as the state.

log = logging.getLogger("ckpt")

SMALLEST = 16 << 10
"""Bytes of the smallest chunk that is worth a read of its anchor: the read of a smaller one takes longer than writing it."""


class AnchorChunks:
    """Reads the anchors of chunks that are to be written. Thread-safe. ``required``: that one cannot be read is an error; else all that
    follows is written without anchors, and the log says why."""

    def __init__(self, base: Base, own_name: str, *, required: bool) -> None:
        """``own_name``: the directory of the save in its run."""
        self._base = base
        self._own_name = own_name
        self._required = required
        self._reader = DigestReader(base.source)
        self._lock = threading.Lock()
        self._usable = True
        if not base.reusable:
            # Whoever removes checkpoints looks for those that refer to them only where the record says so.
            self._give_up("it was saved without reuse=True, so nothing may refer to it")

    def read(self, plan: RankPlan, number: int) -> tuple[memoryview, DataFile] | None:
        """The bytes of a chunk's anchor, in memory that this thread may overwrite until it asks again, and the file that has it; None if it
        has none."""
        spec = plan.specs[number]
        if not self._usable or spec.nbytes < SMALLEST:
            return None
        try:
            anchor = self._base.whole(plan, number)
            if anchor is None:
                return None
            extent, file = anchor
            check_not_replaced([file.path], self._base.name, self._own_name)
            return self._reader.read_decoded(ChunkName(spec.name, spec.box, extent), spec.nbytes, spec.dtype.itemsize), file
        except CkptError as err:
            if self._required:
                raise
            self._give_up(str(err))
            return None

    def _give_up(self, why: str) -> None:
        with self._lock:
            known, self._usable = not self._usable, False
        if not known:
            log.warning("no chunk is stored as its difference from %s: %s", self._base.url, why)


# What ranks tell the leader of chunks that they refer to, and what the leader makes of it: more rows for files.arrow.
#
#     rank 0   "w" chunk 0 is in ../step-1/data/…-00000 ─┐     files.arrow   0, 1   own files
#     rank 1   "w" chunk 1 is in ../step-1/data/…-00001 ─┴──►                2      ../step-1/data/…-00000
#                                                                            3      ../step-1/data/…-00001
#
# Chunks that are stored as differences have such rows too, for the files that have their anchors.
# A rank's row is the same in every save that refers to the same chunks, so the leader asks for it once.


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceRows:
    """``files`` lie in other checkpoints; ``chunks``: name → number of a chunk → which of them has it."""

    files: tuple[DataFile, ...] = ()
    chunks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    anchors: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """The same of chunks' anchors."""
    coded: bool = False
    key: tuple[str, ...] = ()
    """Digests of the ranks' rows that this was made of."""


NO_REFERENCES = ReferenceRows()

References = Iterable[tuple[Chunk, DataFile]]
"""Chunks, and the file that has each, or its anchor."""


def encode_references(references: References, anchors: References, *, coded: bool) -> bytes:
    """A rank's references, as the leader reads them. ``coded``: whether one of the chunks that are referred to is."""
    files: dict[str, tuple[int, DataFile]] = {}
    rows: dict[str, dict[str, list[tuple[int, int]]]] = {"chunks": {}, "anchors": {}}
    for kind, pairs in zip(rows, (references, anchors), strict=True):
        for chunk, file in pairs:
            at = files.setdefault(file.path, (len(files), file))[0]
            rows[kind].setdefault(chunk.name, []).append((chunk.number, at))
    file_rows = [[f.path, f.size, f.header, f.digest, f.rank] for _, f in files.values()]
    return json.dumps({"files": file_rows, **rows, "coded": coded}, separators=(",", ":")).encode()


def join_references(key: tuple[str, ...], rows: Iterable[bytes]) -> ReferenceRows:
    """The references of all ranks, whose rows have the digests ``key``. Files are in the order of their paths."""
    parts = [parse_json(row) for row in rows]
    files = {row[0]: row for part in parts for row in part["files"]}
    number = {path: i for i, path in enumerate(sorted(files))}
    chunks: dict[str, dict[int, int]] = {}
    anchors: dict[str, dict[int, int]] = {}
    for part in parts:
        numbers = [number[row[0]] for row in part["files"]]
        for joined, kind in ((chunks, "chunks"), (anchors, "anchors")):
            for name, of_rank in part[kind].items():
                joined.setdefault(name, {}).update((chunk, numbers[file]) for chunk, file in of_rank)
    data_files = tuple(DataFile(path=p, size=s, header=h, digest=d, rank=r) for p, s, h, d, r in (files[path] for path in number))
    return ReferenceRows(files=data_files, chunks=chunks, anchors=anchors, coded=any(part["coded"] for part in parts), key=key)
