"""Formulas of an average: the weighted sum of floating-point tensors, and tensors that have to be the same in all checkpoints."""

# One element of the result, from the elements x of the checkpoints in the order of the arguments, all arithmetic in float32 (in float64
# if an operand or the result is float64), rounded after every step, no fused multiply-add:
#
#     acc = w[0] * x[0];   acc = acc + w[1] * x[1];   acc = acc + w[2] * x[2];  …   then cast to the result's dtype
#
# Each step is one elementwise operation of torch, so neither the cut into blocks nor the number of threads changes a bit. Blocks stay in
# the cache from the first step to the last.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.errors import MismatchError
from ckpt.layout.geometry import Box

_BLOCK = (1 << 15) - 64
"""Elements at once: fewer than torch divides among threads of its own (32,768). These would spin on the cores that read, hash and write
meanwhile. Two temporaries in float32 are 256 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSum:
    """The sum of ``weights[i]`` times operand i. ``sources`` name the checkpoints in errors. Unless ``allow_nan``, all must be finite."""

    weights: tuple[float, ...]
    sources: tuple[str, ...]
    allow_nan: bool = False

    def boxes(self, box: Box) -> Sequence[Box]:
        return [box] * len(self.weights)

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        flat, result = [x.reshape(-1) for x in operands], out.view(-1)
        wide = torch.float64 if torch.float64 in {out.dtype, *(x.dtype for x in operands)} else torch.float32
        largest = torch.finfo(out.dtype).max
        total, term = torch.empty(2, min(_BLOCK, len(result)), dtype=wide)
        for start in range(0, len(result), _BLOCK):
            length = min(_BLOCK, len(result) - start)
            acc, product = total[:length], term[:length]
            for i, (x, weight) in enumerate(zip(flat, self.weights, strict=True)):
                target = product if i else acc
                part = x[start : start + length]
                torch.mul(part if x.dtype == wide else target.copy_(part), weight, out=target)
                if i:
                    acc.add_(product)
            result[start : start + length] = acc
            if not self.allow_nan:
                low, high = (v.item() for v in torch.aminmax(acc))
                if not (-largest <= low and high <= largest):  # also if one is NaN
                    self._refuse(name, box, start, [x[start : start + length] for x in flat], result[start : start + length])

    def _refuse(self, name: str, box: Box, start: int, operands: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Name the first element that is not finite; there may be none, since what is just above the largest number rounds down to it."""
        for x, source in zip(operands, self.sources, strict=True):
            if (bad := _first(~torch.isfinite(x))) is not None:
                message = f"{place(name, box, start + bad)} is {x[bad].item()}"
                raise MismatchError(
                    message, where=source, hint="leave this checkpoint out, or let the result be so: --allow-nan (allow_nan=True)"
                )
        if (bad := _first(~torch.isfinite(result))) is not None:
            message = f"{place(name, box, start + bad)} of the average is {result[bad].item()}: too large for {str(result.dtype)[6:]}"
            raise MismatchError(message, hint="use smaller weights, or another --dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class SameInAll:
    """The first operand; every other one must have the same bits. ``sources`` name the checkpoints in errors."""

    sources: tuple[str, ...]

    def boxes(self, box: Box) -> Sequence[Box]:
        return [box] * len(self.sources)

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        first = operands[0]
        out.view(-1).view(torch.uint8).copy_(bits := first.reshape(-1).view(torch.uint8))
        for other, source in zip(operands[1:], self.sources[1:], strict=True):
            if (differs := _first(bits != other.reshape(-1).view(torch.uint8))) is not None:
                bad = differs // first.element_size()
                values = f"{_shown(first, bad)} in {self.sources[0]} and {_shown(other, bad)} in {source}"
                message = f"{place(name, box, bad)} is {values}, and {str(first.dtype)[6:]} tensors are not averaged"
                raise MismatchError(message, hint="take it as it is from one checkpoint (--copy GLOB), or leave it out (--exclude GLOB)")


def place(name: str, box: Box, number: int) -> str:
    """Element ``number`` of a box, in row-major order, as ``name[3, 5]``."""
    index = [int(i) + o for i, o in zip(np.unravel_index(number, box.shape), box.offset, strict=True)] if box.shape else []
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def _first(wrong: torch.Tensor) -> int | None:
    return int(torch.argmax(wrong.to(torch.uint8))) if bool(wrong.any()) else None


def _shown(tensor: torch.Tensor, number: int) -> str:
    return str(tensor.reshape(-1)[number].item())
