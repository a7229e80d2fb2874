"""Tensors that are computed from stored ones, box by box, while a conversion writes them: averages, sums with products. No torch here.

Invariant: ``repr`` of a ``Computed`` says all that the elements depend on besides the stored ones. The journal compares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpt.catalog import Catalog
from ckpt.dtypes import DTYPES, DType
from ckpt.layout.geometry import Box
from ckpt.plan.views import LogicalTensor

if TYPE_CHECKING:
    import torch

FLOATING = ("float16", "bfloat16", "float32", "float64")
"""Names of the dtypes that arithmetic takes: others are bits, or need a scale that lies elsewhere."""


class Formula(Protocol):
    """How a box of a tensor is computed. Frozen, with a ``repr`` that says all parameters."""

    def boxes(self, box: Box) -> Sequence[Box]:
        """The box of each operand that ``box`` of the result is computed from."""

    def compute(self, name: str, box: Box, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fill ``out``, of the shape of ``box`` of the tensor ``name``. Operands have the shapes of their boxes; all are contiguous.

        Raises:
            MismatchError: the operands have values that the formula does not take.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """``view`` of stored tensors of catalog number ``source`` of an ``OutputSet``, read as ``dtype``."""

    source: int
    view: LogicalTensor
    dtype: DType


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The elements of an output tensor: ``formula`` of ``operands``."""

    formula: Formula
    operands: tuple[Operand, ...]


def operand(catalog: Catalog, source: int, view: LogicalTensor) -> Operand:
    """A view as an operand: in the dtype that its parts are stored in; in the widest of them, if these are several floating ones."""
    kinds = {catalog.tensors[piece.source].dtype for piece in view.pieces}
    dtype = max(kinds, key=lambda kind: (kind.itemsize, kind.name), default=DTYPES["float32"])
    if len(kinds) > 1 and dtype.itemsize < DTYPES["float32"].itemsize:
        dtype = DTYPES["float32"]
    return Operand(source=source, view=view, dtype=dtype)


def is_floating(catalog: Catalog, view: LogicalTensor) -> bool:
    """Whether arithmetic takes all that a view is made of."""
    return bool(view.pieces) and all(catalog.tensors[piece.source].dtype.name in FLOATING for piece in view.pieces)
