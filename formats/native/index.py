"""The index: tensors.arrow, grids.arrow, files.arrow and state.json (docs/format.md §4, §5, §8).

How two small tables say where every chunk is::

    tensors.arrow               grids.arrow                                 files.arrow
    name   shape    grid        cuts                  boxes   files         path          header digest
    w1     [8, 4]    0 ──────►  0: [[0, 4, 8], [0, 4]]  -     [0, 1] ──┬──►  0: data/…-00000
    w2     [8, 4]    0 ──┘                                             └──►  1: data/…-00001
    flat   [7, 3]    1 ──────►  1: -          3 offsets, shapes  [0, 0, 1]

A grid says how a shape is cut, by boundaries along each dimension (the chunks are all cells, numbered row-major) or by listed boxes, and
which file has each chunk. It says nothing of bytes: the header of a data file has the offset of each of its chunks, by a key that is made
of name and box. So the layers of a model, which are cut alike, share one row.

Invariant: the size grows with tensors plus distinct grids plus files, not with tensors times ranks.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import pyarrow as pa

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import dtype
from ckpt.errors import ConsistencyError, CorruptError, FormatError, StateError
from ckpt.plan.layout.geometry import Cuts
from ckpt.plan.values import StatePart
from ckpt.text import number_of, parse_json

from .paths import EXTENTS, FILES, GRIDS, INDEX_LIMIT, INDEX_NAMES, RANK_ROWS, RANK_TABLE, SOURCES, STATE, TENSORS
from .ranks import REFERENCES_OF_RANKS, decode_ranks, encode_ranks
from .tables import (
    INTEGERS,
    Ragged,
    column,
    find_problem,
    from_file,
    lists,
    node_problem,
    numbers,
    rows_from_file,
    rows_to_file,
    schema,
    to_file,
    too_little_memory,
)
from .virtual import decode_extents, decode_sources, encode_extents

# The last few results of something that takes long and often has the same outcome. Thread-safe.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps the ``limit`` values that were used last. Keys are compared whole, so a value is only ever found for what it was made of."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)


_TENSORS = schema(
    {
        "name": pa.utf8(),
        "dtype": pa.utf8(),
        "shape": INTEGERS,
        "logical": INTEGERS,
        "grid": pa.int32(),
        "alias": pa.utf8(),
        "rank": pa.int32(),
    },
    nullable=("logical", "alias", "rank"),
)
_GRIDS = schema({"cuts": pa.list_(INTEGERS), "boxes": INTEGERS, "files": pa.list_(pa.int32())}, nullable=("cuts", "boxes"))
_ANCHORS = pa.field("anchors", pa.list_(pa.int32()))
FILE_COLUMNS = schema({"path": pa.utf8(), "size": pa.int64(), "header": pa.int64(), "digest": pa.utf8(), "rank": pa.int32()})
_ALIAS = -1


# ------------------------------------------------------------------------------------------------------------ encoding


@dataclass(eq=False, slots=True)
class IndexCache:
    """What an index leaves for the next one, which must have the same tensors and grids.

    ``state`` was made of ``values``, whatever the caller knows these by; a caller with others sets both anew, ``state`` to None.
    """

    tables: dict[str, bytes] = field(default_factory=dict)
    """The index files that depend on tensors and grids alone; empty if there was no index yet."""
    tensor_bytes: int = 0
    values: Hashable = None
    state: bytes | None = None
    part: StatePart | None = None
    """What the state says of a part."""


def encode_index(contents: Contents, cache: IndexCache | None = None) -> dict[str, bytes]:
    """The index files by name. Grids of equal value become one row. What the next index can have from this one is left in ``kept``."""
    cache = IndexCache() if cache is None else cache
    problem = find_problem(replace(contents, tensors=()) if cache.tables else contents)
    if problem is not None:
        raise ConsistencyError(f"these contents cannot be an index: {problem}")
    if not cache.tables:
        tensors = sorted(contents.tensors, key=lambda t: t.name)
        grids, rows = _distinct_grids(tensors)
        cache.tensor_bytes = sum(t.nbytes for t in tensors if t.alias is None)
        made: dict[str, Sequence[Any]] = {"dtype": [t.dtype.name for t in tensors], "grid": rows}
        columns = {f.name: column(made.get(f.name) or [getattr(t, f.name) for t in tensors], f.type) for f in _TENSORS}
        cache.tables = {TENSORS: to_file(columns, _TENSORS), GRIDS: _encode_grids(grids)}
    if cache.state is None:
        cache.state = _encode_state(contents)
    files = {
        **cache.tables,
        FILES: rows_to_file(contents.files, FILE_COLUMNS),
        STATE: cache.state,
        **(encode_extents(contents) if contents.sources else {}),
        **(encode_ranks(contents.rows) if contents.rows else {}),
    }
    for name, data in files.items():
        if len(data) > INDEX_LIMIT:
            what = "keep arrays as tensors, not as plain values" if name in (STATE, RANK_ROWS) else "save fewer tensors"
            raise StateError(f"{name} would have {len(data):,} bytes; at most {INDEX_LIMIT:,} can be read again", hint=what)
    return files


def _distinct_grids(tensors: Iterable[TensorEntry]) -> tuple[list[Grid], list[int]]:
    """Grids that differ in value, and for each tensor the number of its own; −1 for an alias."""
    grids: list[Grid] = []
    by_object: dict[int, int] = {}
    by_value: dict[tuple[object, ...], int] = {}
    rows = []
    for t in tensors:
        if t.alias is not None:
            rows.append(_ALIAS)
            continue
        row = by_object.get(id(t.grid))
        if row is None:
            grid = _plain(t.grid)
            row = by_value.setdefault(_value(grid), len(grids))
            by_object[id(t.grid)] = row
            if row == len(grids):
                grids.append(grid)
        rows.append(row)
    return grids, rows


def _plain(grid: Grid) -> Grid:
    """The same grid with one file number instead of many equal ones."""
    files = np.asarray(grid.files, dtype=np.int32)
    files = files[:1] if (files == files[0]).all() else files
    return Grid(cuts=grid.cuts, boxes=grid.boxes, files=files, anchors=grid.anchors)


def _value(grid: Grid) -> tuple[object, ...]:
    places = tuple(None if column is None else column.tobytes() for column in (grid.files, grid.anchors))
    if grid.cuts is not None:
        return tuple(map(tuple, grid.cuts)), *places
    boxes = _box_rows(grid)
    return boxes.shape, boxes.tobytes(), *places


def _box_rows(grid: Grid) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Boxes as they are stored, ``[n, 2d]``."""
    return np.concatenate(grid.all_boxes(), axis=1, dtype=np.int64)


