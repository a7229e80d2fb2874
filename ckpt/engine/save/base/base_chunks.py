"""The chunks of a base: the checkpoint of the same run that a save may refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.catalog import DataFile, Extent, TensorEntry, job_tensors
from ckpt.engine.save.plan import RankPlan
from ckpt.errors import ConflictError, FormatError, UsageError
from ckpt.formats.native.catalog import NativeCatalog, open_native
from ckpt.formats.native.coding.codecs import CODECS, WITHOUT_ANCHOR
from ckpt.formats.native.datafiles.keys import chunk_key, coded_key
from ckpt.formats.native.datafiles.references import rebased, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBase:
    """The checkpoint whose chunks a save may refer to, a neighbour in the same run. ``id``: only that save of it counts. Not ``required``:
    if it cannot be read, everything is written."""

    url: str
    id: str | None = None
    required: bool = True


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
        if entry is None or plan.assignments[entry.name].alone:
            return None
        if self._number(entry, plan, number) is None:
            return "it cuts them into other chunks, since its layout or number of ranks is another; the next save can refer to these"
        return None if self.catalog.record.reusable else "it was saved without reusable=True; the next save can refer to these"

    def stored_whole(self, plan: RankPlan, number: int) -> tuple[Extent, DataFile] | None:
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
        """Number of the chunk with the same box. None of those of ranks that state their own boxes: to the leader, which is told of a
        reference by number, they have other numbers."""
        name, own, box = plan.chunks[number]
        if plan.assignments[name].alone:
            return None
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
