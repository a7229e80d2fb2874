"""Targets of a load that share some of their elements without being tied: what is written later overwrites what came before.

    memory      ┌──┬──┬──┬──┬──┬──┬──┬──┐
    a = m[:5]   └──────────────┘              elements 3 and 4 belong to both
    b = m[3:]            └──────────────┘

Tied tensors, the same memory under two names, are one target (``ShardTable``). Views that lie between each other's rows share nothing.

A state that was saved with such views has the same values for the elements that they share. So the later target is read beside its
memory, and put there when the earlier ones are filled: if that changes one of them, the checkpoint has other values for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.adapters.tensors import LocalTensor

MOST_PAIRS = 100_000
"""Pairs of views that are compared, of one state: each takes some microseconds."""
_MOST_WORK = 100_000
"""Steps that numpy may take to find an element of two views; more are needed only by views that nobody makes."""


class _AddressRange(NamedTuple):
    start: int
    stop: int
    number: int
    """Of the target."""
    memory: torch.Tensor


def shared_elements(targets: Sequence[LocalTensor]) -> list[tuple[int, int]]:
    """Pairs of targets, by their numbers, that share an element. Reads nothing of the memory."""
    parts = [(number, memory) for number, target in enumerate(targets) for _, memory in target.parts]
    starts = np.array([0 if memory.is_meta else memory.data_ptr() for _, memory in parts], dtype=np.uint64)
    sizes = np.array([memory.nbytes if memory.is_contiguous() else _span(memory) for _, memory in parts], dtype=np.uint64)
    order = np.lexsort((sizes, starts))
    order = order[(starts[order] > 0) & (sizes[order] > 0)]
    stops = (starts + sizes)[order]
    if not len(order) or not (starts[order][1:] < np.maximum.accumulate(stops)[:-1]).any():
        return []  # as nearly always: then no object is made for any of them
    return _compared([_AddressRange(int(starts[i]), int(starts[i] + sizes[i]), *parts[i]) for i in order.tolist()])


def _span(memory: torch.Tensor) -> int:
    """Bytes from the first element of a view to its last one."""
    if not memory.numel():
        return 0
    return (sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True)) + 1) * memory.element_size()


def _compared(extents: Sequence[_AddressRange]) -> list[tuple[int, int]]:
    """``shared_elements`` of extents by increasing start: each is compared with those before it that end after it begins."""
    pairs: dict[tuple[int, int], None] = {}
    earlier, compared = list[_AddressRange](), 0
    for extent in extents:
        earlier = [other for other in earlier if other.stop > extent.start]
        for other in earlier:
            compared += 1
            pair = min(other.number, extent.number), max(other.number, extent.number)
            if compared <= MOST_PAIRS and other.number != extent.number and pair not in pairs and _share(other.memory, extent.memory):
                pairs[pair] = None
        earlier.append(extent)
    return sorted(pairs)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views whose addresses overlap have an element in common."""
    if one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        return np.shares_memory(_addresses(one), _addresses(other), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # too hard: numpy gave up
        return False


def overlaps_itself(memory: torch.Tensor) -> bool:
    """Whether two elements of a view lie at one address: then no values can be loaded into it but some."""
    steps = sorted((stride, size) for size, stride in zip(memory.shape, memory.stride(), strict=True) if size > 1)
    span = 0  # of what the smaller strides reach: a stride beyond it cannot come back to it
    for stride, size in steps:
        if stride <= span:
            break
        span += stride * (size - 1)
    else:
        return False
    if memory.is_meta or not memory.numel():
        return False  # what it is given when it gets memory is dense
    # Two elements at one address differ first in some dimension: of the one that is ahead there, and the other moved to the start,
    # each lies in one of these two views.
    for dim, size in enumerate(memory.shape):
        at_start = memory[(0,) * dim]
        if size > 1 and _may_share(at_start[:1], at_start[1:]):
            return True
    return False


def _may_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return np.shares_memory(_addresses(one), _addresses(other), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # too hard: numpy gave up
        return True


class _Interface:
    """What numpy asks for the place of an array's elements."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _addresses(memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array that is only asked where its elements lie: it may be memory of a GPU."""
    size = memory.element_size()
    interface = {
        "version": 3,
        "data": (memory.data_ptr(), False),
        "shape": tuple(memory.shape),
        "strides": tuple(stride * size for stride in memory.stride()),
        "typestr": f"|V{size}",
    }
    return np.asarray(_Interface(interface))