def _encode_grids(grids: Sequence[Grid]) -> bytes:
    """grids.arrow; the column of anchors is there only if a chunk has one."""
    columns, schema = _grid_columns(grids), _GRIDS
    if any(grid.anchors is not None for grid in grids):
        columns["anchors"], schema = _arrays([grid.anchors for grid in grids], pa.int32()), schema.append(_ANCHORS)
    return to_file(columns, schema)


def _arrays(rows: Sequence[np.ndarray[Any, Any] | None], kind: pa.DataType) -> pa.Array:
    """A column of lists, null for None."""
    there = [row for row in rows if row is not None]
    joined = np.concatenate(there) if there else np.zeros(0, np.int64)
    return lists(numbers(joined, kind), [0 if row is None else len(row) for row in rows], [row is None for row in rows])


def _grid_columns(grids: Sequence[Grid]) -> dict[str, pa.Array]:
    cuts = [() if g.cuts is None else g.cuts for g in grids]
    inner = column([axis for of_grid in cuts for axis in of_grid], INTEGERS)
    return {
        "cuts": lists(inner, [len(c) for c in cuts], [g.cuts is None for g in grids]),
        "boxes": _arrays([_box_rows(g).ravel() if g.cuts is None else None for g in grids], pa.int64()),
        "files": _arrays([g.files for g in grids], pa.int32()),
    }


