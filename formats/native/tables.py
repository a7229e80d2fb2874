"""Arrow IPC files and ragged columns: bytes to numpy and back, whole columns at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ckpt.errors import CorruptError


def to_file(columns: dict[str, pa.Array], schema: pa.Schema) -> bytes:
    """An Arrow IPC file of one table; buffers are compressed with zstd."""
    table = pa.table(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_file(data: bytes, schema: pa.Schema, where: str) -> dict[str, pa.Array]:
    """The columns of ``schema`` of an Arrow IPC file, each in one piece; further columns are ignored.

    Raises:
        CorruptError: not an Arrow file, or a column is missing, of another type, or has a null where or inside of what must not be null.
    """
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
        columns = {f.name: _one_piece(table.column(f.name).cast(f.type), f.type) for f in schema}
    except (pa.ArrowException, OSError, KeyError, ValueError) as err:
        raise CorruptError(f"the index file cannot be read as this format's table: {err}", where=where, hint="rebuild the index") from err
    for f in schema:
        if (columns[f.name].null_count and not f.nullable) or _null_inside(columns[f.name]):
            raise CorruptError(f"the index file has nulls in the column {f.name}", where=where, hint="rebuild the index")
    return columns


def _null_inside(column: pa.Array) -> bool:
    if not pa.types.is_list(column.type):
        return False
    items = column.flatten()
    return bool(items.null_count) or _null_inside(items)


def _one_piece(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], kind)


def lists(values: pa.Array, lengths: Sequence[int], nulls: Sequence[bool] | None = None) -> pa.Array:
    """A list column over flat ``values``: row i has ``lengths[i]`` of them, or is null where ``nulls[i]``."""
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    absent = None if nulls is None else np.array([*nulls, False])  # no `cast` and no mask of lists: they import all of pyarrow.compute
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]), pa.int32(), mask=absent)
    return pa.ListArray.from_arrays(offsets, values)


def flat(rows: Iterable[Iterable[int]], count: int) -> pa.Array:
    """An int64 array of all ``count`` numbers of ``rows``, one row after another."""
    return pa.array(np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=count))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """A list column: row i is ``values[offsets[i]:offsets[i + 1]]`` of its flat values, or null where ``nulls[i]``."""

    offsets: npt.NDArray[np.int32]
    nulls: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.Array) -> Ragged:
        return cls(
            offsets=column.offsets.to_numpy(zero_copy_only=False),
            nulls=column.is_null().to_numpy(zero_copy_only=False),
        )

    def __len__(self) -> int:
        return len(self.nulls)

    def span(self, row: int) -> slice | None:
        return None if self.nulls[row] else slice(int(self.offsets[row]), int(self.offsets[row + 1]))


def flat_values(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers under a list column, all rows one after another; ``Ragged`` has their spans."""
    values: npt.NDArray[Any] = column.values.to_numpy(zero_copy_only=False)
    return values
