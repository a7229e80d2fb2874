"""Nested Python state ⇄ JSON nodes (docs/format.md §8). Invariant: ``decode(encode(x))`` is ``x``, types included, or ``encode`` raises.

Two exceptions: ``OrderedDict``, ``defaultdict`` and ``Counter`` come back as ``dict``, and arrays come back in the byte order of the
machine. No pickle: a node is of a known kind, or an error.
"""

from __future__ import annotations

import base64
import enum
import io
import json
import math
import os
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias

from ckpt.dtypes import DTYPES
from ckpt.errors import FormatError, StateError
from ckpt.needs import require_torch

# What a node is, and how to look at one without reading its values. A *path* is the text that ``join`` makes of the keys on the way to a
# value; it is also how tensors get their names.

Node: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list of nodes, dict of str to node."""

REFERENCES = frozenset({"$tensor", "$inline", "$tensors", "$param_groups", "$per_rank"})
"""Kinds of node whose values are kept elsewhere or name tensors: ``leaf`` makes them, ``special`` reads them."""

OF_TORCH = frozenset({"$size", "$dtype", "$device"})
"""Kinds of node whose values are torch's."""

SCALARS = frozenset((int, float, str, bool, type(None)))
"""Types of nodes that stand for themselves and have nothing below them. A state may have millions, so walks look for these first."""

MAX_DEPTH = 100
"""Containers may be nested this deep."""

NUMPY = frozenset(d.numpy for d in DTYPES.values() if d.numpy is not None)

