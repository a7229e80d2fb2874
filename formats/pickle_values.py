"""What the stand-ins of a pickle mean, for the few names that this reader knows: a table, one function per name. All else stays opaque.

Meaning is given to one object at a time, when it is asked for; the functions only rearrange data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any, NoReturn

import numpy as np

from ckpt.dtypes import DTYPES, dtype
from ckpt.errors import CorruptError, FormatError
from ckpt.plan.layout.partition import Interval, joined, slice_of

from .stand_ins import (
    Array,
    Device,
    GlobalName,
    Keys,
    Made,
    Meanings,
    Persistent,
    Size,
    StoredPart,
    StoredStorage,
    StoredView,
    count_of,
    counts,
    shape_of,
)

# One rank's part of a sharded tensor, out of a pickled ShardedTensor or DTensor: the boxes that it holds.

_MAX_GROUPS = 1 << 16
"""Intervals that one dimension of a part may consist of, and boxes of a part: more than there are tensor-parallel ranks."""


def sharded_tensor(v: Meanings, made: Made) -> StoredPart:
    """A ``ShardedTensor``: its state is (local shards, metadata of all, process group, sharding spec, whether it checks on init)."""
    shards, metadata, *_ = made.state
    described = metadata.attributes()
    boxes = []
    for shard in shards:
        fields = shard.attributes()
        placed = fields["metadata"].attributes()
        view = _view(v, fields["tensor"], counts(placed["shard_sizes"]))
        boxes.append((counts(placed["shard_offsets"]), view))
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape_of(described["size"], 16), boxes=tuple(boxes))


def dtensor(v: Meanings, made: Made) -> StoredPart:
    """A ``DTensor``: its local tensor, and a spec with the mesh, this rank's place on it, and a placement for each mesh dimension.

    (Source of what placements mean: ``_compute_local_shape_and_global_offset`` of torch/distributed/tensor/_utils.py.)
    """
    state = made.attributes()
    spec = state["_spec"].attributes()
    shape, where = shape_of(made.args[2], 16), _coordinate(v, spec["mesh"])
    mesh = _mesh_shape(v, spec["mesh"])
    # Mesh dimensions that cut the same dimension have to do so one after another, as ``_part`` is applied
    for entry in spec.get("shard_order") or ():
        _, dims = entry.args if isinstance(entry, Made) else entry
        if list(counts(dims)) != sorted(counts(dims)):
            v.refuse(f"a DTensor whose dimensions were cut over the mesh dimensions {list(dims)} in that order")
    intervals: list[tuple[Interval, ...]] = [((0, n),) if n else () for n in shape]
    for placement, parts, at in zip(spec["placements"], mesh, where, strict=True):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            v.refuse(f"a DTensor with the placement {kind}")
        fields = placement.attributes()
        (dim,) = counts([fields["dim"]])
        (groups,) = counts([fields["split_factor"]]) if kind == "_StridedShard" else (1,)
        if at >= parts or dim >= len(shape) or not groups:
            v.damaged(f"a DTensor at place {at} of {parts}, cut along dimension {dim} in {groups} groups")
        if groups * max(1, len(intervals[dim])) > _MAX_GROUPS:
            v.refuse(f"a DTensor that is cut in {groups:,} groups")
        intervals[dim] = _part(intervals[dim], groups, parts, at)
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape, boxes=_boxes(v, state["_local_tensor"], intervals))


def _part(intervals: tuple[Interval, ...], groups: int, parts: int, at: int) -> tuple[Interval, ...]:
    """What is left to place ``at`` of ``parts`` of what was held: its part of each of the groups."""
    # Both are as of torch.chunk: the last ones may have less, or nothing. With FSDP over tensor parallelism there is
    # a group for each tensor-parallel rank.
    size = sum(stop - start for start, stop in intervals)
    step = -(-size // groups)
    taken: list[Interval] = []
    for first in range(0, size, step or 1):
        length = min(step, size - first)
        part = -(-length // parts)
        begin = min(at * part, length)
        taken += slice_of(intervals, first + begin, first + min(begin + part, length))
    return joined(taken)


def _boxes(v: Meanings, local: Any, intervals: Sequence[tuple[Interval, ...]]) -> tuple[tuple[tuple[int, ...], StoredView], ...]:
    """The boxes of the whole tensor that the local one is, and the part of it that each is."""
    view = _view(v, local, tuple(sum(stop - start for start, stop in own) for own in intervals))
    if math.prod(len(own) for own in intervals) > _MAX_GROUPS:
        v.refuse("a DTensor with very many boxes")
    if not all(intervals):
        return ((tuple(own[0][0] if own else 0 for own in intervals), view),)
    boxes = []
    for cell in product(*(_placed(own) for own in intervals)):
        first = view.offset + sum(at * stride for (at, _), stride in zip(cell, view.strides, strict=True))
        part = replace(view, offset=first, shape=tuple(stop - start for _, (start, stop) in cell))
        boxes.append((tuple(start for _, (start, _) in cell), part))
    return tuple(boxes)


def _placed(intervals: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Where each interval begins in the local tensor."""
    starts = accumulate((stop - start for start, stop in intervals), initial=0)
    return list(zip(starts, intervals, strict=False))