def _encode_state(contents: Contents) -> bytes:
    document = {"state": contents.state, "ranks": {str(r): dict(contents.ranks[r]) for r in sorted(contents.ranks)}}
    try:
        data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError) as err:
        raise StateError(f"the state is not JSON: {err}", hint="encode it with ckpt.plan.tree first") from err
    problem = _state_problem(contents.state, contents.ranks)
    if problem is not None:
        raise StateError(f"the state cannot be stored: {problem}", hint="flatten the state; nodes come from ckpt.plan.tree")
    return data


# ------------------------------------------------------------------------------------------------------------ decoding


def decode_index(files: Mapping[str, bytes], where: str, *, anchored: bool = False) -> Contents:
    """The contents that the index files say; ``where`` is their directory's URL, for messages. Digests are the caller's to check.
    ``anchored``: whether chunks have anchors."""
    data_files = decode_files(files[FILES], f"{where}/{FILES}")
    state, ranks = _decode_state(files[STATE], f"{where}/{STATE}")
    sources = decode_sources(files[SOURCES], where) if SOURCES in files else ()
    # Compared as bytes, not by digest: an equal key is the same table, so the result of all checks is the same too. A
    # job that lists or reloads its steps decodes the tables of 100,000 tensors once.
    key = files[TENSORS], files[GRIDS], len(data_files) or len(sources), anchored
    tensors = _known.get(key)
    known = tensors is not None
    if tensors is None:
        grids = _GridTable(files[GRIDS], f"{where}/{GRIDS}", anchored=anchored)
        tensors = _decode_tensors(files[TENSORS], grids, f"{where}/{TENSORS}")
    problem = find_problem(Contents(tensors=() if known else tensors, files=data_files, sources=sources))
    if problem is not None:
        _contradicts(problem, where)
    _known.put(key, tensors)
    rows = decode_ranks(files[RANK_TABLE], f"{where}/{RANK_TABLE}") if RANK_TABLE in files else None
    if rows is not None and (ranks or any(t.rank is not None for t in tensors)):
        _contradicts("it has values or tensors of ranks in two places", where)
    extents = decode_extents(files[EXTENTS], tensors, sources, where) if EXTENTS in files else {}
    return Contents(tensors=tensors, files=data_files, state=state, ranks=ranks, sources=sources, extents=extents, rank_rows=rows)


_known: LruCache[tuple[bytes, bytes, int, bool], tuple[TensorEntry, ...]] = LruCache(2)
"""Tables of tensors that were decoded and checked, by their bytes: the steps of a job have equal ones."""


def decode_files(data: bytes, where: str) -> tuple[DataFile, ...]:
    """The rows of files.arrow. Raises CorruptError if it cannot be read."""
    return tuple(DataFile(**row) for row in rows_from_file(data, FILE_COLUMNS, where))


