"""Formulas of an average: the weighted sum of floating-point tensors, and tensors that have to be the same in all checkpoints."""

# One element of the result, from the elements x of the checkpoints in the order of the arguments, all arithmetic in float32 (in float64
# if an operand or the result is float64), rounded after every step, no fused multiply-add:
#
#     acc = w[0] * x[0];   acc = acc + w[1] * x[1];   acc = acc + w[2] * x[2];  …   then cast to the result's dtype
#
# Each step is one elementwise operation of IEEE arithmetic, so neither the cut into blocks nor the number of threads changes a bit, and it
# is what torch computes step by step. numpy does it, since an operation on a block this small takes half as long there; torch casts. Blocks
# stay in the cache from the first step to the last.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import MismatchError
from ckpt.plan.layout.geometry import Box

_BLOCK = 1 << 17
"""Elements at once: two temporaries in float32 are 1 MiB. Smaller blocks spend their time between operations."""
_CAST = (1 << 15) - 64
"""Elements that torch casts at once: fewer than it divides among threads of its own (32,768). These would spin on the cores that read, hash
and write meanwhile."""
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
"""All bits of the exponent: in NaN and infinite numbers, and in no others, all of them are set."""

_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Numbers = npt.NDArray[Any]


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
        total, term = torch.empty(2, min(_BLOCK, len(result)), dtype=wide)
        factors = [term.numpy().dtype.type(weight) for weight in self.weights]
        for start in range(0, len(result), _BLOCK):
            length = min(_BLOCK, len(result) - start)
            parts, into = [x[start : start + length] for x in flat], result[start : start + length]
            acc, product = into if out.dtype == wide else total[:length], term[:length]
            with np.errstate(all="ignore"):  # what is not finite is looked for below
                _add_up(parts, factors, acc, product)
            if acc is not into:
                _cast(acc, into)
            if not self.allow_nan and not _is_finite(into, acc, product):
                self._refuse(name, box, start, parts, into)

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


def _add_up(parts: Sequence[torch.Tensor], factors: Sequence[Any], acc: torch.Tensor, product: torch.Tensor) -> None:
    """The weighted sum of one block in ``acc``; ``product`` is overwritten."""
    total, term = acc.numpy(), product.numpy()
    for i, (part, factor) in enumerate(zip(parts, factors, strict=True)):
        target = term if i else total
        np.multiply(part.numpy() if part.dtype == acc.dtype else _widened(part, target), factor, out=target)
        if i:
            np.add(total, term, out=total)


def _widened(part: torch.Tensor, into: Numbers) -> Numbers:
    """The same numbers as wider ones, in ``into``."""
    if part.dtype == torch.bfloat16 and into.dtype == np.float32:  # the upper half of a float32; shifting is faster than torch's cast
        bits = into.view(np.uint32)
        bits[...] = part.view(torch.int16).numpy().view(np.uint16)
        np.left_shift(bits, 16, out=bits)
    else:
        _cast(part, torch.from_numpy(into))
    return into


def _cast(source: torch.Tensor, into: torch.Tensor) -> None:
    for start in range(0, len(into), _CAST):
        into[start : start + _CAST].copy_(source[start : start + _CAST])


def _is_finite(result: torch.Tensor, acc: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Whether all of a block is finite; ``acc`` is what was rounded to it, ``scratch`` is overwritten."""
    mask = _EXPONENTS.get(result.dtype)
    if mask is None:  # of 8 bits: some have no infinite numbers
        largest = torch.finfo(result.dtype).max
        low, high = (v.item() for v in torch.aminmax(acc))
        return bool(-largest <= low and high <= largest)  # neither if one is NaN
    unsigned = np.dtype(f"u{result.element_size()}")
    bits = result.view(_SIGNED[result.element_size()]).numpy().view(unsigned)
    return int(np.bitwise_and(bits, unsigned.type(mask), out=scratch.numpy().view(unsigned)[: len(bits)]).max()) != mask


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
