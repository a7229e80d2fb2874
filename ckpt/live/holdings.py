"""What one rank has of a live state, and how boxes of it are packed; and what all ranks have, as one catalog, and as a version.

Whoever serves it needs to know no receiver's layout. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt import settings
from ckpt.catalog import CatalogDefaults, Extent, Grid, TensorEntry
from ckpt.errors import FormatError, NotFoundError, UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.net.wire import Kind, encoded, is_hex, kind_of, record
from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Joined, Table, join_tables
from ckpt.plan.transfers import RequestList
from ckpt.plan.views import LogicalTensor
from ckpt.text import parse_json

Rows = Callable[[Any, tuple[slice, ...]], npt.NDArray[np.generic]]
"""The elements of a box of some memory, as an array of a plain dtype of the same item size; a view where that can be."""
Check = Callable[[int, Box], None]
"""Looks whether a box of a tensor is still what it was when it was published; raises CorruptError if not."""


class BoxMemory(NamedTuple):
    """A box of a tensor and its memory: an array of ``box.shape``, or whatever ``Rows`` reads."""

    box: Box
    memory: Any


class TensorParts(NamedTuple):
    """All that this rank has of one tensor of so many ``dimensions``."""

    dimensions: int
    itemsize: int
    parts: Sequence[BoxMemory]


class Packable(Protocol):
    """A version as servers give it: all that this rank has, or what it has so far."""

    def ready(self, requests: RequestList, piece: int, seconds: float) -> bool:
        """Whether a piece can be packed, within some seconds."""

    def pack(self, requests: RequestList, piece: int, out: memoryview) -> int:
        """Pack a piece that is ready."""

    def views(self, requests: RequestList, piece: int, out: memoryview) -> list[memoryview]:
        """The bytes of a piece that is ready, as views that nothing changes before they are sent."""


def array_rows(memory: npt.NDArray[np.generic], slices: tuple[slice, ...]) -> npt.NDArray[np.generic]:
    """The ``Rows`` of numpy arrays."""
    return memory[slices]


@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """The boxes that this rank has, by number of the tensor in the catalog. ``check`` is called for each box before its bytes leave."""

    tensors: Mapping[int, TensorParts]
    rows: Rows = array_rows
    check: Check | None = None
    is_sealed: bool = False
    """Whether the memory cannot change any more: then it is sent as it lies, where that can be."""

    def ready(self, requests: RequestList, piece: int, seconds: float) -> bool:
        """All is here."""
        return True

    def pack(self, requests: RequestList, piece: int, out: memoryview) -> int:
        """Pack the boxes of a piece into ``out``, row-major, each at its place; how many bytes that is."""
        for request, start, stop in requests.spans(piece):
            number, box = self._asked(requests, request, stop - start)
            self.gather(number, box, out[start:stop])
        return requests.places(piece)[1]

    def _asked(self, requests: RequestList, request: int, nbytes: int) -> tuple[int, Box]:
        """Number of the tensor and box of a request of so many bytes, if this rank has anything of the kind."""
        number = int(requests.numbers[request])
        tensor = self.tensors.get(number)
        if tensor is None or tensor.dimensions > requests.offsets.shape[1]:
            raise _not_here(f"nothing of tensor number {number}")
        box = requests.box(request, tensor.dimensions)
        if box.numel * tensor.itemsize != nbytes:
            raise _not_here(f"{box.numel * tensor.itemsize} bytes in {box} of tensor number {number}, not {nbytes}")
        return number, box

    def boxes(self, requests: RequestList, piece: int, out: memoryview) -> list[memoryview]:
        """The bytes of each box of a piece: in this rank's memory where long ones lie in it as they are asked for and it is sealed, and in
        ``out``, into which all others are packed, each at its place."""
        boxes: list[memoryview] = []
        for request, start, stop in requests.spans(piece):
            number, box = self._asked(requests, request, stop - start)
            view = self._in_place(number, box) if self.is_sealed and stop - start >= settings.WORTH_A_CALL else None
            if view is None:
                view = out[start:stop]
                self.gather(number, box, view)
            boxes.append(view)
        return boxes

    def views(self, requests: RequestList, piece: int, out: memoryview) -> list[memoryview]:
        """The bytes of a piece as views, in order; its ``boxes``, and what lies between them."""
        length = requests.places(piece)[1]
        views: list[memoryview] = []
        packed = 0
        for (_, start, stop), view in zip(requests.spans(piece), self.boxes(requests, piece, out), strict=True):
            if view.obj is not out.obj:
                views += [out[packed:start], view] if start > packed else [view]
                packed = stop
        return [*views, out[packed:length]] if length > packed else views

    def _in_place(self, number: int, box: Box) -> memoryview | None:
        """The memory of a box, if that is row-major; it has been checked."""
        for part, memory in self.tensors[number].parts:
            if part.contains(box):
                rows = self.rows(memory, box.relative_to(part.offset).slices)
                if not rows.flags.c_contiguous:
                    return None
                if self.check is not None:
                    self.check(number, box)
                return rows.reshape(-1).view(np.uint8).data
        return None

    def gather(self, number: int, box: Box, out: memoryview) -> None:
        """Pack the row-major elements of a box of tensor ``number``, which may lie in several parts, into ``out``."""
        if self.check is not None:
            self.check(number, box)
        tensor = self.tensors[number]
        missing = box.numel
        for part, memory in tensor.parts:
            common = part if part == box else part.intersect(box)
            if common is None:
                continue
            rows = self.rows(memory, common.relative_to(part.offset).slices)
            target = np.frombuffer(out, dtype=rows.dtype).reshape(box.shape)
            np.copyto(target if common == box else target[common.relative_to(box.offset).slices], rows)
            missing -= common.numel
            if not missing:
                return
        raise _not_here(f"{box.numel - missing} of the {box.numel} elements of {box} of tensor number {number}")


def _not_here(what: str) -> NotFoundError:
    return NotFoundError(f"this rank has {what}", hint="holder and receiver do not mean the same version: take it again")


# A live state as a catalog: tensors whose chunks lie in the memory of ranks, as their layouts cut them.


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveCatalog(CatalogDefaults):
    """See ``ckpt.catalog.Catalog``. A chunk is a cell of a tensor's tiling: what the same ranks have. ``url`` is what messages call it."""

    url: str
    tensors: Mapping[str, TensorEntry]
    layouts: Mapping[str, TensorLayout]
    """Of each tensor that is no alias."""
    numbers: Mapping[str, int]
    """The number by which peers know a tensor: its place among the sorted names, aliases left out."""
    state: Any
    world_size: int
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    own: Sequence[tuple[int, TensorSpec]] = ()
    """Tensors of single ranks, with their places among the ranks."""
    views: Mapping[str, LogicalTensor] = field(default_factory=dict)
    """Of a state in other names: of what each tensor that is no alias is made (``ckpt.live.filling``)."""
    sources: Mapping[str, TensorEntry] = field(default_factory=dict)
    """The tensors of which these are made."""
    translation: str = ""
    """A digest of ``views``, by which ranks compare theirs."""
    format: str = "a live state"

    @classmethod
    def of(
        cls,
        joined: Joined,
        state: Any,
        *,
        url: str,
        world_size: int,
        ranks: Mapping[int, Mapping[str, Any]] | None = None,
        own: Iterable[tuple[int, TensorSpec]] = (),
    ) -> LiveCatalog:
        """From the tables and values of all ranks, joined. ``ranks``: what ``PerRank`` values each place among the ranks has, by path;
        ``own``: places, and the tensors in these values."""
        somewhere = np.zeros(1, dtype=np.int32)
        grids: dict[tuple[TensorLayout, tuple[int, ...]], Grid] = {}
        known: dict[tuple[int, tuple[int, ...]], Grid] = {}  # by identity: a model has very many tensors and few layouts
        entries: dict[str, TensorEntry] = {}
        layouts: dict[str, TensorLayout] = {}
        own = list(own)
        for place, tensor in [*((None, t) for t in joined.tensors.values()), *own]:
            grid = known.get((id(tensor.layout), tensor.shape))
            if grid is None:
                tiling = tensor.layout.tiling(tensor.shape)
                grid = grids.setdefault((tensor.layout, tensor.shape), Grid(cuts=tiling.cuts, boxes=tiling.boxes, files=somewhere))
                known[id(tensor.layout), tensor.shape] = grid
            layouts[tensor.name] = tensor.layout
            entries[tensor.name] = TensorEntry(
                name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, logical=tensor.logical, grid=grid, rank=place
            )
        for name, target in joined.aliases.items():
            entries[name] = replace(entries[target], name=name, alias=target)
        numbers = {name: number for number, name in enumerate(sorted(layouts))}
        return cls(
            url=url, tensors=entries, layouts=layouts, numbers=numbers, state=state, world_size=world_size, ranks=ranks or {}, own=own
        )

    def with_values(self, state: Any, ranks: Mapping[int, Mapping[str, Any]]) -> LiveCatalog:
        """The same tensors with the values of another moment."""
        return replace(self, state=state, ranks=ranks)

    def number(self, entry: TensorEntry) -> int:
        """The number of the tensor that has an entry's bytes."""
        return self.numbers[entry.alias or entry.name]

    def holders(self, entry: TensorEntry) -> IntArray:
        """The ranks that have each chunk, ``[chunks, replicas]``."""
        return self.layouts[entry.alias or entry.name].tiling(entry.shape).holders

    @property
    def backend(self) -> Backend:
        """Refused: nothing of it is stored."""
        raise UsageError(
            "the tensors of a live state lie in the memory of ranks: nothing of them can be read before they are moved",
            where=self.url,
            hint="where names= makes one parameter of several, leave the optimizer out: whether their steps are equal is unknown",
        )

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """How long each chunk is; it is in no file, and its bytes have no digest yet."""
        size = entry.dtype.itemsize
        return [Extent(path="", offset=0, length=entry.grid.box(chunk).numel * size, digest=None) for chunk in chunks]

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """The same for chunks of many tensors."""
        return [self.extents(entry, [chunk])[0] for entry, chunk in wanted]


