"""Nested Python state ⇄ JSON nodes (docs/format.md §8). Invariant: ``decode(encode(x))`` is ``x``, types included, or ``encode`` raises.

Two exceptions: ``OrderedDict``, ``defaultdict`` and ``Counter`` come back as ``dict``, and arrays come back in the byte order of the
machine.
A *path* is the text that ``join`` makes of the keys on the way to a value; it is also how tensors get their names.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

from .dtypes import DTYPES
from .errors import FormatError, StateError

Node: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list of nodes, dict of str to node."""

Leaf: TypeAlias = Callable[[object, str], Node]
"""Asked for the node of a value that is not plain, at a path; None means that it does not know the value."""

Special: TypeAlias = Callable[[str, Any], object]
"""Asked for the value of a node of a kind in ``REFERENCES``: the kind (with its ``$``) and the payload."""

REFERENCES = frozenset({"$tensor", "$inline", "$tensors", "$param_groups", "$per_rank"})
"""Kinds of node whose values are kept elsewhere or name tensors: ``leaf`` makes them, ``special`` reads them."""

MAX_DEPTH = 100
"""Containers may be nested this deep."""

_MAX_INT_BITS = 14284  # the largest that has at most 4300 decimal digits, which is what Python's JSON reader accepts
_NUMPY = frozenset(d.numpy for d in DTYPES.values() if d.numpy is not None)


class Missing(enum.Enum):
    """The type of ``MISSING``."""

    MISSING = "missing"


MISSING = Missing.MISSING
"""What ``find`` returns when nothing is there; None is a node."""