def _contradicts(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the index contradicts itself: {what}", where=where, hint=f"restore {', '.join(INDEX_NAMES)}, or `ckpt rebuild`")


def _decode_tensors(data: bytes, grids: _GridTable, where: str) -> tuple[TensorEntry, ...]:
    columns = from_file(data, _TENSORS, where)
    names, dtypes, shapes, logicals, rows, aliases, ranks = (columns[n].to_pylist() for n in _TENSORS.names)
    # Sorted names are part of the format: a reader can look a name up by bisection, and equal sets of tensors give equal bytes.
    if any(a >= b for a, b in pairwise(names)):
        _contradicts("tensor names are not sorted, or one occurs twice", where)
    try:
        known = {n: dtype(n) for n in set(dtypes)}
    except FormatError as err:
        raise FormatError(err.message, where=where, hint="use a newer release of this software") from err
    at = {n: i for i, n in enumerate(names)}
    tensors = []
    for i, name in enumerate(names):
        if (rows[i] == _ALIAS) != (aliases[i] is not None):
            _contradicts(f"tensor {name!r} needs exactly one of a grid and an alias", where)
        target = i if aliases[i] is None else at.get(aliases[i], i)
        shape, logical = tuple(shapes[i]), None if logicals[i] is None else tuple(logicals[i])
        grid = grids.grid(rows[target], len(shape), name)
        tensors.append(
            TensorEntry(name=name, dtype=known[dtypes[i]], shape=shape, grid=grid, logical=logical, alias=aliases[i], rank=ranks[i])
        )
    return tuple(tensors)


class _GridTable:
    """grids.arrow, decoded a row at a time: how to read boxes depends on the number of dimensions, which tensors know."""

    def __init__(self, data: bytes, where: str, *, anchored: bool) -> None:
        columns = from_file(data, _GRIDS.append(_ANCHORS) if anchored else _GRIDS, where)
        self._where = where
        self._dims = Ragged.of(columns["cuts"])
        self._cuts = Ragged.of(columns["cuts"].values)
        self._cut_values: list[int] = self._cuts.values.tolist()
        self._boxes = Ragged.of(columns["boxes"])
        self._files = Ragged.of(columns["files"])
        self._anchors = Ragged.of(columns["anchors"]) if anchored else None
        self._made: dict[int, Grid] = {}

    def grid(self, row: int, dims: int, name: str) -> Grid:
        """The grid of row ``row``, of the ``dims``-dimensional tensor ``name``."""
        if not 0 <= row < len(self._files):
            _contradicts(f"tensor {name!r} names row {row} of the grids", self._where)
        grid = self._made.get(row)
        if grid is None:
            grid = self._made[row] = self._make(row, dims, name)
        return grid

    def _make(self, row: int, dims: int, name: str) -> Grid:
        files, axes, values = self._files.row(row), self._dims.span(row), self._boxes.row(row)
        if files is None or not len(files) or (axes is None) == (values is None):
            _contradicts(f"the grid of tensor {name!r} needs files and exactly one of cuts and boxes", self._where)
        anchors = None if self._anchors is None else self._anchors.row(row)
        if axes is not None:
            spans = [self._cuts.span(i) or slice(0) for i in range(axes.start, axes.stop)]
            return Grid(cuts=tuple(Cuts(self._cut_values[s]) for s in spans), files=files, anchors=anchors)
        if values is None or dims == 0 or len(values) % (2 * dims):
            _contradicts(f"the boxes of tensor {name!r} do not have its {dims} dimensions", self._where)
        rows = values.reshape(-1, 2 * dims)
        return Grid(boxes=(rows[:, :dims], rows[:, dims:]), files=files, anchors=anchors)


def _decode_state(data: bytes, where: str) -> tuple[Any, dict[int, Mapping[str, Any]]]:
    try:
        document = parse_json(data, finite=True)
        ranks: dict[int, Mapping[str, Any]] = {number_of(r): dict(v.items()) for r, v in document["ranks"].items()}
        problem = _state_problem(document["state"], ranks)
    except MemoryError as err:
        raise too_little_memory(len(data), where) from err
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise CorruptError(f"{STATE} is not as the format requires: {err!r}", where=where, hint=f"restore {STATE} from a copy") from err
    if problem is not None:
        raise CorruptError(f"{STATE} is not as the format requires: {problem}", where=where, hint=f"restore {STATE} from a copy")
    return document["state"], ranks


def _state_problem(state: Any, ranks: Mapping[int, Mapping[str, Any]]) -> str | None:
    own = (
        p
        for values in ranks.values()
        for p in (
            (node_problem(node, REFERENCES_OF_RANKS) if isinstance(path, str) else f"{path!r} is not a path")
            for path, node in values.items()
        )
        if p is not None
    )
    return node_problem(state) or next(own, None)
