"""Distributed optimizers of Megatron-LM's format ``torch``: the flat buffers of ``distrib_optim.pt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.errors import FormatError
from ckpt.formats.megatron.flat import FlatStates, coalesced_layout, members_of
from ckpt.formats.megatron.params import LocalParam
from ckpt.formats.megatron.stored_buffers import HINT, coalesced


def add_distributed(states: FlatStates, number: int, chunks: Sequence[Sequence[LocalParam]], arguments: Mapping[str, Any]) -> None:
    """Add what the ``distrib_optim.pt`` with this archive number has, of the trained parameters of each chunk.

    With experts the file has a list: the buffers of all other parameters, then those of experts, or None for those that another file has.
    """
    archive = states.table.archives[number]
    meaning, where = archive.values.meaning, archive.where
    root = meaning(archive.load())
    parts = list(root) if isinstance(root, (list, tuple)) else [root]
    if len(parts) > 2:
        raise FormatError(f"{len(parts)} optimizers in a chain", where=where, hint=HINT)
    for place, part in enumerate(parts):
        if meaning(part) is None:
            continue
        buffers = coalesced(meaning, number, part, where)
        wanted = [[p for p in chunk if len(parts) == 1 or p.expert == bool(place)] for chunk in chunks]
        expected = [(dtype, [p for p in chunk if p.dtype == dtype]) for chunk in wanted for dtype in dict.fromkeys(p.dtype for p in chunk)]
        if sorted(buffers) != list(range(len(expected))):
            raise FormatError(f"{len(buffers)} buffers of {len(expected)}", where=where, hint=HINT)
        for index, (dtype, params) in enumerate(expected):
            buffer = buffers[index]
            layout = coalesced_layout(members_of(params), buffer.used, arguments) if buffer.dtype == dtype else None
            if layout is None:
                what = f"buffer {index}, {buffer.dtype}, has {buffer.used:,} elements, which are not those of its {len(params)} parameters"
                raise FormatError(what, where=where, hint="frozen parameters, or buckets of an unknown size: save it as torch_dist")
            for param, slot in zip(params, layout.slots, strict=True):
                states.add(param, layout.compact(slot), buffer.segments)
