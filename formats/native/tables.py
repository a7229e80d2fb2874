"""Arrow IPC files and ragged columns: bytes to numpy and back, whole columns at a time."""

from __future__ import annotations

import binascii
import math
import operator
import struct
from base64 import b64decode
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count, pairwise
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, FormatError
from ckpt.io_backends.checks import path_problem
from ckpt.plan.tree import REFERENCES, tag_of

from .datafile import CHUNK_DIGITS, HEADER_LIMIT, LENGTH_BYTES, name_problem
from .paths import is_digest, is_reference, reference_problem

# What an Arrow IPC file takes in memory, known before it is unfolded: a few kilobytes of zstd can stand for gigabytes.
#
# Invariant: only what was looked at here is read afterwards: the messages in the order of the file, not where its footer points.

MOST = 2 << 30
"""Bytes that one index file may unfold to."""
SMALL = 64 << 20
"""So many are never too many."""
RATIO = 1024
"""Beyond that, so many for one of the file: tables of equal grids reach a few hundred."""
ROWS = 64
"""Rows for one byte of the file, and for none ``FEW``: names, paths and places differ from row to row, so a row takes about a byte."""
FEW = 1 << 16
_MAGIC = b"ARROW1"
_START = 8
"""Where the messages begin: after the magic number, padded."""
_RECORD_BATCH = 3
"""``MessageHeader.RecordBatch`` of Arrow's Message.fbs."""


def stream_of(data: bytes) -> pa.Buffer:
    """The messages of an Arrow IPC file, which are an Arrow stream."""
    if not data.startswith(_MAGIC) or not data.endswith(_MAGIC):
        raise ValueError("it does not begin and end as an Arrow IPC file does")
    stream = pa.py_buffer(data).slice(_START)
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(stream))
    nbytes = rows = 0
    for number in count():
        try:
            message = reader.read_next_message()
            if number:  # the first is the schema
                more = _batch_size(message.metadata.to_pybytes(), message.body)
                rows, nbytes = rows + more[0], nbytes + more[1]
        except StopIteration:
            break
        except (struct.error, IndexError) as err:
            raise ValueError(f"a message of it is damaged: {err}") from err
    most = min(MOST, max(SMALL, RATIO * len(data)))
    if nbytes > most or rows > FEW + ROWS * len(data):
        raise ValueError(f"its {len(data):,} bytes unfold to {nbytes:,} bytes and {rows:,} rows, which no index does")
    return stream


def _batch_size(metadata: bytes, body: pa.Buffer) -> tuple[int, int]:
    """Rows and bytes of a record batch as its message describes it (Message.fbs): its length, and its buffers, each of which says how long
    it is unfolded."""
    message = struct.unpack_from("<I", metadata, 0)[0]
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if kind is None or metadata[kind] != _RECORD_BATCH or header is None:
        raise ValueError("it has other messages than record batches")
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    length, pairs = _field(metadata, batch, 0), _field(metadata, batch, 2)
    rows = 0 if length is None else struct.unpack_from("<q", metadata, length)[0]
    buffers = np.zeros((0, 2), dtype=np.int64)
    if pairs is not None:
        start = pairs + struct.unpack_from("<I", metadata, pairs)[0]
        number = struct.unpack_from("<I", metadata, start)[0]
        if start + 4 + 16 * number > len(metadata):
            raise ValueError("a list reaches beyond its message")
        buffers = np.frombuffer(metadata, dtype="<i8", count=2 * number, offset=start + 4).reshape(-1, 2)
    if _field(metadata, batch, 3) is None:  # not compressed: parts of the file
        return rows, int(buffers[:, 1].sum())
    nbytes = 0
    data = memoryview(body) if body is not None else memoryview(b"")
    for offset, size in buffers.tolist():
        if size < 0 or offset < 0 or offset + size > len(data):
            raise ValueError("a buffer reaches beyond its message")
        unfolded = struct.unpack_from("<q", data, offset)[0] if size else 0
        if unfolded < -1:
            raise ValueError("a buffer has a negative length")
        nbytes += size if unfolded == -1 else unfolded
    return rows, nbytes


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Where the field of this number is of the flatbuffer's table that begins at ``table``; None if it is left out."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    at, size = 4 + 2 * slot, struct.unpack_from("<H", data, fields)[0]
    offset = struct.unpack_from("<H", data, fields + at)[0] if at < size else 0
    return table + offset if offset else None


TEXT = 64 << 10
"""Bytes of one text of an index: a name, a path, a URL."""
DIMENSIONS = 255
"""Of one tensor."""


INTEGERS = pa.list_(pa.int64())


