"""Whether the nodes of state.json are what docs/format.md §8 says, so that nobody who walks or decodes them has to ask again.

The same check serves writers and readers. A node of an unknown kind passes: whoever needs its value refuses it.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Callable, Set
from typing import Any

from ckpt.dtypes import DTYPES
from ckpt.tree import REFERENCES, tag_of

MAX_DEPTH = 150
"""Nodes may be nested this deep: Python code that walks them recursively must not overflow its stack."""

_Nodes = list[tuple[Any, bool]]
"""Nodes below a node, and whether a reference may be there."""

_SIMPLE = frozenset((int, bool, type(None), str))


def node_problem(root: Any, references: Set[str] = REFERENCES) -> str | None:
    """What is wrong with a node or anything below it; None if nothing is. Of the kinds in ``REFERENCES`` these are allowed."""
    waiting = [(root, True, 0)]
    while waiting:
        node, may_refer, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"nodes are nested more than {MAX_DEPTH} deep"
        if isinstance(node, (list, dict)):
            below = _below(node, may_refer)
            if tag_of(node) in REFERENCES - references:
                below = None
            if below is None:
                return f"a node with the keys {list(node)[:3]} is malformed, or not allowed where it is"
            waiting += [(n, refer, depth + 1) for n, refer in below if type(n) not in _SIMPLE]
        elif not _is_scalar(node):
            return f"{node!r} is not a JSON value"
    return None


def _is_scalar(node: Any) -> bool:
    return type(node) in _SIMPLE or (isinstance(node, float) and math.isfinite(node))


def _below(node: list[Any] | dict[Any, Any], may_refer: bool) -> _Nodes | None:
    """The nodes below; None if this one is malformed."""
    if isinstance(node, list):
        return [(n, may_refer) for n in node]
    if not all(isinstance(key, str) for key in node):
        return None
    tag = tag_of(node)
    if tag is None:
        return [(n, may_refer) for n in node.values()]
    if len(node) != 1 or (tag in REFERENCES and not may_refer):
        return None
    look = _KINDS.get(tag)
    return look(node[tag], may_refer) if look is not None else [(node[tag], may_refer)]


def _map(payload: Any, may_refer: bool) -> _Nodes | None:
    if not isinstance(payload, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in payload):
        return None
    return [(key, False) for key, _ in payload] + [(value, may_refer) for _, value in payload]


def _tuple(payload: Any, may_refer: bool) -> _Nodes | None:
    return [(n, may_refer) for n in payload] if isinstance(payload, list) else None


def _plain(payload: Any, may_refer: bool) -> _Nodes | None:
    return [(n, False) for n in payload] if isinstance(payload, list) else None


def _name(payload: Any, may_refer: bool) -> _Nodes | None:
    return [] if isinstance(payload, str) else None


def _true(payload: Any, may_refer: bool) -> _Nodes | None:
    return [] if payload is True else None


def _inline(payload: Any, may_refer: bool) -> _Nodes | None:
    if not isinstance(payload, list) or len(payload) != 3:
        return None
    dtype, shape, data = payload
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list):
        return None
    if not all(type(n) is int and 0 <= n <= 64 for n in shape) or not isinstance(data, str):
        return None
    try:
        size = len(b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return None
    return [] if size == math.prod(shape) * DTYPES[dtype].itemsize else None


def _param_groups(payload: Any, may_refer: bool) -> _Nodes | None:
    if not isinstance(payload, list) or not all(isinstance(g, dict) and g.keys() == {"params", "options"} for g in payload):
        return None
    names = [name for group in payload for name in (group["params"] if isinstance(group["params"], list) else [None])]
    options = [group["options"] for group in payload]
    if not all(isinstance(name, str) for name in names) or not all(isinstance(o, dict) and tag_of(o) in (None, "$map") for o in options):
        return None
    return [(o, True) for o in options]


_KINDS: dict[str, Callable[[Any, bool], _Nodes | None]] = {
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
"""Kinds whose payload is walked by others than ``ckpt.tree.decode``, which checks the rest by itself."""

