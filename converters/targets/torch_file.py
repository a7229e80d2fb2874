"""Conversion into one file that ``torch.load`` reads: the nested state."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.catalog import Grid
from ckpt.converters.selection import OutputSet, OutputTensor, choose
from ckpt.converters.target import FileItem, OutputFile, OutputOptions, OutputPlan, Target
from ckpt.dtypes import DType
from ckpt.engine.view import StoredPerRank, StoredTensor, View
from ckpt.errors import UsageError
from ckpt.formats.external import ExternalCatalog, ExternalContents
from ckpt.plan.layout.geometry import Box
from ckpt.plan.tree import child_path
from ckpt.state.tensors import torch_dtype

# Archives as ``torch.save`` writes them, laid out before their tensors are read: zip files whose records are stored as they are.
#
# (Source of the layout: ``caffe2/serialize/inline_container.cc`` and ``torch/serialization.py`` of PyTorch; of zip: PKWARE's APPNOTE 6.3.)

ALIGNED = 64
"""The bytes of each record begin at a multiple of this many."""
_LONG = 0xFFFF_FFFF


@dataclass(frozen=True, eq=False)
class StorageStub:
    """Stands in an object for a tensor whose bytes come later: ``key`` says of which storage, in the order of the archive."""

    key: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Record(NamedTuple):
    """``header`` and ``data`` are where it begins and where its bytes do, from the start of the archive; ``content`` is None if it comes
    later, ``crc`` that of the content."""

    name: bytes
    header: int
    data: int
    size: int
    content: bytes | None
    crc: int


class ArchivePlan:
    """The archive of one object. ``starts`` says where the bytes of the stands go, in the order of their keys, from byte ``base`` of the
    file on; ``size`` is the archive's."""

    def __init__(self, value: Any, stands: Sequence[StorageStub], base: int = 0) -> None:
        self.base = base
        self._at = 0
        self._records: list[_Record] = []
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, len(stands))
        pickler.dump(value)
        self._add("data.pkl", buffer.getvalue())
        self._add("byteorder", b"little")
        self.starts: list[int] = []
        for stand in stands:
            self._add(f"data/{stand.key}", None, stand.nbytes)
            self.starts.append(base + self._records[-1].data)
        for key, content in enumerate(pickler.contents, len(stands)):
            self._add(f"data/{key}", content)
        self._add("version", b"3\n")
        self._directory = self._at
        self._known = [None if r.content is None else (_local(r, r.crc) + r.content, _central(r, r.crc)) for r in self._records]
        """Of each record whose content is there already, what the file has of it, and its entry in the directory."""
        self.size = self._directory + len(self._tail([0] * len(stands)))

    def moved(self, base: int) -> ArchivePlan:
        """The same from another byte of the file on."""
        moved = copy(self)
        moved.base, moved.starts = base, [start - self.base + base for start in self.starts]
        return moved

    def _add(self, name: str, content: bytes | None, size: int = 0) -> None:
        size = size if content is None else len(content)
        full = f"archive/{name}".encode()
        bare = self._at + 30 + len(full) + (20 if size >= _LONG else 0) + 4
        data = -(-bare // ALIGNED) * ALIGNED
        self._records.append(_Record(full, self._at, data, size, content, zlib.crc32(content or b"")))
        self._at = data + size

    def ends(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """All but the bytes of the stands, whose CRC-32 these are: bytes and where they go in the file."""
        later = iter(crcs)
        ends = [
            (self.base + record.header, _local(record, next(later)) if known is None else known[0])
            for record, known in zip(self._records, self._known, strict=True)
        ]
        return [*ends, (self.base + self._directory, self._tail(crcs))]

    def _tail(self, crcs: Sequence[int]) -> bytes:
        later = iter(crcs)
        entries = b"".join(
            _central(record, next(later)) if known is None else known[1] for record, known in zip(self._records, self._known, strict=True)
        )
        count, end = len(self._records), self._directory + len(entries)
        long = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(entries), self._directory)
        locator = struct.pack("<IIQI", 0x07064B50, 0, end, 1)
        few = min(count, 0xFFFF)
        last = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(len(entries), _LONG), min(self._directory, _LONG), 0)
        return entries + long + locator + last


def _local(record: _Record, crc: int) -> bytes:
    long = record.size >= _LONG
    extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if long else b""
    pad = record.data - record.header - 30 - len(record.name) - len(extra) - 4
    extra += struct.pack("<HH", 0x4246, pad) + b"Z" * pad
    size = _LONG if long else record.size
    head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45 if long else 20, 0x800, 0, 0, 0x21, crc, size, size, len(record.name), len(extra))
    return head + record.name + extra


def _central(record: _Record, crc: int) -> bytes:
    sizes = [record.size, record.size] if record.size >= _LONG else []
    offsets = [record.header] if record.header >= _LONG else []
    longs = sizes + offsets
    extra = struct.pack(f"<HH{len(longs)}Q", 1, 8 * len(longs), *longs) if longs else b""
    size, offset = _LONG if sizes else record.size, _LONG if offsets else record.header
    version = 45 if longs else 20
    fields = (version, version, 0x800, 0, 0, 0x21, crc, size, size, len(record.name), len(extra), 0, 0, 0, 0, offset)
    return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, *fields) + record.name + extra


# -------------------------------------------------------------------------------------------------------------- pickle


