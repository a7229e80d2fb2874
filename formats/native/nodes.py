"""Whether the nodes of state.json are what docs/format.md §8 says, so that nobody who walks or decodes them has to ask again.

The same check serves writers and readers. A node of an unknown kind passes: whoever needs its value refuses it.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Callable, Set
from math import isfinite
from typing import Any

from ckpt.dtypes import DTYPES
from ckpt.tree import REFERENCES, tag_of

MAX_DEPTH = 150
"""Nodes may be nested this deep: Python code that walks them recursively must not overflow its stack."""

_Below = tuple[list[Any], list[Any]]
"""The nodes below a node: those that may refer to something as it may itself, and those that must be plain."""

_SIMPLE = frozenset((int, bool, type(None), str))


def node_problem(root: Any, references: Set[str] = REFERENCES) -> str | None:
    """What is wrong with a node or anything below it; None if nothing is. Of the kinds in ``REFERENCES`` these are allowed."""
    waiting: list[tuple[Any, Set[str], int]] = [(root, references, 0)]
    while waiting:
        node, allowed, depth = waiting.pop()
        if isinstance(node, (list, dict)):
            if depth > MAX_DEPTH:
                return f"nodes are nested more than {MAX_DEPTH} deep"
            below = _below(node)
            if below is None or tag_of(node) in REFERENCES - allowed:
                return f"a node with the keys {list(node)[:3]} is malformed, or not allowed where it is"
            tensors = "$tensor" in allowed and depth < MAX_DEPTH
            inside = [n for n in below[0] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n))]
            if tensors:  # by far the most common nodes, as they have to be
                inside = [n for n in inside if not (type(n) is dict and len(n) == 1 and type(n.get("$tensor")) is str)]
            waiting += [(n, allowed, depth + 1) for n in inside]
            keys = (n for n in below[1] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n)))
            waiting += [(n, frozenset(), depth + 1) for n in keys]
        elif type(node) not in _SIMPLE and not (isinstance(node, float) and isfinite(node)):
            return f"{node!r} is not a JSON value"
    return None


def _below(node: list[Any] | dict[Any, Any]) -> _Below | None:
    """The nodes below; None if this one is malformed."""
    if isinstance(node, list):
        return node, []
    if not all(issubclass(kind, str) for kind in {*map(type, node)}):
        return None
    tag = tag_of(node)
    if tag is None:
        return list(node.values()), []
    if len(node) != 1:
        return None
    look = _KINDS.get(tag)
    return look(node[tag]) if look is not None else ([node[tag]], [])


def _map(payload: Any) -> _Below | None:
    if not isinstance(payload, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in payload):
        return None
    return [value for _, value in payload], [key for key, _ in payload]


def _tuple(payload: Any) -> _Below | None:
    return (payload, []) if isinstance(payload, list) else None


def _plain(payload: Any) -> _Below | None:
    return ([], payload) if isinstance(payload, list) else None


def _name(payload: Any) -> _Below | None:
    return ([], []) if isinstance(payload, str) else None


def _true(payload: Any) -> _Below | None:
    return ([], []) if payload is True else None


def _inline(payload: Any) -> _Below | None:
    if not isinstance(payload, list) or len(payload) != 3:
        return None
    dtype, shape, data = payload
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or not isinstance(data, str):
        return None
    if not all(type(n) is int and 0 <= n <= 64 for n in shape):
        return None
    try:
        size = len(b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return None
    return ([], []) if size == math.prod(shape) * DTYPES[dtype].itemsize else None


def _param_groups(payload: Any) -> _Below | None:
    if not isinstance(payload, list) or not all(isinstance(g, dict) and g.keys() == {"params", "options"} for g in payload):
        return None
    if not all(isinstance(g["params"], list) and all(isinstance(name, str) for name in g["params"]) for g in payload):
        return None
    options = [group["options"] for group in payload]
    return (options, []) if all(isinstance(o, dict) and tag_of(o) in (None, "$map") for o in options) else None


_KINDS: dict[str, Callable[[Any], _Below | None]] = {
    "$map": _map,
    "$tuple": _tuple,
    "$set": _plain,
    "$frozenset": _plain,
    "$complex": _plain,
    "$tensor": _name,
    "$tensors": _name,
    "$inline": _inline,
    "$per_rank": _true,
    "$param_groups": _param_groups,
}
"""Kinds whose payload others than ``ckpt.tree.decode`` look into; that one checks the rest by itself."""