TORCH_ONLY = frozenset(
    {"quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
"""Names that a ``$dtype`` may have beside those of ``DTYPES``: dtypes of torch that no stored tensor has."""


class Missing(enum.Enum):
    """The type of ``MISSING``."""

    MISSING = "missing"


MISSING = Missing.MISSING
"""What ``find`` returns when nothing is there; None is a node."""


def text(node: Node, *, sort_keys: bool = True) -> str:
    """The canonical JSON text of a node: compact, keys sorted. Equal texts mean equal nodes, whatever the order of their keys. Without
    ``sort_keys`` they keep that of the state, which is what is stored: an ``OrderedDict`` is more than its items."""
    return json.dumps(node, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)


def shorten(node: Node, limit: int = 80) -> str:
    """The canonical text cut to at most ``limit`` characters, for messages."""
    full = text(node)
    return full if len(full) <= limit else full[: limit - 1] + "…"


def child_path(path: str, key: Node) -> str:
    end = key if isinstance(key, str) else text(key)
    return f"{path}.{end}" if path else end


def at(path: str) -> str:
    return f"the value at {path!r}" if path else "the state"


def mapping_node(pairs: Sequence[tuple[Node, Node]]) -> Node:
    for key, _ in pairs:
        if not isinstance(key, str) or key[:1] == "$":
            return {"$map": [list(pair) for pair in pairs]}
    return dict(pairs)


def tag_of(node: Node) -> str | None:
    """The kind of a typed node, with its ``$``."""
    if not isinstance(node, dict):
        return None
    key: str
    for key in node:  # a mapping may have many thousand
        if key[:1] == "$":
            return key
    return None


def pairs_of(node: Node) -> list[tuple[Node, Node]] | None:
    """Key and value nodes of a mapping, plain or not; None for other nodes."""
    if not isinstance(node, dict):
        return None
    tag = tag_of(node)
    if tag is None:
        return list(node.items())
    return [(k, v) for k, v in node[tag]] if tag == "$map" else None


def items_of(node: Node) -> list[Node] | None:
    """The elements of a list or tuple node; None for other nodes."""
    if isinstance(node, list):
        return node
    return node["$tuple"] if tag_of(node) == "$tuple" else None


def refers(node: Node, kinds: Set[str] = REFERENCES) -> bool:
    """Whether a node of one of ``kinds`` lies in it."""
    if type(node) in SCALARS:
        return False
    if tag_of(node) in kinds:
        return True
    below = items_of(node)
    if below is None:
        below = [v for _, v in pairs_of(node) or ()]
    return any(refers(n, kinds) for n in below if type(n) not in SCALARS)


# Nested Python state → JSON nodes.

Leaf: TypeAlias = Callable[[object, str], Node]
"""Asked for the node of a value that is not plain, at a path; None means that it does not know the value."""

_PLAIN_INT = 1 << 63
"""Ints nearer to 0 than this need no look at their size."""
_MAX_INT_BITS = 14284  # the largest that has at most 4300 decimal digits, which is what Python's JSON reader accepts


def join(path: str, key: object) -> str:
    """The path of a child: ``a.b`` for a string key, ``a.5`` for an index or integer key, the JSON text of the key's node for others."""
    if type(key) is str and key.isascii():
        return f"{path}.{key}" if path else key
    return child_path(path, _encode_key(key, path))


def encode(value: object, path: str, leaf: Leaf, quick: Mapping[type, Leaf] | None = None) -> Node:
    """Turn a nested state into a node.

    Plain values are None, bool, int, float, complex, str, bytes, dict (also ``OrderedDict``, ``defaultdict`` and ``Counter``), list, tuple,
    set, frozenset, ``io.BytesIO``, numpy scalars and arrays of the dtypes of docs/format.md §7, ``torch.dtype``, ``torch.device`` and
    ``torch.Size``. Subclasses of these are not plain. ``leaf(value, path)`` is asked for everything else, except in keys and in sets, where
    only plain values may be. Values of the classes in ``quick`` are given to what they have there, before anything else is tried.
    """
    return _Encoder(leaf, quick=quick).node(value, path)


def _unknown(value: object, path: str) -> None:
    return None


def _encode_key(key: object, path: str) -> Node:
    return _Encoder(_unknown).node(key, child_path(path, "(key)"))


class _Encoder:
    def __init__(self, leaf: Leaf, around: set[int] | None = None, quick: Mapping[type, Leaf] | None = None) -> None:
        self.leaf = leaf
        self.quick = {**_SCALARS, **quick} if quick else _SCALARS
        self.open: set[int] = set() if around is None else around  # ids of the containers around the value in hand

    def node(self, value: object, path: str) -> Node:
        if value is None or type(value) is bool:
            return value
        quick = self.quick.get(type(value))
        if quick is not None:
            return quick(value, path)
        if type(value) in _CONTAINERS:
            return self.container(value, path)
        node = _library_node(value)
        if node is None and type(value) is io.BytesIO and self.leaf is not _unknown:  # which is asked in keys and in sets
            node = {"$bytesio": _base64(value.getvalue())}
        if node is None:
            node = self.leaf(value, path)
        if node is None:
            raise StateError(f"{at(path)} cannot be stored: {_type_name(value)}", hint=_way_out(value))
        return node

    def container(self, value: Any, path: str) -> Node:
        if id(value) in self.open:
            raise StateError(f"{at(path)} contains itself: {_type_name(value)}", hint="remove the reference that leads back")
        if len(self.open) >= MAX_DEPTH:
            raise StateError(f"{at(path)} lies more than {MAX_DEPTH} containers deep", hint="flatten the state")
        self.open.add(id(value))
        try:
            if isinstance(value, dict):
                return self.mapping(value, path)
            if isinstance(value, (set, frozenset)):
                return self.unordered(value, path)
            start, quick = f"{path}." if path else "", self.quick
            items: list[Node] = []
            for i, child in enumerate(value):  # a list may have many thousand
                known = quick.get(type(child))
                where = f"{start}{i}"
                items.append(self.node(child, where) if known is None else known(child, where))
            return items if type(value) is list else {"$tuple": items}
        finally:
            self.open.discard(id(value))

    def mapping(self, value: dict[object, object], path: str) -> Node:
        pairs: list[tuple[Node, Node]] = []
        start, quick = f"{path}." if path else "", self.quick
        key_node: Node
        for key, child in value.items():
            if type(key) is str and key.isascii():  # a mapping may have many thousand
                key_node, where = key, start + key
            elif type(key) is int and -_PLAIN_INT < key < _PLAIN_INT:
                key_node, where = key, f"{start}{key}"
            else:
                key_node = _encode_key(key, path)
                where = child_path(path, key_node)
            known = quick.get(type(child))
            pairs.append((key_node, self.node(child, where) if known is None else known(child, where)))
        node = mapping_node(pairs)
        if "$map" in node:
            _refuse_twins([k for k, _ in pairs if type(k) not in (str, int)], path)
        return node

    def unordered(self, value: set[object] | frozenset[object], path: str) -> Node:
        plain = _Encoder(_unknown, self.open)
        elements = sorted((plain.node(v, child_path(path, "(element)")) for v in value), key=text)
        _refuse_twins(elements, path)
        return {f"${type(value).__name__}": elements}


def _refuse_twins(nodes: Sequence[Node], path: str) -> None:
    """NaN differs from itself, so a dict or set can have two; read back they would be one."""
    if len(set(map(text, nodes))) != len(nodes):
        raise StateError(f"{at(path)} has NaN more than once as key or element", hint="use one NaN")


def _int_node(value: int, path: str) -> Node:
    if value.bit_length() > _MAX_INT_BITS:
        raise StateError(f"{at(path)} is an integer of more than 4300 digits", hint="store it as bytes: value.to_bytes(...)")
    return value


def _float_node(value: float, path: str) -> Node:
    return value if math.isfinite(value) else {"$float": str(value)}


def _complex_node(value: complex, path: str) -> Node:
    return {"$complex": [_float_node(value.real, path), _float_node(value.imag, path)]}


def _str_node(value: str, path: str) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise StateError(f"{at(path)} is not Unicode: {value[:40]!r}", hint="store it as bytes: os.fsencode(value) for file names") from e
    return value


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


_SCALARS: dict[type, Callable[[Any, str], Node]] = {
    int: _int_node,
    float: _float_node,
    complex: _complex_node,
    str: _str_node,
    bytes: lambda value, _: {"$bytes": _base64(value)},
}
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset})


