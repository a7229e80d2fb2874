"""Ties a checkpoint to the live objects of a state: which stored tensor goes into which memory, and what is set when all bytes are there.

Binding changes nothing. ``Binding.create`` gives memory to meta tensors, ``Binding.apply`` sets values; between the two the
tensors are filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt import units
from ckpt.catalog import Catalog, job_tensors
from ckpt.errors import MismatchError, StateError
from ckpt.plan import tree
from ckpt.plan.layout.layout import Layout
from ckpt.plan.match import Selection, enclosing_module
from ckpt.plan.tree import Node, join

from . import lazy
from .bind_optimizers import OptimizerBinder
from .dtensor import is_wrapper
from .flat_parameters import EngineState, partition_again, refresh, reshard
from .shard_table import ShardCache, ShardTable, own_name
from .sharded import NamedValues, Sharded, is_named, merge, place, same_boxes
from .targets import Binder, Binding, Setter, inline_only
from .torch_objects import (
    EXTRA_STATE,
    ParamNames,
    copies_of,
    frozen_beside,
    is_frozen,
    is_offloaded,
    names_in,
    params_of,
    refuse_zero,
    refuses_pickles,
    scan_state,
    tensors_of,
)
from .walk import Compound, PerRank, StatefulObject, is_stateful, restore_in_place, state_of, values_in

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

# Finds under which names a checkpoint has the state of an optimizer's parameters, where these are not the state's own.
#
# ``ckpt`` names a parameter within the state, ``get_optimizer_state_dict`` of torch within its module:
#
#     the state asks for    optimizer.state.model.layers.0.weight.exp_avg
#     DCP has stored        optimizer.state.layers.0.weight.exp_avg
#
# The module in front, here ``model``, is that of ``ckpt.plan.match``. The caller's own renames come first: with
# ``rename={"optim.*": "optimizer.*"}``, what is stored as ``optim.state.layers.0.weight.exp_avg`` is found as well. If names match once
# these are renamed, or if nobody can know the module, nothing is mapped.

_USUAL = ("step", "exp_avg", "momentum_buffer")
"""Keys of the state of most optimizers."""


def optimizer_renames(
    optimizers: Sequence[tuple[str, Optimizer]], names: ParamNames, catalog: Catalog, selection: Selection
) -> tuple[tuple[str, str], ...]:
    """Rename rules for optimizers of a state, by path, whose parameters the checkpoint names within their module: from the names that the
    caller's own renames give."""
    stored: Set[str] = job_tensors(catalog).keys()
    if selection.rename and optimizers:
        stored = {selection.renamed(name) for name in stored}
    rules: list[tuple[str, str]] = []
    for path, optimizer in optimizers:
        prefix = join(path, "state")
        wanted = {name for group in params_of(optimizer, names, path) for name, _ in group}
        keys = {*_USUAL, *(key for state in optimizer.state.values() for key in state)}
        first = next(iter(wanted), None)
        if first is None or any(f"{prefix}.{first}.{key}" in stored for key in keys):
            continue  # the usual case, without a look at every name
        owners = {name[len(prefix) + 1 :].rpartition(".")[0] for name in stored if name.startswith(f"{prefix}.")}
        module = enclosing_module(owners, wanted)
        # One path explains what it can: a rank of a pipeline wants a part, and a parameter without a gradient has no state.
        if module is not None and (not module.rivals or len(module.explained) == len(wanted)):
            rules.append((f"{prefix}.*", f"{prefix}.{module.path}.*"))
    return tuple(rules)


