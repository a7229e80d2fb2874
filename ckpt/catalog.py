"""What every reader gives and every writer takes: tensors, and for each the chunks that hold it. Pure values; bytes are read elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.plan.layout.partition import BoxPartition

from .dtypes import DType

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid(BoxPartition):
    """How a tensor is cut into chunks, and which data file has each (docs/format.md §5)."""

    files: npt.NDArray[np.int32]
    """A row of the catalog's files for each chunk, or a single one for all."""
    anchors: npt.NDArray[np.int32] | None = None
    """For each chunk the row of the file that has its anchor, or −1; None: no chunk has an anchor."""

    def file(self, chunk: int) -> int:
        """Row of the catalog's files that has this chunk."""
        return int(self.files[0 if len(self.files) == 1 else chunk])


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One stored tensor. ``shape`` is global; ``logical`` is the leading part of it that is not padding, or None; ``rank`` is None
    unless it belongs to one rank."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    grid: Grid
    logical: tuple[int, ...] | None = None
    alias: str | None = None
    """The stored tensor that this name also stands for; ``grid`` is then that tensor's."""
    rank: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One data file: ``path`` relative to the checkpoint, ``size`` and ``header`` in bytes, ``digest`` of the header, the ``rank``
    that wrote it."""

    path: str
    size: int
    header: int
    digest: str
    rank: int


class Extent(NamedTuple):
    """Contiguous bytes that hold one chunk: ``digest`` is the XXH3-64 of these bytes in hex, or None where the format has none.

    ``codec`` names what the bytes are coded with (docs/format.md), None if they are the chunk's own. ``crc32`` is what another format says
    of these bytes: only ``verify`` looks at it. ``anchor``: what it takes to decode them, where that is more than these bytes. A checkpoint
    has very many of these: hence a tuple.
    """

    path: str
    offset: int
    length: int
    digest: str | None
    codec: str | None = None
    crc32: int | None = None
    anchor: Anchored | None = None

    def decoding_bytes(self, nbytes: int) -> int:
        """Memory that it takes to read and decode a coded chunk, which has ``nbytes``."""
        return nbytes + self.length + (0 if self.anchor is None else self.anchor.extent.decoding_bytes(nbytes))


class Anchored(NamedTuple):
    """The other half of a chunk that is stored as its difference from an anchor (docs/format.md §15): ``extent`` has the anchor's chunk,
    which has no anchor itself, and ``digest`` is the XXH3-128 in hex of the bytes that the difference is decoded to."""

    extent: Extent
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of others that a virtual checkpoint points into: ``path`` below ``root``, a URL. ``size`` in bytes; ``stamp`` is what its
    storage gave to tell versions of the file apart, or None if it cannot."""

    root: str
    path: str
    size: int
    stamp: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """Where the rows of single ranks lie, one after another: row i, of rank ``ranks[i]``, ends at byte ``stops[i]`` and has the XXH3-64
    ``digests[i]``."""

    ranks: IntArray
    stops: IntArray
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that an index says: what a writer writes and a reader reads. ``state`` and ``ranks`` are JSON nodes (docs/format.md §8)."""

    tensors: tuple[TensorEntry, ...]
    files: tuple[DataFile, ...]
    state: Any = None
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    sources: tuple[SourceFile, ...] = ()
    """Of a virtual checkpoint, in the place of ``files``: grids number these."""
    rows: Mapping[int, bytes] = field(default_factory=dict)
    """What ranks have of their own, by rank, as the format has it (``formats.native.ranks``): in the place of ``ranks``, and of tensors of
    single ranks. A writer gives it."""
    rows_bytes: int = 0
    """Sum of the sizes of the tensors in ``rows``."""
    rank_rows: RankRows | None = None
    """Where a reader finds them."""
    extents: Mapping[str, Sequence[Extent]] = field(default_factory=dict)
    """Of a virtual checkpoint: the chunks of each tensor that is no alias, in their order. Paths do not count: grids name the source."""


class Replica(NamedTuple):
    """Another stored copy of a box of a tensor: whoever compares it reads ``extent``."""

    name: str
    box: Box
    extent: Extent


class StoredFile(Protocol):
    """A file with tensors: ``path`` relative to the backend, ``size`` in bytes, the ``rank`` that wrote it where the format says so."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int | None: ...


