"""What an Arrow IPC file takes in memory, known before it is unfolded: a few kilobytes of zstd can stand for gigabytes.

Invariant: only what was looked at here is read afterwards: the messages in the order of the file, not where its footer points.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
    nbytes = rows = 0
    for batch in _batches(stream):
        rows += batch.rows
        nbytes += batch.nbytes
    most = min(MOST, max(SMALL, RATIO * len(data)))
    if nbytes > most or rows > FEW + ROWS * len(data):
        raise ValueError(f"its {len(data):,} bytes unfold to {nbytes:,} bytes and {rows:,} rows, which no index does")
    return stream


class _Batch(NamedTuple):
    rows: int
    nbytes: int


def _batches(stream: pa.Buffer) -> Iterator[_Batch]:
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(stream))
    schema = True
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if not schema:
            try:
                yield _batch(message.metadata.to_pybytes(), message.body)
            except (struct.error, IndexError) as err:
                raise ValueError(f"a message of it is damaged: {err}") from err
        schema = False


def _batch(metadata: bytes, body: pa.Buffer) -> _Batch:
    """A record batch as its message describes it (Message.fbs): its length, and its buffers, each of which says how long it is unfolded."""
    message = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind = message.place(1)
    header = message.place(2)
    if kind is None or metadata[kind] != _RECORD_BATCH or header is None:
        raise ValueError("it has other messages than record batches")
    batch = _Table(metadata, header + struct.unpack_from("<I", metadata, header)[0])
    length = batch.place(0)
    rows = 0 if length is None else struct.unpack_from("<q", metadata, length)[0]
    buffers = batch.pairs(2)
    if batch.place(3) is None:  # not compressed: parts of the file
        return _Batch(rows, int(buffers[:, 1].sum()))
    nbytes = 0
    data = memoryview(body) if body is not None else memoryview(b"")
    for offset, size in buffers.tolist():
        if size < 0 or offset < 0 or offset + size > len(data):
            raise ValueError("a buffer reaches beyond its message")
        unfolded = struct.unpack_from("<q", data, offset)[0] if size else 0
        if unfolded < -1:
            raise ValueError("a buffer has a negative length")
        nbytes += size if unfolded == -1 else unfolded
    return _Batch(rows, nbytes)


class _Table:
    """A table of a flatbuffer, which begins at ``at``."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    def place(self, slot: int) -> int | None:
        """Where the field of this number is; None if it is left out."""
        at = 4 + 2 * slot
        offset = struct.unpack_from("<H", self._data, self._fields + at)[0] if at < self._size else 0
        return self._at + offset if offset else None

    def pairs(self, slot: int) -> npt.NDArray[np.int64]:
        """A vector of structs of two numbers ``[n, 2]``."""
        place = self.place(slot)
        if place is None:
            return np.zeros((0, 2), dtype=np.int64)
        start = place + struct.unpack_from("<I", self._data, place)[0]
        count = struct.unpack_from("<I", self._data, start)[0]
        if start + 4 + 16 * count > len(self._data):
            raise ValueError("a list reaches beyond its message")
        return np.frombuffer(self._data, dtype="<i8", count=2 * count, offset=start + 4).reshape(-1, 2)