def bind(
    state: object,
    catalog: Catalog,
    *,
    rank: int,
    ranks: tuple[int, ...],
    layout: Layout | None,
    selection: Selection,
    cast: bool,
    shards: ShardCache | None = None,
) -> Binding:
    """Walk a state and match it with a checkpoint. Changes nothing. ``shards`` is what an earlier walk found, if there was one."""
    seen = scan_state(state)
    with lazy.torch.no_grad() if lazy.imported else nullcontext():
        shard_table = ShardTable(rank, ranks, layout, seen.meshes, shards=shards or ShardCache())
        names = names_in(seen.modules)
        renames = optimizer_renames(seen.optimizers, names, catalog, selection)
        walk = _BindWalk(catalog, shard_table, selection.followed_by(renames), names, cast=cast)
        walk.binding.renames = renames
        walk.value(state, catalog.state, "", _no_setter)
        if walk.named is not None:
            walk.bind_named(walk.named)
        walk.settle()
        shard_table.shards.known.update(shard_table.anew)
    del walk.optimizers  # a circle: all that the walk knows would wait for the collector
    return walk.binding


def _no_setter(value: object) -> None:
    raise AssertionError("the root of a state is a container and is changed in place")


def _reorder(target: OrderedDict[Any, Any], keys: Iterable[Any]) -> None:
    for key in keys:
        if key in target:
            target.move_to_end(key)