def schema(kinds: Mapping[str, pa.DataType], nullable: Collection[str] = ()) -> pa.Schema:
    """Columns and what they hold; without nulls, but for ``nullable`` ones."""
    return pa.schema([pa.field(name, kind, nullable=name in nullable) for name, kind in kinds.items()])


def to_file(columns: dict[str, pa.Array], schema: pa.Schema) -> bytes:
    """An Arrow IPC file of one table; buffers are compressed with zstd."""
    table = pa.table(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def rows_to_file(rows: Sequence[Any], schema: pa.Schema) -> bytes:
    """The same of rows whose attributes are the columns."""
    return to_file({f.name: column([getattr(row, f.name) for row in rows], f.type) for f in schema}, schema)


def from_file(data: bytes, schema: pa.Schema, where: str) -> dict[str, pa.Array]:
    """The columns of ``schema`` of an Arrow IPC file, each in one piece; further columns are ignored."""
    try:
        table = pa.ipc.open_stream(stream_of(data)).read_all()
        table.validate(full=True)
        columns = {}
        for f in schema:
            column = table.column(f.name)
            if not _plain(column.type):  # casts of others unfold: of dictionaries, views and runs
                raise ValueError(f"the column {f.name} is {column.type}, not {f.type}")
            if column.type != f.type:
                column = column.cast(f.type)  # imports all of pyarrow.compute
            chunks = column.chunks or [pa.nulls(0, f.type)]
            columns[f.name] = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    except MemoryError as err:  # pa.ArrowMemoryError is one
        raise too_little_memory(len(data), where) from err
    except (pa.ArrowException, OSError, KeyError, ValueError) as err:
        raise CorruptError(f"the index file cannot be read as this format's table: {err}", where=where, hint="`ckpt rebuild`") from err
    for f in schema:
        most = TEXT if pa.types.is_string(f.type) else DIMENSIONS if f.name in ("shape", "logical", "strides") else None
        if most is not None:
            column = columns[f.name]
            offsets = np.frombuffer(column.buffers()[1] or b"", dtype=np.int32)[column.offset : column.offset + len(column) + 1]
            longest = int(np.diff(offsets).max(initial=0))  # bytes of a text, or entries of a list
            if longest > most:
                message = f"the index file has {longest:,} entries in one row of the column {f.name}; at most {most:,} are read"
                raise CorruptError(message, where=where, hint="rebuild the index")
        if (columns[f.name].null_count and not f.nullable) or _null_inside(columns[f.name]):
            raise CorruptError(f"the index file has nulls in the column {f.name}", where=where, hint="`ckpt rebuild`")
    return columns


def rows_from_file(data: bytes, schema: pa.Schema, where: str) -> Iterator[dict[str, Any]]:
    """The rows of a small file, by column."""
    columns = from_file(data, schema, where)
    return (dict(zip(schema.names, row, strict=True)) for row in zip(*(columns[n].to_pylist() for n in schema.names), strict=True))


def too_little_memory(size: int, where: str) -> FormatError:
    """No CorruptError: nobody is to go on from an older step because this machine is short of memory."""
    return FormatError(
        f"an index file of {size:,} bytes takes more memory than there is", where=where, hint="read it on a machine with more memory"
    )


def _plain(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _plain(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _null_inside(column: pa.Array) -> bool:
    if not pa.types.is_list(column.type):
        return False
    items = column.flatten() if column.values.null_count else column.values  # `flatten` imports all of pyarrow.compute
    return bool(items.null_count) or _null_inside(items)


# Columns are made of their buffers and read from them: `pa.array` and `to_numpy` import all of pandas where it is installed, and numpy's
# masked arrays, which costs a job's first save half a second.


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """What ``pa.array(values, kind)`` is, of integers, texts, or lists of integers; None is null."""
    nulls = [value is None for value in values]
    if pa.types.is_list(kind):
        lengths = [0 if value is None else len(value) for value in values]
        rows = (value for value in values if value is not None)
        return lists(numbers(np.fromiter(chain.from_iterable(rows), np.int64, sum(lengths)), kind.value_type), lengths, nulls)
    if not pa.types.is_string(kind):
        wide = np.uint64 if kind == pa.uint64() else np.int64
        return numbers(np.fromiter((0 if value is None else value for value in values), wide, len(values)), kind, nulls)
    texts = [b"" if value is None else value.encode() for value in values]
    buffers = [_bits(nulls), pa.py_buffer(_offsets([len(text) for text in texts])), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def numbers(values: npt.NDArray[Any], kind: pa.DataType, nulls: Sequence[bool] = ()) -> pa.Array:
    """An array of integers; raises OverflowError if one does not fit ``kind``."""
    narrow = np.ascontiguousarray(values, dtype=str(kind))
    if narrow.dtype != values.dtype and not np.array_equal(narrow, values):
        raise OverflowError(f"a number of an index does not fit {kind}")
    return pa.Array.from_buffers(kind, len(values), [_bits(nulls), pa.py_buffer(narrow)])


def lists(values: pa.Array, lengths: Sequence[int], nulls: Sequence[bool] = ()) -> pa.Array:
    """A list column over flat ``values``: row i has ``lengths[i]`` of them, or is null where ``nulls[i]``."""
    kind, buffers = pa.list_(values.type), [_bits(nulls), pa.py_buffer(_offsets(lengths))]
    return pa.Array.from_buffers(kind, len(lengths), buffers, children=[values])


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    ends = np.cumsum(np.asarray([0, *lengths], dtype=np.int64))
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"a column of an index has {ends[-1]:,} bytes or entries")
    return ends.astype(np.int32)


def _bits(nulls: Sequence[bool]) -> pa.Buffer | None:
    """Arrow's bitmap of what is there; None if all is."""
    return pa.py_buffer(np.packbits(~np.asarray(nulls, dtype=np.bool_), bitorder="little")) if any(nulls) else None


def integers(array: pa.Array) -> npt.NDArray[Any]:
    """The integers of an array without nulls, in its memory."""
    end = array.offset + len(array)
    return np.frombuffer(array.buffers()[1], dtype=str(array.type), count=end)[array.offset :] if end else np.zeros(0, str(array.type))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """A list column: row i is ``values[offsets[i]:offsets[i + 1]]`` of its flat values, or null where ``nulls[i]``. Of lists of lists there
    are only the spans."""

    offsets: npt.NDArray[np.int32]
    nulls: npt.NDArray[np.bool_]
    values: npt.NDArray[Any]

    @classmethod
    def of(cls, column: pa.Array) -> Ragged:
        flat = np.zeros(0) if pa.types.is_list(column.values.type) else integers(column.values)
        offsets = integers(column.offsets) if len(column) else np.zeros(1, np.int32)  # Arrow allows none where there are no rows
        return cls(offsets=offsets, nulls=_nulls(column), values=flat)

    def __len__(self) -> int:
        return len(self.nulls)

    def span(self, row: int) -> slice | None:
        return None if self.nulls[row] else slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def row(self, row: int) -> npt.NDArray[Any] | None:
        span = self.span(row)
        return None if span is None else self.values[span]


def _nulls(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Where a column has no value."""
    # Not ``is_null``, which imports all of pyarrow.compute.
    bits = column.buffers()[0]
    if bits is None:
        return np.zeros(len(column), dtype=np.bool_)
    end = column.offset + len(column)
    values = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=end, bitorder="little")
    nulls: npt.NDArray[np.bool_] = values[column.offset :] == 0
    return nulls


# What must hold between the rows of an index, whoever wrote it, and in the nodes of a state. The same checks serve writers and readers.
#
# That boxes of an irregular grid do not overlap is proven by whoever plans a save, with ``geometry.find_fault``; here their sizes have to
# add up.

_MAX_BYTES = (1 << 63) - 1


def find_problem(contents: Contents) -> str | None:
    """What is wrong with an index, naming the tensor or file; None if nothing is."""
    by_name = {t.name: t for t in contents.tensors}
    if len(by_name) != len(contents.tensors):
        return "a tensor name occurs twice"
    for f in contents.files:
        problem = reference_problem(f.path) if is_reference(f.path) else path_problem(f.path)
        if problem is not None:
            return problem
        if not 0 < f.header <= min(f.size, LENGTH_BYTES + HEADER_LIMIT) or f.rank < 0 or not is_digest(f.digest):
            return f"the row of data file {f.path} cannot be: size {f.size}, header {f.header}, digest {f.digest!r}, rank {f.rank}"
    if len({f.path for f in contents.files}) != len(contents.files):
        return "a data file occurs twice"
    if any(is_reference(a.path) and not is_reference(b.path) for a, b in pairwise(contents.files)):
        return "data files of other checkpoints come before its own"
    checked: dict[tuple[int, tuple[int, ...]], str | None] = {}
    for t in contents.tensors:
        problem = _tensor_problem(t, by_name)
        if problem is None and t.alias is None:
            key = (id(t.grid), t.shape)
            if key not in checked:
                checked[key] = grid_problem(t.grid, t.shape, len(contents.files) or len(contents.sources))
            problem = checked[key]
        if problem is not None:
            return f"tensor {t.name!r}: {problem}"
    return None


def find_excess(tensors: Collection[TensorEntry], files: Iterable[DataFile]) -> str | None:
    """Whether there are more chunks than the headers of ``files``, as the index itself describes them, can list: then nobody must try to.

    A grid of a few thousand cuts per dimension has more cells than memory can. Every chunk has a digest in a header; or a row of its own,
    in a virtual checkpoint, which is not asked about.
    """
    grids = {id(t.grid): t.grid for t in tensors}
    uses = Counter(id(t.grid) for t in tensors if t.alias is None)
    chunks, room = sum(count * grids[grid].count for grid, count in uses.items()), sum(f.header for f in files) // CHUNK_DIGITS
    return f"the tensors have {chunks} chunks, the headers of the data files have room for {room}" if chunks > room else None


def tensor_problem(t: TensorEntry, by_name: Mapping[str, TensorEntry], files: int) -> str | None:
    """What is wrong with one tensor of a checkpoint of ``files`` data files; None if nothing is."""
    problem = _tensor_problem(t, by_name)
    return problem if problem is not None or t.alias is not None else grid_problem(t.grid, t.shape, files)


def _tensor_problem(t: TensorEntry, by_name: Mapping[str, TensorEntry]) -> str | None:
    problem = name_problem(t.name)
    if problem is not None:
        return problem
    if len(t.shape) > DIMENSIONS:
        return f"it has {len(t.shape)} dimensions; at most {DIMENSIONS} can be stored"
    if min(t.shape, default=0) < 0:
        return f"its shape {t.shape} has a negative size"
    if math.prod(max(n, 1) for n in t.shape) * t.dtype.itemsize > _MAX_BYTES:
        return f"its shape {t.shape} cannot be addressed"
    logical = t.logical
    if logical is not None and (len(logical) != len(t.shape) or not all(0 <= a <= b for a, b in zip(logical, t.shape, strict=True))):
        return f"its logical shape {logical} is not a leading part of {t.shape}"
    if t.rank is not None and t.rank < 0:
        return f"its rank is {t.rank}"
    return None if t.alias is None else _alias_problem(t, by_name.get(t.alias))


def _alias_problem(t: TensorEntry, target: TensorEntry | None) -> str | None:
    if target is None or target.alias is not None:
        return f"it is an alias of {t.alias!r}, which is not a stored tensor"
    one, other = ((x.dtype.name, x.shape, x.logical, x.rank) for x in (t, target))
    return None if one == other else f"it is {one}, but the tensor {t.alias!r} that it is an alias of is {other}"


def grid_problem(grid: Grid, shape: tuple[int, ...], files: int) -> str | None:
    """Why ``grid`` is not one of a tensor of ``shape`` in a checkpoint of ``files`` data files; None if it is."""
    if (grid.cuts is None) == (grid.boxes is None):
        return "its grid has both or neither of cuts and boxes"
    problem = _cuts_problem(grid.cuts, shape) if grid.cuts is not None else _boxes_problem(grid, shape)
    if problem is not None:
        return problem
    if len(grid.files) not in (1, grid.count):
        return f"its grid has {grid.count} chunks, but names a file for {len(grid.files)}"
    if grid.files.min() < 0 or grid.files.max() >= files:
        return f"its grid names a data file that is not one of the {files}"
    if grid.anchors is None:
        return None
    if len(grid.anchors) != grid.count:
        return f"its grid has {grid.count} chunks, but names an anchor, or none, for {len(grid.anchors)}"
    return (
        f"its grid names an anchor that is not in one of the {files} data files"
        if (bool(grid.anchors.min() < -1 or grid.anchors.max() >= files))
        else None
    )


def _cuts_problem(cuts: Sequence[Sequence[int]], shape: tuple[int, ...]) -> str | None:
    if len(cuts) != len(shape):
        return f"its grid cuts {len(cuts)} dimensions, its shape is {shape}"
    for i, (c, size) in enumerate(zip(cuts, shape, strict=True)):
        if size == 0 and tuple(c) == (0, 0):
            continue
        if len(c) < 2 or c[0] != 0 or c[-1] != size or not all(map(operator.lt, c, c[1:])):
            return f"its cuts of dimension {i} do not increase from 0 to {size}"
    return None


def _boxes_problem(grid: Grid, shape: tuple[int, ...]) -> str | None:
    offsets, shapes = grid.all_boxes()
    if not shape or offsets.shape != shapes.shape or offsets.ndim != 2 or offsets.shape[1] != len(shape) or len(offsets) == 0:
        return f"the boxes of its grid are not boxes of a tensor of shape {shape}"
    size = np.array(shape, dtype=np.int64)
    outside = (offsets < 0) | (shapes < 0) | (shapes > size) | (offsets > size - shapes) | ((shapes == 0) & (size > 0))
    if outside.any():
        at = int(np.argwhere(outside)[0, 0])
        return f"box {at} of its grid, at {offsets[at].tolist()} of shape {shapes[at].tolist()}, is empty or leaves the shape {shape}"
    covered, wanted = sum(shapes.prod(axis=1).tolist()), math.prod(shape)
    return f"the boxes of its grid have {covered} elements, it has {wanted}" if covered != wanted else None


# Whether the nodes of state.json are what docs/format.md §8 says, so that nobody who walks or decodes them has to ask again.
# A node of an unknown kind passes: whoever needs its value refuses it.

MAX_DEPTH = 150
"""Nodes may be nested this deep: Python code that walks them recursively must not overflow its stack."""

_Below = tuple[list[Any], list[Any]]
"""The nodes below a node: those that may refer to something as it may itself, and those that must be plain."""

_SIMPLE = frozenset((int, bool, type(None), str))


def node_problem(root: Any, references: Set[str] = REFERENCES) -> str | None:
    """What is wrong with a node or anything below it; None if nothing is. Of the kinds in ``REFERENCES`` these are allowed."""
    waiting: list[tuple[Any, Set[str], int]] = [(root, references, 0)]
    while waiting:
        node, allowed, depth = waiting.pop()
        if isinstance(node, (list, dict)):
            if depth > MAX_DEPTH:
                return f"nodes are nested more than {MAX_DEPTH} deep"
            below = _below(node)
            if below is None or tag_of(node) in REFERENCES - allowed or (not allowed and "$bytesio" in node):
                return f"a node with the keys {list(node)[:3]} is malformed, or not allowed where it is"
            tensors = "$tensor" in allowed and depth < MAX_DEPTH
            inside = [n for n in below[0] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n))]
            if tensors:  # by far the most common nodes, as they have to be
                inside = [n for n in inside if not (type(n) is dict and len(n) == 1 and type(n.get("$tensor")) is str)]
            waiting += [(n, allowed, depth + 1) for n in inside]
            keys = (n for n in below[1] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n)))
            waiting += [(n, frozenset(), depth + 1) for n in keys]
        elif type(node) not in _SIMPLE and not (isinstance(node, float) and isfinite(node)):
            return f"{node!r} is not a JSON value"
    return None


def _below(node: list[Any] | dict[Any, Any]) -> _Below | None:
    """The nodes below; None if this one is malformed. ``ckpt.plan.tree.decode`` checks the rest by itself."""
    if isinstance(node, list):
        return node, []
    if not all(issubclass(kind, str) for kind in {*map(type, node)}):
        return None
    tag = tag_of(node)
    if tag is None:
        return list(node.values()), []
    if len(node) != 1:
        return None
    payload = node[tag]
    nodes: _Below | None = [payload], []
    if tag in ("$tensor", "$tensors"):
        nodes = ([], []) if isinstance(payload, str) else None
    elif tag == "$per_rank":
        nodes = ([], []) if payload is True else None
    elif tag == "$inline":
        nodes = ([], []) if _is_inline(payload) else None
    elif tag in ("$map", "$tuple", "$set", "$frozenset", "$complex", "$param_groups") and not isinstance(payload, list):
        nodes = None
    elif tag == "$tuple":
        nodes = payload, []
    elif tag in ("$set", "$frozenset", "$complex"):
        nodes = [], payload
    elif tag == "$map":
        pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in payload)
        nodes = ([value for _, value in payload], [key for key, _ in payload]) if pairs else None
    elif tag == "$param_groups":
        groups = all(
            isinstance(g, dict)
            and g.keys() == {"params", "options"}
            and isinstance(g["params"], list)
            and all(isinstance(name, str) for name in g["params"])
            and isinstance(g["options"], dict)
            and tag_of(g["options"]) in (None, "$map")
            for g in payload
        )
        nodes = ([group["options"] for group in payload], []) if groups else None
    return nodes


def _is_inline(payload: Any) -> bool:
    if not isinstance(payload, list) or len(payload) != 3:
        return False
    dtype, shape, data = payload
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or not isinstance(data, str):
        return False
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > 64:
        return False
    if math.prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize > _MAX_BYTES:
        return False
    try:
        size = len(b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return False
    return size == math.prod(shape) * DTYPES[dtype].itemsize