class _Pickler(pickle.Pickler):
    """Pickles an object with stands in the form that ``torch.load`` reads, ``weights_only`` too. ``contents`` are the bytes of tensors that
    are in it as they are, which get keys from ``key`` on."""

    def __init__(self, file: io.BytesIO, key: int) -> None:
        super().__init__(file, protocol=2)  # the protocol of torch.save
        self.contents: list[bytes] = []
        self._first = key
        self._storages: dict[int, tuple[Any, StorageStub]] = {}

    def reducer_override(self, obj: Any) -> Any:
        """A stand is pickled as torch pickles a tensor of its dtype."""
        if not isinstance(obj, StorageStub):
            return NotImplemented
        rebuild, arguments = torch.empty(0, dtype=torch_dtype(obj.dtype)).__reduce_ex__(2)  # type: ignore[no-untyped-call]
        storage, _, _, _, *rest = arguments
        self._storages[id(storage)] = storage, obj
        strides = torch.empty(obj.shape, device="meta").stride()
        rest = [OrderedDict() if isinstance(r, OrderedDict) else r for r in rest]
        return rebuild, (storage, 0, obj.shape, strides, *rest)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, *self._place(obj, obj, 1)
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
            return "storage", kind, *self._place(obj, obj._untyped_storage, obj.dtype.itemsize)
        return None

    def _place(self, storage: Any, untyped: torch.UntypedStorage, itemsize: int) -> tuple[str, str, int]:
        """Key, device and elements of a storage: that of a stand, or one whose bytes are there."""
        if id(storage) in self._storages:
            stand = self._storages[id(storage)][1]
            return str(stand.key), "cpu", stand.nbytes // itemsize
        self.contents.append(torch.empty(0, dtype=torch.uint8).set_(untyped).numpy().tobytes())
        return str(self._first + len(self.contents) - 1), "cpu", len(self.contents[-1]) // itemsize


# The state of a checkpoint as nested Python values, as torch's own tools save it: module and optimizer dictionaries.

Leaf = Callable[[OutputTensor], Any]


def nested_state(chosen: OutputSet, leaf: Leaf) -> Any:
    """The state with ``leaf(tensor)`` in place of tensors. A ``PerRank`` value is a mapping from ranks to their values. Tensors that
    the state does not name are at its top, by name.

    Parameters of an optimizer are named within the module whose key their names begin with, as torch's ``get_optimizer_state_dict`` does.
    """
    none = Grid(cuts=(), files=np.zeros(1, dtype=np.int32))
    entries = [w.entry(none) for w in chosen.tensors.values()]
    contents = ExternalContents(tensors=entries, files=(), state=chosen.state, ranks=chosen.ranks)
    source = chosen.catalog
    view = View(ExternalCatalog(contents, backend=source.backend, format=source.format, locate=lambda wanted: []))
    reached: set[str] = set()

    def filled(value: Any, path: str) -> Any:
        if isinstance(value, StoredTensor):
            reached.add(value.name)
            return leaf(chosen.tensors[value.name])
        if isinstance(value, StoredPerRank):
            ranks = {r: view.per_rank(path, r) for r, values in sorted(chosen.ranks.items()) if path in values}
            return {r: filled(child, path) for r, child in ranks.items()}
        if isinstance(value, Mapping):
            return {k: filled(v, child_path(path, k) if isinstance(k, (str, int)) else path) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(filled(v, child_path(path, i)) for i, v in enumerate(value))
        return value

    state = filled(view.state(), "")
    rest = {name: leaf(wanted) for name, wanted in chosen.tensors.items() if name not in reached}
    if not rest:
        return _within_modules(state) if isinstance(state, dict) else state
    if (state is not None and not isinstance(state, dict)) or rest.keys() & (state or {}):
        hint = "leave it out: --exclude"
        raise UsageError(f"the state has no place for the tensor {min(rest)!r}", where=source.url, hint=hint)
    return _within_modules({**(state or {}), **rest})


def _within_modules(state: dict[Any, Any]) -> dict[Any, Any]:
    modules = [key for key, value in state.items() if isinstance(key, str) and isinstance(value, dict) and not _is_optimizer(value)]
    return {k: _renamed(v, modules) if _is_optimizer(v) else v for k, v in state.items()}


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def _renamed(optimizer: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    groups = optimizer["param_groups"]
    named = [*optimizer["state"], *(p for g in groups if isinstance(g, dict) for p in g.get("params", ()))]
    inside = [m for m in modules if all(isinstance(n, str) and n.startswith(f"{m}.") for n in named)]
    if not inside or not named or not all(isinstance(g, dict) for g in groups):
        return optimizer
    cut = len(inside[0]) + 1
    state = {name[cut:]: value for name, value in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": [{**g, "params": [p[cut:] for p in g.get("params", ())]} for g in groups]}


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """One archive with everything."""
    if layout.name is None:
        raise UsageError("the format torch is one file", where=layout.url, hint="name the file")
    if layout.shard_size is not None:
        raise UsageError("the format torch has one file", hint="leave out --shard-size")
    stands: dict[str, StorageStub] = {}
    members: list[OutputTensor] = []

    def leaf(wanted: OutputTensor) -> StorageStub:
        real = chosen.tensors[wanted.alias] if wanted.alias is not None else wanted
        if real.name not in stands:
            members.append(real.without_padding())
            stands[real.name] = StorageStub(len(stands), real.dtype, members[-1].shape)
        return stands[real.name]

    state = nested_state(chosen, leaf)
    archive = ArchivePlan(state, list(stands.values()))
    items = [FileItem(w.name, Box.whole(w.shape), at, w.dtype.itemsize) for w, at in zip(members, archive.starts, strict=True)]
    file = OutputFile(path=layout.name, size=archive.size, items=tuple(items), ends=archive.ends)
    return OutputPlan(files=(file,), digest="crc32", finish=lambda backend: None)


TARGET = Target(name="torch", computes=True, choose=choose, plan=plan, one_file=lambda url: True)
"""For ``ckpt.converters.target``."""
