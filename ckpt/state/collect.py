"""What a rank brings to a save: its tensors with their places, the JSON nodes of everything else, and what of it changes only behind a
fence."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ckpt.errors import CoverageError, StateError
from ckpt.plan.layout.layout import Layout
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.tree import Node, child_path, encode, join, leaves, mapping_node, pairs_of, tag_of
from ckpt.plan.values import REPLICA, StatePart

from . import lazy
from .dtensor import dtensor_types, is_wrapper
from .flat_parameters import EngineState, FlatPart
from .shard_table import ShardCache, ShardTable, StateOf
from .sharded import NamedValues, Sharded, is_main, is_named, place
from .subclasses import TENSORS, describe
from .tensors import LocalTensor
from .torch_objects import (
    EXTRA_STATE,
    LEFT_OUT,
    ModuleTensors,
    ParamNames,
    PartTaker,
    added_by,
    check_keys,
    copies_of,
    frozen_beside,
    inline,
    is_frozen,
    names_in,
    params_of,
    refuse_zero,
    scan_state,
    tensors_of,
    without_addresses,
)
from .walk import Compound, PerRank, is_stateful, state_of

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

# What of a state changes only behind a fence (``engine.save.staging``), so that a save in the background may copy it later.
#
# Torch calls a hook of ours before each optimizer's step, and the hook waits. Nothing else that changes tensors waits by itself. An
# optimizer counts that is in the state, or that the hook has seen: who publishes weights seldom gives the optimizer, too.

seen: WeakSet[Optimizer] = WeakSet()
"""Optimizers of this process that the hook has waited for."""


class Fenced:
    """An object that calls ``fence()`` before it changes its tensors; or leaves changing them, and parameters of the state's modules, to
    ``optimizers``."""

    optimizers: Sequence[Optimizer] = ()


def fencing(value: object) -> Sequence[Optimizer] | None:
    """The optimizers whose steps alone change the tensors of a value; None if something may change them that does not wait."""
    optimizers = [value] if isinstance(value, lazy.Optimizer) else value.optimizers if isinstance(value, Fenced) else None
    return optimizers if optimizers is not None and all(map(_waits, optimizers)) else None


def _waits(optimizer: Optimizer) -> bool:
    """Whether its step runs torch's hooks: not if its class has never called ``Optimizer.__init__``, or its step was replaced."""
    if getattr(optimizer.step, "hooked", False):
        return True
    inner = getattr(optimizer, "optimizer", None)  # accelerate's, for one, has the real one inside
    return isinstance(inner, lazy.Optimizer) and _waits(inner)


log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Collected:
    """One rank's share of a state. ``own`` are the nodes of its ``PerRank`` values by path."""

    shard_table: ShardTable
    params: ParamNames
    state: Node = None
    own: dict[str, Node] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    """Globs of the part that no name of this rank matches."""
    trains: bool = True
    """Whether the part has a tensor of this rank that requires a gradient."""
    changers: list[tuple[object, int, int]] = field(default_factory=list)
    """Objects of the state, and which of ``shard_table.names`` are theirs: of their own tensors, from the first to the last."""

    def fenced(self) -> set[str]:
        """Stored names of what changes only behind a fence: what an optimizer steps, and what is :class:`Fenced`. Of what several names
        of the state make up, only if all of them are."""
        stored, names, optimizers = self.shard_table.names, set[str](), {*seen}
        for value, first, last in self.changers:
            waiting = fencing(value)
            if waiting is not None:
                names.update(islice(stored, first, last))
                optimizers.update(waiting)
        owners = self.params.owners
        groups = (g for o in optimizers for g in owners.get(id(o)) or [group["params"] for group in o.param_groups])
        for param in (p for group in groups for p in group if p.requires_grad):
            # Not the frozen ones, as a forward pass may write a momentum encoder or a codebook that the optimizer was given, too.
            # Only those in modules of the state: a name that the optimizer was given may be that of another tensor.
            if id(param) in self.params.plain:
                names.add(self.params.plain[id(param)])
                names.update(self.shard_table.fields.get(self.params.plain[id(param)], ()))
            names.update(name for name, _ in self.params.flat.get(id(param), {}).values())
        unfenced = {s for name, s in stored.items() if name not in names} | self.shard_table.forward_mutable
        return {stored[name] for name in names if name in stored} - unfenced


