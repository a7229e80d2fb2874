"""Boxes of views, read into memory: any part of a tensor that is made of stored ones, in any order of axes, cast if it has to be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ckpt.adapters.memory import raw_view
from ckpt.adapters.tensors import LocalShard, LocalTensor
from ckpt.catalog import Catalog
from ckpt.dtypes import DTYPES
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.layout.geometry import Box
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.views import LogicalTensor, ViewPiece


class ViewBox(NamedTuple):
    """``box`` of ``view`` belongs into ``memory``, of the shape of the box. Another dtype than the stored one is converted to."""

    view: LogicalTensor
    box: Box
    memory: torch.Tensor


def read_views(reader: Reader, parts: Iterable[ViewBox]) -> None:
    """Fill the memory of all parts, in one go: near ranges together, in parallel, compared with the digests that there are.

    Filling of views becomes zeros.
    """
    reader.run(reader.plan(job for part in parts for job in _jobs(reader.catalog, part)))


def _jobs(catalog: Catalog, part: ViewBox) -> Iterator[TensorLoad]:
    pieces = list(part.view.overlapping(part.box)) if part.box.numel else []
    if sum(p.box.numel for p in pieces) < part.box.numel:
        raw_view(part.memory).zero_()
    for piece in pieces:
        entry = catalog.tensors[piece.source]
        dtype = DTYPES[str(part.memory.dtype).removeprefix("torch.")]
        info = TensorSpec(entry.name, dtype, entry.shape, TensorLayout.replicated((0,)), entry.logical)
        local = LocalShard(piece.part, in_stored_order(piece, part.memory[piece.box.relative_to(part.box.offset).slices]))
        yield TensorLoad(target=LocalTensor(info, [local], entry.name), entry=entry)


def in_stored_order(piece: ViewPiece, memory: torch.Tensor) -> torch.Tensor:
    """The memory of a piece with the axes of the stored tensor: a view of shape ``piece.part.shape``."""
    axes = {axis: i for i, axis in enumerate(piece.axes) if axis is not None}
    kept = memory[tuple(0 if axis is None else slice(None) for axis in piece.axes)]
    places = {i: n for n, i in enumerate(sorted(axes.values()))}
    ordered = kept.permute([places[axes[a]] for a in sorted(axes)])
    for axis in range(len(piece.part.shape)):
        if axis not in axes:
            ordered = ordered.unsqueeze(axis)
    return ordered