class _BindWalk(Binder):
    def __init__(self, catalog: Catalog, shard_table: ShardTable, selection: Selection, names: ParamNames, *, cast: bool) -> None:
        super().__init__(catalog, shard_table, selection, cast=cast)
        self.optimizers = OptimizerBinder(self, names)
        self.named: NamedValues | None = None
        self._own: dict[str, torch.Tensor] = {}
        self._left = 0  # mappings of the checkpoint that dicts of plain values did not take

    # ---- containers

    def value(self, target: object, node: Node, path: str, put: Setter) -> None:
        """Bind one value of the state: recurse where live objects lie below it, replace it where not."""
        if isinstance(target, lazy.Tensor) and type(target) not in lazy.PLAIN and is_wrapper(target):
            self.wrapper(path, target, node)
        elif isinstance(target, (lazy.Tensor, Sharded)):  # a ShardedTensor too
            self.tensor(path, target)
        elif isinstance(target, PerRank):
            self.per_rank(target, path)
        elif isinstance(target, Compound):
            self.compound(target, node, path)
        elif isinstance(target, lazy.Module):
            if id(target) in self.optimizers.names.engines:
                self.compound(EngineState(target), node, path)
            else:
                self.module(target, node, path)
        elif isinstance(target, lazy.Optimizer):
            self.optimizers.bind(target, node, path)
        elif type(target) is not dict and is_stateful(target):
            self.stateful(target, node, path)
        elif isinstance(target, dict) and ((live := _has_live(target) if path else _LIVE) or self.nodes.children(node) is not None):
            self.mapping(target, node, path, live=live)
        elif isinstance(target, (list, tuple)) and _has_live(target):
            self.sequence(target, node, path, put)
        elif type(target) not in tree.SCALARS and is_named(target):
            self.named = self.named or NamedValues()
            self.named.add(target)
            self.binding.values.append(path)  # of a list that has plain values too: a save left its place empty
        elif self.selection.wants(path):
            self.plain(node, path, lambda value: put(restore_in_place(target, value)))

    def mapping(self, target: dict[Any, Any], node: Node, path: str, *, live: int) -> None:
        """Bind each key of a dict. ``live`` is what it holds (``_has_live``). If that is plain values, or what says its name itself, it
        also takes the keys that just the checkpoint has; in the latter case tensors, too: a sharded state dict may not have all yet.

        A state may have millions of plain values. Where nothing is selected or renamed, those of one dict that stand for themselves are
        taken together, and if all that is stored there is taken, the path of the dict stands for theirs.
        """
        start, tensor, left = f"{path}." if path else "", self.tensor, self._left
        children = self.nodes.children(node) or {}
        # The fast path for large states of plain values: a scalar that replaces a scalar needs no path, no glob and
        # no closure. They are collected and set in one go at the end, after everything was matched.
        everything = not self.selection.only and not self.selection.rename
        alike: list[Any] = []
        for key, value in list(target.items()):
            if everything and type(value) in tree.SCALARS and type(children.get(key, tree.MISSING)) in tree.SCALARS and key == key:
                alike.append(key)
                continue
            at = start + key if type(key) is str and key.isascii() else join(path, key)
            # First, and without a closure: there may be many thousand.
            if type(value) in lazy.PLAIN or (isinstance(value, lazy.Tensor) and not is_wrapper(value)):
                stored = self.entries.get(at) if at.endswith(EXTRA_STATE) else None
                if stored is None or stored.shape == tuple(value.shape) or stored.dtype.name != "uint8" or key not in children:
                    tensor(at, value)
                elif self.selection.wants(at):  # what a module has serialised, of any length
                    self.decoded(self.nodes.child(node, key, at), at, partial(target.__setitem__, key))
            else:
                self.value(value, self.nodes.child(node, key, at), at, partial(target.__setitem__, key))
        runs = [alike] if live == _LIVE else [alike, *self.added(target, children, path, everything=everything, tensors=live == _NAMED)]
        if not live and not children and self.selection.wants(path):
            self.binding.values.append(path)
        if any(runs):
            complete = everything and not live and self._left == left
            self.binding.values += [path] if complete else [join(path, key) for run in runs for key in run]
            self.binding.apply += [partial(_take, target, run, children) for run in runs[:1] if run]
        if isinstance(target, OrderedDict) and not live:  # its order is a part of what it is
            self.binding.apply.append(partial(_reorder, target, children))

    def added(
        self, target: dict[Any, Any], children: Mapping[Any, Node], path: str, *, everything: bool, tensors: bool
    ) -> Iterator[list[Any]]:
        """Take the keys that just the checkpoint has, in its order. Gives those whose values stand for themselves, as they are taken."""
        run: list[Any] = []
        for key, child in children.items():
            if key in target:
                continue
            if everything and type(child) in tree.SCALARS:
                if not run:
                    self.binding.apply.append(partial(_take, target, run, children))
                run.append(key)
                continue
            if run:
                yield run
                run = []
            at = join(path, key)
            if self.selection.wants(at) and self.selection.renamed(at) == at and (tensors or not tree.refers(child)):
                (self.decoded if tensors else self.plain)(child, at, partial(target.__setitem__, key))
            else:
                self._left += 1
        if run:
            yield run

    def sequence(self, target: Sequence[object], node: Node, path: str, put: Setter) -> None:
        loaded = list(target)
        stored = tree.items_of(node)
        if stored is not None and len(stored) != len(loaded):
            self.binding.misfits.append(f"{path}: {len(stored)} elements in the checkpoint, {len(loaded)} in the state")
            return
        before = len(self.binding.values)
        for i, item in enumerate(target):
            at = join(path, i)
            self.value(item, self.nodes.child(node, i, at), at, partial(loaded.__setitem__, i))
        if stored is not None and not tree.refers(node):  # then the stored list is a leaf as a whole: taken if all in it is
            # A stored list of plain values is one leaf. It counts as used only if all of its elements were taken,
            # whether one by one or through a container inside of it; else strict loads report what is left.
            taken = set(self.binding.values[before:])
            if all(_is_below(taken, join(path, i), where) for i, item in enumerate(stored) for where, _ in tree.leaves(item)):
                self.binding.values.append(path)
        if isinstance(target, list):
            self.binding.apply.append(lambda: target.__setitem__(slice(None), loaded))
        else:
            self.binding.apply.append(lambda: put(tuple(loaded)))

    # ---- objects

    def bind_named(self, named: NamedValues) -> None:
        """Bind what says its name itself, wherever it lies in the state."""
        for name, values in named.boxes.items():
            if not self.selection.wants(name):
                continue
            again = list(same_boxes(values))
            twice = {id(value) for _, value in again}
            local = self.shard_table.add(name, place(name, [v for v in values if id(v) not in twice], self.shard_table.rank))
            entry, shape = self.entries.get(name), local.info.shape
            if values[0].allow_shape_mismatch and entry is not None and len(entry.shape) == len(shape):
                stored = entry.logical or entry.shape  # what both have is loaded, and the rest of the state's zeroed
                local.info = replace(local.info, shape=tuple(map(max, entry.shape, shape)), logical=stored)
            self.target(name, local)
            self.binding.apply += [partial(second.data.detach().copy_, first.data.detach()) for first, second in again]
        for name, objects in named.objects.items():
            for each in objects if self.selection.wants(name) else ():
                self.decoded(self.nodes.child(self.catalog.state, name, name), name, partial(setattr, each, "data"), template=each.data)
        self.binding.apply += [partial(merge, factory, built) for factory, built in named.factories]

    def module(self, module: torch.nn.Module, node: Node, path: str) -> None:
        parts = tensors_of(module)
        frozen = frozen_beside(module, parts) if self.selection.trainable else frozenset[str]()
        copies = [at for n in copies_of(module, parts) if n not in frozen and self.selection.wants(at := join(path, n))]
        if copies:
            raise StateError(
                f"the module's state_dict() gives copies of {units.plural(len(copies), 'tensor')}, which cannot be filled in place",
                where=f"tensor {copies[0]}",
                hint="load into module.state_dict() itself, and give that to module.load_state_dict()",
            )
        meta = [name for name, t in parts.tensors.items() if t.is_meta and not (self.selection.trainable and is_frozen(t))]
        empty = [at for name in meta if self.selection.wants(at := join(path, name))]
        if empty and is_offloaded(module):
            raise StateError(
                "accelerate offloads the module, and would put its own values back before the next forward pass",
                where=f"tensor {empty[0]}",
                hint="load before cpu_offload, disk_offload or dispatch_model; or call accelerate.hooks.remove_hook_from_submodules first",
            )
        before = len(self.binding.shapes)
        if parts.flat:
            self.binding.create += [lambda: reshard(module), lambda: partition_again(module)]
            self.binding.apply.append(lambda: refresh(module))
        for name, part in parts.flat.items():
            self.tensor(join(path, name), part)
        for name, tensor in parts.tensors.items():
            if name in frozen:
                self.left_alone(join(path, name), tensor)
            elif type(tensor) not in lazy.PLAIN and is_wrapper(tensor):
                self.wrapper(at := join(path, name), tensor, self.nodes.child(node, name, at))
            else:
                self.tensor(join(path, name), tensor)
        for number in range(before, len(self.binding.shapes)):
            self.resizes(number, path, parts.owners)
        for name in parts.extra:
            state_name = join(path, name)
            if self.selection.wants(state_name):
                child, owner = self.nodes.child(node, name, state_name), parts.owners[name]
                self.decoded(child, state_name, owner.set_extra_state)
                if tree.tag_of(child) == "$tensor" and refuses_pickles(owner):
                    self.binding.trials.append((state_name, child, owner.set_extra_state))

    def resizes(self, number: int, path: str, owners: Mapping[str, torch.nn.Module]) -> None:
        """Say of a shape that does not fit what to do if its module changes shapes when it loads, which is not asked for the others."""
        text = self.binding.shapes[number]
        owner = owners.get(text.partition(": ")[0].removeprefix(f"{path}."))
        if owner is None or ": shape " not in text:
            return
        for method in ("_load_from_state_dict", "load_state_dict"):
            if getattr(type(owner), method) is not getattr(lazy.Module, method):
                self.binding.shapes[number] += f" ({type(owner).__name__} has a {method} of its own, which is not called)"
                return

    def stateful(self, target: Any, node: Node, path: str) -> None:
        refuse_zero(target, path)
        below = (f"{path}.{where}" for where, _ in tree.leaves(node)) if node is not tree.MISSING else ()
        if not self.selection.wants(path) and not any(map(self.selection.wants, below)):
            return
        if lazy.imported and isinstance(target, lazy.torch.amp.GradScaler) and target.is_enabled() and tree.pairs_of(node) == []:
            self.binding.misfits.append(f"{path}: of a GradScaler that was not enabled, enabled in the state (only= leaves it out)")
        template, before = state_of(target, path), len(self.binding.apply)
        self.decoded(node, path, target.load_state_dict, template=template)
        tensors = _tensor_names(node) or any(isinstance(value, lazy.Tensor) for _, value in values_in(template, ""))
        if len(self.binding.apply) > before and not tensors:
            self.binding.objects.append(StatefulObject(path=path, target=target, take=self.binding.apply.pop(), old=template))

    def per_rank(self, target: PerRank, path: str) -> None:
        if not self.selection.wants(path):
            return
        self.binding.values.append(path)
        nodes = _AtPath(self.catalog.ranks, path)
        # The own rank first: with values that lie apart, looking at another rank's reads its row from storage.
        some = self.shard_table.position in nodes or len(nodes)  # in this order: the values of other ranks may have to be read
        try:
            chosen = target.choose(nodes, self.catalog.world_size, self.shard_table.rank, self.shard_table.ranks) if some else None
        except MismatchError as err:
            self.binding.misfits.append(f"{path}: {err.message}")
            return
        if chosen is None:
            self.binding.missing.append(path)
            return
        values: list[Any] = [None] * len(chosen.ranks)
        for i, rank in enumerate(chosen.ranks):
            fresh = {name: self._own_tensor(name) for name in _tensor_names(nodes[rank])}
            self.binding.apply.append(partial(self._rebuild, nodes[rank], fresh, partial(values.__setitem__, i)))
        self.binding.apply.append(lambda: chosen.take(values))

    @staticmethod
    def _rebuild(node: Node, tensors: Mapping[str, torch.Tensor], put: Setter) -> None:
        put(tree.decode(node, lambda kind, payload: tensors[payload] if kind == "$tensor" else inline_only(kind, payload)))

    def compound(self, target: Compound, node: Node, path: str) -> None:
        slots, before = target.slots(), len(self.binding.apply)
        self.mapping(slots, node, path, live=_has_live(slots) if path else _LIVE)
        if len(self.binding.apply) > before:
            self.binding.apply.append(lambda: target.loaded(slots))

    def _own_tensor(self, stored: str) -> torch.Tensor:
        if stored in self._own:
            return self._own[stored]  # tied when it was saved
        entry = self.referred(stored)
        new = self._own[stored] = self.room_for(entry)
        local = self.shard_table.add_own(f"{stored}>", new)
        self.binding.targets[own_name(f"{stored}>", self.shard_table.position)] = (local, entry)
        return new


