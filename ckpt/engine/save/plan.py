"""What one rank writes, and how: it follows from the rank's tables alone, so the next save of the same state has the same plan.

Invariant: a plan is used again only if every tensor of the state has the same name, dtype, shape, padding and layout, and every limit
that the plan depends on is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from ckpt import settings
from ckpt.dtypes import dtype
from ckpt.formats.native.datafile import ChunkSpec, DataFilePlan, coded_groups, plan_data_files
from ckpt.formats.native.paths import data_path
from ckpt.formats.native.ranks import OwnTensor, encode_tensors
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, Fragment, TensorSpec, assign, fragments, replicated_chunks
from ckpt.plan.reads import group_sizes
from ckpt.plan.tables import Table, split_tables
from ckpt.state.collect import Collected
from ckpt.state.shard_table import ShardCache
from ckpt.text import parse_json

if TYPE_CHECKING:
    from ckpt.plan.copies import MirrorPlacement

NO_ID = "0" * 16
"""Stands for the id of the save in plans that are kept."""
_ALIGN = 16
APART = 256
"""Most ranks of a job whose values and tensors of their own are in the tables of the index; of more they lie apart."""
KEPT = 2
"""Plans of different states that a job keeps: a model and its averaged copy are often saved in turns."""


class Chunk(NamedTuple):
    """A chunk that this rank writes: number ``number`` of tensor ``name``. A rank may have very many: hence a tuple."""

    name: str
    number: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Chunks ``numbers`` of a rank, neighbours in data file number ``file`` from byte ``start`` on; ``lengths`` of each, in bytes."""

    file: int
    start: int
    length: int
    numbers: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How one rank writes. ``position``: its place among those that take part."""

    rank: int = 0
    position: int = 0
    merge_flat_shards: bool = False
    codec: str | None = None
    mirrors: MirrorPlacement | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPlan:
    """``shared`` are the parts of the rank's table as it sends them, ``own`` its own (only if it has values of its own), and
    ``own_tensors`` the same for a row of the index; ``chunks`` in the order in which every rank lists them, ``specs`` what their files
    say of them; ``files`` with ``NO_ID`` as id, or ``groups`` of chunks that become files once they are coded; ``batches`` of each file
    or group; ``sends`` and ``receives`` are what moves between ranks before merged chunks are whole; ``replicated`` the tensors, and
    their chunks, that other ranks have too."""

    key: _Key
    assignments: Mapping[str, ChunkAssignment]
    chunks: Sequence[Chunk]
    batches: Sequence[Sequence[Batch]]
    specs: Sequence[ChunkSpec] = ()
    files: Sequence[DataFilePlan] = ()
    groups: Sequence[slice] = ()
    shared: Sequence[bytes] = ()
    own: bytes = b""
    own_tensors: bytes = b""
    sends: Sequence[Fragment] = ()
    receives: Sequence[Fragment] = ()
    replicated: Sequence[tuple[str, Sequence[int]]] = ()
    numbers: Sequence[int] = ()
    """Of a plan without what is referred to: the number of each chunk in the whole plan."""
    has_128: bool = False
    """Whether headers have room for digests of 128 bits."""
    mirrored: int = 0
    """Of ``files`` the last so many are those of other ranks, which this one writes, too (``ckpt.plan.copies``)."""

    def whole_number(self, number: int) -> int:
        """The number of a chunk in the whole plan."""
        return self.numbers[number] if self.numbers else number

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all chunks, before coding."""
        return sum(batch.length for batches in self.batches for batch in batches)

    @cached_property
    def requests(self) -> int:
        """Ranges that are handed to the storage: each batch, and the header of each file."""
        return sum(len(batches) + 1 for batches in self.batches)


@dataclass(eq=False)
class Plans:
    """What a job remembers between saves of the same state: its shards, and the last few plans of this rank."""

    shards: ShardCache = field(default_factory=ShardCache)
    hits: int = 0
    _kept: list[RankPlan] = field(default_factory=list)
    _reduced: list[_Reduced] = field(default_factory=list)

    def plan(self, collected: Collected, how: WriteOptions) -> RankPlan:
        """The plan for a collected state: a kept one, or a new one."""
        shard_table = collected.shard_table
        if len(self.shards.known) > 4 * len(shard_table.tensors) + 1000:
            self.shards.known.clear()  # of states that are not saved any more
        # The key has values, not objects: a training loop builds its state dictionary anew for each save, and equal
        # specs mean an equal plan. Limits are part of it, since tests change them.
        infos = tuple(t.info for t in shard_table.tensors.values())
        key = _Key(infos, dict(shard_table.aliases), frozenset(shard_table.own), how, (settings.CHUNK, settings.UNDIVIDED))
        for i, kept in enumerate(self._kept):
            if kept.key.same_chunks(key) and kept.key.how.codec == how.codec:
                self.hits += 1
                self._kept.append(self._kept.pop(i))
                return kept
        made = make_plan(key)
        self._kept = [*self._kept, made][-KEPT:]
        return made

    def without(self, plan: RankPlan, numbers: Sequence[int], *, has_128: bool) -> RankPlan:
        """What is left of a plan that :meth:`plan` gave: the chunks of these numbers. ``has_128``: headers have digests of 128 bits."""
        for kept in self._reduced:
            if kept.of is plan and kept.plan.has_128 == has_128 and kept.plan.numbers == numbers:
                return kept.plan
        specs = [plan.specs[n] for n in numbers]
        made = replace(plan, chunks=[plan.chunks[n] for n in numbers], numbers=numbers, has_128=has_128)
        made = replace(made, **_files_for(specs, position=plan.key.how.position, codec=plan.key.how.codec, has_128=has_128))
        made = replace(made, own_tensors=_own_tensors(made, split_tables(plan.key.infos, plan.key.aliases, plan.key.own)[1]))
        self._reduced = [*self._reduced, _Reduced(plan, made)][-KEPT:]
        return made


