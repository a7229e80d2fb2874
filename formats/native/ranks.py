"""Values and tensors of single ranks, in index files of their own (docs/format.md §12).

A job of many ranks has thousands of random number generators and loaders. In the tables that every reader opens they would be most of the
index; here each rank has a row of JSON, and a reader takes those of the ranks that it asks for. A writer puts the rows one after another
and looks into none of them: each rank makes its own, and checks it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import xxhash

from ckpt.catalog import DataFile, Grid, RankRows, TensorEntry
from ckpt.dtypes import DType, dtype
from ckpt.errors import CorruptError, FormatError, NotFoundError, StateError
from ckpt.io_backends.checks import read_checked
from ckpt.plan.layout.geometry import Cuts
from ckpt.text import parse_json

from .paths import RANK_ROWS, RANK_TABLE
from .tables import column, find_excess, from_file, integers, node_problem, schema, tensor_problem, to_file, too_little_memory

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

    from .commit import CommitRecord

_TABLE = schema({"rank": pa.int32(), "length": pa.int64(), "digest": pa.uint64()})
REFERENCES_OF_RANKS = frozenset({"$tensor", "$inline"})
"""Kinds of nodes that refer to something, in the values of ranks."""


class OwnTensor(NamedTuple):
    """A tensor of one rank: its chunks are the cells of ``cuts``, and ``files`` says which of the rank's data files has each; a single
    entry stands for all."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    files: Sequence[int]


def encode_tensors(tensors: Sequence[OwnTensor], aliases: Mapping[str, str]) -> bytes:
    """The part of a row that is the same in the next save of the same state."""
    members: dict[str, dict[str, Any]] = {}
    for t in tensors:
        members[t.name] = {"dtype": t.dtype.name, "shape": t.shape}
        if list(t.files) != [0] or any(len(c) > 2 for c in t.cuts):
            members[t.name] |= {"cuts": t.cuts, "files": list(t.files)}
    return json.dumps({"tensors": members, "aliases": dict(aliases)}, separators=(",", ":")).encode()


def encode_row(tensors: bytes, values: Mapping[str, Any]) -> bytes:
    """One rank's row, of what ``encode_tensors`` gave and of nodes by path."""
    for path, node in values.items():
        problem = node_problem(node, REFERENCES_OF_RANKS)
        if problem is not None:
            raise StateError(f"the value {path} of a rank cannot be stored: {problem}", hint="nodes come from ckpt.plan.tree")
    return tensors[:-1] + b',"values":' + json.dumps(dict(values), allow_nan=False, separators=(",", ":")).encode() + b"}\n"


def encode_ranks(rows: Mapping[int, bytes]) -> dict[str, bytes]:
    """The two index files, of the rows by rank."""
    ranks = sorted(rows)
    columns = {
        "rank": column(ranks, pa.int32()),
        "length": column([len(rows[r]) for r in ranks], pa.int64()),
        "digest": column([xxhash.xxh3_64_intdigest(rows[r]) for r in ranks], pa.uint64()),
    }
    return {RANK_TABLE: to_file(columns, _TABLE), RANK_ROWS: b"".join(rows[r] for r in ranks)}


def decode_ranks(data: bytes, where: str) -> RankRows:
    """Where the row of each rank is. Raises CorruptError if it cannot be read."""
    columns = from_file(data, _TABLE, where)
    ranks, lengths, digests = (integers(columns[n]) for n in _TABLE.names)
    stops = np.cumsum(lengths, dtype=np.int64)  # below 0 where it overflows
    if (np.diff(ranks) <= 0).any() or (len(ranks) and (ranks[0] < 0 or lengths.min() < 0 or stops.min() < 0)):
        raise CorruptError("the ranks do not increase, or a row has no length that can be", where=where, hint="`ckpt rebuild`")
    return RankRows(ranks=ranks.astype(np.int64), stops=stops, digests=digests.astype(np.uint64))


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """What one rank has of its own."""

    values: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