def collect(
    state: object,
    *,
    rank: int,
    ranks: tuple[int, ...],
    layout: Layout | None,
    shards: ShardCache | None = None,
    part: StatePart | None = None,
) -> Collected:
    """Walk a state. No tensor is copied. ``shards`` is what the last walk found, if there was one; ``part`` what is wanted, if not all."""
    seen = scan_state(state)
    with lazy.torch.no_grad() if lazy.imported else nullcontext():
        shard_table = ShardTable(rank, ranks, layout, seen.meshes, shards=shards or ShardCache())
        parts = dict[int, ModuleTensors]()
        collected = Collected(shard_table, names_in(seen.modules, parts))
        taker = None if part is None else PartTaker(part)
        walk = _CollectWalk(collected, shard_table, parts, taker)
        node = encode(state, "", walk.leaf, dict.fromkeys((*lazy.PLAIN, *dtensor_types()), walk.tensor))
        if walk.named is not None:
            node = walk.with_named(node, walk.named)
        if taker is not None:
            node, collected.idle, collected.trains = taker.labelled(node), taker.idle(), taker.trains
        collected.state = _rehomed(node, "", walk.renumbered)[0] if walk.renumbered else node
    for tensor in shard_table.tensors.values():
        for _, memory in tensor.parts:
            if memory.is_meta or (not memory.untyped_storage().nbytes() and memory.numel() > 0):
                raise StateError(
                    "a tensor on the meta device, or one whose memory was freed, has no values to save",
                    where=f"tensor {tensor.state_name}",
                    hint="give it memory first: module.to_empty(device=...) and initialise it, or load a checkpoint into it; if accelerate "
                    "offloads the module, accelerate.hooks.remove_hook_from_submodules brings its values back",
                )
    for name in shard_table.unproven & shard_table.tensors.keys():
        _check_complete(shard_table.tensors[name], rank)
    shard_table.shards.known.update(shard_table.anew)
    if _may_repeat(collected.state):  # a load could not tell the two apart
        paths = set[str]()
        for path, _ in leaves(collected.state):
            if path in paths:
                raise StateError("two values of the state have this path", where=path, hint="rename one of the keys on the way to it")
            paths.add(path)
    return collected


def _may_repeat(node: Node) -> bool:
    """Whether two values can have one path: only where a key begins as another one of the same mapping, up to a dot, or is no word."""
    if not isinstance(node, dict):
        return isinstance(node, list) and any(map(_may_repeat, node))
    for key, child in node.items():
        if key == "$map" or (not key and not (type(child) is dict and "$tensors" in child)):  # what an optimizer or a module has there
            return True
        # Paths are keys joined by dots, so {"a": {"b": 1}, "a.b": 2} has two values at "a.b". That needs one key that
        # begins with another one and a dot: the common state, with no dots in its keys, is not searched at all.
        at = key.find(".")
        while at >= 0:
            if key[:at] in node:
                return True
            at = key.find(".", at + 1)
    below = [n for n in node.values() if type(n) is list or (type(n) is dict and "$tensor" not in n)]
    return any(map(_may_repeat, below))


def _check_complete(tensor: LocalTensor, rank: int) -> None:
    """Raise unless this rank has all that a tensor's layout gives it."""
    parts = tensor.parts
    if len(parts) == 1 and parts[0].box.shape == tensor.info.shape:
        return
    pieces = tensor.info.layout.pieces(tensor.info.shape, rank)
    if len(parts) == len(pieces) == 1 and parts[0].box.shape == pieces[0].box.shape:
        return
    present, due = (sum(p.box.numel for p in boxes) for boxes in (parts, pieces))
    if present != due:
        raise CoverageError(
            f"rank {rank} has {present} of the {due} elements that the layout gives it",
            where=f"tensor {tensor.info.name}",
            hint="put all that the layout stacks into the state: every expert of the rank, with this tensor",
        )


