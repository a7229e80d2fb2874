"""An object graph with stand-ins → a node of state (docs/format.md §8), and the tensors in it by name.

Names are those that ``ckpt.save`` gives to the tensors of the same state. What has no known meaning is kept as a mapping that says its
class, arguments and attributes, and is told: ``opaque``.
"""

# A pickle is a graph: one list can be in ten others, and in itself. Nodes are a tree, so what is shared is written out again, and a few
# bytes could unfold to any number of nodes ("billion laughs"). Two limits hold: MAX_DEPTH for nesting, and a budget of nodes that grows
# with the length of the pickle (SLACK nodes for a byte). Long texts and bytes are charged by their length, since they too can be shared.

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from ckpt.errors import CorruptError, FormatError, StateError
from ckpt.plan import tree
from ckpt.plan.tree import MAX_DEPTH, Node, child_path, mapping_node

from .pickle_values import PickleValues
from .stand_ins import Array, Device, GlobalName, Made, Persistent, Size, StoredPart, StoredStorage, StoredView

SLACK = 16
"""Nodes may be this many times what a pickle has bytes: objects are shared, and nodes are not."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAX_NAME = 4096

Place = Callable[[StoredView | StoredPart, str], Node]
"""Takes the tensor at a path; gives the node that stands for it."""


class NodeMaker:
    """Turns one object graph into nodes. ``place`` is given each tensor; ``opaque`` says, by path, what has no known meaning."""

    def __init__(self, values: PickleValues, place: Place, *, pickle_bytes: int) -> None:
        self.values = values
        self.place = place
        self.opaque: dict[str, str] = {}
        self._left = 10_000 + SLACK * pickle_bytes

    def root(self, value: Any, path: str = "") -> Node:
        """The node of the whole graph."""
        try:
            return self.node(value, path, 0)
        except StateError as err:
            raise FormatError(err.message, where=self.values.where, hint=err.hint) from err

    def node(self, value: Any, path: str, depth: int) -> Node:
        self._charge(1)
        if len(path) > _MAX_NAME:
            self.values.refuse(f"a value whose name, made of the keys that lead to it, has more than {_MAX_NAME} characters")
        if type(value) in _SCALARS:
            self._charge(len(value) if type(value) is bytes else len(value) >> 4 if type(value) is str else 0)
            return tree.encode(value, path, _unknown)
        if depth > MAX_DEPTH:
            self.values.damaged(f"values nested more than {MAX_DEPTH} deep, or one that contains itself,")
        meant = self.values.meaning(value)
        if meant is not value and type(meant) in _SCALARS:
            return self.node(meant, path, depth)
        kind = type(meant)
        if kind in _CONTAINERS:
            if isinstance(meant, dict):
                return self._mapping(meant, path, depth)
            if isinstance(meant, (set, frozenset)):
                elements = sorted((self._plain(v, path, depth + 1) for v in meant), key=tree.text)
                return {f"${type(meant).__name__}": elements}
            items = [self.node(v, child_path(path, i), depth + 1) for i, v in enumerate(meant)]
            return items if type(meant) is list else {"$tuple": items}
        if kind in (StoredView, StoredPart):
            return self._tensor(meant, path)
        if kind in (Persistent, StoredStorage):
            self.values.refuse(f"a storage outside of any tensor, at {path!r},")
        return self._object(meant, path, depth)

    def _charge(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            self.values.damaged("a few values that unfold to very many")

    def _tensor(self, tensor: StoredView | StoredPart, path: str) -> Node:
        if not 0 < len(path.encode("utf-8", "surrogatepass")) <= _MAX_NAME or "\0" in path:
            if not path:
                return self.place(tensor, "tensor")
            self.values.damaged("a tensor whose name is too long, or has a NUL,")
        return self.place(tensor, path)

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> Node:
        pairs, named = [], True
        for key, child in value.items():
            key_node = key if type(key) is str and key.isascii() else self._plain(key, path, depth + 1)
            named = named and type(key_node) is str
            pairs.append((key_node, self.node(child, child_path(path, key_node), depth + 1)))
        if not named and len({tree.text(k) for k, _ in pairs}) != len(pairs):
            self.values.damaged(f"a mapping with the same key twice, at {path!r},")
        return mapping_node(pairs)

    def _plain(self, value: Any, path: str, depth: int) -> Node:
        """The node of a key or of an element of a set: no tensor may be in it."""
        outside, self.place = self.place, _no_tensor
        try:
            return self.node(value, child_path(path, "(key)"), depth)
        finally:
            self.place = outside

    def _object(self, value: Any, path: str, depth: int) -> Node:
        if type(value) is Size:
            return {"$size": list(value)}
        if type(value) is Device:
            return {"$device": value.text}
        if type(value) is bytearray:
            return self.node(bytes(value), path, depth)
        if type(value) is Array:
            self._charge(len(value.data))
            data = tree.encode(value.data, "", _unknown)["$bytes"]
            if value.shape is None:
                return {"$scalar": [value.dtype, data]}
            return {"$array": [value.dtype, list(value.shape), data]}
        if type(value) is GlobalName:
            if self.values.is_dtype(value):
                return {"$dtype": value.name}
            self._note_opaque(path, str(value))
            return {"__global__": str(value)}
        assert type(value) is Made
        # Tensors in it are tensors of the checkpoint too.
        of, args = value.of, value.args
        if value.name == "copyreg._reconstructor" and args and type(args[0]) is GlobalName:
            of, args = args[0], ()
        fields: dict[str, Any] = {"__class__": str(of) if type(of) is GlobalName else of}
        self._note_opaque(path, str(of) if type(of) is GlobalName else "what another object made")
        parts = {"__args__": list(args), "__kwargs__": value.kwargs, "__state__": value.state}
        parts |= {"__items__": value.items, "__pairs__": None if value.pairs is None else [list(p) for p in value.pairs]}
        fields |= {k: v for k, v in parts.items() if v is not None and not (type(v) is list and not v)}
        return self._mapping(fields, path, depth + 1)

    def _note_opaque(self, path: str, of: str) -> None:
        """Note that what lies at ``path`` has no known meaning."""
        self._charge(len(path) + len(of) >> 4)
        self.opaque[path] = of


def step_node(step: float) -> Node:
    """A step as torch's optimizers keep it: a number in a tensor."""
    return {"$inline": ["float32", [], b64encode(struct.pack("<f", step)).decode()]}


def _no_tensor(tensor: object, path: str) -> Node:
    raise CorruptError("the file has a tensor in the key of a mapping, or in a set", where=path, hint="the file is damaged")


def _unknown(value: object, path: str) -> Node:
    return None


_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
