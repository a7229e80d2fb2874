"""Which chunks of a rank are in the base already: the save refers to them, and writes the others.

    every tensor ──► may it be as it was? ──no──► written
                          │ yes: a candidate
                     XXH3-128 of each of its chunks
                          │
                     the base has name, box, dtype and these 128 bits? ──no──► written, and the header of its file keeps the 128 bits
                          │ yes
                     a reference to the file that has the bytes

To ask costs nothing. Candidates are a module's parameters without gradients, and tensors whose version, by which torch counts changes, and
memory are those of the save before. In the first save of a process all are that no optimizer changes. The answer is never trusted: versions
do not see writes through ``.data`` or numpy, so the digest alone decides. What turns out to have changed
again and again is not asked for any more.

This is done in the caller's thread, before anything is staged: what is referred to is neither copied nor written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash

from ckpt.adapters.shard_table import ShardTable
from ckpt.catalog import DataFile, Extent, TensorEntry, job_tensors
from ckpt.concurrency.workers import run_tasks
from ckpt.engine.save.plan import Chunk, RankPlan
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.errors import CkptError, ConflictError, FormatError, MismatchError, UsageError
from ckpt.formats.native.catalog import NativeCatalog, open_native
from ckpt.formats.native.coding.codecs import CODECS, WITHOUT_ANCHOR
from ckpt.formats.native.datafiles.keys import chunk_key, coded_key
from ckpt.formats.native.datafiles.references import rebased, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.text import units

log = logging.getLogger("ckpt")

GROUP = 64
"""Chunks that are hashed in one task."""
TRIES = 2
"""A candidate that had changed so many times in a row is none any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBase:
    """The checkpoint whose chunks a save may refer to, a neighbour in the same run. ``id``: only that save of it counts. Not ``required``:
    if it cannot be read, everything is written."""

    url: str
    id: str | None = None
    required: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Reuse:
    """What a rank need not write. ``base`` and ``id`` are its directory and its save; ``references`` and ``digests``, the XXH3-128 of
    chunks that are written, go by the numbers of the plan that was asked about."""

    base: str = ""
    id: str = ""
    references: Mapping[int, DataFile] = field(default_factory=dict)
    rows: Sequence[tuple[Chunk, DataFile]] = ()
    """``references`` with their chunks."""
    coded: bool = False
    """Whether a chunk that is referred to is coded."""
    chunks: BaseChunks | None = None
    """All of the base; None if there is none, or it cannot be read."""
    digests: Mapping[int, str] = field(default_factory=dict)
    nbytes: int = 0
    """Of the chunks that are referred to."""

    def remaining(self, count: int) -> list[int]:
        """Which of ``count`` chunks are written."""
        return [number for number in range(count) if number not in self.references]


NO_REUSE = Reuse()


