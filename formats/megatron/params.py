"""One rank's parameters: which elements of which tensors of the whole model they are. Pure.

Tensor parallelism cuts rows or columns; of gated first layers (SwiGLU) each rank has a part of the gate, then one of the same size of the
up projection. (Source: ``apply_swiglu_sharded_factory`` of Megatron-LM core/transformer/mlp.py.)
"""

# What a rank has of a weight [rows, columns] with tensor parallelism of 2:
#
#     rows cut (QKV, embedding)        columns cut (projections back)      gated first layer (SwiGLU)
#
#     rank 0  | rows 0 .. n/2  |       rank 0 | rank 1                     rank 0  | gate, first half  |
#     rank 1  | rows n/2 .. n  |       half of each row                            | up, first half    |
#                                                                          rank 1  | gate, second half |
#                                                                                  | up, second half   |
#
# The whole of a gated layer is all of the gate, then all of the up projection. So a rank's flat parameter is two boxes of it, not one.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .names import is_gated_part, tensor_parallel_axis


class ParamBlock(NamedTuple):
    """A box of the tensor ``name`` of the whole model, at ``offset``, and its elements in a rank's flat parameter: the first at ``start``,
    then row by row, or with ``strides`` elements between neighbours."""

    name: str
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParam:
    """A parameter as one rank has it: ``numel`` elements, which are ``blocks`` of tensors. ``shared``: the first and last pipeline stage
    have it both; ``expert``: it is reduced over the ranks that have the same experts."""

    dtype: str
    numel: int
    blocks: tuple[ParamBlock, ...]
    shared: bool = False
    expert: bool = False


class ParamPart(NamedTuple):
    """A rank's part of one tensor: the ``shape`` of the whole, and the boxes."""

    shape: tuple[int, ...]
    blocks: tuple[ParamBlock, ...]


def cut_of(name: str, local: tuple[int, ...], rank: int, ranks: int, *, gated: bool, cut_latent: bool = False) -> ParamPart:
    """What part of tensor ``name`` a parameter of shape ``local`` is on tensor-parallel ``rank`` of ``ranks``; for ``cut_latent`` see
    ``tensor_parallel_axis``."""
    zeros = (0,) * len(local)
    axis = tensor_parallel_axis(name, cut_latent=cut_latent) if ranks > 1 else None
    if axis is None or axis >= len(local):
        return ParamPart(local, (ParamBlock(name, 0, local, zeros),))
    shape = (*local[:axis], local[axis] * ranks, *local[axis + 1 :])
    if not gated or not is_gated_part(name):
        return ParamPart(shape, (ParamBlock(name, 0, local, (*zeros[:axis], rank * local[axis], *zeros[axis + 1 :])),))
    half = (local[0] // 2, *local[1:])
    gate = ParamBlock(name, 0, half, (rank * half[0], *zeros[1:]))
    up = ParamBlock(name, math.prod(half), half, (shape[0] // 2 + rank * half[0], *zeros[1:]))
    return ParamPart(shape, (gate, up))


def local_shape(name: str, shape: tuple[int, ...], ranks: int, *, cut_latent: bool = False) -> tuple[int, ...] | None:
    """The shape of a rank's part of a whole tensor; None if it cannot be divided."""
    axis = tensor_parallel_axis(name, cut_latent=cut_latent) if ranks > 1 else None
    if axis is None:
        return shape
    return None if shape[axis] % ranks else (*shape[:axis], shape[axis] // ranks, *shape[axis + 1 :])


def is_latent_cut(name: str, local: Mapping[str, tuple[int, ...]], ranks: int, arguments: Mapping[str, Any]) -> bool | None:
    """Whether the rows of a projection down to latent vectors are cut, as the shapes say that one of ``ranks`` has; None if they do not.

    The projection up takes what the norm after it gives: all latent elements. Those of keys and values come with the rotated part of keys,
    whose size only the arguments say.
    """
    kind = "kv" if name.endswith("linear_kv_down_proj.weight") else "q"
    up = local.get(name.replace("_down_proj", "_up_proj"))
    rotated = 0 if kind == "q" else arguments.get("qk_pos_emb_head_dim")
    rows = local[name][0]
    if up is None or not isinstance(rotated, int):
        other = name.replace("linear_kv_down_proj", "linear_q_down_proj")
        return is_latent_cut(other, local, ranks, arguments) if kind == "kv" and other in local else None
    total_rows = up[1] + rotated
    return rows != total_rows if total_rows in (rows, rows * ranks) else None


def gated_layers(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The first layers, by name, that are a gate and an up projection: they have twice as many rows as the second has columns."""
    layers = set()
    for name, shape in shapes.items():
        if name.endswith(".linear_fc2.weight"):
            first = name.removesuffix("linear_fc2.weight") + "linear_fc1.weight"
            if shapes.get(first, (0,))[0] == 2 * shape[-1]:
                layers |= {first, first.removesuffix("weight") + "bias"}
    return frozenset(layers)


def transposed_experts(
    name: str, numbers: Sequence[int], local: tuple[int, ...], hidden: int, rank: int, ranks: int, *, gated: bool
) -> list[ParamPart]:
    """The experts in ``weight1`` or ``weight2`` of GroupedMLP: transposed, one after another in memory, whatever shape the parameter says.
    In ``name`` the number of an expert goes for ``{}``.

    (Source: ``GroupedMLP.forward`` of Megatron-LM core/transformer/moe/experts.py.)
    """
    inner = math.prod(local) // (hidden * len(numbers))
    cuts = []
    for place, number in enumerate(numbers):
        at, own = place * hidden * inner, name.format(number)
        if own.endswith("linear_fc2.weight"):  # in memory [inner, hidden]
            cuts.append(ParamPart((hidden, inner * ranks), (ParamBlock(own, at, (hidden, inner), (0, rank * inner), (1, hidden)),)))
            continue
        parts = 2 if gated else 1  # in memory [hidden, inner], gate before up
        rows = inner // parts
        blocks = (ParamBlock(own, at + i * rows, (rows, hidden), (i * rows * ranks + rank * rows, 0), (1, inner)) for i in range(parts))
        cuts.append(ParamPart((inner * ranks, hidden), tuple(blocks)))
    return cuts
