"""Finding nodes in others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from ckpt.errors import FormatError

from .decoding import HINT, decode
from .nodes import MISSING, SCALARS, Missing, Node, child_path, items_of, pairs_of, refers, tag_of


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


def leaves(node: Node, *, but: Set[str] = frozenset(), outside: Set[str] = frozenset()) -> Iterator[tuple[str, Node]]:
    """Path and node of every leaf, in order, but for nodes of some kinds that lie in containers, and for all containers at the paths of
    ``outside``.

    Mappings are walked, unless they are empty. A list or tuple is walked if a node of a kind in ``REFERENCES`` lies below it; if not, it
    is a leaf. Everything else is a leaf.
    """
    return _leaves("", node, but, outside)


def _leaves(path: str, node: Node, but: Set[str], outside: Set[str]) -> Iterator[tuple[str, Node]]:
    children = pairs_of(node)
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
            yield from _leaves(at, child, but, outside)
