"""The values of a state: those of all ranks joined, their paths under renames, and parts of a state. In a save nothing is dropped: what
differs on ranks that both have it is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from ckpt.errors import ConsistencyError, CoverageError, UsageError
from ckpt.settings import check_flags

from .match import Selection, globs_of_only
from .tables import ranks_text
from .tree import MISSING, Missing, Node, child_path, children_of, find, items_of, key_of, mapping_node, pairs_of, shorten, tag_of, text

Variants: TypeAlias = Sequence[tuple[Sequence[int], Node]]
"""Ranks, and the node that they have."""
_SHOWN = 10
REPLICA = "$replica"
"""The kind of a value at the top of a rank's state that another rank has to save. No checkpoint has one."""


def join_values(nodes: Variants) -> Node:
    """Join the states of several groups of ranks into one: each entry is the ranks of a group and their node.

    Mappings are united by key; a module without extra states counts as a mapping where others have some. Lists of equal length are
    joined element by element if an element is itself a container. ``$param_groups`` that differ are united: groups with equal options
    become one, wherever they stand. Everything else must be equal.
    """
    if not nodes:
        raise UsageError("there are no states to merge")
    conflicts: list[str] = []
    joined = _merge("", nodes, conflicts)
    if conflicts:
        shown = "".join(f"\n  {c}" for c in conflicts[:_SHOWN])
        more = f"\n  and {len(conflicts) - _SHOWN} more" if len(conflicts) > _SHOWN else ""
        raise ConsistencyError(
            f"the ranks disagree about {len(conflicts)} value{'s' * (len(conflicts) > 1)} of the state:{shown}{more}",
            hint="make the values equal on all ranks, or wrap a value that is meant to differ in ckpt.PerRank",
        )
    unsaved = [str(key) for key, child in pairs_of(joined) or () if tag_of(child) == REPLICA]
    if unsaved:
        more = f", and of {len(unsaved) - 1} more" if len(unsaved) > 1 else ""
        message = f"all ranks that have it say that they have a replica{more}, so none saves it"
        raise CoverageError(message, where=f"object {unsaved[0]}", hint="one rank has to give it the replica_id 0")
    return joined


def _merge(path: str, nodes: Variants, conflicts: list[str]) -> Node:
    if len(nodes) == 1:
        return nodes[0][1]
    # A module that has no extra states on these ranks is written like one that has.
    pairs_by_ranks = [(ranks, [("", n)] if tag_of(n) == "$tensors" else pairs_of(n)) for ranks, n in nodes]
    mappings = [(ranks, pairs) for ranks, pairs in pairs_by_ranks if pairs is not None]
    if len(mappings) == len(nodes) and any(tag_of(n) != "$tensors" for _, n in nodes):
        return _merge_mappings(path, mappings, conflicts)
    variants = _distinct(nodes)
    first = nodes[0][1]
    if len(variants) == 1:
        return first
    if all(tag_of(n) == "$param_groups" for _, n in variants):
        return _merge_groups(path, variants, conflicts)
    elements = [items_of(n) for _, n in variants]
    if _joinable(variants, elements):
        columns = [
            _merge(
                child_path(path, i), [(ranks, e[i]) for (ranks, _), e in zip(variants, elements, strict=True) if e is not None], conflicts
            )
            for i in range(len(elements[0] or ()))
        ]
        return columns if isinstance(first, list) else {"$tuple": columns}
    conflicts.append(_conflict(path, variants))
    return first


def _joinable(variants: Variants, elements: Sequence[list[Node] | None]) -> bool:
    """Lists of scalars are compared whole: a differing random state is one conflict, not 624."""
    alike = len({type(n) for _, n in variants}) == 1 and None not in elements and len({len(e or ()) for e in elements}) == 1
    return alike and any(isinstance(x, (list, dict)) for e in elements for x in e or ())


def _distinct(nodes: Variants) -> list[tuple[list[int], Node]]:
    """One entry for each different node, with the ranks of all that are equal to it."""
    by_text: dict[str, tuple[list[int], Node]] = {}
    for ranks, node in nodes:
        by_text.setdefault(text(node), ([], node))[0].extend(ranks)
    return list(by_text.values())


def _merge_mappings(path: str, mappings: Sequence[tuple[Sequence[int], list[tuple[Node, Node]]]], conflicts: list[str]) -> Node:
    columns: dict[Any, tuple[Node, list[tuple[Sequence[int], Node]]]] = {}
    for ranks, pairs in mappings:
        for key_node, child in pairs:
            columns.setdefault(key_of(key_node), (key_node, []))[1].append((ranks, child))
    if not path:
        columns = {key: (node, [c for c in column if tag_of(c[1]) != REPLICA] or column[:1]) for key, (node, column) in columns.items()}
    return mapping_node([(key_node, _merge(child_path(path, key_node), column, conflicts)) for key_node, column in columns.values()])


