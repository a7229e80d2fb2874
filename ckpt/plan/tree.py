"""Nested Python state ⇄ JSON nodes (docs/format.md §8). Invariant: ``decode(encode(x))`` is ``x``, types included, or ``encode`` raises.

Two exceptions: ``OrderedDict``, ``defaultdict`` and ``Counter`` come back as ``dict``, and arrays come back in the byte order of the
machine.
"""

from __future__ import annotations

import base64
import enum
import io
import math
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeAlias

from ckpt.dtypes import DTYPES
from ckpt.errors import FormatError, StateError

from .tree_decoding import (
    HINT,
    MAX_DEPTH,
    MISSING,
    NUMPY,
    REFERENCES,
    SCALARS,
    TORCH_ONLY,
    Missing,
    Node,
    Special,
    at,
    check,
    child_path,
    decode,
    items_of,
    mapping_node,
    pairs_of,
    refers,
    shorten,
    tag_of,
    text,
)

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

    Plain values are None, bool, int, float, complex, str, bytes, dict (also ``OrderedDict``, ``defaultdict`` and ``Counter``), list,
    tuple, set, frozenset, ``io.BytesIO``, numpy scalars and arrays of the dtypes of docs/format.md §7, ``torch.dtype``,
    ``torch.device`` and ``torch.Size``. Subclasses of these are not plain. ``leaf(value, path)`` is asked for everything else, except in
    keys and in sets, where only plain values may be. Values of the classes in ``quick`` are given to what they have there, before
    anything else is tried.
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
        node = _numpy_node(value)
        if node is None:
            node = _torch_node(value)
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
            items = self.elements(value, path)
            return items if type(value) is list else {"$tuple": items}
        finally:
            self.open.discard(id(value))

    def elements(self, values: Sequence[object], path: str) -> list[Node]:
        start, quick = f"{path}." if path else "", self.quick
        nodes: list[Node] = []
        for i, child in enumerate(values):  # a list may have many thousand
            known = quick.get(type(child))
            where = f"{start}{i}"
            nodes.append(self.node(child, where) if known is None else known(child, where))
        return nodes

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


def _numpy_node(value: Any) -> Node:
    np = sys.modules.get("numpy")
    if np is None or not (type(value) is np.ndarray or isinstance(value, np.generic)) or value.dtype.name not in NUMPY:
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


__all__ = [
    "MAX_DEPTH",
    "MISSING",
    "REFERENCES",
    "SCALARS",
    "Leaf",
    "Missing",
    "Node",
    "Special",
    "check",
    "child_path",
    "children_of",
    "decode",
    "encode",
    "find",
    "items_of",
    "join",
    "key_of",
    "leaves",
    "mapping_node",
    "pairs_of",
    "refers",
    "shorten",
    "tag_of",
    "text",
]