@dataclass(eq=False)
class SeenVersions:
    """What a job remembers of its tensors between saves: to know which may be as they were."""

    versions: dict[str, tuple[object, ...]] = field(default_factory=dict)
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    """XXH3-128 of candidates' chunks in the last save."""
    changes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """How many times in a row a candidate had changed after all; those of equal versions apart from the others."""

    def candidates(self, shard_table: ShardTable) -> dict[str, bool]:
        """Names of the tensors that may be as they were in the save before, each with whether its version is. Keeps what they are now."""
        now: dict[str, tuple[object, ...]] = {}
        for name, local in shard_table.tensors.items():
            now[name] = tuple([_version(part.memory) for part in local.parts])
        for name, tensor in shard_table.originals():  # what is done to a DTensor shows in its own version alone
            now[name] = (*now.get(name, ()), _version(tensor)[1])
        trained = shard_table.optimizer_updated - shard_table.frozen
        before, self.versions = self.versions, now
        asked = {}
        for name, version in now.items():
            same = version == before.get(name)
            may_be = same or name in shard_table.frozen or (name not in before and name not in trained)
            if may_be and name not in shard_table.own and self.changes[name, same] < TRIES:
                asked[name] = same
        return asked

    def learn(self, asked: Mapping[str, bool], digests: dict[tuple[str, int], str]) -> None:
        """Remember which candidates had changed; ``digests`` are those of their chunks."""
        changed = {key[0] for key, digest in digests.items() if self.digests.get(key, digest) != digest}
        for name in {key[0] for key in digests}:
            key = name, asked[name]
            self.changes[key] = self.changes[key] + 1 if name in changed else 0
        self.digests = digests


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is and how often it was changed; tensors of inference mode are not counted."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class BaseChunks:
    """The chunks of a base, as a neighbour of it may refer to them."""

    def __init__(self, base: SaveBase, backend: Backend) -> None:
        """
        Raises:
            UsageError: it is no neighbour of what is saved.
            ConflictError: it is not the save that it should be.
            FormatError: it has no data files.
            CkptError: it cannot be read.
        """
        here = open_backend(base.url)
        run, self.name = split_url(here)
        own_run, self.own_name = split_url(backend)
        elsewhere = real_url(run) != real_url(own_run)
        if elsewhere or self.name == self.own_name or here.link() is not None:
            what = f"does not lie in {own_run}" if elsewhere else "is what this save replaces" if here.link() is None else "is a link"
            hint = "name another step of the same run as base="
            if elsewhere:
                hint = f"copy it into {own_run} first (`ckpt cp`) and name the copy, or save the part that changes: trainable=True"
            raise UsageError(f"the base {base.url} {what}", where=backend.url, hint=hint)
        catalog = open_native(here)
        if not isinstance(catalog, NativeCatalog):
            raise FormatError("a virtual checkpoint has no data files to refer to", where=base.url, hint="name another base")
        if base.id is not None and catalog.record.id != base.id:
            raise ConflictError("the base was replaced by another save", where=base.url, hint="save without a base, or name this one")
        self.id = catalog.record.id
        self.catalog = catalog
        self._tensors = job_tensors(catalog)
        self._numbers: dict[int, dict[tuple[object, ...], int]] = {}
        self._rows: dict[int, DataFile] = {}

    def entry(self, plan: RankPlan, number: int) -> TensorEntry | None:
        """The base's tensor of this name, dtype and shape; None if it has none."""
        spec = plan.specs[number]
        entry = self._tensors.get(spec.name)
        return entry if entry is not None and entry.alias is None and (entry.dtype, entry.shape) == (spec.dtype, spec.shape) else None

    def lookup(self, plan: RankPlan, number: int) -> tuple[str, DataFile, bool] | None:
        """XXH3-128 and file of the base's chunk of this name, box and dtype, and whether it is coded; None if it has none.

        Raises:
            CorruptError: the file is missing, or its header damaged.
            ConflictError: it is a file of what this save replaces.
        """
        spec, entry = plan.specs[number], self.entry(plan, number)
        if entry is None:
            return None
        chunk = self._number(entry, plan, number)
        if chunk is None:
            return None
        row = entry.grid.file(chunk)
        digests = self.catalog.header(row).strong_digests
        keys = [chunk_key(spec.name, spec.box, spec.shape, spec.dtype)]
        if self.catalog.coded:  # a difference is not referred to: it would need its anchor's file besides
            keys += [coded_key(spec.name, spec.box, spec.shape, codec) for codec in CODECS if codec not in WITHOUT_ANCHOR]
        for i, key in enumerate(keys):
            if key in digests:
                return digests[key], self._row(row), i > 0
        return None

    def unmatched(self, plan: RankPlan, number: int) -> str | None:
        """Why nobody can say whether the base has a chunk that ``lookup`` does not find, if that is not as it should be: it has no such
        tensor, or what was trained then stays as it is now."""
        entry = self.entry(plan, number)
        if entry is None:
            return None
        if self._number(entry, plan, number) is None:
            return "it cuts them into other chunks, since its layout or number of ranks is another; the next save can refer to these"
        return None if self.catalog.record.reusable else "it was saved without reusable=True; the next save can refer to these"

    def anchor(self, plan: RankPlan, number: int) -> tuple[Extent, DataFile] | None:
        """Where the base has the chunk of this name, box and dtype, and the file; None if it has none, or has it as a difference.

        Raises:
            CorruptError: the file is missing, or its header damaged.
            ConflictError: it is a file of what this save replaces.
        """
        entry = self.entry(plan, number)
        chunk = self._number(entry, plan, number) if entry is not None else None
        if entry is None or chunk is None:
            return None
        extent = self.catalog.extents(entry, [chunk])[0]
        return None if extent.anchor is not None else (extent, self._row(entry.grid.file(chunk)))

    def _number(self, entry: TensorEntry, plan: RankPlan, number: int) -> int | None:
        """Number of the chunk with the same box."""
        name, own, box = plan.chunks[number]
        grid, cuts = entry.grid, plan.assignments[name].cuts
        if cuts is not None and grid.cuts is not None and len(cuts) == len(grid.cuts) and all(map(_same, cuts, grid.cuts)):
            return own
        if id(grid) not in self._numbers:
            offsets, shapes = grid.all_boxes()
            boxes = zip(map(tuple, offsets.tolist()), map(tuple, shapes.tolist()), strict=True)
            self._numbers[id(grid)] = {at: i for i, at in enumerate(boxes)}
        return self._numbers[id(grid)].get((box.offset, box.shape))

    def _row(self, row: int) -> DataFile:
        if row not in self._rows:
            file = self.catalog.files[row]
            path = rebased(file.path, self.name, self.own_name)
            self._rows[row] = DataFile(path=path, size=file.size, header=file.header, digest=file.digest, rank=file.rank)
        return self._rows[row]


