"""A live state in other names: a translation makes new tensors of boxes of the source's, and targets of it fill through strided views.

    source           qkv [12, 8]  rows 0-7 q, 8-9 k, 10-11 v        k [2, 8] = qkv[8:10]        (a view: ckpt.plan.views)
    a rank has       k[:, 0:4], as memory M
    it asks for      qkv[8:10, 0:4], and what comes goes to M, seen as that box

So transfers, digests and copies know the source's tensors alone: a target of a translated tensor is turned into targets of those that it is
made of, whose memory is the same. Nothing is put together elsewhere and then copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import xxhash

from ckpt.catalog import Grid, TensorEntry
from ckpt.converters.mapping.convention import model_views
from ckpt.converters.selection import OutputTensor, SelectOptions, Views, choose
from ckpt.errors import CkptError, ConsistencyError, UsageError
from ckpt.net.rows import Row
from ckpt.plan.match import common_box
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.views import LogicalTensor, ViewPiece
from ckpt.state.tensors import LocalShard, LocalTensor

from .holdings import LiveCatalog

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


# What matching says of a checkpoint and a state, in the words of whoever called: a version and a state, or an old and a new state.

_INSPECT = "`ckpt inspect` shows what is stored; "


@contextmanager
def worded(*, stored: str, state: str = "the state", layout: str = "layout=") -> Iterator[None]:
    """Errors name what is taken from as ``stored``, and what it goes into as ``state``; hints name the argument ``layout``.

    Matching is that of a load, with some twenty messages. To hand two nouns down to all of them would be more than to name the things
    once, where it is known what they are.
    """
    try:
        yield
    except CkptError as err:
        err.message = _worded(err.message, stored, state, layout)
        err.hint = None if err.hint is None else _worded(err.hint, stored, state, layout)
        raise


def _worded(text: str, stored: str, state: str, layout: str) -> str:
    text = re.sub(r"\bthe checkpoint\b", stored, text.replace(_INSPECT, ""))
    return re.sub(r"(?<![\w.])layout=", layout, re.sub(r"\bthe state\b", state, text))
