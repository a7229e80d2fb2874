"""What a receiver wants of a live state: for each bound tensor the boxes of its memory, and how what comes is put there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt.adapters.memory import raw_view, reads_otherwise
from ckpt.engine.load.copying import Stored, copy_box
from ckpt.engine.load.reader import TensorLoad
from ckpt.layout.geometry import Box
from ckpt.plan.match import common_box
from ckpt.plan.transfers import Share, Want

from .catalog import LiveCatalog
from .client import piece_boxes


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """The bound tensors, each with what is wanted for it; ``padding`` is memory beyond the source's tensors, filled with zeros."""

    jobs: Sequence[TensorLoad]
    wants: Sequence[Want]
    padding: Sequence[torch.Tensor]

    @classmethod
    def of(cls, jobs: Iterable[TensorLoad], catalog: LiveCatalog) -> Wanted:
        kept: list[TensorLoad] = []
        wants: list[Want] = []
        padding: list[torch.Tensor] = []
        for job in jobs:
            target, entry = job
            stored = common_box(target.info, entry)
            boxes: list[Box] = []
            for part in target.parts:
                box: Box | None = part.box
                if not stored.contains(part.box):
                    padding.append(part.memory)
                    box = part.box.intersect(stored)
                if box is not None and box.numel:
                    boxes.append(box)
            if boxes:
                kept.append(job)
                wants.append(
                    Want(entry.name, catalog.number(entry), entry.dtype.itemsize, entry.grid, catalog.holders(entry), tuple(boxes))
                )
        return cls(jobs=kept, wants=wants, padding=padding)

    def pad(self) -> None:
        """Fill the padding."""
        for memory in self.padding:
            (memory if reads_otherwise(memory) else raw_view(memory)).zero_()

    def place(self, share: Share, piece: int, data: npt.NDArray[np.uint8]) -> None:
        """Put the boxes of a piece where they belong."""
        for want, request, start, stop in piece_boxes(share, piece):
            target, entry = self.jobs[want]
            box = share.requests.box(request, len(entry.shape))
            copy_box(Stored(data[start:stop], 0, box, entry.dtype), box, target)

    def memories(self) -> list[torch.Tensor]:
        """All that is written."""
        return [part.memory for job in self.jobs for part in job.target.parts]
