"""Nested Python state ⇄ JSON nodes (docs/format.md §8). Invariant: ``decode(encode(x))`` is ``x``, types included, or ``encode`` raises.

Two exceptions: ``OrderedDict``, ``defaultdict`` and ``Counter`` come back as ``dict``, and arrays come back in the byte order of the
machine.
"""

from .decoding import Special, check, decode
from .encoding import Leaf, encode, join
from .looking import children_of, find, key_of, leaves
from .nodes import (
    MAX_DEPTH,
    MISSING,
    REFERENCES,
    SCALARS,
    Missing,
    Node,
    child_path,
    items_of,
    mapping_node,
    pairs_of,
    refers,
    shorten,
    tag_of,
    text,
)

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