class _AtPath(Mapping[int, Node]):
    """The nodes that ranks have at one path, by rank; of each rank that is asked for, and of all if all are."""

    def __init__(self, ranks: Mapping[int, Mapping[str, Node]], path: str) -> None:
        self._ranks = ranks
        self._path = path

    def __getitem__(self, rank: int) -> Node:
        return self._ranks[rank][self._path]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(rank for rank, nodes in self._ranks.items() if self._path in nodes))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _take(target: dict[Any, Any], keys: Sequence[Any], children: Mapping[Any, Node]) -> None:
    for key in keys:
        target[key] = children[key]


def _is_below(taken: Set[str], at: str, where: str) -> bool:
    """Whether the path ``where`` below ``at``, or something that contains it and is not above ``at``, was taken."""
    return any(p in taken for p in (at, *(f"{at}.{where[:i]}" for i, c in enumerate(f"{where}.") if c == "." and i)))


_NAMED, _LIVE = 1, 2


def _has_live(value: object) -> int:
    """Whether a container holds anything that is loaded in place: ``_LIVE``, or ``_NAMED`` if all of it says its name itself."""
    if type(value) in tree.SCALARS:
        return 0
    if isinstance(value, (dict, list, tuple)):
        most = 0
        for child in value.values() if isinstance(value, dict) else value:  # until the first that is live: there may be many thousand
            if type(child) not in tree.SCALARS and (most := max(most, _has_live(child))) == _LIVE:
                break
        return most
    live = isinstance(value, (lazy.Tensor, Sharded, PerRank, Compound, lazy.Module, lazy.Optimizer))
    return _LIVE if live or is_stateful(value) else _NAMED if is_named(value) else 0


def _tensor_names(node: Node) -> list[str]:
    return [leaf["$tensor"] for _, leaf in tree.leaves(node) if isinstance(leaf, dict) and "$tensor" in leaf]
