"""Conversion into a checkpoint of ``torch.distributed.checkpoint``: data files in our own layout, metadata by torch's own classes.

A data file is one ``torch.save`` archive after another; ``.metadata`` says where each is. (Source:
``torch/distributed/checkpoint/filesystem.py`` of PyTorch 2.13.)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

from ckpt.adapters.tensors import torch_dtype
from ckpt.errors import ConflictError, UsageError
from ckpt.geometry import Box
from ckpt.io_backends.protocol import Backend

from .archives import Archive, Stand
from .choosing import Chosen, Wanted, choose
from .nested import nested_state
from .target import Layout, OutFile, Planned, Target, in_groups
from .windows import Item, slabs

METADATA = ".metadata"
BOX = 256 << 20
"""Bytes of the largest stored box: loads read a box whole."""
FILE = 4 << 30
"""Bytes of a data file, about, unless the caller says."""


class _Stored(NamedTuple):
    """One item: a box of a tensor, or the bytes of a value."""

    fqn: str
    wanted: Wanted | None
    box: Box | None
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.wanted is None or self.box is None else self.box.numel * self.wanted.dtype.itemsize


@dataclass(eq=False)
class _Marked:
    """Stands for a tensor while the state is flattened."""

    tensor: torch.Tensor
    wanted: Wanted = field(repr=False)


def plan(chosen: Chosen, layout: Layout) -> Planned:
    """Data files, one item after another, and the metadata."""
    known: dict[int, _Marked] = {}

    def leaf(wanted: Wanted) -> torch.Tensor:
        marked = _Marked(torch.empty(0, device="meta"), wanted.without_padding())
        known[id(marked.tensor)] = marked
        return marked.tensor

    state = nested_state(chosen, leaf)
    flat, paths = flatten_state_dict(state if isinstance(state, dict) else {"state": state})
    stored = [item for fqn, value in flat.items() for item in _items(fqn, value, known)]
    described: dict[str, Any] = {fqn: _described(value, known) for fqn, value in flat.items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files = []
    for number, group in enumerate(in_groups([s.nbytes for s in stored], layout.shard_size or FILE)):
        files.append(_file(f"__{number}_0.distcp", [stored[i] for i in group], places))
    metadata = Metadata(state_dict_metadata=described, planner_data=paths, storage_data=places, version="1.0.0")
    data = pickle.dumps(metadata)

    def finish(backend: Backend) -> None:
        try:
            backend.publish(METADATA, data, replaces=None)
        except ConflictError:
            if backend.read(METADATA) != data:
                raise

    return Planned(files=tuple(files), digest="crc32", finish=finish)


def _items(fqn: str, value: Any, known: dict[int, _Marked]) -> list[_Stored]:
    marked = known.get(id(value))
    if marked is None:
        inside = _inside(value, known)
        if inside is not None:
            told = f"the tensor {inside.name!r} lies in a {type(value).__name__}, which torch.distributed.checkpoint keeps as one value"
            raise UsageError(told, hint="leave it out: --exclude; or save it in a list or mapping")
        held = io.BytesIO()
        torch.save(value, held)
        if not isinstance(value, torch.Tensor):
            return [_Stored(fqn, None, None, held.getvalue())]
        return [_Stored(fqn, None, Box.whole(value.shape), held.getvalue())]
    return [_Stored(fqn, marked.wanted, box, b"") for box in _boxes(marked.wanted)]


def _inside(value: Any, known: dict[int, _Marked]) -> Wanted | None:
    """A tensor of the checkpoint somewhere in a value: its elements are not there yet, and would be lost."""
    if id(value) in known:
        return known[id(value)].wanted
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := _inside(part, known)) is not None), None)


def _boxes(wanted: Wanted) -> list[Box]:
    """The boxes that a tensor is stored in."""
    return list(slabs(Box.whole(wanted.shape), wanted.dtype.itemsize, (), BOX)) or [Box.whole(wanted.shape)]


def _described(value: Any, known: dict[int, _Marked]) -> TensorStorageMetadata | BytesStorageMetadata:
    marked = known.get(id(value))
    if marked is None and not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    if marked is None:
        shape, dtype = tuple(value.shape), value.dtype
        boxes = [Box.whole(shape)]
    else:
        shape, dtype = marked.wanted.shape, torch_dtype(marked.wanted.dtype)
        boxes = _boxes(marked.wanted)
    chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def _file(path: str, members: Sequence[_Stored], places: dict[MetadataIndex, _StorageInfo]) -> OutFile:
    items: list[Item] = []
    archives: list[Archive] = []
    values: list[tuple[int, bytes]] = []
    at = 0
    for member in members:
        index = MetadataIndex(member.fqn, None if member.box is None else torch.Size(member.box.offset))
        if member.wanted is None or member.box is None:
            values.append((at, member.data))
            size = len(member.data)
        else:
            stand = Stand(0, member.wanted.dtype, member.box.shape)
            archives.append(Archive(stand, [stand], at))
            items.append(Item(member.wanted.name, member.box, archives[-1].starts[0], stand.dtype.itemsize))
            size = archives[-1].size
        places[index] = _StorageInfo(path, at, size)
        after = -(-(at + size) // 64) * 64  # items begin where tensors may
        values.append((at + size, bytes(after - at - size)))
        at = after

    def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
        found = [end for archive, digest in zip(archives, digests, strict=True) for end in archive.ends([digest])]
        return sorted([*found, *(v for v in values if v[1])])

    return OutFile(path=path, size=at, items=tuple(items), ends=ends)


TARGET = Target(name="dcp", choose=choose, plan=plan)
"""For ``ckpt.converters.target``."""
