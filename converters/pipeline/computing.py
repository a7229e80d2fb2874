"""Fills boxes of computed tensors: reads the boxes of their operands from all sources, then lets the formula put them together.
Memory: what the caller gives, for operands.
"""

# Boxes are taken in batches whose operands fit the memory together:
#
#     boxes       | a[0:9] | b | c[0:4] |  d[0:64]                     |
#     batches     |------- 1 -----------|----- 2 -----|----- 3 --------|      a box whose operands do not fit is cut along its rows
#     sources     0: read_views   1: read_views   2: read_views               each a single plan, read by several threads
#     then        formula(operands) -> memory of the box                     several boxes at a time
#
# A chunk has one digest, so part of a chunk costs reading all of it. Boxes end where chunks of source 0 end; only a box that is cut here
# reads chunks twice, and that takes more than a dozen operands at the default memory.

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ckpt.adapters.tensors import torch_dtype
from ckpt.concurrency.workers import run_tasks
from ckpt.converters.select.computed import Computed
from ckpt.engine.load.reader import Reader
from ckpt.layout.geometry import Box

from .page_memory import page_memory
from .view_reader import ViewBox, read_views
from .windows import slabs

_BATCH = 128 << 20
"""Bytes of operands from which on another batch begins: enough for all threads, and new memory costs time."""
_ALIGNED = 64
"""Operands begin at multiples of so many bytes."""


class ComputedBox(NamedTuple):
    """``box`` of the tensor ``name`` belongs into ``memory``, which is contiguous and has the shape of the box."""

    name: str
    computed: Computed
    box: Box
    memory: torch.Tensor

    @property
    def operand_bytes(self) -> int:
        """Memory that the operands take."""
        boxes = self.computed.formula.boxes(self.box)
        return sum(_padded(box.numel * o.dtype.itemsize) for box, o in zip(boxes, self.computed.operands, strict=True))


class Computing:
    """Computes boxes with operands from the catalogs of ``readers``, in at most ``memory`` bytes, or as many as one row of a box needs."""

    def __init__(self, readers: Sequence[Reader], *, memory: int) -> None:
        self._readers = readers
        self._memory = memory
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, boxes: Sequence[ComputedBox]) -> None:
        """Compute all of these boxes."""
        batch, used = list[ComputedBox](), 0
        for part in (part for box in boxes for part in self._parts(box)):
            if batch and used + part.operand_bytes > min(self._memory, _BATCH):
                self._compute(batch, used)
                batch, used = [], 0
            batch.append(part)
            used += part.operand_bytes
        if batch:
            self._compute(batch, used)

    def _parts(self, whole: ComputedBox) -> Iterator[ComputedBox]:
        """The box, or parts of it that are contiguous in it and small enough for the memory."""
        if whole.operand_bytes <= self._memory:
            yield whole
            return
        itemsize = whole.memory.element_size()
        most = max(itemsize, whole.box.numel * itemsize * self._memory // whole.operand_bytes)
        flat, at = whole.memory.reshape(-1), 0
        for box in slabs(whole.box, itemsize, (), most):
            yield whole._replace(box=box, memory=flat[at : at + box.numel].view(box.shape))
            at += box.numel

    def _compute(self, batch: Sequence[ComputedBox], needed: int) -> None:
        if len(self._scratch) < needed:
            self._scratch = page_memory(needed)
        at, operands = 0, list[list[torch.Tensor]]()
        views: list[list[ViewBox]] = [[] for _ in self._readers]
        for part in batch:
            operands.append([])
            for box, one in zip(part.computed.formula.boxes(part.box), part.computed.operands, strict=True):
                length = math.prod(box.shape) * one.dtype.itemsize
                memory = self._scratch[at : at + length].view(torch_dtype(one.dtype)).view(box.shape)
                at += _padded(length)
                operands[-1].append(memory)
                views[one.source].append(ViewBox(one.view, box, memory))
        for reader, parts in zip(self._readers, views, strict=True):
            read_views(reader, parts)
        tasks = [
            partial(part.computed.formula.compute, part.name, part.box, read, part.memory)
            for part, read in zip(batch, operands, strict=True)
        ]
        run_tasks(tasks, min(self._readers[0].threads, os.cpu_count() or 1), "ckpt-compute")


def _padded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
