"""The state of a checkpoint whose tensors get other names: what an optimizer says of parameters follows them, other values stay. No torch.

A parameter that is made of several, as a fused one is, gets the steps and options that they all have; where they differ, that is an error.
One that is taken apart gives its own to each part. What cannot follow is named.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ckpt.catalog import Catalog, TensorEntry
from ckpt.errors import UsageError
from ckpt.formats.external import Range, read_ranges
from ckpt.formats.external_elements import read_box
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.tree import MISSING, Missing, Node
from ckpt.plan.views import LogicalTensor

# Values of a state by their paths: which there are, which are gone, which are chosen. Pure.

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


# What an optimizer's node says of parameters, and what becomes of it when q, k and v become qkv:
#
#     state         q: {step: 7}, k: {step: 7}, v: {step: 7}     qkv: {step: 7}        all the same, or an error that names two
#     param_groups  [q, k] lr 0.1 · [v] lr 0.1                   [qkv] lr 0.1          options of both groups must be the same
#     the other way                                              q, k and v get what qkv had
#
# ``origins`` has for each new parameter the old ones that it is made of, from the pieces of the views. Whatever cannot follow (a value of
# a parameter that is not taken, groups that name no parameters) is listed in ``left_out``.


_INLINE = 64
"""Elements of a tensor that is kept among the values (docs/format.md §8)."""


class RenamedState(NamedTuple):
    """The node of a state; the paths of stored values that it has not; and stored tensors whose numbers are all the same there: among the
    values, or as another one that is taken, because their parameters became one."""

    state: Node
    left_out: tuple[str, ...] = ()
    united: frozenset[str] = frozenset()


def option_tensors(catalog: Catalog) -> set[str]:
    """Names of tensors that are options of optimizers, such as a learning rate: values, of which no translation speaks."""
    groups = [_by_key(node).get("param_groups") for node in optimizers_in(catalog.state)]
    named = (name for node in groups for name in _tensors(node) if name in catalog.tensors)
    return {name for name in named if catalog.tensors[name].numel <= _INLINE}


def renamed_state(
    catalog: Catalog, entries: Collection[str], views: Mapping[str, LogicalTensor], rest: Node, *, optimizers: bool = True
) -> RenamedState:
    """The state of the tensors that ``views`` make of stored ones, by their new names.

    Args:
        entries: names of the stored tensors that may be taken.
        rest: the stored state without optimizers and without what refers to names that are not among the new ones (``pruning.pruned``).
        optimizers: take optimizers too.
    """
    pairs, state = _by_key(catalog.state), _by_key(rest)
    own = {name for name, entry in catalog.tensors.items() if entry.rank is not None}
    now, before = _by_first({*views} - own), _by_first({*catalog.tensors} - own)
    optimizers_here = [RenamedOptimizer(catalog, entries, views, key) for key, node in pairs.items() if is_optimizer(node)]
    for one in optimizers_here:
        state.pop(one.key, None)
        if optimizers and (node := one.node(pairs[one.key])) is not MISSING:
            state[one.key] = node
        elif not optimizers:
            one.left_out = [one.key]
    done = {one.key for one in optimizers_here}
    state |= {key: {"$tensors": key} for key in pairs if key not in done and key in now and now[key] != before.get(key)}
    named = {*_tensors(rest)}
    flat = [name for key, names in now.items() for name in names if key not in state and name not in named]
    unnamed = [(key, child) for key, child in tree.pairs_of(rest) or () if not isinstance(key, str)]
    node_of_all = tree.mapping_node([*unnamed, *state.items(), *((name, {"$tensor": name}) for name in sorted(flat))])
    gone = [path for path in lost(catalog.state, node_of_all) if path.partition(".")[0] not in done]
    gone += [path for one in optimizers_here for path in one.left_out]
    return RenamedState(node_of_all, tuple(gone), frozenset(name for one in optimizers_here for name in one.united))


def _by_first(names: Iterable[str]) -> dict[str, set[str]]:
    """Names by what stands before the first dot."""
    by_first: dict[str, set[str]] = {}
    for name in names:
        by_first.setdefault(name.partition(".")[0], set()).add(name)
    return by_first


def _tensors(node: Node) -> Iterator[str]:
    return (leaf["$tensor"] for _, leaf in tree.leaves(node) if tree.tag_of(leaf) == "$tensor")


def _by_key(node: Node) -> dict[str, Node]:
    return {key: child for key, child in tree.pairs_of(node) or () if isinstance(key, str)}


class NamedGroup(NamedTuple):
    options: Node
    names: Sequence[str]


class RenamedOptimizer:
    """One optimizer of a state, at the path ``key``. Parameters are called by their names in the state; ``modules`` are what may precede
    the names that the optimizer has for them, by default the first part of every tensor's name."""

    def __init__(
        self,
        catalog: Catalog,
        entries: Collection[str],
        views: Mapping[str, LogicalTensor],
        key: str,
        *,
        modules: Sequence[str] | None = None,
    ) -> None:
        self.catalog = catalog
        self.small = option_tensors(catalog).intersection(entries)
        self.views = views
        self.key = key
        self.head = f"{key}.state."
        self.left_out: list[str] = []
        self.united: set[str] = set()
        self.modules = modules or sorted({f"{name.partition('.')[0]}." for name in catalog.tensors if not name.startswith(self.head)})

    def node(self, node: Node) -> Node | Missing:
        """Its node under the new names; ``MISSING`` if none of its tensors is kept."""
        parts = _by_key(node)
        if self._has(self.catalog.tensors) and not self._has(self.views):
            self.left_out += [f"{self.key}.{part}" for part in parts]
            return MISSING
        self.check_numbers()
        fields = {"state": self.state(parts.pop("state"))}
        groups = self.groups(parts.pop("param_groups", []))
        if groups:
            fields["param_groups"] = {"$param_groups": groups}
        self.left_out += [f"{self.key}.{part}" for part, child in parts.items() if tree.refers(child)]
        return {**fields, **{part: child for part, child in parts.items() if not tree.refers(child)}}

    def _has(self, names: Iterable[str]) -> bool:
        return any(name.startswith(self.head) for name in names)

    # ---- parameters

    def full(self, name: str) -> str:
        """The name in the state of a parameter that the optimizer may name within its module."""
        if name in self.catalog.tensors:
            return name
        return next((head + name for head in self.modules if head + name in self.catalog.tensors), name)

    @cached_property
    def origins(self) -> dict[str, list[str]]:
        """New parameter → those that it is made of."""
        origins: dict[str, dict[str, None]] = {}
        for name, view in self.views.items():
            for source in dict.fromkeys(piece.source for piece in view.pieces):
                if name.startswith(self.head) and source.startswith(self.head):
                    origins.setdefault(self._owner(name)[0], {})[self.full(self._owner(source)[0])] = None
                else:
                    origins.setdefault(name, {})[source] = None
        return {name: list(of) for name, of in origins.items()}

    def _owner(self, name: str) -> tuple[str, str]:
        """Parameter and key of a tensor of the state."""
        owner, _, key = name[len(self.head) :].rpartition(".")
        return owner, key

    # ---- values of parameters

    def state(self, node: Node) -> Node:
        by_parameter: dict[str, dict[str, Node]] = {}
        for name, child in tree.pairs_of(node) or ():
            values = {k: v for k, v in _by_key(child).items() if not tree.refers(v) or tree.tag_of(v) == "$inline"}
            if name and values:
                by_parameter[self.full(name) if isinstance(name, str) else tree.text(name)] = values
        taken = {old for of in self.origins.values() for old in of}
        self.left_out += [f"{self.head}{name}.{key}" for name, values in by_parameter.items() if name not in taken for key in values]
        moved = {new: self._united(new, [(old, by_parameter.get(old, {})) for old in of]) for new, of in self.origins.items()}
        moved = {new: values for new, values in moved.items() if values}
        tensors: Node = {"$tensors": f"{self.key}.state"}
        return {"": tensors, **moved} if moved else tensors

    def _united(self, new: str, parts: Sequence[tuple[str, Mapping[str, Node]]]) -> Mapping[str, Node]:
        first, values = parts[0]
        for other, more in parts[1:]:
            for key in {**values, **more}:
                mine, theirs = (v.get(key, MISSING) for v in (values, more))
                if mine is MISSING or theirs is MISSING or tree.text(mine) != tree.text(theirs):
                    raise self.differ(new, key, (first, _shown(mine)), (other, _shown(theirs)))
        return values

    def check_numbers(self) -> None:
        """Raise UsageError if parameters that become one have different numbers (steps) among their tensors."""
        numbers: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.catalog.tensors.items():
            if name.startswith(self.head) and not entry.shape:
                owner, key = self._owner(name)
                numbers.setdefault(self.full(owner), {})[key] = entry
        merged = [
            (new, key, {old: numbers.get(old, {}).get(key) for old in of})
            for new, of in self.origins.items()
            for key in (dict.fromkeys(k for old in of for k in numbers.get(old, {})) if len(of) > 1 else ())
            if (made := self.views.get(f"{self.head}{new}.{key}")) is not None and not made.shape
        ]
        wanted = {e.alias or e.name for _, _, of in merged for e in of.values() if e is not None}
        values = _numbers(self.catalog, [self.catalog.tensors[name] for name in sorted(wanted)])
        self.united |= {e.name for _, _, of in merged for e in of.values() if e is not None}
        for new, key, of in merged:
            stored_numbers = [(old, None if e is None else values[e.alias or e.name]) for old, e in of.items()]
            for old, value in stored_numbers[1:]:
                if value is None or value != stored_numbers[0][1]:
                    raise self.differ(new, key, *((o, "nothing" if v is None else v) for o, v in (stored_numbers[0], (old, value))))

    def differ(self, new: str, what: str, one: tuple[str, str], other: tuple[str, str]) -> UsageError:
        message = f"{new!r} would be made of parameters that differ in the {what}: {one[0]!r} has {one[1]}, {other[0]!r} has {other[1]}"
        return UsageError(message, hint=f"leave the optimizer out: --skip '{self.key}.*'")

    # ---- options

    def groups(self, node: Node) -> list[dict[str, Any]]:
        """Groups of the new parameters. One that is made of parameters of several groups needs the same options in all."""
        groups = groups_by_name(node)
        if groups is None:
            self.left_out.append(f"{self.key}.param_groups")
            return []
        into: dict[str, list[str]] = {}
        for new, of in self.origins.items():
            for old in of:
                into.setdefault(old, []).append(new)
        made_groups: list[dict[str, Any]] = []
        given: dict[str, tuple[str, Node]] = {}
        for group in groups:
            names: list[str] = []
            for old in map(self.full, group.names):
                self.left_out += [f"{self.key}.param_groups of {old}"] if old not in into else []
                for new in into.get(old, ()):
                    if new not in given:
                        names.append(new)
                    first, options = given.setdefault(new, (old, group.options))
                    self.check_options(new, (first, options), (old, group.options))
            if names or not group.names:
                made_groups.append({"params": names, "options": self.options(group.options)})
        members = {self.full(old) for group in groups for old in group.names}
        tied = {entry.name: entry.alias for entry in self.catalog.tensors.values() if entry.alias is not None}
        for new, (first, _) in given.items():
            for other in self.origins[new]:
                if other not in members and tied.get(other) not in members:
                    raise self.differ(new, "groups of options", (first, "one"), (other, "none"))
        return made_groups

    def options(self, node: Node) -> Node:
        """Options, with tensors of the checkpoint as values; without those that are not taken."""
        kept = []
        for key, child in tree.pairs_of(node) or ():
            if self.small.issuperset(_tensors(child)):
                kept.append((key, self.inlined(child)))
            else:
                self.left_out.append(f"{self.key}.param_groups.{key}")
        return tree.mapping_node(kept)

    def inlined(self, node: Node) -> Node:
        if tree.tag_of(node) == "$tensor":
            entry = self.catalog.tensors[node["$tensor"]]
            self.united.add(entry.name)
            data = read_box(self.catalog, entry, Box.whole(entry.shape)).tobytes()
            return {"$inline": [entry.dtype.name, list(entry.shape), b64encode(data).decode()]}
        items = tree.items_of(node)
        if items is None or not tree.refers(node):
            return node
        made = [self.inlined(child) for child in items]
        return made if isinstance(node, list) else {"$tuple": made}

    def check_options(self, new: str, one: tuple[str, Node], other: tuple[str, Node]) -> None:
        mine, theirs = _by_key(one[1]), _by_key(other[1])
        for key in {**mine, **theirs} if one[1] is not other[1] else ():
            values = [options.get(key, MISSING) for options in (mine, theirs)]
            if MISSING in values or tree.text(values[0]) != tree.text(values[1]):
                raise self.differ(new, f"option {key}", (one[0], _shown(values[0])), (other[0], _shown(values[1])))


