"""Values of a state by their paths: which there are, which are gone, which are chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ckpt import tree
from ckpt.tree import MISSING, Missing, Node

_TENSORS = ("$tensor", "$tensors")


def lost(before: Node, after: Node) -> list[str]:
    """Paths of the values that only the state ``before`` has."""
    there = {*value_paths(after)}
    return [
        path
        for path in value_paths(before)
        if path not in there and not any(path[:i] in there for i, c in enumerate(path) if c == ".")  # what contains it may be there
    ]


def selected(node: Node, globs: Sequence[str], path: str = "") -> Node:
    """The node with only the values whose path fits a glob. What refers to tensors stays."""
    chosen = _selected(node, globs, path)
    return {} if chosen is MISSING else chosen


def _selected(node: Node, globs: Sequence[str], path: str) -> Node | Missing:
    pairs, items = tree.pairs_of(node), tree.items_of(node)
    if pairs:
        left = [(k, v) for k, child in pairs if (v := _selected(child, globs, tree.child_path(path, k))) is not MISSING]
        return tree.mapping_node(left) if left else MISSING
    if items is None or not tree.refers(node):
        return node if tree.tag_of(node) in _TENSORS or any(fnmatchcase(path, glob) for glob in globs) else MISSING
    chosen = [_selected(child, globs, tree.child_path(path, i)) for i, child in enumerate(items)]
    if all(child is MISSING for child in chosen):
        return MISSING
    kept = [None if child is MISSING else child for child in chosen]
    return kept if isinstance(node, list) else {"$tuple": kept}


def value_paths(state: Node) -> list[str]:
    """Paths of all that is no tensor."""
    return [path for path, node in tree.leaves(state) if path and tree.tag_of(node) not in _TENSORS]