def _view(v: Meanings, value: Any, shape: tuple[int, ...]) -> StoredView:
    view = v.meaning(value)
    if type(view) is not StoredView or view.shape != shape:
        v.damaged(f"a part of a tensor that should have the shape {list(shape)} and has not")
    return view


def _coordinate(v: Meanings, mesh: Made) -> tuple[int, ...]:
    coordinate = mesh.attributes().get("_coordinate_on_dim")
    if coordinate is None:
        v.refuse("a DTensor that does not say where on the mesh its rank was")
    return counts(coordinate)


def _mesh_shape(v: Meanings, mesh: Made) -> tuple[int, ...]:
    """How many ranks each dimension of a DeviceMesh has: torch 2.9 and later keep a layout, earlier ones a tensor of ranks."""
    fields = mesh.attributes()
    if type(fields.get("_layout")) is Made:
        layout = fields["_layout"].attributes()
        if "axes" in layout:
            sizes = [counts(axis.attributes()["shape"]) for axis in layout["axes"]]
            return tuple(math.prod(s) for s in sizes)
        if "shape" in layout:
            return tuple(n if type(n) is int else math.prod(counts(n)) for n in layout["shape"])
    ranks = v.meaning(fields.get("mesh", fields.get("_mesh")))
    if type(ranks) is not StoredView:
        v.refuse("a DTensor whose mesh has no shape that is known")
    return ranks.shape


