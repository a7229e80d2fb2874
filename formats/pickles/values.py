"""What the stand-ins of a pickle mean, for the few names that this reader knows: a table, one function per name. All else stays opaque.

Meaning is given to one object at a time, when it is asked for; the functions only rearrange data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from ckpt.dtypes import DTYPES, dtype
from ckpt.errors import CorruptError, FormatError

from .sharded import dtensor, sharded_tensor
from .stand_ins import Array, Device, GlobalName, Keys, Made, Persistent, Size, StoredStorage, StoredView, count_of, counts, shape_of


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

    def refuse(self, what: str) -> NoReturn:
        hint = "load it with the library that wrote it, and save plain dense tensors"
        raise FormatError(f"the file has {what}, which is not known here", where=self.where, hint=hint)

    # ---- tensors

    def storage(self, value: Any) -> StoredStorage:
        """The storage that a persistent id stands for."""
        if type(value) is not Persistent:
            self.damaged("a tensor without a storage")
        kind, of, key, _, count, *_ = value.id
        if kind != "storage" or type(of) is not GlobalName or type(key) is not str:
            self.damaged("a reference that is no storage")
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
        return _of_subclass(v, kind, inner)
    if _class(kind) not in _PLAIN_TENSORS:
        v.refuse(f"a tensor of the class {_class(kind)}")
    return v.meaning(inner)


def _class(kind: Any) -> str:
    return str(kind) if type(kind) is GlobalName else f"a {type(kind).__name__}"


def _of_subclass(v: PickleValues, kind: Any, made: Made) -> Any:
    name = _class(made.args[0] if type(made.args[0]) is GlobalName else kind)
    reader = {"DTensor": dtensor, "ShardedTensor": sharded_tensor}.get(name.rpartition(".")[2])
    if reader is None:
        v.refuse(f"a tensor of the class {name}")
    return reader(v, made)


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
