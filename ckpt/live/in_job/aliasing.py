"""Whether the memory of an old and a new state is the same: then bytes would be overwritten before all who want them have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ckpt.adapters.tensors import LocalShard, LocalTensor
from ckpt.live.naming.renaming import Target


class _Extent(NamedTuple):
    """The addresses that a part of a tensor lies at, and what is there."""

    start: int
    stop: int
    device: str
    name: str
    part: LocalShard


def shared_memory(old: Iterable[LocalTensor], new: Sequence[Target]) -> list[str]:
    """A line for each tensor of the new state that shares memory with the old one, unless it is the same box of the same tensor in the same
    place, with the same dtype: then it keeps its bytes.

    Addresses are compared as ranges, so two views that interleave count as sharing. Nothing is changed.
    """
    before = sorted(_extents((local.info.name, local) for local in old), key=lambda e: (e.device, e.start))
    problems = []
    by_device: dict[str, list[_Extent]] = {}
    for extent in before:
        by_device.setdefault(extent.device, []).append(extent)
    columns = {
        device: (np.array([e.start for e in extents]), np.maximum.accumulate(np.array([e.stop for e in extents])))
        for device, extents in by_device.items()
    }
    for local, entry in new:
        source = entry.alias or entry.name
        for extent in _extents([(local.state_name, local)]):
            starts, stops = columns.get(extent.device, (np.zeros(0), np.zeros(0)))
            first, last = int(np.searchsorted(stops, extent.start, "right")), int(np.searchsorted(starts, extent.stop, "left"))
            others = [e for e in by_device.get(extent.device, ())[first:last] if e.stop > extent.start and not _same(e, extent, source)]
            if others:
                problems.append(f"{extent.name}: its memory is also that of {others[0].name} in the old state")
                break
    return problems


def _extents(tensors: Iterable[tuple[str, LocalTensor]]) -> list[_Extent]:
    extents = []
    for name, local in tensors:
        for part in local.parts:
            memory = part.memory
            if memory.is_meta or not memory.numel():
                continue
            start, size = memory.data_ptr(), memory.element_size()
            last = sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True))
            extents.append(_Extent(start, start + (last + 1) * size, str(memory.device), name, part))
    return extents


def _same(old: _Extent, new: _Extent, source: str) -> bool:
    a, b = old.part, new.part
    return (
        old.name == source
        and (old.start, a.box, a.memory.dtype) == (new.start, b.box, b.memory.dtype)
        and a.memory.stride() == b.memory.stride()
    )
