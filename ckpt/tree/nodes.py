"""What a node is, and how to look at one without reading its values. A *path* is the text that ``join`` makes of the keys on the way to a
value; it is also how tensors get their names."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from ckpt.dtypes import DTYPES

Node: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list of nodes, dict of str to node."""

REFERENCES = frozenset({"$tensor", "$inline", "$tensors", "$param_groups", "$per_rank"})
"""Kinds of node whose values are kept elsewhere or name tensors: ``leaf`` makes them, ``special`` reads them."""

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


def text(node: Node) -> str:
    """The canonical JSON text of a node: compact, keys sorted. Equal texts mean equal nodes, whatever the order of their keys."""
    return json.dumps(node, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


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


def refers(node: Node) -> bool:
    """Whether a node of a kind in ``REFERENCES`` lies in it."""
    if type(node) in SCALARS:
        return False
    if tag_of(node) in REFERENCES:
        return True
    below = items_of(node)
    if below is None:
        below = [v for _, v in pairs_of(node) or ()]
    return any(refers(n) for n in below if type(n) not in SCALARS)