# Versions of a live state, and the manifest that says what one consists of. JSON, nothing is unpickled.

_WHAT = "version of a live state"
Hex = Annotated[str, is_hex]


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A published state: the ``run`` of its source, a random number in hex; the ``step`` that the trainer gave it; the ``digest`` of its
    manifest, which covers every byte of it."""

    run: Hex
    step: int
    digest: Hex

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run}"

    def to_json(self) -> dict[str, Any]:
        made: dict[str, Any] = encoded(self)
        return made

    @classmethod
    def from_json(cls, data: Any) -> Version:
        """FormatError if it is no version."""
        return record(cls, data, _WHAT, None)


VERSION: Kind = kind_of(Version)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a version consists of. Tables, values and the values of single ranks go by the XXH3-128 of their bytes, since most are as
    they were in the version before: ``tables`` with the ranks that have each, ``own`` by rank. ``number`` counts the versions of a run;
    ``segments`` has, by rank, the bytes of its boxes and the digest of the digests of their blocks."""

    run: Hex
    step: int
    number: int
    ranks: tuple[int, ...]
    tables: tuple[tuple[Hex, tuple[int, ...]], ...]
    state: Hex
    own: Mapping[int, Hex]
    segments: Mapping[int, tuple[int, Hex]]

    def to_bytes(self) -> bytes:
        """Equal for equal manifests."""
        return json.dumps(encoded(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """FormatError if it is no manifest."""
        try:
            return record(cls, parse_json(data), _WHAT, None)
        except ValueError as err:
            raise _malformed(err) from err

    @property
    def name(self) -> str:
        """What the holders of its pieces call it."""
        return f"{self.run}/{self.number}"

    def version(self, data: bytes) -> Version:
        """``data`` are its bytes."""
        return Version(run=self.run, step=self.step, digest=digest_of_blob(data))

    def blobs(self) -> list[str]:
        """The digests of all that it refers to, each once."""
        return list(dict.fromkeys([*(digest for digest, _ in self.tables), self.state, *self.own.values()]))


def digest_of_blob(data: bytes) -> str:
    """By which a manifest refers to something."""
    return xxhash.xxh3_128_hexdigest(data)


def own_blob(values: Mapping[str, Any], table: Table) -> bytes:
    """What one rank alone has: its ``PerRank`` values, and the tensors in them."""
    return json.dumps({"values": values, "table": table.to_bytes().decode()}).encode()


def catalog_of(manifest: Manifest, blobs: Mapping[str, bytes], url: str, like: LiveCatalog | None = None) -> LiveCatalog:
    """The catalog of a version, whose ``blobs`` have been compared with their digests. ``like``: that of a version with the same tables,
    whose tensors it then shares, unless single ranks have others."""
    places = {rank: place for place, rank in enumerate(manifest.ranks)}
    try:
        own = {places[rank]: parse_json(blobs[digest]) for rank, digest in manifest.own.items()}
        own_tensors = [(place, t) for place, each in own.items() for t in Table.from_bytes(each["table"].encode()).tensors]
        values = {place: each["values"] for place, each in own.items()}
        state = parse_json(blobs[manifest.state])
        if like is not None and like.own == own_tensors:
            return replace(like, url=url, state=state, ranks=values)
        tables = [(ranks, Table.from_bytes(blobs[digest])) for digest, ranks in manifest.tables]
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise _malformed(err) from err
    joined = join_tables(tables, stored=False)
    return LiveCatalog.of(joined, state, url=url, world_size=len(manifest.ranks), ranks=values, own=own_tensors)


def tensors_of(manifest: Manifest, blobs: Mapping[str, bytes], rank: int) -> list[TensorSpec]:
    """All tensors that one rank of the source knows."""
    tables = [Table.from_bytes(blobs[digest]) for digest, ranks in manifest.tables if rank in ranks]
    if rank in manifest.own:
        tables.append(Table.from_bytes(parse_json(blobs[manifest.own[rank]])["table"].encode()))
    return [tensor for table in tables for tensor in table.tensors]


def _malformed(err: Exception) -> FormatError:
    return FormatError(f"the received message is not a valid {_WHAT}: {err!r}", hint="use the same release of ckpt at both ends")
