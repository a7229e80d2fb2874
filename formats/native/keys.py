"""Keys of chunks in data files (docs/format.md §6). ``parse_key`` inverts ``chunk_key``: a key that ends in ``]`` always carries a box."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt.dtypes import DType
from ckpt.geometry import Box

NAME_BYTES = 4096
METADATA = "__metadata__"

Ranges = tuple[tuple[int, int] | None, ...]
"""Per dimension ``(start, stop)`` in elements, or None where the box spans the dimension."""

_NUMBER = "(?:0|[1-9][0-9]*)"
_RANGE = f"(?:{_NUMBER}:{_NUMBER}|:)"
_BOX = re.compile(rf"\[((?:{_RANGE}(?:,{_RANGE})*)?)\]\Z")


def chunk_key(name: str, box: Box, shape: Sequence[int], dtype: DType) -> str:
    """The key of the chunk ``box`` of a tensor of global ``shape``, all in elements of ``dtype``."""
    shape = tuple(shape)
    if box.shape == shape and is_plain(name, shape, dtype):
        return name
    ranges = [":" if s == n else f"{o}:{o + s}" for o, s, n in zip(box.offset, box.shape, shape, strict=True)]
    return f"{name}[{','.join(ranges)}]"


def is_plain(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether a whole tensor goes by its bare name: if the name cannot be mistaken and the entry has the tensor's own dimensions."""
    return not name.endswith("]") and name != METADATA and len(dtype.stored_shape(shape)) == len(shape)


def parse_key(key: str) -> tuple[str, Ranges | None]:
    """The name and the ranges of a key; None for the bare name of a whole tensor.

    Raises:
        ValueError: the key ends in ``]`` but not in a box, or a range of the box ends before it starts.
    """
    if not key.endswith("]"):
        return key, None
    at = key.rfind("[")
    match = _BOX.match(key, at) if at > 0 else None
    if match is None:
        raise ValueError(f"{key!r} does not end in a box")
    text = match[1]
    return key[:at], tuple(_range(r) for r in text.split(",")) if text else ()


def _range(text: str) -> tuple[int, int] | None:
    start, stop = text.split(":")
    if not start:
        return None
    if int(stop) < int(start):
        raise ValueError(f"range {text!r} ends before it starts")
    return int(start), int(stop)


def name_problem(name: str) -> str | None:
    """Why a name cannot be stored, or None."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return f"the name {name!r} has a lone surrogate and cannot be written as UTF-8"
    if not 1 <= size <= NAME_BYTES:
        return f"the name {name[:80]!r} has {size} bytes; a name has 1 to {NAME_BYTES}"
    return f"the name {name!r} has a NUL character" if "\0" in name else None
