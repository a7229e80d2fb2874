"""``.metadata`` of ``torch.distributed.checkpoint``: a pickle that says which boxes of which tensors lie where.

(Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` of PyTorch 2.0 to 2.13. Others derive classes of their own from
``Metadata``: ``MCoreMetadata`` of Megatron-Core 0.15 adds ``mcore_data``.)
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt import dtypes, settings
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, FormatError
from ckpt.io_backends.checks import path_problem

from .external import Range, read_ranges
from .pickle_loader import load_pickle
from .pickle_values import PickleValues
from .stand_ins import Made, StoredView, counts, shape_of
from .torch_archive import MAGIC, Archive, FileRange
from .torchzip import rows_of

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


METADATA = ".metadata"
DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_MODULE = "torch.distributed.checkpoint.metadata"
_PARTS = ("state_dict_metadata", "storage_data")
_TENSOR_PARTS = frozenset({"properties", "size", "chunks"})


def rank_of(path: str) -> int | None:
    """The rank that wrote a data file, as its name says."""
    match = DATA_FILE.fullmatch(path)
    return int(match[1]) if match and len(match[1]) < 9 else None


class DcpItem(NamedTuple):
    """Where one item lies: ``offset`` and ``length`` in bytes of a file."""

    path: str
    offset: int
    length: int


class DcpBox(NamedTuple):
    """One stored box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    item: DcpItem


class DcpTensor(NamedTuple):
    """A tensor as the metadata describe it: its dtype by name, its global shape, and its boxes; empty ones are left out."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[DcpBox, ...]


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """All that ``.metadata`` says. ``paths`` gives, by name, the keys that led there in the state that was saved, if it was kept;
    ``attributes`` is everything as it was pickled, with stand-ins."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpItem]
    paths: Mapping[str, tuple[str | int, ...]]
    attributes: Mapping[str, Any]


def read_metadata(backend: Backend) -> Metadata:
    """Read and check ``.metadata``."""
    where = f"{backend.url.rstrip('/')}/{METADATA}"
    if backend.size(METADATA) > settings.FOREIGN_PICKLE:
        raise FormatError(f"metadata of more than {settings.FOREIGN_PICKLE:,} bytes", where=where, hint="save tensors on fewer ranks")
    return _MetadataReader(where).read(backend.read(METADATA))