class _Reduced(NamedTuple):
    """A plan without some of the chunks ``of`` another one."""

    of: RankPlan
    plan: RankPlan


@dataclass(frozen=True, slots=True, eq=False)
class _Key:
    """What a plan follows from."""

    infos: tuple[TensorSpec, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    how: WriteOptions = WriteOptions()
    limits: tuple[int, ...] = ()

    def same_chunks(self, other: _Key) -> bool:
        """Whether the rank writes the same chunks, in whatever files."""
        return (
            len(self.infos) == len(other.infos)
            and all(a is b or a == b for a, b in zip(self.infos, other.infos, strict=True))
            and (self.aliases, self.own, self.limits) == (other.aliases, other.own, other.limits)
            and replace(self.how, codec=None) == replace(other.how, codec=None)
        )


def make_plan(key: _Key) -> RankPlan:
    how = key.how
    shared, own = split_tables(key.infos, key.aliases, key.own)
    assignments = assign(shared.tensors, merge_flat_shards=how.merge_flat_shards) | assign(own.tensors)
    sends, receives = fragments(shared.tensors, assignments, how.rank) if how.merge_flat_shards else ([], [])
    if how.mirrors is None:
        plan = plan_assigned(key.infos, assignments, how)
    else:
        plan = plan_mirrored(key.infos, assignments, how.mirrors, rank=how.rank)
    plan = replace(plan, key=key, sends=sends, receives=receives, replicated=replicated_chunks(assignments, how.rank))
    parts = [part.to_bytes() for part in shared.parts()]
    return replace(plan, shared=parts, own=own.to_bytes(), own_tensors=_own_tensors(plan, own))


def plan_assigned(infos: Sequence[TensorSpec], assignments: Mapping[str, ChunkAssignment], how: WriteOptions) -> RankPlan:
    """The plan of a rank for chunks whose writers are known. Nothing is told, sent or compared."""
    chunks = chunks_of(assignments, how.rank)
    specs = specs_of(chunks, {t.name: t for t in infos})
    files = _files_for(specs, position=how.position, codec=how.codec, has_128=False)
    return RankPlan(key=_Key(tuple(infos)), assignments=assignments, chunks=chunks, **files)


def plan_mirrored(
    infos: Sequence[TensorSpec], assignments: Mapping[str, ChunkAssignment], mirrors: MirrorPlacement, *, rank: int
) -> RankPlan:
    """The same for a rank that also writes what others own: a file for each owner and set of mirrors, its own ones first."""
    tensors = {t.name: t for t in infos}
    groups = mirrored_groups(assignments, mirrors, rank)
    chunks, files = [chunk for group in groups.values() for chunk in group], list[DataFilePlan]()
    first = 0
    for (owner, code), group in groups.items():
        made = plan_data_files(specs_of(group, tensors), id=NO_ID, rank=mirrors.positions[owner])
        for part, file in enumerate(made):
            path = data_path(NO_ID, file.rank, mirrors.file_number(code, part))
            files.append(replace(file, path=path, first=first + file.first))
        first += len(group)
    position = mirrors.positions[rank]
    made_of = _FilePart(specs=specs_of(chunks, tensors), files=files, groups=[], batches=[_batches(n, f) for n, f in enumerate(files)])
    count = sum(f.rank != position for f in files)
    return RankPlan(key=_Key(tuple(infos)), assignments=assignments, chunks=chunks, mirrored=count, **made_of)


def mirrored_groups(
    assignments: Mapping[str, ChunkAssignment], mirrors: MirrorPlacement, rank: int, *, own: bool = False
) -> dict[tuple[int, int], list[Chunk]]:
    """The chunks that a rank writes, by owner and code of the mirrors: its own ones first, then in the order of the owners. ``own``: its
    own ones only. Chunks of one file are in the order in which every rank lists them."""
    written = {}
    for known, o in {id(o): o for o in assignments.values()}.items():
        numbers = [(number, rank, code) for number, code in mirrors.written_by(o, rank)]
        numbers += [] if own else mirrors.mirrored_by(o, rank)
        written[known] = [(owner, code, number, o.box(number)) for number, owner, code in numbers]
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for name in sorted(assignments):
        for owner, code, number, box in written[id(assignments[name])]:
            groups.setdefault((owner, code), []).append(Chunk(name, number, box))
    return {key: groups[key] for key in sorted(groups, key=lambda key: (key[0] != rank, key))}


class _FilePart(TypedDict):
    """The part of a plan that follows from the chunks alone."""

    specs: Sequence[ChunkSpec]
    files: Sequence[DataFilePlan]
    groups: Sequence[slice]
    batches: Sequence[Sequence[Batch]]


def _files_for(specs: Sequence[ChunkSpec], *, position: int, codec: str | None, has_128: bool) -> _FilePart:
    groups = coded_groups([c.nbytes for c in specs]) if codec is not None else []
    files = plan_data_files(specs, id=NO_ID, rank=position, has_128=has_128) if codec is None else []
    batches = [_batches(n, f) for n, f in enumerate(files)] or [_coded_batches(n, g, specs) for n, g in enumerate(groups)]
    return _FilePart(specs=specs, files=files, groups=groups, batches=batches)


_UNMERGED = ChunkAssignment(
    cuts=None, boxes=None, owners=np.zeros(0, np.int64), cell=np.zeros(0, np.int64), cell_holders=np.zeros((0, 1), np.int64)
)


def plan_image(infos: Sequence[TensorSpec], boxes: Sequence[tuple[str, Box]]) -> RankPlan:
    """The plan of a rank that keeps these boxes in memory, one after another, and writes no file. Nothing is told, sent or compared."""
    chunks = [Chunk(name, number, box) for number, (name, box) in enumerate(boxes)]
    sizes = {t.name: t.dtype.itemsize for t in infos}
    lengths = [chunk.box.numel * sizes[chunk.name] for chunk in chunks]
    starts = [0, *accumulate(lengths)]
    batches = [
        Batch(0, starts[g.start], sum(lengths[g.start : g.stop]), range(g.start, g.stop), lengths[g.start : g.stop])
        for g in group_sizes(lengths, settings.CACHE_BLOCK)
    ]
    return RankPlan(key=_Key(tuple(infos)), assignments=dict.fromkeys(sizes, _UNMERGED), chunks=chunks, batches=[batches])


def own_tensors(row: bytes, rank: int) -> list[TensorSpec]:
    """The tensors of a row of the index that ``rank`` made, as its plan has them."""
    layout, members = TensorLayout(Mesh.flat((rank,))), parse_json(row)["tensors"]
    return [TensorSpec(name, dtype(t["dtype"]), tuple(t["shape"]), layout) for name, t in members.items()]


def _own_tensors(plan: RankPlan, own: Table) -> bytes:
    """The rank's own tensors for its row in the index: which of its files has each chunk is known before anything is written."""
    names = {t.name for t in own.tensors}
    spans = plan.groups or [slice(f.first, f.first + len(f)) for f in plan.files]
    file = {(c.name, c.number): n for n, span in enumerate(spans) for c in plan.chunks[span] if c.name in names}
    tensors = []
    for t in own.tensors:
        assignment = plan.assignments[t.name]
        files = [file[t.name, i] for i in range(len(assignment.owners))]
        tensors.append(OwnTensor(t.name, t.dtype, t.shape, assignment.product, files if len({*files}) > 1 else files[:1]))
    return encode_tensors(tensors, own.aliases)


def _coded_batches(number: int, group: slice, specs: Sequence[ChunkSpec]) -> list[Batch]:
    """Chunks that are coded one by one; where they start says only where they are staged, aligned to any item size."""
    batches, at = [], 0
    for i in range(group.start, group.stop):
        batches.append(Batch(number, at, specs[i].nbytes, [i], [specs[i].nbytes]))
        at += -(-specs[i].nbytes // _ALIGN) * _ALIGN
    return batches


def chunks_of(assignments: Mapping[str, ChunkAssignment], rank: int) -> list[Chunk]:
    """The chunks that a rank writes, in the order in which every rank lists them."""
    # Grouped by distinct assignment: a model has thousands of tensors and a dozen grids, and only the search in a
    # grid grows with the number of ranks.
    distinct = {id(o): o for o in assignments.values()}
    written = {key: [(i, o.box(i)) for i in o.written_by(rank)] for key, o in distinct.items()}
    return [Chunk(name, i, box) for name in sorted(assignments) for i, box in written[id(assignments[name])]]


def specs_of(chunks: Sequence[Chunk], tensors: Mapping[str, TensorSpec]) -> list[ChunkSpec]:
    return [ChunkSpec(name=c.name, box=c.box, shape=tensors[c.name].shape, dtype=tensors[c.name].dtype) for c in chunks]


def _batches(number: int, plan: DataFilePlan) -> list[Batch]:
    """Chunks in the order of the file, small neighbours together."""
    order = np.lexsort((plan.lengths, plan.offsets))  # an empty chunk before the one that begins where it lies
    numbers, starts, lengths = (order + plan.first).tolist(), plan.offsets[order].tolist(), plan.lengths[order].tolist()
    return [
        Batch(number, starts[g.start], sum(lengths[g.start : g.stop]), numbers[g.start : g.stop], lengths[g.start : g.stop])
        for g in group_sizes(lengths, settings.CACHE_BLOCK)
    ]