def groups_by_name(node: Node) -> list[NamedGroup] | None:
    """Options and names of parameters, also as ``torch.distributed.checkpoint`` stores them; None if parameters are not named."""
    if tree.tag_of(node) == "$param_groups":
        return [NamedGroup(group["options"], group["params"]) for group in node["$param_groups"]]
    groups = []
    for group in tree.items_of(node) or ():
        pairs = tree.pairs_of(group) or []
        names = next((v for k, v in pairs if k == "params"), None)
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            return None
        groups.append(NamedGroup(tree.mapping_node([(k, v) for k, v in pairs if k not in ("params", "param_names")]), names))
    return groups


def _shown(node: Node | Missing) -> str:
    return "nothing" if node is MISSING else tree.shorten(node)


def _numbers(catalog: Catalog, entries: Sequence[TensorEntry]) -> dict[str, str]:
    """Single numbers as texts, by name."""
    if not entries:
        return {}  # and whoever has nothing that can be read (a live state) is not asked
    # They are compared, not loaded: digests are not looked at.
    extents = catalog.extents_of([(entry, 0) for entry in entries])
    plain = [(e, x) for e, x in zip(entries, extents, strict=True) if x.codec is None]
    read = read_ranges(catalog.backend, [Range(x.path, x.offset, x.length) for _, x in plain])
    numbers = {entry.name: data for (entry, _), data in zip(plain, read, strict=True)}
    numbers |= {e.name: read_box(catalog, e, Box((), ())).tobytes() for e, x in zip(entries, extents, strict=True) if x.codec is not None}
    texts = {}
    for entry in entries:
        kind, data = entry.dtype.numpy, numbers[entry.name]
        texts[entry.name] = data.hex() if kind is None else str(np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0])
    return texts