class _MetadataReader:
    def __init__(self, where: str) -> None:
        self.where = where
        self.values = PickleValues(where)
        self._known_paths: set[str] = set()
        self._counted: dict[int, tuple[int, ...]] = {}

    def read(self, data: bytes) -> Metadata:
        root = load_pickle(data, self.where)  # alive to the end, so that an object is known by its id
        fields = self._attributes(root)
        try:
            items = self._items(fields["storage_data"])
            tensors, values = {}, {}
            for name, described in fields["state_dict_metadata"].items():
                if not isinstance(name, str) or not 0 < len(name) <= 4096 or "\0" in name:
                    self.damaged(f"a name of the kind {type(name).__name__}, or one that is too long")
                if described.name == f"{_MODULE}.BytesStorageMetadata":
                    values[name] = self._item(items, name, None)
                elif described.name == f"{_MODULE}.TensorStorageMetadata" or described.attributes().keys() >= _TENSOR_PARTS:
                    tensors[name] = self._tensor(name, described.attributes(), items)
                else:
                    hint = "load it with the program that wrote it, and save it with torch.distributed.checkpoint"
                    raise FormatError(f"{name} is described by a {described.name}, which is not known here", where=self.where, hint=hint)
            paths = self._paths(fields.get("planner_data"))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
            self.damaged(f"{type(err).__name__}: {err}", err)
        return Metadata(tensors=tensors, values=values, paths=paths, attributes=fields)

    def _attributes(self, root: Any) -> Mapping[str, Any]:
        """What the pickled object has."""
        # It may be of a class derived from ``Metadata``, which adds attributes: its parts tell.
        if type(root) is not Made:
            self.damaged(f"it is a {type(root).__name__}, no Metadata")
        fields = root.attributes()
        missing = [name for name in _PARTS if not isinstance(fields.get(name), dict)]
        if missing and root.name == f"{_MODULE}.Metadata":
            self.damaged(f"they have no {' and no '.join(missing)}")
        if missing:
            what = f"the metadata are a {root.name or 'nameless object'} without {' and '.join(missing)}"
            hint = "no known version of torch.distributed.checkpoint writes such metadata: load it with the program that wrote it"
            raise FormatError(what, where=self.where, hint=hint)
        return fields

    def _items(self, stored: Any) -> dict[tuple[str, tuple[int, ...] | None], DcpItem]:
        items = {}
        for index, info in stored.items():
            key, place = _fields(index), _fields(info)
            if type(key["fqn"]) is not str:
                self.damaged(f"a {type(key['fqn']).__name__} as a name")
            transforms = place.get("transform_descriptors")
            if transforms:
                hint = "load it with torch.distributed.checkpoint, and save it without `_extensions`"
                through = ", ".join(t if type(t) is str else type(t).__name__ for t in transforms)
                raise FormatError(f"{key['fqn']} is stored through {through}", where=self.where, hint=hint)
            path = place["relative_path"]
            if path not in self._known_paths:
                problem = path_problem(path) if type(path) is str else "no path"
                if problem is not None:
                    self.damaged(f"{key['fqn']} lies in a file that cannot be: {problem}")
                self._known_paths.add(path)
            offset, length = counts((place["offset"], place["length"]))
            at = None if key.get("offset") is None else self._counts(key["offset"])  # what is None was not pickled
            items[key["fqn"], at] = DcpItem(path, offset, length)
        return items

    def _counts(self, value: Any) -> tuple[int, ...]:
        """``counts``; boxes and items have the same offsets."""
        cached = self._counted.get(id(value))
        if cached is None:
            cached = self._counted[id(value)] = counts(value)
        return cached

    def _item(self, items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem], name: str, offset: tuple[int, ...] | None) -> DcpItem:
        item = items.get((name, offset))
        if item is None:
            self.damaged(f"{name}{'' if offset is None else f' at {list(offset)}'} lies nowhere")
        return item

    def _tensor(self, name: str, fields: Mapping[str, Any], items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]) -> DcpTensor:
        # The dtype is the first member of the state; a dict is what older versions wrote
        state = fields["properties"].state
        kind = self.values.dtype_name(state["dtype"] if isinstance(state, dict) else state[0])
        shape = shape_of(fields["size"], DTYPES[kind].itemsize)
        boxes = []
        for chunk in fields["chunks"]:
            place = _fields(chunk)
            offset, sizes = self._counts(place["offsets"]), self._counts(place["sizes"])
            if len(offset) != len(shape) or any(o + n > size for o, n, size in zip(offset, sizes, shape, strict=True)):
                self.damaged(f"a box {list(sizes)} at {list(offset)} does not lie in {name} {list(shape)}")
            if 0 not in sizes:
                boxes.append(DcpBox(offset, sizes, self._item(items, name, offset)))
        return DcpTensor(kind, shape, tuple(boxes))

    def _paths(self, planned: Any) -> dict[str, tuple[str | int, ...]]:
        """``planner_data`` of the default planner; other planners keep other things there."""
        if not isinstance(planned, dict):
            return {}
        rows = ((name, tuple(keys)) for name, keys in planned.items() if isinstance(name, str) and isinstance(keys, (tuple, list)))
        return {name: keys for name, keys in rows if keys and all(type(k) in (str, int) for k in keys)}

    def damaged(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise CorruptError(f"the metadata are damaged: {what}", where=self.where, hint="copy the checkpoint again") from cause


def _fields(made: Made) -> Mapping[str, Any]:
    """The attributes of an object, by names that are asked for one by one."""
    return made.state if type(made.state) is dict else made.attributes()


# The items of a DCP checkpoint: each is a whole ``torch.save`` archive inside a data file.
#
# Where its bytes are is said at the end of an item, what they are at its beginning. The end of one is beside the beginning of the next, so
# items that follow one another take one small read each.

HEAD = 1536
"""Bytes at the beginning of an item: in them are the pickle of a tensor and the header of its bytes."""
TAIL = 1024
"""Bytes at its end: the directory of its seven records."""
WHOLE = 16 << 10
"""Items of values that are shorter are read whole."""
AT_ONCE = 2048
"""Items that are read before the next ones."""

ItemEnds = tuple[tuple[int, bytes], tuple[int, bytes]]
"""Where in an item its first bytes begin, and its last ones, and these bytes; twice the same of a short item."""


def open_items(backend: Backend, items: Sequence[DcpItem], sizes: Mapping[str, int]) -> Iterator[Archive]:
    """The archives of items, in order; many are read at once, and those of up to ``WHOLE`` bytes completely."""
    for first in range(0, len(items), AT_ONCE):
        batch = items[first : first + AT_ONCE]
        ranges = [ranges_of(item, sizes, WHOLE, backend.url) for item in batch]
        data = iter(read_ranges(backend, [r for of_item in ranges for r in of_item]))
        for item, of_item in zip(batch, ranges, strict=True):
            parts = [(r.offset - item.offset, next(data)) for r in of_item]
            yield archive_of(backend, item, (parts[0], parts[-1]))


def archive_of(backend: Backend, item: DcpItem, cached: ItemEnds) -> Archive:
    """The archive that an item is, some of whose bytes were read. Errors as for :func:`open_items`."""
    window = FileRange(backend, item.path, item.offset, item.length, tail=TAIL)
    window.preload(cached)
    if not cached[0][1].startswith(MAGIC):
        raise FormatError(
            "an item is not an archive of `torch.save`", where=window.where, hint="items in other serialization formats are not read"
        )
    return Archive(backend, window)


def ranges_of(item: DcpItem, sizes: Mapping[str, int], least: int, url: str) -> list[Range]:
    """What to read of an item before anything is known of it: its beginning and its end, or all of it if it has up to ``least`` bytes."""
    if item.offset + item.length > sizes[item.path]:
        raise CorruptError(
            f"an item should end at byte {item.offset + item.length:,} of a file of {sizes[item.path]:,} bytes",
            where=f"{url.rstrip('/')}/{item.path}",
            hint="the file was cut off, or is of another save: copy the checkpoint again",
        )
    if item.length <= max(least, HEAD + TAIL):
        return [Range(item.path, item.offset, item.length)]
    return [Range(item.path, item.offset, HEAD), Range(item.path, item.offset + item.length - TAIL, TAIL)]


def box_place(archive: Archive, name: str, dtype: str, box: DcpBox) -> tuple[int, int | None]:
    """Where in its file the bytes of a stored box begin, and their CRC-32 if the item says it."""
    archive.values.where = f"tensor {name}, {archive.where}"
    value = archive.values.meaning(archive.load())
    if type(value) is not StoredView or (value.dtype, value.shape) != (dtype, box.shape):
        has = f"{value.dtype} {list(value.shape)}" if type(value) is StoredView else "no tensor"
        raise CorruptError(
            f"the metadata have a box {dtype} {list(box.shape)} of {name} here, and the file has {has}",
            where=archive.where,
            hint="metadata and data files are of different saves: copy the checkpoint again",
        )
    rows = rows_of(value)
    if rows is None or len(rows) != 1 or value.lazy:
        hint = "load it with torch.distributed.checkpoint, and save contiguous tensors"
        what = value.lazy or f"its strides are {list(value.strides)}"
        raise FormatError(f"tensor {name} of shape {list(box.shape)} is not stored row by row: {what}", where=archive.where, hint=hint)
    offset = rows[0].start * value.itemsize
    crc = archive.crc32(value.storage, offset, math.prod(box.shape) * value.itemsize)
    return archive.starts([value.storage])[0] + offset, crc


# Where the bytes of stored boxes begin in their items, and their checksums. Items with boxes of one shape and dtype differ in the elements
# and in checksums alone: what was found out about one of them holds for all that are, byte for byte, the same elsewhere.
#
# Invariant: an item counts as like another one only if all that was looked at there, its beginning up to the elements and its directory, is
# the same here but for the checksums, which are not looked at.

# DCP stores each box as an archive of ``torch.save`` of its own: pickle and directory around the elements. Most of the archives of a
# large checkpoint differ in nothing but the elements and their checksums:
#
#     item        |head: headers, pickle|elements .....|tail: directory|
#     template    |same bytes           |              |same bytes     |     checksums are cut out of both before comparing
#
# So the first item of a kind is parsed in full. Of others of the same length, dtype and shape, head and tail are read, and if they equal
# a template byte for byte, the elements begin where they do there. If not, the item is parsed in full too.


_SIZES, _SUM = struct.Struct("<3H"), struct.Struct("<I")
_ENTRY, _ENTRY_SIZES, _ENTRY_SUM = 46, 28, 16
"""Of an entry of a zip directory: its length without name and extras, where their lengths are, and where the checksum is."""
_LOCAL_SUM = 14
_MOST = 8
"""Kinds of items of one length that are kept in mind."""

Described = tuple[str, str, "DcpBox"]
"""Name and dtype of a tensor, and one of its boxes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ItemTemplate:
    """Items of one kind: ``head`` are the bytes before the elements, ``tail`` those from the directory on, without checksums; ``head_sums``
    and ``tail_sums`` say where these are, ``crc`` where in the tail that of the elements is, if they are a whole record. Other positions
    count from the start of the item."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    directory: int
    head_sums: tuple[int, ...]
    tail_sums: tuple[int, ...]
    head: bytes
    tail: bytes
    crc: int | None

    def crc_in(self, cached: ItemEnds) -> int | None:
        """The checksum of the elements of an item of this kind, if it says one."""
        at, data = cached[1]
        return None if self.crc is None else _SUM.unpack_from(data, self.directory - at + self.crc)[0] or None

    def fits(self, cached: ItemEnds, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether what was read of an item is of this kind, and the elements are as described."""
        if (self.dtype, self.shape) != (dtype, shape):
            return False
        first, last = cached
        head, tail = first[1][: self.start], last[1][self.directory - last[0] :]
        return _without(head, self.head_sums) == self.head and _without(tail, self.tail_sums) == self.tail


class Places:
    """Looks into items, each once, and remembers what kinds of them there are. Thread-safe."""

    def __init__(self, backend: Backend, sizes: Mapping[str, int]) -> None:
        self._backend = backend
        self._sizes = sizes
        self._kinds: dict[int, list[_ItemTemplate]] = {}
        self._places: dict[tuple[str, int], tuple[int, int | None]] = {}
        self._lock = threading.Lock()

    def of(self, item: DcpItem) -> tuple[int, int | None]:
        """Where in its file the bytes of a box begin, and their CRC-32 if the item says it. It was looked into before."""
        return self._places[item[:2]]

    def look(self, wanted: Iterable[Described]) -> None:
        """Look into the items of these boxes that were not looked into before, many at once."""
        with self._lock:
            new = [*{d[2].item[:2]: d for d in wanted if d[2].item[:2] not in self._places}.values()]
            for first in range(0, len(new), AT_ONCE):
                batch = new[first : first + AT_ONCE]
                ranges = [ranges_of(box.item, self._sizes, 0, self._backend.url) for _, _, box in batch]
                data = iter(read_ranges(self._backend, [r for of_item in ranges for r in of_item]))
                for described, of_item in zip(batch, ranges, strict=True):
                    item = described[2].item
                    parts = [(r.offset - item.offset, next(data)) for r in of_item]
                    place, crc = self._place(described, (parts[0], parts[-1]))
                    self._places[item[:2]] = (item.offset + place, crc)

    def _place(self, described: Described, cached: ItemEnds) -> tuple[int, int | None]:
        name, dtype, box = described
        kinds = self._kinds.setdefault(box.item.length, [])
        for kind in kinds:
            if kind.fits(cached, dtype, box.shape):
                return kind.start, kind.crc_in(cached)
        archive = archive_of(self._backend, box.item, cached)
        place, crc = box_place(archive, name, dtype, box)
        start = place - box.item.offset
        new_kind = _kind(archive, cached, box.item, dtype, box.shape, start)
        if new_kind is not None and len(kinds) < _MOST:
            kinds.append(new_kind)
        return start, crc


def _kind(archive: Archive, cached: ItemEnds, item: DcpItem, dtype: str, shape: tuple[int, ...], start: int) -> _ItemTemplate | None:
    """What items like this one have in common; None if its beginning or its directory were not read whole."""
    first, last = cached
    records = archive.records
    directory = max(r.limit for r in records)
    if start > len(first[1]) or directory < last[0]:
        return None
    head, tail = first[1][:start], last[1][directory - last[0] :]
    head_sums = tuple(r.header + _LOCAL_SUM for r in records if r.header < start)
    # Where the checksums of the entries are, by the names of their records
    count = len(records)
    sums, at = {}, 0
    for _ in range(count):
        sizes = _SIZES.unpack_from(tail, at + _ENTRY_SIZES)
        sums[tail[at + _ENTRY : at + _ENTRY + sizes[0]]] = at + _ENTRY_SUM
        at += _ENTRY + sum(sizes)
    candidates = [r for r in records if r.header <= start < r.limit and r.size == math.prod(shape) * dtypes.dtype(dtype).itemsize]
    return _ItemTemplate(
        dtype=dtype,
        shape=shape,
        start=start,
        directory=directory,
        head_sums=head_sums,
        tail_sums=tuple(sums.values()),
        head=_without(head, head_sums),
        tail=_without(tail, tuple(sums.values())),
        crc=sums[candidates[0].name.encode()] if candidates else None,
    )


def _without(data: bytes, sums: Sequence[int]) -> bytes:
    """The bytes without checksums of 4 bytes."""
    parts = [data[a + 4 : b] for a, b in zip((-4, *sums), (*sums, len(data)), strict=True)]
    return b"".join(parts)
