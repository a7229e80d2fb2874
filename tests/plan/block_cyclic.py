"""A placement that the package does not have: the whole of what somebody writes who adds one.

``dealt`` is the oracle: it deals the blocks of a real tensor out, like cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Shard as TorchShard

from ckpt.plan.layout.placement_base import AxisSplit, DTensorAxis, Split


@dataclass(frozen=True, slots=True)
class BlockCyclic(AxisSplit):
    """Blocks of ``block`` elements are dealt out over ``over``, as ScaLAPACK does; the last may be shorter."""

    dim: int
    over: str
    block: int

    def part(self, size: int, parts: int, index: int) -> Sequence[tuple[int, int]]:
        return [(at, min(at + self.block, size)) for at in range(index * self.block, size, parts * self.block)]

    def size_before(self, size: int, parts: int) -> int:
        return size * parts

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        return (cls(placement.dim, axis.over, placement.block), 0) if isinstance(placement, DealtOut) else None


class DealtOut(TorchShard):
    """The same as a DTensor has it: a special case of torch's ``Shard``."""

    def __init__(self, dim: int, block: int) -> None:
        super().__init__(dim)
        self.block = block


def dealt(tensor: torch.Tensor, block: int, parts: int, index: int) -> torch.Tensor:
    """What part ``index`` has of the rows of a tensor."""
    return torch.cat([tensor[:0], *tensor.split(block)[index::parts]])