class PickleValues:
    """Gives meaning to the stand-ins of one pickle, which is called ``where`` in errors."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.keys = Keys()

    def meaning(self, value: Any) -> Any:
        """The value that a stand-in is for; whatever is none, or has no known meaning, comes back as it is."""
        if type(value) is not Made:
            return value
        known = MEANINGS.get(value.name)
        if known is None:
            if value.name.startswith(_TENSOR_MAKERS):
                self.refuse(f"a tensor made by {value.name}")
            return value
        try:
            return known(self, value)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as err:
            self.damaged(f"{value.name} with arguments that it cannot have ({type(err).__name__}: {err})", err)

    def damaged(self, what: str, cause: BaseException | None = None) -> NoReturn:
        hint = "the file is damaged, or was made to do harm: get it again from where it was written"
        raise CorruptError(f"the file has {what}", where=self.where, hint=hint) from cause

    def refuse(self, what: str, save: str = "save plain dense tensors") -> NoReturn:
        hint = f"load it with the library that wrote it, and {save}; or leave it out: only=, --exclude"
        raise FormatError(f"the file has {what}, which is not known here", where=self.where, hint=hint)

    # ---- tensors

    def storage(self, value: Any) -> StoredStorage:
        """The storage that a persistent id stands for."""
        if type(value) is not Persistent:
            self.damaged("a tensor without a storage")
        kind, of, key, _, count, *_ = value.id
        if kind != "storage" or type(of) is not GlobalName or type(key) is not str:
            self.damaged("a reference that is not a storage")
        if of.name not in _STORAGES:
            self.refuse(f"a storage of the kind {of}")
        name = _STORAGES[of.name]
        return StoredStorage(key=key, dtype=name, nbytes=count_of(count) * (DTYPES[name].itemsize if name else 1))

    def view(self, storage: Any, offset: Any, shape: Any, strides: Any, name: str | None, extra: Any) -> StoredView:
        """A checked view: all of its elements lie in its storage."""
        stored = self.storage(storage)
        name = name or stored.dtype or "uint8"
        sizes = shape_of(shape, DTYPES[name].itemsize)
        lazy = " and ".join(_text(k) for k, v in extra.items() if v) if extra else ""
        view = StoredView(storage=stored, dtype=name, offset=count_of(offset), shape=sizes, strides=counts(strides), lazy=lazy or None)
        if len(view.shape) != len(view.strides):
            self.damaged(f"a tensor of {len(view.shape)} dimensions and {len(view.strides)} strides")
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
        if math.prod(view.shape) and (last + 1) * view.itemsize > stored.nbytes:
            self.damaged(f"a tensor that reaches to byte {(last + 1) * view.itemsize:,} of a storage of {stored.nbytes:,}")
        return view

    def dtype_name(self, value: Any) -> str:
        """The name of a ``torch.dtype``."""
        if type(value) is not GlobalName or value.module != "torch":
            self.damaged("a dtype that is none")
        return dtype(value.name).name

    def is_dtype(self, value: Any) -> bool:
        return type(value) is GlobalName and value.module == "torch" and value.name in DTYPES


def _text(value: Any) -> str:
    """Of text and numbers only: the text of a few tuples that contain each other can be endless."""
    if type(value) not in (str, int):
        raise ValueError(f"a {type(value).__name__} where a text should be")
    return str(value)


# ------------------------------------------------------------------------------------------------------- known names


def _tensor_v2(v: PickleValues, made: Made) -> StoredView:
    storage, offset, shape, strides, *rest = made.args
    return v.view(storage, offset, shape, strides, None, rest[2] if len(rest) > 2 else None)


def _tensor_v3(v: PickleValues, made: Made) -> StoredView:
    storage, offset, shape, strides, _, _, name, *rest = made.args
    return v.view(storage, offset, shape, strides, v.dtype_name(name), rest[0] if rest else None)


def _first(v: PickleValues, made: Made) -> Any:
    return v.meaning(made.args[0])


def _from_type(v: PickleValues, made: Made) -> Any:
    """A tensor with attributes of its own, or of a subclass: what it was made by says the rest."""
    func, kind, args, state = made.args
    inner = Made(func, args, state=state)
    if inner.name == "torch._utils._rebuild_wrapper_subclass":
        name = _class(inner.args[0] if type(inner.args[0]) is GlobalName else kind)
        reader = {"DTensor": dtensor, "ShardedTensor": sharded_tensor}.get(name.rpartition(".")[2])
        if reader is None:
            v.refuse(f"a tensor of the class {name}", "save it with ckpt.save, which stores what such a tensor is made of")
        return reader(v, inner)
    if _class(kind) not in _PLAIN_TENSORS:
        v.refuse(f"a tensor of the class {_class(kind)}")
    return v.meaning(inner)


def _class(kind: Any) -> str:
    return str(kind) if type(kind) is GlobalName else f"a {type(kind).__name__}"


def _mapping(v: PickleValues, made: Made) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for group in (*(arg for arg in made.args if type(arg) in (list, tuple, dict)), made.pairs or []):
        for key, value in group.items() if type(group) is dict else group:
            mapping[_key(v, key)] = value
    return mapping


def _key(v: PickleValues, value: Any) -> Any:
    if not v.keys.allow(value):
        raise ValueError(f"a {type(value).__name__} as a key")
    return value


def _set(v: PickleValues, made: Made) -> Any:
    return {_key(v, key) for key in made.args[0]} if made.args else set()


def _frozenset(v: PickleValues, made: Made) -> Any:
    return frozenset(_key(v, key) for key in made.args[0]) if made.args else frozenset()


def _complex(v: PickleValues, made: Made) -> complex:
    real, imag = made.args
    return complex(real, imag)


def _encode(v: PickleValues, made: Made) -> bytes:
    """How protocol 2 writes bytes."""
    text, coding = made.args
    if type(text) is not str or type(coding) is not str or coding != "latin1":
        raise ValueError("a coding that is not latin1")
    return text.encode("latin1")


def _bytearray(v: PickleValues, made: Made) -> bytes:
    data = v.meaning(made.args[0]) if made.args else b""
    if type(data) is not bytes:
        raise ValueError("no bytes")
    return data


def _array(v: PickleValues, made: Made) -> Any:
    """``numpy._reconstruct``, whose state has all: version, shape, dtype, whether column-major, bytes."""
    _, shape, kind, fortran, data = made.state
    dtype_of, raw = _numpy_dtype(v, kind), v.meaning(data)
    sizes = counts(shape)
    if dtype_of is None or type(raw) is not bytes:
        return made
    return _array_bytes(dtype_of, sizes, raw, column_major=bool(fortran))


def _array_bytes(kind: np.dtype[Any], shape: tuple[int, ...], raw: bytes, *, column_major: bool) -> Array:
    if column_major:
        raw = np.frombuffer(raw, kind).reshape(shape, order="F").tobytes("C")
    return _little(kind, shape, raw, math.prod(shape))


def _array_of_buffer(v: PickleValues, made: Made) -> Any:
    """How protocol 5 writes arrays: bytes, dtype, shape, and whether row-major (``C``) or not (``F``)."""
    data, kind, shape, order = made.args
    dtype_of, raw = _numpy_dtype(v, kind), v.meaning(data)
    if dtype_of is None or type(raw) not in (bytes, bytearray):
        return made
    return _array_bytes(dtype_of, counts(shape), bytes(raw), column_major=order == "F")


def _numpy_scalar(v: PickleValues, made: Made) -> Any:
    dtype_of, raw = _numpy_dtype(v, made.args[0]), v.meaning(made.args[1])
    return made if dtype_of is None or type(raw) is not bytes else _little(dtype_of, None, raw, 1)


def _little(kind: np.dtype[Any], shape: tuple[int, ...] | None, raw: bytes, count: int) -> Array:
    if len(raw) != count * kind.itemsize:
        raise ValueError(f"{len(raw)} bytes for {count} elements of {kind}")
    return Array(kind.name, shape, np.frombuffer(raw, kind).astype(kind.newbyteorder("<"), copy=False).tobytes())


def _numpy_dtype(v: PickleValues, made: Any) -> np.dtype[Any] | None:
    """A dtype of numbers; None for structures, objects and text."""
    if type(made) is not Made or made.name != "numpy.dtype" or type(made.args[0]) is not str or made.args[0] not in _NUMPY_CODES:
        return None
    order = made.state[1] if type(made.state) is tuple else "|"
    kind: np.dtype[Any] = np.dtype(made.args[0]).newbyteorder(">" if order == ">" else "<")
    return kind


_NUMPY_CODES = frozenset(f"{kind}{size}" for kind, sizes in {"b": "1", "i": "1248", "u": "1248", "f": "248"}.items() for size in sizes) | {
    "c8",
    "c16",
}
_STORAGES: Mapping[str, str | None] = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": None,
}
_PLAIN_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
"""Classes that mean the same as their elements. Others may keep a scale, for example, beside them."""
_TENSOR_MAKERS = ("torch._utils._rebuild", "torch._tensor.", "torch.nn.parameter.", "torch.storage._load_from_bytes")
"""Beginnings of names whose objects are tensors: unknown ones are errors, since leaving a tensor out would lose it."""

MEANINGS: Mapping[str, Callable[[PickleValues, Made], Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": lambda v, made: Size(counts(made.args[0])),
    "torch.device": lambda v, made: Device(":".join(map(_text, made.args))),
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "collections.Counter": _mapping,
    "builtins.dict": _mapping,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.complex": _complex,
    "builtins.bytes": _bytearray,  # empty ones, in protocol 2
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encode,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array_of_buffer,
    "numpy._core.numeric._frombuffer": _array_of_buffer,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
"""``module.name`` → what a call of it gives. What is not here is opaque."""
