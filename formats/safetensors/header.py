"""The header of a safetensors file: 8 bytes with its length, JSON, then the bytes of all tensors without a gap.

(Source: the README of https://github.com/huggingface/safetensors, and its limits.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt.dtypes import FROM_SAFETENSORS, DType
from ckpt.errors import CorruptError, FormatError
from ckpt.text.json_reader import parse_object

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

MAX_HEADER = 100_000_000
"""Bytes of a header, as in the safetensors library."""
FIRST = 32 << 10
"""Bytes that are read first: most headers are shorter."""


class TensorSpan(NamedTuple):
    """One tensor of a file: ``offset`` in bytes from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def length(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileHeader(NamedTuple):
    """All tensors of a file by name, and what its ``__metadata__`` says."""

    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]


def read_header(backend: Backend, path: str, size: int) -> FileHeader:
    """Read and check the header of a file of ``size`` bytes."""
    where = f"{backend.url.rstrip('/')}/{path}"
    data = backend.read(path, 0, min(size, FIRST))
    stop = data_start(data, size, where)
    if stop > len(data):
        data += backend.read(path, len(data), stop - len(data))
    return parse_header(data, size, where)


def data_start(data: bytes, size: int, where: str) -> int:
    """Where the bytes of tensors begin in a file of ``size`` bytes, of which ``data`` are the first."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MAX_HEADER or 8 + length > size:
        _damaged(where, f"a header of {length:,} bytes in a file of {size:,}")
    return 8 + length


def parse_header(data: bytes, size: int, where: str) -> FileHeader:
    """Check the header of a file of ``size`` bytes, which is among its first bytes, ``data``."""
    start = data_start(data, size, where)
    content = _json(data[8:start], where)
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        _damaged(where, "metadata that are no texts")
    tensors = {name: _stored(name, entry, start, where) for name, entry in content.items()}
    _check_cover(tensors, start, size, where)
    return FileHeader(tensors, {k: v for k, v in metadata.items() if isinstance(v, str)})


def _json(data: bytes, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) != len(pairs):
            _damaged(where, f"the same name twice in its header: {_twice([k for k, _ in pairs])!r}")
        return by_name

    try:
        return parse_object(data, object_of=once)
    except ValueError as err:
        _damaged(where, f"a damaged header: {err}", err)


def _twice(names: list[str]) -> str:
    return next(name for name, times in Counter(names).items() if times > 1)


def _stored(name: str, entry: Any, base: int, where: str) -> TensorSpan:
    try:
        spelled, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        counts = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as err:
        _damaged(where, f"a malformed entry for {name!r}", err)
    if not counts or not isinstance(shape, list) or not isinstance(spelled, str) or not name or len(name) > 4096 or "\0" in name:
        _damaged(where, f"a malformed entry for {name[:80]!r}")
    kind = FROM_SAFETENSORS.get(spelled)
    if kind is None:
        known = ", ".join(sorted(FROM_SAFETENSORS))
        raise FormatError(f"tensor {name} has the unknown dtype {spelled!r}", where=where, hint=f"known dtypes: {known}")
    if spelled == "F4":
        shape = _packed(name, shape, where)
    span = TensorSpan(kind, tuple(shape), base + start)
    if span.length != stop - start:
        _damaged(where, f"{stop - start:,} bytes for tensor {name}, {spelled} {shape}, which takes {span.length:,}")
    return span


def _packed(name: str, shape: list[int], where: str) -> list[int]:
    """The header counts values of 4 bits, and elements here are bytes with two of them."""
    if not shape or shape[-1] % 2:
        raise FormatError(f"tensor {name} has an odd number of 4-bit values in a row", where=where, hint="store them as U8")
    return [*shape[:-1], shape[-1] // 2]


def _check_cover(tensors: Mapping[str, TensorSpan], base: int, size: int, where: str) -> None:
    """Every byte after the header belongs to one tensor."""
    end, last = base, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
        if stored.offset != end:
            what = "overlaps" if stored.offset < end else f"leaves a hole of {stored.offset - end:,} bytes after"
            _damaged(where, f"a tensor {name} that {what} {last}")
        end, last = stored.offset + stored.length, name
    if end != size:
        _damaged(where, f"{size:,} bytes, and its header accounts for {end:,}")


def _damaged(where: str, what: str, cause: BaseException | None = None) -> NoReturn:
    hint = "the file is damaged or was cut off: get it again"
    raise CorruptError(f"the safetensors file has {what}", where=where, hint=hint) from cause
