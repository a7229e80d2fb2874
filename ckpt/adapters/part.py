"""Takes a part of a state while it is collected: which tensors, and what is left of the nodes of all else.

Names are selected as a load with the same ``only=`` and ``trainable=`` selects them, so such a load of a whole checkpoint into the same
state reads what such a save writes.

    tensors, objects     are left out where they are met, and leave ``LEFT_OUT`` in their place
    plain values         are cut from the encoded state afterwards, with all containers of which nothing is left
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt.errors import StateError
from ckpt.plan.part import LABEL, StatePart
from ckpt.tree import MISSING, Missing, Node, child_path, items_of, join, mapping_node, pairs_of, refers, tag_of

from .fsdp1 import FlatPart

_LEFT = "$left_out"
LEFT_OUT: Mapping[str, bool] = {_LEFT: True}
"""The node of what does not belong to the part."""


def is_frozen(value: object) -> bool:
    """Whether training does not change a tensor: a parameter without ``requires_grad``."""
    owner = value.owner if isinstance(value, FlatPart) else value
    return isinstance(owner, torch.nn.Parameter) and not owner.requires_grad


class PartTaker:
    """Decides for one walk over a state. ``trains``: whether it has met a tensor of the part that requires a gradient."""

    def __init__(self, part: StatePart) -> None:
        self.part = part
        self.trains = False
        self._met: list[str] = []
        self._decided: list[Node] = []  # nodes of objects that have decided for themselves

    def wants(self, path: str, value: object = None) -> bool:
        """Whether the part has what is at ``path``: a tensor, or something without names below it."""
        wanted = self.part.wants(path)
        if wanted:
            self._met.append(path)
            self.meet(value)
        return wanted and not (self.part.trainable and is_frozen(value))

    def meet(self, value: object) -> None:
        """Note that the part has a tensor, or the state of an optimizer for it."""
        owner = value.owner if isinstance(value, FlatPart) else value
        self.trains = self.trains or (isinstance(owner, torch.Tensor) and owner.requires_grad)

    def wants_some(self, path: str, state: object) -> bool:
        """Whether the part has an object: it is selected itself, or something in its ``state_dict`` is."""
        inside = [at for at in _paths(state, path) if self.wants(at)]  # all, since ``idle`` has to know
        return self.wants(path) or bool(inside)

    def decided(self, node: Node) -> Node:
        """Keep a node as it is."""
        self._decided.append(node)
        return node

    def idle(self) -> list[str]:
        """Globs that no name has matched."""
        return [glob for glob in self.part.only if not any(StatePart(only=(glob,)).wants(path) for path in self._met)]

    def labelled(self, state: Node) -> Node:
        """What is left of the state of a walk, with the label of a part."""
        pairs = pairs_of(state) or []
        if any(key == LABEL for key, _ in pairs):
            raise StateError(
                f"the key {LABEL!r} of a state says that a checkpoint is a part", where=LABEL, hint="give the value another key"
            )
        keep = {id(node) for node in self._decided}
        left = self._cut(state, "", keep)
        return mapping_node([*(pairs_of(left) or []), (LABEL, self.part.to_node())])

    def _cut(self, node: Node, path: str, keep: set[int]) -> Node | Missing:
        tag = tag_of(node)
        if tag == _LEFT:
            return MISSING
        if id(node) in keep or (tag is not None and tag not in ("$map", "$tuple") and refers(node)):
            return node
        pairs = pairs_of(node)
        if pairs:
            kept = [(key, child) for key, below in pairs if (child := self._cut(below, child_path(path, key), keep)) is not MISSING]
            return mapping_node(kept) if kept else MISSING
        items = items_of(node)
        if items is None or not (refers(node) or any(_leaves_out(item) for item in items)):
            return node if self.wants(path) else MISSING
        # What a load leaves alone in a list keeps its place, so that the others have theirs.
        elements = [self._cut(item, child_path(path, i), keep) for i, item in enumerate(items)]
        if all(element is MISSING for element in elements):
            return MISSING
        filled = [None if element is MISSING else element for element in elements]
        return {"$tuple": filled} if tag == "$tuple" else filled


def _leaves_out(node: Node) -> bool:
    """Whether something in a node does not belong to the part."""
    if tag_of(node) == _LEFT:
        return True
    below = items_of(node)
    return any(map(_leaves_out, [child for _, child in pairs_of(node) or ()] if below is None else below))


def _paths(value: object, path: str) -> list[str]:
    """The paths of all that lies in containers."""
    if isinstance(value, dict):
        return [inside for key, child in value.items() for inside in _paths(child, join(path, key))]
    if isinstance(value, (list, tuple)):
        return [inside for i, child in enumerate(value) for inside in _paths(child, join(path, i))]
    return [path]
