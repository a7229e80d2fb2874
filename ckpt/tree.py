"""Nested Python state ⇄ JSON nodes (docs/format.md §8). Invariant: ``decode(encode(x))`` is ``x``, types included, or ``encode`` raises.

Two exceptions: ``OrderedDict`` and ``defaultdict`` come back as ``dict``, and arrays come back in the byte order of the machine.
A *path* is the text that ``join`` makes of the keys on the way to a value; it is also how tensors get their names.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .dtypes import DTYPES
from .errors import ConsistencyError, FormatError, StateError, UsageError

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
    return _child(path, _encode_key(key, path))


def _child(path: str, key: Node) -> str:
    end = key if isinstance(key, str) else text(key)
    return f"{path}.{end}" if path else end


# ------------------------------------------------------------------------------------------------------------ encode


def encode(value: object, path: str, leaf: Leaf) -> Node:
    """Turn a nested state into a node.

    Plain values are None, bool, int, float, complex, str, bytes, dict (also ``OrderedDict`` and ``defaultdict``), list, tuple, set,
    frozenset, numpy scalars and arrays of the dtypes of docs/format.md §7, ``torch.dtype``, ``torch.device`` and ``torch.Size``.
    Subclasses of these are not plain. ``leaf(value, path)`` is asked for everything else, except in keys and in sets, where only plain
    values may be.

    Raises:
        StateError: a value is neither plain nor known to ``leaf``, contains itself, is nested too deep, or is a string that is not Unicode.
    """
    return _Encoder(leaf).node(value, path)


def _unknown(value: object, path: str) -> None:
    return None


def _encode_key(key: object, path: str) -> Node:
    if type(key) is str and key.isascii():
        return key
    return _Encoder(_unknown).node(key, _child(path, "(key)"))


class _Encoder:
    def __init__(self, leaf: Leaf, around: set[int] | None = None) -> None:
        self.leaf = leaf
        self.open: set[int] = set() if around is None else around  # ids of the containers around the value in hand

    def node(self, value: object, path: str) -> Node:
        if value is None or type(value) is bool:
            return value
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value, path)
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
            items = [self.node(v, _child(path, i)) for i, v in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        finally:
            self.open.discard(id(value))

    def mapping(self, value: dict[object, object], path: str) -> Node:
        pairs = []
        for key, child in value.items():
            key_node = _encode_key(key, path)
            pairs.append((key_node, self.node(child, _child(path, key_node))))
        found = _mapping_node(pairs)
        if "$map" in found:
            _refuse_twins([k for k, _ in pairs], path)
        return found

    def unordered(self, value: set[object] | frozenset[object], path: str) -> Node:
        plain = _Encoder(_unknown, self.open)
        elements = sorted((plain.node(v, _child(path, "(element)")) for v in value), key=text)
        _refuse_twins(elements, path)
        return {f"${type(value).__name__}": elements}


def _refuse_twins(nodes: Sequence[Node], path: str) -> None:
    """NaN differs from itself, so a dict or set can have two; read back they would be one."""
    if len(set(map(text, nodes))) != len(nodes):
        raise StateError(f"{_at(path)} has NaN more than once as key or element", hint="use one NaN")


def _mapping_node(pairs: Sequence[tuple[Node, Node]]) -> Node:
    if all(isinstance(k, str) and not k.startswith("$") for k, _ in pairs):
        return dict(pairs)
    return {"$map": [list(pair) for pair in pairs]}


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
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple, set, frozenset})


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
        tag = _tag(node)
        if tag is None:
            return {k: self.value(v, _child(path, k)) for k, v in node.items()}
        if len(node) != 1:
            raise FormatError(f"{_at(path)} mixes {tag!r} with other keys", hint=_HINT)
        if tag in REFERENCES:
            return self.special(tag, node[tag])
        return self.nested(tag, node[tag], path) if tag in _NESTED else _typed(tag, node[tag], path)

    def items(self, nodes: Sequence[Node], path: str) -> list[object]:
        return [self.value(n, _child(path, i)) for i, n in enumerate(nodes)]

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
            key = self.value(pair[0], _child(path, "(key)"))
            try:
                if key in found:
                    raise FormatError(f"{_at(path)} has the key {shorten(pair[0])} twice", hint=_HINT)
            except TypeError as e:
                raise _malformed("$map", path) from e
            found[key] = self.value(pair[1], _child(path, pair[0]))
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


def _tag(node: Node) -> str | None:
    """The kind of a typed node, with its ``$``."""
    if not isinstance(node, dict):
        return None
    return next((k for k in node if k.startswith("$")), None)


def _pairs(node: Node) -> list[tuple[Node, Node]] | None:
    """Key and value nodes of a mapping, plain or not; None for other nodes."""
    if not isinstance(node, dict):
        return None
    tag = _tag(node)
    if tag is None:
        return list(node.items())
    return [(k, v) for k, v in node[tag]] if tag == "$map" else None


def items_of(node: Node) -> list[Node] | None:
    """The elements of a list or tuple node; None for other nodes."""
    """The elements of a list or tuple; None for other nodes."""
    if isinstance(node, list):
        return node
    return node["$tuple"] if _tag(node) == "$tuple" else None


def _key(node: Node) -> Any:
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
            node = next((v for k, v in _pairs(node) or () if _key(k) == key), MISSING)
            if node is MISSING:
                return MISSING
    return node


def leaves(node: Node) -> Iterator[tuple[str, Node]]:
    """Path and node of every leaf, in order.

    Mappings are walked, unless they are empty. A list or tuple is walked if a node of a kind in ``REFERENCES`` lies below it; if not, it
    is a leaf. Everything else is a leaf.
    """
    return _leaves("", node)


def _leaves(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    children = _pairs(node)
    items = items_of(node)
    if items is not None and refers(node):
        children = list(enumerate(items))
    if not children:
        yield path, node
    for key, child in children or ():
        yield from _leaves(_child(path, key), child)


def refers(node: Node) -> bool:
    """Whether a node of a kind in ``REFERENCES`` lies in it."""
    if _tag(node) in REFERENCES:
        return True
    below = items_of(node)
    if below is None:
        below = [v for _, v in _pairs(node) or ()]
    return any(map(refers, below))


# ------------------------------------------------------------------------------------------------------------- merge

Variants: TypeAlias = Sequence[tuple[Sequence[int], Node]]
_SHOWN = 10


def merge(nodes: Variants) -> Node:
    """Join the states of several groups of ranks into one: each entry is the ranks of a group and their node.

    Mappings are united by key; a module without extra states counts as a mapping where others have some. Lists of equal length are
    joined element by element if an element is itself a container. ``$param_groups`` that differ are united: groups with equal options
    become one, wherever they stand. Everything else must be equal.

    Raises:
        ConsistencyError: nodes at one path differ, or a parameter has two different options; names the paths, the values and the ranks.
    """
    if not nodes:
        raise UsageError("there are no states to merge")
    conflicts: list[str] = []
    joined = _merge("", nodes, conflicts)
    if conflicts:
        shown = "".join(f"\n  {c}" for c in conflicts[:_SHOWN])
        more = f"\n  and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        raise ConsistencyError(
            f"the ranks disagree about {len(conflicts)} value{'s' * (len(conflicts) > 1)} of the state:{shown}{more}",
            hint="make the values equal on all ranks, or wrap a value that is meant to differ in ckpt.PerRank",
        )
    return joined


def _merge(path: str, nodes: Variants, conflicts: list[str]) -> Node:
    if len(nodes) == 1:
        return nodes[0][1]
    mappings = [(ranks, pairs) for ranks, n in nodes if (pairs := _module_pairs(n)) is not None]
    if len(mappings) == len(nodes) and any(_tag(n) != "$tensors" for _, n in nodes):
        return _merge_mappings(path, mappings, conflicts)
    variants = _distinct(nodes)
    first = nodes[0][1]
    if len(variants) == 1:
        return first
    if all(_tag(n) == "$param_groups" for _, n in variants):
        return _merge_groups(path, variants, conflicts)
    elements = [items_of(n) for _, n in variants]
    if _joinable(variants, elements):
        columns = [
            _merge(_child(path, i), [(ranks, e[i]) for (ranks, _), e in zip(variants, elements, strict=True) if e is not None], conflicts)
            for i in range(len(elements[0] or ()))
        ]
        return columns if isinstance(first, list) else {"$tuple": columns}
    conflicts.append(_conflict(path, variants))
    return first


def _module_pairs(node: Node) -> list[tuple[Node, Node]] | None:
    """``_pairs``, with a module that has no extra states on these ranks written like one that has."""
    return [("", node)] if _tag(node) == "$tensors" else _pairs(node)


def _joinable(variants: Variants, elements: Sequence[list[Node] | None]) -> bool:
    """Lists of scalars are compared whole: a differing random state is one conflict, not 624."""
    alike = len({type(n) for _, n in variants}) == 1 and None not in elements and len({len(e or ()) for e in elements}) == 1
    return alike and any(isinstance(x, (list, dict)) for e in elements for x in e or ())


def _distinct(nodes: Variants) -> list[tuple[list[int], Node]]:
    """One entry for each different node, with the ranks of all that are equal to it."""
    found: dict[str, tuple[list[int], Node]] = {}
    for ranks, node in nodes:
        found.setdefault(text(node), ([], node))[0].extend(ranks)
    return list(found.values())


def _merge_mappings(path: str, mappings: Sequence[tuple[Sequence[int], list[tuple[Node, Node]]]], conflicts: list[str]) -> Node:
    columns: dict[Any, tuple[Node, list[tuple[Sequence[int], Node]]]] = {}
    for ranks, pairs in mappings:
        for key_node, child in pairs:
            columns.setdefault(_key(key_node), (key_node, []))[1].append((ranks, child))
    return _mapping_node([(key_node, _merge(_child(path, key_node), column, conflicts)) for key_node, column in columns.values()])


def _merge_groups(path: str, variants: Variants, conflicts: list[str]) -> Node:
    groups: dict[str, dict[str, Any]] = {}
    placed: dict[str, str] = {}  # parameter → text of its options
    clashes: dict[tuple[str, str], list[str]] = {}  # two texts of options → the parameters that have both
    for _, node in variants:
        for group in node["$param_groups"]:
            options = text(group["options"])
            joined = groups.setdefault(options, {"params": [], "options": group["options"]})
            for name in group["params"]:
                if name not in placed:
                    placed[name] = options
                    joined["params"].append(name)
                elif placed[name] != options:
                    clashes.setdefault((placed[name], options), []).append(name)
    for names in clashes.values():
        _report_clash(path, variants, list(dict.fromkeys(names)), conflicts)
    return {"$param_groups": list(groups.values())}


def _report_clash(path: str, variants: Variants, names: Sequence[str], conflicts: list[str]) -> None:
    """One conflict per option that differs, at the path of the first of the parameters."""
    name, *others = names
    options = [(ranks, g["options"]) for ranks, node in variants for g in node["$param_groups"] if name in g["params"]]
    found: list[str] = []
    _merge(_child(path, name), options, found)
    if not found:  # an option that one side lacks
        found.append(_conflict(_child(path, name), _distinct(options)))
    note = f" (and so for {len(others)} more parameters)" if others else ""
    conflicts.extend(c + note for c in found)


def _conflict(path: str, variants: Variants) -> str:
    values = [f"{shorten(node)} on {_ranks(ranks)}" for ranks, node in variants[:4]]
    more = f", and {len(variants) - 4} more values" if len(variants) > 4 else ""
    return f"{path or 'the state'}: {', '.join(values)}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 8``; long lists are cut."""
    spans: list[list[int]] = []
    for r in sorted(set(ranks)):
        if spans and spans[-1][1] == r - 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:8]] + ["…"] * (len(spans) > 8)
    return f"rank{'s' * (len(set(ranks)) != 1)} {', '.join(shown)}"