def _same(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and tuple(a) == tuple(b)


def find_reuse(
    base: SaveBase | None,
    backend: Backend,
    plan: RankPlan,
    source: ChunkSource,
    asked: Mapping[str, bool],
    seen: SeenVersions,
    threads: int,
) -> Reuse:
    """What of a plan is in the base. ``asked``: the candidates (``SeenVersions``).

    Raises:
        CkptError: the base is required, and it cannot be read, is none, or has nothing of this state.
    """
    numbers = [n for n, c in enumerate(plan.chunks) if c.name in asked and c.box.numel and not plan.assignments[c.name].merged]
    digests: dict[int, str] = {}
    run_tasks([partial(_hash, source, numbers[i : i + GROUP], digests) for i in range(0, len(numbers), GROUP)], threads, "ckpt-hash")
    seen.learn(asked, {(plan.chunks[n].name, plan.chunks[n].number): digest for n, digest in digests.items()})
    if base is None:
        return Reuse(digests=digests)
    try:
        chunks = BaseChunks(base, backend)
        alike = {n: stored for n in numbers if (stored := chunks.lookup(plan, n)) is not None}
        if base.required and plan.chunks and not any(chunks.entry(plan, n) is not None for n in range(len(plan.chunks))):
            raise MismatchError(
                "the base has none of this state's tensors: another name, dtype or shape each", where=base.url, hint="name another base"
            )
    except CkptError as err:
        if base.required:
            raise
        log.warning("nothing of %s is referred to, and all is written: %s", base.url, err)
        return Reuse(base=split_url(open_backend(base.url))[1], id=base.id or "", digests=digests)
    equal = {n: stored for n, stored in alike.items() if stored[0] == digests[n]}
    _note_unmatched(base, plan, chunks, [n for n in numbers if n not in alike])
    return Reuse(
        base=chunks.name,
        id=chunks.id,
        references={n: row for n, (_, row, _) in equal.items()},
        rows=[(plan.chunks[n], row) for n, (_, row, _) in equal.items()],
        coded=any(coded for _, _, coded in equal.values()),
        chunks=chunks,
        digests={n: digest for n, digest in digests.items() if n not in equal},
        nbytes=sum(plan.specs[n].nbytes for n in equal),
    )


def _note_unmatched(base: SaveBase, plan: RankPlan, chunks: BaseChunks, numbers: Sequence[int]) -> None:
    """Say how much of what may be as it was is written all the same, since the base cannot tell."""
    sizes: Counter[str] = Counter()
    for n in numbers:
        why = chunks.unmatched(plan, n)
        if why is not None:
            sizes[why] += plan.specs[n].nbytes
    for why, size in sizes.items():
        log.warning("%s of tensors that may be as they were in %s are written again: %s", units.size(size), base.url, why)


def _hash(source: ChunkSource, numbers: Sequence[int], digests: dict[int, str]) -> None:
    for number in numbers:
        digests[number] = xxhash.xxh3_128_hexdigest(source.view(number))