class RankParts:
    """The rows of a checkpoint, each read when it is asked for first. ``of_job`` are the tensors of no single rank. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        record: CommitRecord,
        rows: RankRows,
        *,
        files: Sequence[DataFile],
        of_job: Mapping[str, TensorEntry],
        read_all: Callable[[], bytes],
    ) -> None:
        """``files`` are those of the index, and ``read_all`` gives the verified file of all rows."""
        self._backend = backend
        self._read_all = read_all
        self._file = record.index[RANK_ROWS]
        self._where = f"{backend.url.rstrip('/')}/{self._file.path}"
        self._rows = rows
        self._number = {rank: number for number, rank in enumerate(rows.ranks.tolist())}
        self._parts: dict[int, RankPart] = {}
        self._lock = threading.Lock()
        self._data_files = files
        self._of_rank: dict[int, list[int]] = {}
        self.of_job = of_job
        self.known: dict[str, TensorEntry] = {}
        """Tensors of the ranks that were asked for."""
        size = int(rows.stops[-1]) if len(rows.stops) else 0
        if size != self._file.size or (self._number and max(self._number) >= record.world_size):
            self._damaged(f"the table of its rows lists {size} bytes of ranks below {max(self._number, default=0) + 1}")

    @property
    def ranks(self) -> KeysView[int]:
        """Those that have something of their own, increasing."""
        return self._number.keys()

    def part(self, rank: int) -> RankPart | None:
        """What a rank has of its own; None if nothing."""
        number = self._number.get(rank)
        if number is None:
            return None
        with self._lock:
            if rank not in self._parts:
                start, stop = (int(self._rows.stops[n]) if n >= 0 else 0 for n in (number - 1, number))
                self._keep(rank, self._read(number, start, stop - start))
            return self._parts[rank]

    def all(self) -> Mapping[int, RankPart]:
        """What all ranks have of their own, read at once."""
        with self._lock:
            if len(self._parts) < len(self._number):
                data = self._read_all()
                starts = [0, *self._rows.stops.tolist()]
                for rank, number in self._number.items():
                    if rank not in self._parts:
                        self._keep(rank, self._checked(number, starts[number], data[starts[number] : starts[number + 1]]))
            return {rank: self._parts[rank] for rank in self._number}

    def _read(self, number: int, start: int, length: int) -> bytes:
        def read() -> bytes:
            try:
                data = self._backend.read(self._file.path, start, length)
            except NotFoundError as err:
                raise CorruptError("the file with the values of ranks is missing", where=self._where, hint="restore it") from err
            return self._checked(number, start, data)

        return read_checked(self._backend, self._file.path, read, offset=start, length=length)

    def _checked(self, number: int, start: int, data: bytes) -> bytes:
        if xxhash.xxh3_64_intdigest(data) != int(self._rows.digests[number]):
            self._damaged(f"bytes {start} to {start + len(data)} do not fit their digest")
        return data

    def _keep(self, rank: int, data: bytes) -> None:
        try:
            members = parse_json(data, finite=True)
            values, own, aliases = (_of_kind(dict, members[m], m) for m in ("values", "tensors", "aliases"))
            tensors = {name: self._entry(rank, name, _of_kind(dict, t, name)) for name, t in own.items()}
            for name, target in aliases.items():
                of = tensors[target]
                if name in own:
                    raise ValueError(f"{name!r} is a tensor and an alias")
                tensors[name] = TensorEntry(name=name, dtype=of.dtype, shape=of.shape, grid=of.grid, alias=target, rank=rank)
        except MemoryError as err:
            raise too_little_memory(len(data), self._where) from err
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as err:
            self._damaged(f"the row of rank {rank} is not as the format requires: {err!r}")
        problems = (node_problem(node, REFERENCES_OF_RANKS) for node in values.values())
        problem = next((p for p in problems if p is not None), None)
        problem = problem or find_excess(tensors.values(), [self._data_files[n] for n in self._of_rank.get(rank, ())])
        for name, entry in tensors.items():
            problem = problem or tensor_problem(entry, tensors, len(self._data_files))
            if problem is None and (name in self.of_job or self.known.setdefault(name, entry) is not entry):
                problem = f"the tensor {name!r} occurs elsewhere too"
        if problem is not None:
            self._damaged(f"the row of rank {rank}: {problem}")
        self._parts[rank] = RankPart(values=values, tensors=tensors)

    def _entry(self, rank: int, name: str, members: Mapping[str, Any]) -> TensorEntry:
        if not self._of_rank:
            for row, file in enumerate(self._data_files):
                self._of_rank.setdefault(file.rank, []).append(row)
        mine = self._of_rank[rank]
        numbers = members.get("files", [0])
        if not numbers or min(numbers) < 0:
            raise ValueError(f"the files of {name!r} are {numbers!r:.100}")
        try:
            kind = dtype(members["dtype"])
        except FormatError as err:
            raise FormatError(err.message, where=self._where, hint="use a newer release of this software") from err
        cuts = tuple(Cuts(c) for c in members.get("cuts", [(0, n) for n in _of_kind(list, members["shape"], name)]))
        sizes = [n for part in (members["shape"], *cuts) for n in part]
        if any(type(n) is not int for n in sizes):
            raise ValueError(f"a size of {name!r} is not an integer")
        grid = Grid(cuts=cuts, files=np.array([mine[n] for n in numbers], dtype=np.int32))
        return TensorEntry(name=name, dtype=kind, shape=tuple(members["shape"]), grid=grid, rank=rank)

    def _damaged(self, what: str) -> NoReturn:
        raise CorruptError(f"the index is damaged: {what}", where=self._where, hint="restore this file from a copy, or load another step")


def _of_kind(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{what!r} is {value!r:.100}")
    return value


class ValuesOfRanks(Mapping[int, Mapping[str, Any]]):
    """The values of all ranks, by rank; a row is read when its rank is asked for, and all of them together when all are."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts

    def __getitem__(self, rank: int) -> Mapping[str, Any]:
        part = self._parts.part(rank)
        if part is None:
            raise KeyError(rank)
        return part.values

    def __contains__(self, rank: object) -> bool:
        return rank in self._parts.ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts.ranks)

    def __len__(self) -> int:
        return len(self._parts.ranks)

    def items(self) -> ItemsView[int, Mapping[str, Any]]:
        return {rank: part.values for rank, part in self._parts.all().items()}.items()

    def values(self) -> ValuesView[Mapping[str, Any]]:
        return {rank: part.values for rank, part in self._parts.all().items()}.values()


class TensorsOfRanks(Mapping[str, TensorEntry]):
    """All tensors, by name. Those of single ranks are read when one that is not known yet is asked for, or all are."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts
        self.of_job = parts.of_job
        self._all: dict[str, TensorEntry] | None = None

    def __getitem__(self, name: str) -> TensorEntry:
        entry = self.of_job.get(name) or self._parts.known.get(name)
        return self._everything()[name] if entry is None else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._everything())

    def __len__(self) -> int:
        return len(self._everything())

    def items(self) -> ItemsView[str, TensorEntry]:
        return self._everything().items()

    def values(self) -> ValuesView[TensorEntry]:
        return self._everything().values()

    def _everything(self) -> dict[str, TensorEntry]:
        if self._all is None:
            self._parts.all()
            self._all = dict(sorted({**self.of_job, **self._parts.known}.items()))
        return self._all