def _library_node(value: Any) -> Node:
    """The node of a value of numpy, or of torch, whoever has imported it; None if it is none."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if np is not None and (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.name in NUMPY:
        raw = _base64(np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes())
        name = value.dtype.name
        return {"$array": [name, list(value.shape), raw]} if type(value) is np.ndarray else {"$scalar": [name, raw]}
    if torch is None:
        return None
    if type(value) is torch.Size:
        return {"$size": [int(n) for n in value]}
    if type(value) is torch.dtype:
        name = str(value).removeprefix("torch.")
        return {"$dtype": name} if name in DTYPES or name in TORCH_ONLY else None
    return {"$device": str(value)} if type(value) is torch.device else None


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _way_out(value: Any) -> str:
    np = sys.modules.get("numpy")
    if isinstance(value, enum.Enum):
        return "store its .value or .name"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store value._asdict(), or tuple(value)"
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return f"store numpy values of the dtypes {', '.join(sorted(NUMPY))} (np.asarray for subclasses of ndarray), or value.tolist()"
    if isinstance(value, Mapping):
        return "store dict(value)"
    for plain in (int, float, complex, str, bytes, list, tuple, set, frozenset):
        if isinstance(value, plain):
            return f"only {plain.__name__} itself is stored, not its subclasses: store {plain.__name__}(value)"
    if isinstance(value, (bytearray, memoryview)):
        return "store bytes(value)"
    if isinstance(value, os.PathLike):
        return "store os.fspath(value)"
    if isinstance(value, (slice, range)):
        return "store (value.start, value.stop, value.step)"
    return (
        "make it a tensor or a JSON value, give the object state_dict and load_state_dict, "
        "or save what each rank needs of it as plain values in ckpt.PerRank"
    )


# JSON nodes → nested Python state.

Special: TypeAlias = Callable[[str, Any], object]
"""Asked for the value of a node of a kind in ``REFERENCES``: the kind (with its ``$``) and the payload."""


def decode(node: Node, special: Special) -> object:
    """Turn a node back into the value it stands for. ``special(kind, payload)`` gives the values of the kinds in ``REFERENCES``."""
    return _Decoder(special).value(node, "")


def check(node: Node) -> None:
    """Raise what :func:`decode` would, without making values and without torch."""
    _Checker().value(node, "")


class _Decoder:
    def __init__(self, special: Special) -> None:
        self.special = special

    def value(self, node: Node, path: str) -> object:
        if isinstance(node, list):
            return self.items(node, path)
        if not isinstance(node, dict):
            return node
        tag = tag_of(node)
        if tag is None:
            return {k: v if type(v) in SCALARS else self.value(v, child_path(path, k)) for k, v in node.items()}
        if len(node) != 1:
            raise FormatError(f"{at(path)} mixes {tag!r} with other keys", hint=HINT)
        if tag in REFERENCES:
            return self.special(tag, node[tag])
        return self.nested(tag, node[tag], path) if tag in _NESTED else self.typed(tag, node[tag], path)

    def typed(self, tag: str, payload: Any, path: str) -> object:
        read = _READERS.get(tag)
        if read is None:
            raise FormatError(f"{at(path)} is of unknown kind {tag!r}", hint=HINT)
        try:
            return read(payload)
        except ModuleNotFoundError:
            require_torch(at(path))
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as e:
            raise _malformed(tag, path) from e

    def items(self, nodes: Sequence[Node], path: str) -> list[object]:
        return [n if type(n) in SCALARS else self.value(n, child_path(path, i)) for i, n in enumerate(nodes)]

    def nested(self, tag: str, payload: Any, path: str) -> object:
        if not isinstance(payload, list):
            raise _malformed(tag, path)
        if tag == "$map":
            return self.map(payload, path)
        items: list[Any] = self.items(payload, path)
        if tag == "$tuple":
            return tuple(items)
        try:
            if tag == "$complex":
                real, imaginary = (x for x in items if type(x) in (int, float))  # no bool, and no number of numpy
                elements: complex | set[object] | frozenset[object] = complex(real, imaginary)
                count = 2
            else:
                elements = set(items) if tag == "$set" else frozenset(items)
                count = len(elements)
        except (TypeError, ValueError, OverflowError) as e:
            raise _malformed(tag, path) from e
        if len(items) != count:  # equal elements of a set, or something beside a complex number's two
            raise _malformed(tag, path)
        return elements

    def map(self, payload: list[Any], path: str) -> dict[object, object]:
        entries: dict[object, object] = {}
        for pair in payload:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _malformed("$map", path)
            key, stored = pair
            if type(key) not in SCALARS:
                key = self.value(key, child_path(path, "(key)"))
            try:
                if key in entries:
                    raise FormatError(f"{at(path)} has the key {shorten(pair[0])} twice", hint=HINT)
            except TypeError as e:
                raise _malformed("$map", path) from e
            entries[key] = stored if type(stored) in SCALARS else self.value(stored, child_path(path, pair[0]))
        return entries


HINT = "the state was written by newer or other software, or is damaged: run `ckpt verify`"
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(?::(?:0|[1-9][0-9]*))?")
_NESTED = frozenset({"$map", "$tuple", "$set", "$frozenset", "$complex"})


def _malformed(tag: str, path: str) -> FormatError:
    return FormatError(f"{at(path)} is not a well-formed {tag} node", hint=HINT)


def _read_bytes(payload: Any) -> bytes:
    raw = base64.b64decode(payload, validate=True)
    if len(payload) != 4 * -(-len(raw) // 3):  # Python passes over padding beyond what is needed
        raise ValueError("padding")
    return raw


def _read_array(payload: Any) -> Any:
    import numpy as np

    name, shape, raw = payload
    if name not in NUMPY:
        raise ValueError(name)
    dtype = np.dtype(name)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(shape)
    return np.frombuffer(_read_bytes(raw), dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype)


def _read_scalar(payload: Any) -> object:
    name, raw = payload
    return _read_array([name, [], raw])[()]


def _checked_size(payload: Any) -> tuple[int, ...]:
    if not isinstance(payload, list) or not all(type(n) is int and -(2**63) <= n < 2**63 for n in payload):
        raise ValueError(payload)
    return tuple(payload)


def _checked_dtype(payload: Any) -> str:
    if payload not in DTYPES and payload not in TORCH_ONLY:
        raise ValueError(payload)
    return str(payload)


def _checked_device(payload: Any) -> str:
    if not isinstance(payload, str) or _DEVICE.fullmatch(payload) is None:
        raise ValueError(payload)
    return payload


def _read_size(payload: Any) -> object:
    sizes = _checked_size(payload)
    import torch

    return torch.Size(sizes)


def _read_dtype(payload: Any) -> object:
    name = _checked_dtype(payload)
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {name}", hint="read it with a newer torch")
    return dtype


def _read_device(payload: Any) -> object:
    text = _checked_device(payload)
    import torch

    try:
        return torch.device(text)
    except RuntimeError as e:
        raise FormatError(f"this torch knows no device {text!r}", hint="import the package that brings the device, then read again") from e


_READERS: dict[str, Callable[[Any], object]] = {
    "$bytes": _read_bytes,
    "$bytesio": lambda payload: io.BytesIO(_read_bytes(payload)),
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$scalar": _read_scalar,
    "$array": _read_array,
    "$size": _read_size,
    "$dtype": _read_dtype,
    "$device": _read_device,
}


class _Checker(_Decoder):
    """Walks as the decoder does; where that would need torch, or give a reference's value, it only looks at the payload."""

    _WITHOUT_TORCH: ClassVar[Mapping[str, Callable[[Any], object]]] = {
        "$size": _checked_size,
        "$dtype": _checked_dtype,
        "$device": _checked_device,
    }

    def __init__(self) -> None:
        super().__init__(self.reference)

    def typed(self, tag: str, payload: Any, path: str) -> object:
        read = self._WITHOUT_TORCH.get(tag)
        if read is None:
            return super().typed(tag, payload, path)
        try:
            return read(payload) if tag == "$size" else (tag, read(payload))  # it equals a tuple of its elements
        except (TypeError, ValueError) as e:
            raise _malformed(tag, path) from e

    def reference(self, kind: str, payload: Any) -> None:
        if kind == "$param_groups":
            for group in payload:
                self.value(group["options"], "")


