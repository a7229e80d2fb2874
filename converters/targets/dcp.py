"""Conversion into a checkpoint of ``torch.distributed.checkpoint``: the nested state, flattened as its own planner does."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt import settings
from ckpt.converters.selection import OutputSet, OutputTensor, choose
from ckpt.converters.target import FileItem, OutputFile, OutputOptions, OutputPlan, Target, slabs
from ckpt.dtypes import DType
from ckpt.errors import UsageError
from ckpt.formats.native.writer import publish
from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import group_sizes
from ckpt.state.tensors import torch_dtype

from .torch_file import ArchivePlan, StorageStub, nested_state

# What a checkpoint of ``torch.distributed.checkpoint`` consists of: data files in our own layout, metadata by torch's own classes.
#
# A data file is one ``torch.save`` archive after another; ``.metadata`` says where each is. (Source:
# ``torch/distributed/checkpoint/filesystem.py`` of PyTorch 2.13.)

METADATA = ".metadata"
BOX = 256 << 20
"""Bytes of the largest stored box: loads read a box whole."""

Places = dict[MetadataIndex, _StorageInfo]
Described = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


class TensorItem(NamedTuple):
    """An item that is a box of the tensor ``fqn``: the elements of ``part`` of what is converted, in the shape of ``box``."""

    fqn: str
    box: Box
    wanted: OutputTensor
    part: Box

    @property
    def nbytes(self) -> int:
        return self.part.numel * self.wanted.dtype.itemsize


class PickledItem(NamedTuple):
    """An item that is known already, as ``torch.save`` writes it: a value, or a small tensor, whose only box is ``box``."""

    fqn: str
    data: bytes
    box: Box | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data)


Stored = TensorItem | PickledItem


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def boxes_of(box: Box, itemsize: int) -> list[Box]:
    """A box in those that are stored."""
    return list(slabs(box, itemsize, (), BOX)) or [box]


def described(shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]) -> TensorStorageMetadata:
    """What the metadata say of a tensor."""
    chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def index_of(fqn: str, box: Box | None) -> MetadataIndex:
    """What names an item."""
    return MetadataIndex(fqn, None if box is None else torch.Size(box.offset))


def data_files(stored: Sequence[Stored], size: int | None, *, folder: str = "") -> tuple[tuple[OutputFile, ...], Places]:
    """Files of about ``size`` bytes below ``folder``, one item after another, and where each item is."""
    places: Places = {}
    groups = group_sizes([s.nbytes for s in stored], size or settings.DATA_FILE)
    files = [_file(folder, f"__{n}_0.distcp", [stored[i] for i in group], places) for n, group in enumerate(groups)]
    return tuple(files), places


_VERSION: dict[str, Any] = {"version": "1.0.0"} if "version" in Metadata.__dataclass_fields__ else {}  # torch 2.6 has none


def metadata(tensors: Described, places: Places, paths: Any = None) -> bytes:
    """The file of metadata; ``paths`` are the planner's."""
    return pickle.dumps(Metadata(state_dict_metadata=dict(tensors), planner_data=paths, storage_data=places, **_VERSION))


@lru_cache(maxsize=4096)
def _archive(dtype: DType, shape: tuple[int, ...]) -> ArchivePlan:
    """Of one tensor: a model has very many, and few shapes."""
    stand = StorageStub(0, dtype, shape)
    return ArchivePlan(stand, [stand])


def _file(folder: str, name: str, members: Sequence[Stored], places: Places) -> OutputFile:
    items: list[FileItem] = []
    archives: list[ArchivePlan] = []
    values: list[tuple[int, bytes]] = []
    at = 0
    for member in members:
        if isinstance(member, PickledItem):
            values.append((at, member.data))
            size = len(member.data)
        else:
            archives.append(_archive(member.wanted.dtype, member.box.shape).moved(at))
            items.append(FileItem(member.wanted.name, member.part, archives[-1].starts[0], member.wanted.dtype.itemsize))
            size = archives[-1].size
        places[index_of(member.fqn, member.box)] = _StorageInfo(name, at, size)
        after = -(-(at + size) // 64) * 64  # items begin where tensors may
        values.append((at + size, bytes(after - at - size)))
        at = after

    def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
        closing = [end for archive, digest in zip(archives, digests, strict=True) for end in archive.ends([digest])]
        return sorted([*closing, *(v for v in values if v[1])])

    return OutputFile(path=f"{folder}{name}", size=at, items=tuple(items), ends=ends)


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
    return OutputPlan(files=files, digest="crc32", finish=lambda backend: publish(backend, METADATA, data), last=(METADATA,))


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
"""For ``ckpt.converters.target``."""
