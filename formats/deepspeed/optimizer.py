"""The optimizer as a node of the state: parameter groups by name, and states that are no tensors."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt import tree
from ckpt.tree import Node


def group_nodes(
    options: Sequence[Mapping[Any, Any]], names: Sequence[Sequence[str]], node: Callable[[Mapping[Any, Any]], Node]
) -> list[dict[str, Any]]:
    """Parameter groups: names and options of each."""
    return [{"params": list(members), "options": node(of)} for of, members in zip(options, names, strict=False)]


def optimizer_node(groups: Sequence[Mapping[str, Any]], values: Mapping[str, Mapping[str, Node]]) -> Node:
    """The node of an optimizer. Groups with the same options, as the stages of a pipeline have, are one; a parameter is named once."""
    merged: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for group in groups:
        into = merged.setdefault(tree.text(group["options"]), {"params": [], "options": group["options"]})
        into["params"] += [name for name in group["params"] if name not in seen]
        seen |= set(group["params"])
    tensors: Node = {"$tensors": "optimizer.state"}
    kept = {name: {key: _step(value) if key == "step" else value for key, value in of.items()} for name, of in values.items()}
    return {"state": {"": tensors, **kept} if kept else tensors, "param_groups": {"$param_groups": list(merged.values())}}


def _step(value: Node) -> Node:
    """A step that is a plain number as the tensor that torch's optimizers keep it in."""
    if type(value) not in (int, float):
        return value
    return {"$inline": ["float32", [], b64encode(struct.pack("<f", value)).decode()]}