# Finding nodes in others.


def key_of(node: Node) -> Any:
    """The key that a key node stands for: equal keys are one key, as in a dict."""
    return decode(node, _no_reference) if isinstance(node, dict) else node


def _no_reference(kind: str, payload: Any) -> object:
    raise FormatError(f"a key is of kind {kind!r}", hint=HINT)


def children_of(node: Node) -> Mapping[Any, Node] | None:
    """The nodes of a mapping by the keys that these stand for, plain or not; None for other nodes. Of equal keys the first counts."""
    if isinstance(node, dict) and tag_of(node) is None:
        return node
    pairs = pairs_of(node)
    if pairs is None:
        return None
    children: dict[Any, Node] = {}
    for key_node, child in pairs:
        with suppress(TypeError):  # what cannot be a key is none: whoever decodes the mapping says so
            children.setdefault(key_of(key_node), child)
    return children


def find(node: Node, path_keys: Sequence[object]) -> Node | Missing:
    """The node that these keys and indices lead to, or ``MISSING``."""
    for key in path_keys:
        if isinstance(node, dict) and isinstance(key, str) and not key.startswith("$") and (key in node or len(node) > 1):
            # The common case first: a plain mapping, which may have many thousand keys.
            if key not in node:
                return MISSING
            node = node[key]
            continue
        items = items_of(node)
        if items is not None:
            if type(key) is not int or not 0 <= key < len(items):
                return MISSING
            node = items[key]
        else:
            node = next((v for k, v in pairs_of(node) or () if key_of(k) == key), MISSING)
            if node is MISSING:
                return MISSING
    return node


def leaves(node: Node, path: str = "", *, but: Set[str] = frozenset(), outside: Set[str] = frozenset()) -> Iterator[tuple[str, Node]]:
    """Path and node of every leaf below ``path``, in order, but for nodes of some kinds that lie in containers, and for all containers at
    the paths of ``outside``.

    Mappings are walked, unless they are empty. A list or tuple is walked if a node of a kind in ``REFERENCES`` lies below it; if not, it
    is a leaf. Everything else is a leaf.
    """
    children: Collection[tuple[Node, Node]] | None
    # A plain mapping, which may have millions of values, is walked as it is.
    children = node.items() if type(node) is dict and tag_of(node) is None else pairs_of(node)
    items = items_of(node) if children is None else None
    if items is not None and refers(node):
        children = list(enumerate(items))
    if not children:
        yield path, node
    for key, child in children or ():
        at = child_path(path, key)
        if type(child) in SCALARS:
            yield at, child
        elif not (but and type(child) is dict and len(child) == 1 and next(iter(child)) in but) and at not in outside:
            yield from leaves(child, at, but=but, outside=outside)
