"""Values of a state by their paths: which there are, which are gone, which are chosen. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ckpt.catalog import Catalog
from ckpt.plan import tree
from ckpt.plan.tree_decoding import MISSING, Missing, Node

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


# What of a state belongs to optimizers, and a state without what refers to tensors that are not taken. Pure.


def optimizer_tensors(catalog: Catalog) -> frozenset[str]:
    """Names of tensors of optimizers: what lies in their states (:func:`is_optimizer`)."""
    names = sorted(catalog.tensors)
    of_optimizers: set[str] = set()
    for node in optimizers_in(catalog.state):
        for name, prefix in references(node):
            of_optimizers.update(below(names, name) if prefix else [name])
    return frozenset(of_optimizers)


def optimizers_in(node: Any) -> Iterable[Any]:
    """The nodes of all optimizers of a state, however deep they lie."""
    if is_optimizer(node):
        yield node
        return
    for child in _children(node):
        yield from optimizers_in(child)


def is_optimizer(node: tree.Node) -> bool:
    """Whether it is the state of an optimizer, as all of torch give it; or as Megatron's come where their groups do not say which
    parameters are theirs: then these are under ``groups``, as plain values."""
    if not isinstance(node, dict) or tree.tag_of(node) is not None or "state" not in node:
        return False
    return "param_groups" in node or isinstance(node.get("groups"), list)


def _children(node: Any) -> list[Any]:
    items = tree.items_of(node)
    return list(items) if items is not None else [child for _, child in tree.pairs_of(node) or ()]


def references(node: Any) -> Iterable[tuple[str, bool]]:
    """Names of tensors in a node, and whether it is the beginning of names."""
    tag = tree.tag_of(node)
    if tag in ("$tensor", "$tensors"):
        yield node[tag], tag == "$tensors"
        return
    for child in _children(node):
        yield from references(child)


def below(names: Sequence[str], prefix: str) -> Sequence[str]:
    """Those of the sorted names that begin with ``prefix`` and a dot."""
    first = bisect_left(names, f"{prefix}.")
    return names[first : bisect_left(names, f"{prefix}/", first)]  # "/" comes after "."


def pruned(node: Any, kept: Sequence[str], *, optimizers: bool) -> Any:
    """The node without what refers to other tensors than those ``kept``, names in their order; without ``optimizers`` if told so.

    Containers that have nothing left go too; in a list, None stands for what is gone.
    """
    kept_node = _pruned(node, kept, optimizers=optimizers)
    return {} if kept_node is tree.MISSING else kept_node


def _pruned(node: Any, kept: Sequence[str], *, optimizers: bool) -> Any:
    tag = tree.tag_of(node)
    if tag == "$tensor":
        at = bisect_left(kept, node[tag])
        return node if kept[at : at + 1] == [node[tag]] else tree.MISSING
    if tag == "$tensors":
        return node if below(kept, node[tag]) or not node[tag] else tree.MISSING
    if not optimizers and is_optimizer(node):
        return tree.MISSING
    items, pairs = tree.items_of(node), tree.pairs_of(node)
    if items is not None:
        left = [_pruned(child, kept, optimizers=optimizers) for child in items]
        if left and all(child is tree.MISSING for child in left):
            return tree.MISSING
        left = [None if child is tree.MISSING else child for child in left]
        return left if tag is None else {tag: left}
    if pairs is None or (tag is not None and tag != "$map"):
        return node
    rest = [(k, kept_child) for k, child in pairs if (kept_child := _pruned(child, kept, optimizers=optimizers)) is not tree.MISSING]
    return tree.mapping_node(rest) if rest or not pairs else tree.MISSING


def pruned_values(values: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    """The values of one rank that do not refer to a tensor that is left out."""
    kept_values = {path: _pruned(node, kept, optimizers=True) for path, node in values.items()}
    return {path: node for path, node in kept_values.items() if node is not tree.MISSING}
