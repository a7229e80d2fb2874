"""A live state in other names: a translation makes new tensors of boxes of the source's, and targets of it fill through strided views.

    source           qkv [12, 8]  rows 0-7 q, 8-9 k, 10-11 v        k [2, 8] = qkv[8:10]        (a view: ckpt.plan.views)
    a rank has       k[:, 0:4], as memory M
    it asks for      qkv[8:10, 0:4], and what comes goes to M, seen as that box

So transfers, digests and copies know the source's tensors alone: a target of a translated tensor is turned into targets of those that it is
made of, whose memory is the same. Nothing is put together elsewhere and then copied.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import xxhash

from ckpt.adapters.tensors import LocalShard, LocalTensor
from ckpt.catalog import Grid, TensorEntry
from ckpt.converters.mapping.convention import model_views
from ckpt.converters.select.selection import OutputTensor, SelectOptions, Views, choose
from ckpt.coordination.rows import Row
from ckpt.errors import ConsistencyError, UsageError
from ckpt.live.catalog import LiveCatalog
from ckpt.plan.match import common_box
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.views import LogicalTensor, ViewPiece

Target = tuple[LocalTensor, TensorEntry]
"""Memory of the receiver, and the tensor of the source that goes there."""


def views_of(names: str | os.PathLike[str] | None, convention: str | None, numbers: Mapping[str, int] | None) -> Views | None:
    """The translation that a caller asks for; None if it asks for none."""
    if names is None:
        if convention is not None or numbers:
            raise UsageError("convention= and numbers= are for a translation of names", hint="give names= too, or leave them out")
        return None
    if convention is None:
        raise UsageError("names= says how names are translated, but not into which", hint='give convention= too, such as "huggingface"')
    return model_views(os.fspath(names), convention, numbers or {})


def in_other_names(catalog: LiveCatalog, views: Views, *, strict: bool) -> LiveCatalog:
    """The same state as the translation ``views`` gives it. No element moves."""
    chosen = choose(catalog, SelectOptions(views=views))
    if strict and chosen.left_out:
        listed = ", ".join(sorted(chosen.left_out)[:20])
        message = f"these values cannot follow their tensors into other names: {listed}"
        raise UsageError(message, where=catalog.url, hint="leave them out of the old state, or pass strict=False")
    made = {name: wanted.view for name, wanted in sorted(chosen.tensors.items())}
    return replace(
        catalog,
        tensors={name: _entry(wanted) for name, wanted in chosen.tensors.items()},
        state=chosen.state,
        ranks=chosen.ranks,
        views=made,
        sources=catalog.tensors,
        translation=xxhash.xxh3_128_hexdigest(repr(list(made.items())).encode()),
    )


def check_alike(rows: Mapping[int, Row]) -> None:
    """Leader: raise ConsistencyError unless all ranks translate alike; ``rows`` have the digests of their translations."""
    if len({row["translation"] for row in rows.values()}) > 1:
        raise ConsistencyError(
            "the ranks translate the names in different ways", hint="give the same names=, convention= and numbers= on every rank"
        )


def _entry(wanted: OutputTensor) -> TensorEntry:
    return wanted.entry(Grid(cuts=tuple((0, n) for n in wanted.shape), files=np.zeros(1, dtype=np.int32)))


def source_targets(target: Target, view: LogicalTensor, catalog: LiveCatalog, padding: list[torch.Tensor]) -> list[Target]:
    """A target of a translated tensor as targets of the tensors that it is made of, in the same memory. Memory of parts that reach beyond
    them is added to ``padding``."""
    local, wanted = target[0], common_box(target[0].info, target[1])
    parts: dict[str, list[LocalShard]] = {}
    for part in local.parts:
        box, filled = part.box.intersect(wanted), 0
        for piece in view.overlapping(box) if box is not None else ():
            memory = part.memory[piece.box.relative_to(part.box.offset).slices]
            parts.setdefault(piece.source, []).append(LocalShard(piece.part, _along_source(memory, piece)))
            filled += piece.box.numel
        if filled < part.box.numel:
            padding.append(part.memory)
    targets: list[Target] = []
    for name, shards in parts.items():
        entry = catalog.sources[name]
        spec = TensorSpec(name, local.info.dtype, entry.shape, catalog.layouts[entry.alias or name], entry.logical)
        targets.append((LocalTensor(spec, shards, local.state_name), entry))
    return targets


def _along_source(memory: torch.Tensor, piece: ViewPiece) -> torch.Tensor:
    """The memory of ``piece.box``, seen as the box ``piece.part`` of the source."""
    for axis in reversed([i for i, source in enumerate(piece.axes) if source is None]):
        memory = memory.select(axis, 0)
    sources = [source for source in piece.axes if source is not None]
    memory = memory.permute([sources.index(source) for source in sorted(sources)])
    for axis in range(len(piece.part.shape)):
        if axis not in sources:
            memory = memory.unsqueeze(axis)
    return memory
