"""What a checkpoint of ``torch.distributed.checkpoint`` consists of: data files in our own layout, metadata by torch's own classes.

A data file is one ``torch.save`` archive after another; ``.metadata`` says where each is. (Source:
``torch/distributed/checkpoint/filesystem.py`` of PyTorch 2.13.)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.converters.pipeline.target import OutputFile
from ckpt.converters.pipeline.windows import FileItem, slabs
from ckpt.converters.select.selection import OutputTensor
from ckpt.dtypes import DType
from ckpt.layout.geometry import Box
from ckpt.plan.reads import group_sizes
from ckpt.settings import limits

from .torch_archive import ArchivePlan, StorageStub

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
    groups = group_sizes([s.nbytes for s in stored], size or limits.DATA_FILE)
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
