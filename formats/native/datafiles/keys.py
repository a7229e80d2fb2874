"""Keys of chunks in data files (docs/format.md §6, §10).

``parse_key`` inverts ``chunk_key`` and ``coded_key``: a key that ends in ``]`` always carries a box, one that ends in ``]#codec`` always
a box and a codec.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt.dtypes import DType
from ckpt.layout.geometry import Box

NAME_BYTES = 4096
METADATA = "__metadata__"

Ranges = tuple[tuple[int, int] | None, ...]
"""Per dimension ``(start, stop)`` in elements, or None where the box spans the dimension."""

_NUMBER = "(?:0|[1-9][0-9]*)"
_RANGE = f"(?:{_NUMBER}:{_NUMBER}|:)"
_BOX = re.compile(rf"\[((?:{_RANGE}(?:,{_RANGE})*)?)\]\Z")
_CODEC = re.compile(r"\]#([a-z0-9-]+)\Z")


def chunk_key(name: str, box: Box, shape: Sequence[int], dtype: DType) -> str:
    """The key of the uncoded chunk ``box`` of a tensor of global ``shape``, all in elements of ``dtype``."""
    shape = tuple(shape)
    if box.shape == shape and is_plain(name, shape, dtype):
        return name
    return name + box_text(box, shape)


def coded_key(name: str, box: Box, shape: Sequence[int], codec: str) -> str:
    """The key of the chunk ``box`` of a tensor of global ``shape``, coded with ``codec``: it always carries its box."""
    return f"{name}{box_text(box, shape)}#{codec}"


def box_text(box: Box, shape: Sequence[int]) -> str:
    """The box as keys have it: ``[0:128,:]``."""
    ranges = [":" if s == n else f"{o}:{o + s}" for o, s, n in zip(box.offset, box.shape, shape, strict=True)]
    return f"[{','.join(ranges)}]"


def is_plain(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether a whole tensor goes by its bare name: if the name cannot be mistaken and the entry has the tensor's own dimensions."""
    return is_bare(name) and len(dtype.stored_shape(shape)) == len(shape)


def is_bare(name: str) -> bool:
    """Whether a name cannot be mistaken for a key with a box or a codec, or for the metadata."""
    return not ("]" in name and (name.endswith("]") or _CODEC.search(name))) and name != METADATA


def parse_key(key: str) -> tuple[str, Ranges | None, str | None]:
    """The name, the ranges and the codec of a key. No ranges: the bare name of a whole tensor. No codec: the chunk's bytes as they are."""
    coded = _CODEC.search(key)
    codec = None if coded is None else coded[1]
    boxed = key if coded is None else key[: coded.start() + 1]
    if not boxed.endswith("]"):
        return key, None, None
    at = boxed.rfind("[")
    match = _BOX.match(boxed, at) if at > 0 else None
    if match is None:
        raise ValueError(f"{key!r} does not end in a box")
    text = match[1]
    return key[:at], tuple(_range(r) for r in text.split(",")) if text else (), codec


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
