"""``.metadata`` of ``torch.distributed.checkpoint``: a pickle that says which boxes of which tensors lie where.

(Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` of PyTorch 2.0 to 2.13. Others derive classes of their own from
``Metadata``: ``MCoreMetadata`` of Megatron-Core 0.15 adds ``mcore_data``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt import settings
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.native.paths import path_problem
from ckpt.formats.pickles.loader import load_pickle
from ckpt.formats.pickles.stand_ins import Made, counts, shape_of
from ckpt.formats.pickles.values import PickleValues

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_PARTS = ("state_dict_metadata", "storage_data")
_TENSOR_PARTS = frozenset({"properties", "size", "chunks"})


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
                self._check_path(path, key["fqn"])
            offset, length = counts((place["offset"], place["length"]))
            at = None if key.get("offset") is None else self._counts(key["offset"])  # what is None was not pickled
            items[key["fqn"], at] = DcpItem(path, offset, length)
        return items

    def _check_path(self, path: Any, name: str) -> None:
        problem = path_problem(path) if type(path) is str else "no path"
        if problem is not None:
            self.damaged(f"{name} lies in a file that cannot be: {problem}")
        self._known_paths.add(path)

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
        kind = self._dtype(fields["properties"])
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

    def _dtype(self, properties: Made) -> str:
        """The dtype is the first member of the state; a dict is what older versions wrote."""
        state = properties.state
        return self.values.dtype_name(state["dtype"] if isinstance(state, dict) else state[0])

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