def _merge_groups(path: str, variants: Variants, conflicts: list[str]) -> Node:
    groups: dict[str, dict[str, Any]] = {}
    placed: dict[str, str] = {}  # parameter → text of its options
    clashes: dict[tuple[str, str], list[str]] = {}  # two texts of options → the parameters that have both
    for _, node in variants:
        for group in node["$param_groups"]:
            options = text(group["options"])
            joined = groups.setdefault(options, {"params": [], "options": group["options"]})
            for name in group["params"]:
                if name not in placed:
                    placed[name] = options
                    joined["params"].append(name)
                elif placed[name] != options:
                    clashes.setdefault((placed[name], options), []).append(name)
    for names in clashes.values():
        _report_clash(path, variants, list(dict.fromkeys(names)), conflicts)
    return {"$param_groups": list(groups.values())}


def _report_clash(path: str, variants: Variants, names: Sequence[str], conflicts: list[str]) -> None:
    """One conflict per option that differs, at the path of the first of the parameters."""
    name, *others = names
    options = [(ranks, g["options"]) for ranks, node in variants for g in node["$param_groups"] if name in g["params"]]
    clashes: list[str] = []
    _merge(child_path(path, name), options, clashes)
    if not clashes:  # an option that one side lacks
        clashes.append(_conflict(child_path(path, name), _distinct(options)))
    note = f" (and so for {len(others)} more parameters)" if others else ""
    conflicts.extend(c + note for c in clashes)


def _conflict(path: str, variants: Variants) -> str:
    values = [f"{shorten(node)} on {ranks_text(sorted(set(ranks)))}" for ranks, node in variants[:4]]
    more = f", and {len(variants) - 4} more values" if len(variants) > 4 else ""
    return f"{path or 'the state'}: {', '.join(values)}{more}"


# The values of a checkpoint by the paths that the state gives them: renames move values as they move tensors. Pure.

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
        self.origins: dict[str, str] = {}
        """Path in the state → where the checkpoint has it, of what is renamed."""
        self._children: dict[int, Mapping[Any, Node] | None] = {}  # id of a mapping's node, which lives as long as the root
        for path, node in _all(root, "") if selection.moves else ():
            moved = renamed_path(selection, path)
            if moved != path:
                self._moved[moved] = node
                self.origins[moved] = path

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


def _all(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Every node below a container, and its path."""
    children = pairs_of(node)
    if children is None:
        children = list(enumerate(items_of(node) or ()))
    for key, child in children:
        at = child_path(path, key)
        yield at, child
        yield from _all(child, at)


CLASS = "__tensor_flatten__"
"""The key under which the description of a tensor that is made of others names its class (docs/format.md §8)."""


def made_of_others(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Path and description of each tensor in a node that is made of others."""
    if isinstance(node, dict) and CLASS in node:
        yield path, node
        return
    for at, child in ((child_path(path, key), child) for key, child in pairs_of(node) or enumerate(items_of(node) or ())):
        yield from made_of_others(child, at)


# A part of a state: what a save takes of it, and how a load knows that a checkpoint is no whole one. Pure.

LABEL = "ckpt-part"
"""The key of the state's root under which a part says what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """``only``: globs of names, as for a load; ``trainable``: without parameters that do not require a gradient."""

    only: tuple[str, ...] = ()
    trainable: bool = False

    @classmethod
    def of(cls, only: str | Sequence[str] | None, *, trainable: bool) -> StatePart | None:
        """What a caller asks for; None if it is the whole state."""
        check_flags(trainable=trainable)
        globs = globs_of_only(only)
        return cls(only=globs, trainable=trainable) if globs or trainable else None

    def wants(self, path: str) -> bool:
        return not self.only or any(fnmatchcase(path, glob) for glob in self.only)

    def to_node(self) -> Node:
        """As the state of a checkpoint says it."""
        return {"only": list(self.only), "trainable": self.trainable}

    def text(self) -> str:
        """As the arguments of a call."""
        globs = [repr(glob) for glob in self.only]
        only = [f"only={globs[0]}" if len(globs) == 1 else f"only=[{', '.join(globs)}]"] if globs else []
        return ", ".join([*only, *(["trainable=True"] if self.trainable else [])])


def part_in(state: Node) -> StatePart | None:
    """The part that a checkpoint with this state is; None if it is a whole one, or does not say it as we do."""
    label: Any = state.get(LABEL) if isinstance(state, Mapping) else None
    if not isinstance(label, Mapping) or not isinstance(label.get("only"), list):
        return None
    return StatePart(only=tuple(map(str, label["only"])), trainable=label.get("trainable") is True)
