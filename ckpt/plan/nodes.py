"""The values of a checkpoint by the paths that the state gives them: renames move values as they move tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.tree import MISSING, Missing, Node, child_path, children_of, find, items_of, pairs_of

from .match import Selection

_ANY = ".\0"
"""Stands for whatever lies in a container: no name has NUL."""


def renamed_path(selection: Selection, path: str) -> str:
    """The path in the state of what the checkpoint has at ``path``. A rule for all that lies in a container moves the container too."""
    moved = selection.renamed(path)
    if moved != path:
        return moved
    inside = selection.renamed(path + _ANY)
    return inside.removesuffix(_ANY) if inside.endswith(_ANY) else path


class Nodes:
    """Finds the nodes of a checkpoint's state while a state is walked."""

    def __init__(self, root: Node, selection: Selection) -> None:
        self._selection = selection
        self._moved: dict[str, Node] = {}
        self._origins: dict[str, str] = {}
        self._children: dict[int, Mapping[Any, Node] | None] = {}  # id of a mapping's node, which lives as long as the root
        for path, node in _all(root, "") if selection.moves else ():
            moved = renamed_path(selection, path)
            if moved != path:
                self._moved[moved] = node
                self._origins[moved] = path

    def child(self, node: Node | Missing, key: object, path: str) -> Node | Missing:
        """The node that the state has at ``path``, where ``key`` leads to from the node of its container; or ``MISSING``."""
        if path in self._moved:
            return self._moved[path]
        if self._selection.moves and renamed_path(self._selection, path) != path:
            return MISSING  # what the checkpoint has there goes elsewhere
        children = self.children(node)
        if children is None:
            return find(node, [key])
        return children.get(key, MISSING) if key == key else MISSING  # NaN is no key that is found

    def children(self, node: Node | Missing) -> Mapping[Any, Node] | None:
        """The nodes of a mapping by their keys; None for other nodes."""
        if not isinstance(node, dict):
            return None
        if id(node) not in self._children:
            self._children[id(node)] = children_of(node)
        return self._children[id(node)]

    def origin(self, path: str) -> str:
        """Where the checkpoint has what the state has at ``path``."""
        return self._origins.get(path, path)


def _all(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Every node below a container, and its path."""
    children = pairs_of(node)
    if children is None:
        children = list(enumerate(items_of(node) or ()))
    for key, child in children:
        at = child_path(path, key)
        yield at, child
        yield from _all(child, at)