def text(node: Node) -> str:
    """The canonical JSON text of a node: compact, keys sorted. Equal texts mean equal nodes, whatever the order of their keys."""
    return json.dumps(node, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def shorten(node: Node, limit: int = 80) -> str:
    """The canonical text cut to at most ``limit`` characters, for messages."""
    full = text(node)
    return full if len(full) <= limit else full[: limit - 1] + "…"


def join(path: str, key: object) -> str:
    """The path of a child: ``a.b`` for a string key, ``a.5`` for an index or integer key, the JSON text of the key's node for others.

    Raises:
        StateError: ``key`` cannot be stored.
    """
    return child_path(path, _encode_key(key, path))


def child_path(path: str, key: Node) -> str:
    end = key if isinstance(key, str) else text(key)
    return f"{path}.{end}" if path else end


# ------------------------------------------------------------------------------------------------------------ encode


def encode(value: object, path: str, leaf: Leaf, quick: Mapping[type, Leaf] | None = None) -> Node:
    """Turn a nested state into a node.

    Plain values are None, bool, int, float, complex, str, bytes, dict (also ``OrderedDict``, ``defaultdict`` and ``Counter``), list,
    tuple, set, frozenset, numpy scalars and arrays of the dtypes of docs/format.md §7, ``torch.dtype``, ``torch.device`` and
    ``torch.Size``. Subclasses of these are not plain. ``leaf(value, path)`` is asked for everything else, except in keys and in sets,
    where only plain values may be. Values of the classes in ``quick`` are given to what they have there, before anything else is tried.

    Raises:
        StateError: a value is neither plain nor known to ``leaf``, contains itself, is nested too deep, or is a string that is not Unicode.
    """
    return _Encoder(leaf, quick=quick).node(value, path)


def _unknown(value: object, path: str) -> None:
    return None


def _encode_key(key: object, path: str) -> Node:
    if type(key) is str and key.isascii():
        return key
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
        found = _numpy_node(value)
        if found is None:
            found = _torch_node(value)
        if found is None:
            found = self.leaf(value, path)
        if found is None:
            raise _refusal(value, path)
        return found

    def container(self, value: Any, path: str) -> Node:
        if id(value) in self.open:
            raise StateError(f"{_at(path)} contains itself: {_type_name(value)}", hint="remove the reference that leads back")
        if len(self.open) >= MAX_DEPTH:
            raise StateError(f"{_at(path)} lies more than {MAX_DEPTH} containers deep", hint="flatten the state")
        self.open.add(id(value))
        try:
            if isinstance(value, dict):
                return self.mapping(value, path)
            if isinstance(value, (set, frozenset)):
                return self.unordered(value, path)
            items = [self.node(v, child_path(path, i)) for i, v in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        finally:
            self.open.discard(id(value))

    def mapping(self, value: dict[object, object], path: str) -> Node:
        pairs: list[tuple[Node, Node]] = []
        start, quick = f"{path}." if path else "", self.quick
        for key, child in value.items():
            if type(key) is str and key.isascii():  # a mapping may have many thousand
                key_node, at = key, start + key
            else:
                key_node = _encode_key(key, path)
                at = child_path(path, key_node)
            known = quick.get(type(child))
            pairs.append((key_node, self.node(child, at) if known is None else known(child, at)))
        found = mapping_node(pairs)
        if "$map" in found:
            _refuse_twins([k for k, _ in pairs], path)
        return found

    def unordered(self, value: set[object] | frozenset[object], path: str) -> Node:
        plain = _Encoder(_unknown, self.open)
        elements = sorted((plain.node(v, child_path(path, "(element)")) for v in value), key=text)
        _refuse_twins(elements, path)
        return {f"${type(value).__name__}": elements}


def _refuse_twins(nodes: Sequence[Node], path: str) -> None:
    """NaN differs from itself, so a dict or set can have two; read back they would be one."""
    if len(set(map(text, nodes))) != len(nodes):
        raise StateError(f"{_at(path)} has NaN more than once as key or element", hint="use one NaN")


def mapping_node(pairs: Sequence[tuple[Node, Node]]) -> Node:
    for key, _ in pairs:
        if not isinstance(key, str) or key[:1] == "$":
            return {"$map": [list(pair) for pair in pairs]}
    return dict(pairs)


def _int_node(value: int, path: str) -> Node:
    if value.bit_length() > _MAX_INT_BITS:
        raise StateError(f"{_at(path)} is an integer of more than 4300 digits", hint="store it as bytes: value.to_bytes(...)")
    return value


def _float_node(value: float, path: str) -> Node:
    return value if math.isfinite(value) else {"$float": str(value)}


def _complex_node(value: complex, path: str) -> Node:
    return {"$complex": [_float_node(value.real, path), _float_node(value.imag, path)]}


def _str_node(value: str, path: str) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise StateError(f"{_at(path)} is not Unicode: {value[:40]!r}", hint="store it as bytes: os.fsencode(value) for file names") from e
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


def _numpy_node(value: Any) -> Node:
    np = sys.modules.get("numpy")
    if np is None or not (type(value) is np.ndarray or isinstance(value, np.generic)) or value.dtype.name not in _NUMPY:
        return None
    raw = _base64(np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes())
    name = value.dtype.name
    return {"$array": [name, list(value.shape), raw]} if type(value) is np.ndarray else {"$scalar": [name, raw]}


def _torch_node(value: Any) -> Node:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if type(value) is torch.Size:
        return {"$size": [int(n) for n in value]}
    if type(value) is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    return {"$device": str(value)} if type(value) is torch.device else None


def _at(path: str) -> str:
    return f"the value at {path!r}" if path else "the state"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: Any, path: str) -> StateError:
    return StateError(f"{_at(path)} cannot be stored: {_type_name(value)}", hint=_way_out(value))


def _way_out(value: Any) -> str:
    np = sys.modules.get("numpy")
    if isinstance(value, enum.Enum):
        return "store its .value or .name"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store value._asdict(), or tuple(value)"
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return f"store numpy values of the dtypes {', '.join(sorted(_NUMPY))} (np.asarray for subclasses of ndarray), or value.tolist()"
    if isinstance(value, Mapping):
        return "store dict(value)"
    for plain in (int, float, complex, str, bytes, list, tuple, set, frozenset):
        if isinstance(value, plain):
            return f"only {plain.__name__} itself is stored, not its subclasses: store {plain.__name__}(value)"
    if isinstance(value, (bytearray, memoryview)):
        return "store bytes(value)"
    return (
        "make it a tensor or a JSON value, give the object state_dict and load_state_dict, "
        "or save what each rank needs of it as plain values in ckpt.PerRank"
    )


# ------------------------------------------------------------------------------------------------------------ decode


def decode(node: Node, special: Special) -> object:
    """Turn a node back into the value it stands for. ``special(kind, payload)`` gives the values of the kinds in ``REFERENCES``.

    Raises:
        FormatError: the node is malformed or of an unknown kind.
    """
    return _Decoder(special).value(node, "")


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
            return {k: self.value(v, child_path(path, k)) for k, v in node.items()}
        if len(node) != 1:
            raise FormatError(f"{_at(path)} mixes {tag!r} with other keys", hint=_HINT)
        if tag in REFERENCES:
            return self.special(tag, node[tag])
        return self.nested(tag, node[tag], path) if tag in _NESTED else _typed(tag, node[tag], path)

    def items(self, nodes: Sequence[Node], path: str) -> list[object]:
        return [self.value(n, child_path(path, i)) for i, n in enumerate(nodes)]

    def nested(self, tag: str, payload: Any, path: str) -> object:
        if not isinstance(payload, list):
            raise _malformed(tag, path)
        if tag == "$map":
            return self.map(payload, path)
        items = self.items(payload, path)
        if tag == "$complex":
            parts = [x for x in items if isinstance(x, (int, float))]
            if len(items) != 2 or len(parts) != 2:
                raise _malformed(tag, path)
            return complex(*parts)
        if tag == "$tuple":
            return tuple(items)
        try:
            return set(items) if tag == "$set" else frozenset(items)
        except TypeError as e:
            raise _malformed(tag, path) from e

    def map(self, payload: list[Any], path: str) -> dict[object, object]:
        found: dict[object, object] = {}
        for pair in payload:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _malformed("$map", path)
            key = self.value(pair[0], child_path(path, "(key)"))
            try:
                if key in found:
                    raise FormatError(f"{_at(path)} has the key {shorten(pair[0])} twice", hint=_HINT)
            except TypeError as e:
                raise _malformed("$map", path) from e
            found[key] = self.value(pair[1], child_path(path, pair[0]))
        return found


_HINT = "the state was written by newer or other software, or is damaged: run `ckpt verify`"
_NESTED = frozenset({"$map", "$tuple", "$set", "$frozenset", "$complex"})


def _malformed(tag: str, path: str) -> FormatError:
    return FormatError(f"{_at(path)} is not a well-formed {tag} node", hint=_HINT)


def _typed(tag: str, payload: Any, path: str) -> object:
    read = _READERS.get(tag)
    if read is None:
        raise FormatError(f"{_at(path)} is of unknown kind {tag!r}", hint=_HINT)
    try:
        return read(payload)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as e:
        raise _malformed(tag, path) from e


def _read_bytes(payload: Any) -> bytes:
    return base64.b64decode(payload, validate=True)


def _read_array(payload: Any) -> Any:
    import numpy as np

    name, shape, raw = payload
    if name not in _NUMPY:
        raise ValueError(name)
    dtype = np.dtype(name)
    return np.frombuffer(_read_bytes(raw), dtype=dtype.newbyteorder("<")).reshape(shape).astype(dtype)


def _read_scalar(payload: Any) -> object:
    name, raw = payload
    return _read_array([name, [], raw])[()]


def _read_size(payload: Any) -> object:
    import torch

    return torch.Size(payload)


def _read_dtype(payload: Any) -> object:
    import torch

    found = getattr(torch, payload)
    if not isinstance(found, torch.dtype):
        raise ValueError(payload)
    return found


def _read_device(payload: Any) -> object:
    import torch

    if not isinstance(payload, str):
        raise ValueError(payload)
    return torch.device(payload)


_READERS: dict[str, Callable[[Any], object]] = {
    "$bytes": _read_bytes,
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$scalar": _read_scalar,
    "$array": _read_array,
    "$size": _read_size,
    "$dtype": _read_dtype,
    "$device": _read_device,
}


# -------------------------------------------------------------------------------------------------------------- look


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


def key_of(node: Node) -> Any:
    """The key that a key node stands for: equal keys are one key, as in a dict."""
    return decode(node, _no_reference) if isinstance(node, dict) else node


def _no_reference(kind: str, payload: Any) -> object:
    raise FormatError(f"a key is of kind {kind!r}", hint=_HINT)


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


def leaves(node: Node, *, but: Set[str] = frozenset()) -> Iterator[tuple[str, Node]]:
    """Path and node of every leaf, in order, but for nodes of some kinds that lie in containers.

    Mappings are walked, unless they are empty. A list or tuple is walked if a node of a kind in ``REFERENCES`` lies below it; if not, it
    is a leaf. Everything else is a leaf.
    """
    return _leaves("", node, but)


def _leaves(path: str, node: Node, but: Set[str]) -> Iterator[tuple[str, Node]]:
    children = pairs_of(node)
    items = items_of(node) if children is None else None
    if items is not None and refers(node):
        children = list(enumerate(items))
    if not children:
        yield path, node
    for key, child in children or ():
        if not (but and type(child) is dict and len(child) == 1 and next(iter(child)) in but):
            yield from _leaves(child_path(path, key), child, but)


def refers(node: Node) -> bool:
    """Whether a node of a kind in ``REFERENCES`` lies in it."""
    if tag_of(node) in REFERENCES:
        return True
    below = items_of(node)
    if below is None:
        below = [v for _, v in pairs_of(node) or ()]
    return any(map(refers, below))