class SaveRecord(Protocol):
    """What a native checkpoint says about the save that made it (docs/format.md §2)."""

    @property
    def id(self) -> str: ...

    @property
    def created(self) -> str: ...

    @property
    def writer(self) -> str: ...

    @property
    def features(self) -> tuple[str, ...]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def lost(self) -> tuple[str, ...]: ...


class CatalogDefaults:
    """The answers of a format that does not know: catalogs inherit them, and override what their format tells."""

    record: SaveRecord | None = None
    files: Sequence[StoredFile] = ()
    notes: Sequence[str] = ()
    suspect: str | None = None
    about_storage: Sequence[str] = ()

    def replicas(self) -> Sequence[Replica]:
        return ()


class Catalog(Protocol):
    """A checkpoint as any reader gives it. What not every format has comes from :class:`CatalogDefaults`."""

    @property
    def url(self) -> str: ...

    @property
    def format(self) -> str:
        """Name and version of the format, such as ``"ckpt 1"``."""

    @property
    def backend(self) -> Backend:
        """Where the bytes are; the paths of extents are relative to it."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    @property
    def world_size(self) -> int:
        """How many ranks saved it; ``ranks`` and the entries' ``rank`` count them from 0."""

    @property
    def state(self) -> Any:
        """The JSON node of what is not a tensor."""

    @property
    def ranks(self) -> Mapping[int, Mapping[str, Any]]:
        """Per-rank values by rank and path."""

    @property
    def record(self) -> SaveRecord | None:
        """The commit record of a native checkpoint."""

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold tensors, in the order in which grids number them; none if they are not this checkpoint's own."""

    @property
    def notes(self) -> Sequence[str]:
        """What the reader left out of the files."""

    @property
    def suspect(self) -> str | None:
        """Why some of the stored values may be wrong, if the software that wrote them is known for it."""

    @property
    def about_storage(self) -> Sequence[str]:
        """Paths of the state that say how the checkpoint is stored, and not what it holds: a copy may have others."""

    def replicas(self) -> Sequence[Replica]:
        """Boxes that are stored more than once: the copies that :meth:`extents` does not give."""

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """Where the bytes of these chunks are. Reads and verifies file headers as needed.

        Raises:
            CorruptError: a file is missing, too short, or its header does not fit the index.
        """

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """The same for one chunk each of many tensors: pairs of a tensor and a chunk's number.

        Raises:
            CorruptError: as above.
        """


def job_tensors(catalog: Catalog) -> Mapping[str, TensorEntry]:
    """The tensors that belong to no single rank. Those of ranks are not read for it, where they lie apart."""
    known: Mapping[str, TensorEntry] | None = getattr(catalog.tensors, "of_job", None)
    return {n: e for n, e in catalog.tensors.items() if e.rank is None} if known is None else known


def identity(catalog: Catalog) -> str:
    """What tells one save at a URL from another: the id of a checkpoint of ours; empty for other formats, which do not say."""
    return "" if catalog.record is None else catalog.record.id


# What a format gives to be recognised and opened. A further format is a file or a room of its own with one ``Format`` value.


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format: ``name`` for people, how to recognise it, how to open it.

    ``recognises(backend, names)`` is given the names directly below the root, directories with a trailing slash. It may read small files to
    be sure, and returns False, never an error, for what is not its own. ``open`` raises NotFoundError, NotCommittedError, FormatError or
    CorruptError.
    """

    name: str
    recognises: Callable[[Backend, Sequence[str]], bool]
    open: Callable[[Backend], Catalog]
    open_within: Callable[[Backend, Sequence[str] | None], Catalog] | None = None
    """The same for a format that points at other places: below which roots they may lie; None: anywhere. Raises AccessError."""
