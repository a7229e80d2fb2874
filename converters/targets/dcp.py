"""Conversion into a checkpoint of ``torch.distributed.checkpoint``: the nested state, flattened as its own planner does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from ckpt.adapters.tensors import torch_dtype
from ckpt.converters.pipeline.target import OutputOptions, OutputPlan, Target, publish_once
from ckpt.converters.select.selection import OutputSet, OutputTensor, choose
from ckpt.errors import UsageError
from ckpt.layout.geometry import Box

from .dcp_files import METADATA, PickledItem, Stored, TensorItem, boxes_of, data_files, described, metadata, saved
from .nested_state import nested_state


@dataclass(eq=False)
class _Marked:
    """Stands for a tensor while the state is flattened."""

    tensor: torch.Tensor
    wanted: OutputTensor = field(repr=False)

    @cached_property
    def boxes(self) -> list[Box]:
        return boxes_of(Box.whole(self.wanted.shape), self.wanted.dtype.itemsize)


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """Data files, one item after another, and the metadata."""
    known: dict[int, _Marked] = {}

    def leaf(wanted: OutputTensor) -> torch.Tensor:
        marked = _Marked(torch.empty(0, device="meta"), wanted.without_padding())
        known[id(marked.tensor)] = marked
        return marked.tensor

    state = nested_state(chosen, leaf)
    flat, paths = flatten_state_dict(state if isinstance(state, dict) else {"state": state})
    stored = [item for fqn, value in flat.items() for item in _items(fqn, value, known)]
    files, places = data_files(stored, layout.shard_size)
    data = metadata({fqn: _described(value, known) for fqn, value in flat.items()}, places, paths)
    return OutputPlan(files=files, digest="crc32", finish=lambda backend: publish_once(backend, METADATA, data), last=(METADATA,))


def _items(fqn: str, value: Any, known: dict[int, _Marked]) -> list[Stored]:
    marked = known.get(id(value))
    if marked is None:
        inside = _inside(value, known)
        if inside is not None:
            message = f"the tensor {inside.name!r} lies in a {type(value).__name__}, which torch.distributed.checkpoint keeps as one value"
            raise UsageError(message, hint="leave it out: --exclude; or save it in a list or mapping")
        return [PickledItem(fqn, saved(value), Box.whole(value.shape) if isinstance(value, torch.Tensor) else None)]
    return [TensorItem(fqn, box, marked.wanted, box) for box in marked.boxes]


def _inside(value: Any, known: dict[int, _Marked]) -> OutputTensor | None:
    """A tensor of the checkpoint somewhere in a value: its elements are not there yet, and would be lost."""
    if id(value) in known:
        return known[id(value)].wanted
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((inner for part in parts if (inner := _inside(part, known)) is not None), None)


def _described(value: Any, known: dict[int, _Marked]) -> TensorStorageMetadata | BytesStorageMetadata:
    marked = known.get(id(value))
    if marked is not None:
        return described(marked.wanted.shape, torch_dtype(marked.wanted.dtype), marked.boxes)
    if isinstance(value, torch.Tensor):
        return described(value.shape, value.dtype, [Box.whole(value.shape)])
    return BytesStorageMetadata()


TARGET = Target(name="dcp", computes=True, choose=choose, plan=plan)
"""For ``ckpt.converters.pipeline.target``."""