def _rehomed(node: Node, path: str, renumbered: Mapping[str, str]) -> tuple[Node, list[str]]:
    """Move references to renumbered tensors to where their stored names lead, so that the ranks' states can be joined: layer 0 of a
    stage is not layer 0 of the job. Returns the node and the names that belong further up."""
    pairs = pairs_of(node)
    if pairs is None:
        return node, []
    kept: list[tuple[Node, Node]] = []
    moved: dict[str, None] = {}
    for key, child in pairs:
        at = child_path(path, key)
        if at in renumbered and tag_of(child) == "$tensor":
            moved[renumbered[at]] = None
            continue
        changed, below = _rehomed(child, at, renumbered)
        moved |= dict.fromkeys(below)
        if changed or not below:
            kept.append((key, changed))
    # Names below this node's own path stay here, under what is left of their name; the others travel up, until a
    # container is reached whose path they begin with. In the end the ranks' states have the same tree.
    start = f"{path}." if path else ""
    home = [name for name in moved if name.startswith(start)]
    kept += [(name[len(start) :], {"$tensor": name}) for name in home]
    return mapping_node(kept), [name for name in moved if not name.startswith(start)]


@dataclass(eq=False)
class _CollectWalk:
    """The ``leaf`` callbacks of one walk over a state."""

    collected: Collected
    shard_table: ShardTable
    parts: dict[int, ModuleTensors]
    """Tensors of the state's modules, by id."""
    taker: PartTaker | None
    """What decides what a part has; None for a whole state."""
    renumbered: dict[str, str] = field(default_factory=dict)
    """Path and stored name of tensors that the layout gave another name; not those inside of what has a ``state_dict``."""
    named: NamedValues | None = None

    def leaf(self, value: object, path: str) -> Node:
        if isinstance(value, (lazy.Tensor, Sharded)):
            return self.tensor(value, path)
        if isinstance(value, PerRank):
            if self.taker is not None and not self.taker.wants(path):
                return LEFT_OUT
            if path in self.collected.own:
                raise StateError("two PerRank values of the state have this path", where=path, hint="rename one of them")
            self.collected.own[path] = encode(value.saved(self.shard_table.rank, self.shard_table.ranks), path, self.own_leaf)
            return {"$per_rank": True}
        if isinstance(value, lazy.Module):
            engine = id(value) in self.collected.params.engines
            return self.leaf(EngineState(value), path) if engine else self.module(value, path)
        before = len(self.shard_table.names)
        node: Node = None
        if isinstance(value, Compound):
            node = encode(value.parts(), path, self.leaf)
        elif isinstance(value, lazy.Optimizer):
            node = self.optimizer(value, path)
        elif is_stateful(value):
            node = self.stateful(value, path)
        elif is_named(value):
            self.named = self.named or NamedValues()
            self.named.add(value)
            return LEFT_OUT
        self.collected.changers.append((value, before, len(self.shard_table.names)))
        return node

    def stateful(self, value: object, path: str) -> Node:
        refuse_zero(value, path)
        # What an object gives of itself goes back to it as it was: names inside are not moved to where a layout would have them.
        outside, given = dict(self.renumbered), state_of(value, path)
        if self.taker is not None and not self.taker.wants_some(path, given):
            return LEFT_OUT
        taker, self.taker = self.taker, None  # all of it
        node = encode(given, path, self.inner_leaf)
        self.taker, self.renumbered = taker, outside
        return node if taker is None else taker.decided(node)

    def tensor(self, tensor: Any, path: str) -> Node:
        if self.taker is not None and not self.taker.wants(path, tensor):
            return LEFT_OUT
        if type(tensor) not in lazy.PLAIN and is_wrapper(tensor):
            placed = self.shard_table.add_fields(path or _named(path), tensor)
            return {**describe(tensor, path), TENSORS: {field: {"$tensor": local.info.name} for field, local in placed.items()}}
        self.shard_table.add(path or _named(path), without_addresses(tensor) if path.endswith(EXTRA_STATE) else tensor)
        name = self.shard_table.names[path]
        if name != path:
            self.renumbered[path] = name
        return {"$tensor": name}

    def inner_leaf(self, value: object, path: str) -> Node:
        """Inside of what has a ``state_dict``: only what ``load_state_dict`` can be given back."""
        if isinstance(value, (PerRank, Compound, lazy.Module, lazy.Optimizer)) or (not isinstance(value, lazy.Tensor) and is_named(value)):
            raise StateError(
                f"a {type(value).__name__} inside of an object's state_dict could not be loaded again",
                where=path,
                hint="put it into the state itself, beside the object, or its state_dict() into the object's",
            )
        return self.leaf(value, path)

    def with_named(self, state: Node, named: NamedValues) -> Node:
        """The state without the values that say their names themselves, and these beside it."""
        taker, table = self.taker or PartTaker(StatePart()), self.shard_table
        beside: dict[str, Node] = {}
        for name, boxes in named.boxes.items():
            if taker.wants(name, boxes[0].data):
                # Replicas, too, say that there is such a tensor, of which somebody has to save every box.
                beside[name] = {"$tensor": table.add(name, place(name, boxes, table.rank, main=True)).info.name}
        for name, objects in named.objects.items():
            saved = [*filter(is_main, objects)]
            if len(saved) > 1:
                raise StateError("two objects of the state have this name", where=name, hint="give all but one of them a replica_id")
            if taker.wants(name):
                beside[name] = taker.decided(encode(saved[0].data, name, self.object_leaf) if saved else {REPLICA: True})
        left = pairs_of(taker.left(state)) or []
        taken = next((key for key, _ in left if key in beside), None)
        if taken is not None:
            raise StateError(
                "a value of the state, and one that defines its name itself, have this name", where=str(taken), hint="rename one"
            )
        return mapping_node([*left, *beside.items()])

    def object_leaf(self, value: object, path: str) -> Node:
        """Inside of an object that only this rank saves."""
        if isinstance(value, lazy.Tensor):
            here = TensorLayout(Mesh.flat((self.shard_table.rank,)))
            return {"$tensor": self.shard_table.add(path, Sharded(value.detach(), tuple(value.shape), here)).info.name}
        return None

    def own_leaf(self, value: object, path: str) -> Node:
        if isinstance(value, lazy.Tensor):
            return {"$tensor": self.shard_table.add_own(_named(path), value).info.name}
        if is_stateful(value) and not isinstance(value, (lazy.Module, lazy.Optimizer)):
            return encode(state_of(value, path), path, self.own_leaf)
        return None

    def module(self, module: torch.nn.Module, path: str) -> Node:
        if not path:
            raise StateError("a module lies under an empty key, so its tensors have no prefix", hint='{"model": module}')
        parts = self.parts.get(id(module)) or tensors_of(module)
        shard_table = self.shard_table
        taker = self.taker
        flat = {name: part for name, part in parts.flat.items() if not part.elsewhere}
        wanted = {name: part for name, part in flat.items() if taker is None or taker.wants(join(path, name), part)}
        for name, part in wanted.items():
            changed = shard_table.optimizer_updated if isinstance(part.owner, lazy.Parameter) else shard_table.forward_mutable
            changed.add(shard_table.add(join(path, name), part).info.name)
        tensors: Mapping[str, torch.Tensor] = parts.tensors
        if taker is not None:
            frozen = frozen_beside(module, parts) if taker.part.trainable else frozenset[str]()
            tensors = {n: tensor for n, tensor in tensors.items() if n not in frozen and taker.wants(join(path, n), tensor)}
        if added_by(module, parts):
            _warn_of_copies(module, parts, path, tensors)
        extra: list[tuple[str, Node]] = []
        for name, tensor in tensors.items():
            if type(tensor) not in lazy.PLAIN and is_wrapper(tensor):
                stored = {local.info.name for local in shard_table.add_fields(join(path, name), tensor).values()}
                extra.append((name, describe(tensor, join(path, name))))
            else:
                stored = {shard_table.add(join(path, name), tensor).info.name}
            # Buffers, and embeddings with max_norm, whose rows that are looked up are scaled in the forward pass.
            if not isinstance(tensor, lazy.Parameter) or getattr(parts.owners[name], "max_norm", None) is not None:
                shard_table.forward_mutable |= stored
            if isinstance(tensor, lazy.Parameter):
                shard_table.optimizer_updated |= stored
                if tensor.requires_grad:
                    shard_table.trainable |= stored
                else:
                    shard_table.frozen |= stored
        node: Node = {"$tensors": path}
        if parts.extra or extra:
            named = [(n, without_addresses(value), join(path, n)) for n, value in parts.extra.items()]
            extra += [(n, encode(value, at, self.inner_leaf)) for n, value, at in named if taker is None or taker.wants(at)]
            node = mapping_node([("", node), *extra])
            wanted |= dict(extra)
        if taker is None:
            return node
        return taker.decided(node) if wanted or tensors else LEFT_OUT

    def optimizer(self, optimizer: Optimizer, path: str) -> Node:
        taker, groups = self.taker, params_of(optimizer, self.collected.params, path)
        check_keys(optimizer, self.collected.params, path)
        prefix, groups_path = join(path, "state"), join(path, "param_groups")
        values: dict[str, Node] = {"": {"$tensors": prefix}}
        param_groups = []
        for group, named in zip(optimizer.param_groups, groups, strict=True):
            complete: list[tuple[str, torch.Tensor | FlatPart]] = []
            for name, param in named:
                if isinstance(param, FlatPart) and param.elsewhere:
                    continue
                every_key = True
                if taker is not None:
                    if taker.part.trainable and is_frozen(param):
                        continue
                    every_key = taker.wants(join(path, name)) or taker.wants(f"{prefix}.{name}")  # as a load selects
                    if every_key:
                        taker.meet(param)
                complete += [(name, param)] if every_key else []
                if every_key and (group.get("fused") or optimizer.state.get(param.owner if isinstance(param, FlatPart) else param)):
                    self.shard_table.trainable.add(self.shard_table.stored_name(name, param))
                if isinstance(param, FlatPart):
                    rest = self.flat_state(optimizer.state.get(param.owner, {}), param, f"{prefix}.{name}", every_key=every_key)
                else:
                    rest = self.param_state(optimizer.state.get(param, {}), StateOf(param, name, prefix), every_key=every_key)
                if rest:
                    values[self.shard_table.stored_name(name, param)] = rest
            stored = list(dict.fromkeys(self.shard_table.stored_name(name, param) for name, param in complete))
            if stored or taker is None or (not group["params"] and taker.wants(groups_path)):
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                param_groups.append({"params": stored, "options": encode(options, groups_path, inline)})
        node = {"state": mapping_node(list(values.items())), "param_groups": {"$param_groups": param_groups}}
        if taker is None:
            return node
        has_state = any(name.startswith(f"{prefix}.") for name in self.shard_table.tensors)
        has_params = any(group["params"] for group in param_groups)
        return taker.decided(node) if has_params or has_state or len(values) > 1 else LEFT_OUT

    def param_state(self, state: dict[str, object], param: StateOf, *, every_key: bool) -> dict[str, Node]:
        """Add the tensors of one parameter's state; return the nodes of what is not a tensor. Unless ``every_key`` is wanted, each is asked
        for."""
        rest = {}
        for key, value in state.items():
            state_name = f"{param.prefix}.{param.name}.{key}"
            if not every_key and self.taker is not None and not self.taker.wants(state_name):
                continue
            if isinstance(value, lazy.Tensor) and type(value) not in lazy.PLAIN and is_wrapper(value):
                placed = self.shard_table.add_fields(state_name, value, param).values()
                self.shard_table.optimizer_updated.update(local.info.name for local in placed)
                rest[key] = describe(value, state_name)
            elif isinstance(value, lazy.Tensor):
                self.shard_table.optimizer_updated.add(self.shard_table.add(state_name, value, param).info.name)
            else:
                rest[key] = encode(value, state_name, self.leaf)
        return rest

    def flat_state(self, state: dict[str, object], part: FlatPart, state_name: str, *, every_key: bool) -> dict[str, Node]:
        """The same for a parameter in a flat one; ranks that have none of its elements have none of its state."""
        rest = {}
        for key, value in state.items() if part.count else ():
            at = f"{state_name}.{key}"
            if not every_key and self.taker is not None and not self.taker.wants(at):
                continue
            if isinstance(value, lazy.Tensor):
                self.shard_table.optimizer_updated.add(self.shard_table.add(at, part.state(value, at)).info.name)
            else:
                rest[key] = encode(value, at, self.leaf)
        return rest


_warned: WeakSet[torch.nn.Module] = WeakSet()


def _warn_of_copies(module: torch.nn.Module, parts: ModuleTensors, path: str, wanted: Collection[str]) -> None:
    """Say it at the first save, not at the load after the run has died."""
    copies = [join(path, name) for name in copies_of(module, parts) if name in wanted] if module not in _warned else []
    if copies:
        _warned.add(module)
        log.warning(
            "the state_dict() of the module at %r gives copies of tensors (%s), so a load into the module will be refused: "
            "save and load module.state_dict() itself, and give that to module.load_state_dict()",
            path,
            ", ".join(copies[:3]) + (", …" if len(copies) > 3 else ""),
        )


def _named(path: str) -> str:
    if not path:
        raise StateError("a tensor of the state has no name", hint='pass a mapping, with a name for each tensor: {"name": tensor}')
    return path
