"""Ties a checkpoint to the live objects of a state: which stored tensor goes into which memory, and what is set when all bytes are there.

Binding changes nothing. ``Binding.create`` gives memory to meta tensors, ``Binding.apply`` sets values; between the two the
tensors are filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt import tree
from ckpt.catalog import Catalog, TensorEntry
from ckpt.errors import CorruptError, FormatError, ShapeError, StateError
from ckpt.plan.match import Selection, misfit
from ckpt.plan.nodes import Nodes
from ckpt.rules import Layout
from ckpt.tree import MISSING, Node, join

from .collect import check_root, is_stateful, stored_param_name
from .dtensor import DTensor
from .memory import raw_view
from .meshes import meshes_in
from .modules import copies_of, modules_in, tensors_of
from .optimizers import decode_inline, names_in, on_host, params_of, set_options, state_path
from .per_rank import PerRank
from .place import Placer, own_name
from .refill import like, refill
from .tensors import Held, LocalTensor, torch_dtype

Setter = Callable[[Any], None]


@dataclass(eq=False)
class Binding:
    """What a load will do on this rank, and everything that does not fit.

    ``targets``: name in the state → (memory, stored tensor). ``used``: stored names that go somewhere. ``values``: paths of JSON
    values that are taken.
    """

    targets: dict[str, tuple[LocalTensor, TensorEntry]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    values: list[str] = field(default_factory=list)
    create: list[Callable[[], None]] = field(default_factory=list)
    apply: list[Callable[[], None]] = field(default_factory=list)


def bind(
    state: object, catalog: Catalog, *, rank: int, ranks: tuple[int, ...], layout: Layout | None, selection: Selection, cast: bool
) -> Binding:
    """Walk a state and match it with a checkpoint. Changes nothing.

    Raises:
        UsageError, StateError, LayoutError: as for a save.
    """
    check_root(state)
    walk = _Walk(catalog, Placer(rank, ranks, layout, meshes_in(state)), selection, names_in(modules_in(state)), cast=cast)
    walk.value(state, catalog.state, "", _no_setter)
    walk.settle()
    return walk.found


def _no_setter(value: object) -> None:
    raise AssertionError("the root of a state is a container and is changed in place")


@dataclass(frozen=True, slots=True)
class _Param:
    """A parameter of an optimizer: its name in the state and in the checkpoint; ``host``: its single numbers are in host memory;
    ``whole``: all of its state is wanted."""

    states: MutableMapping[Any, Any]
    param: torch.Tensor
    name: str
    stored: str
    prefix: str
    host: bool
    whole: bool

    def said(self, key: str) -> str:
        return f"{self.prefix}.{self.name}.{key}"

    def stored_path(self, key: str) -> str:
        return f"{self.prefix}.{self.stored}.{key}"


class _Walk:
    def __init__(self, catalog: Catalog, placer: Placer, selection: Selection, names: Mapping[int, str], *, cast: bool) -> None:
        self.catalog = catalog
        self.placer = placer
        self.selection = selection
        self.cast = cast
        self.names = names
        self.found = Binding()
        self.entries = selection.view({n: e for n, e in catalog.tensors.items() if e.rank is None})
        self.nodes = Nodes(catalog.state, selection)
        self._by_param: dict[str, dict[str, dict[str, TensorEntry]]] = {}
        self._absent: list[tuple[str, LocalTensor]] = []
        self._meta: list[tuple[LocalTensor, torch.Tensor]] = []
        self._own: dict[str, torch.Tensor] = {}

    def settle(self) -> None:
        """A tied name that the checkpoint lacks is not missing if the memory is filled under another name. What is missing gets no
        memory."""
        filled = {id(local) for local, _ in self.found.targets.values()}
        self.found.missing += [name for name, local in self._absent if id(local) not in filled]
        self.found.create += [partial(self.materialise, local, tensor) for local, tensor in self._meta if id(local) in filled]

    # ---- containers

    def value(self, target: object, node: Node, path: str, put: Setter) -> None:
        """Bind one value of the state: recurse where live objects lie below it, replace it where not."""
        if isinstance(target, torch.Tensor):
            self.tensor(path, target)
        elif isinstance(target, PerRank):
            self.per_rank(target, path)
        elif isinstance(target, torch.nn.Module):
            self.module(target, node, path)
        elif isinstance(target, Optimizer):
            self.optimizer(target, node, path)
        elif is_stateful(target):
            self.stateful(target, node, path)
        elif isinstance(target, dict) and (not path or _has_live(target)):
            for key in list(target):
                at = join(path, key)
                self.value(target[key], self.nodes.child(node, key, at), at, _item_setter(target, key))
        elif isinstance(target, (list, tuple)) and _has_live(target):
            self.sequence(target, node, path, put)
        elif self.selection.wants(path):
            self.plain(node, path, lambda value: put(refill(target, value)))

    def sequence(self, target: Sequence[object], node: Node, path: str, put: Setter) -> None:
        loaded = list(target)
        stored = tree.items_of(node)
        if stored is not None and len(stored) != len(loaded):
            self.found.misfits.append(f"{path}: {len(stored)} elements in the checkpoint, {len(loaded)} in the state")
            return
        for i, item in enumerate(target):
            at = join(path, i)
            self.value(item, self.nodes.child(node, i, at), at, _item_setter(loaded, i))
        if isinstance(target, list):
            self.found.apply.append(lambda: target.__setitem__(slice(None), loaded))
        else:
            self.found.apply.append(lambda: put(tuple(loaded)))

    def plain(self, node: Node, path: str, put: Setter) -> None:
        if node is MISSING:
            self.found.missing.append(path)
            return
        if tree.refers(node):
            self.found.misfits.append(f"{path}: tensors in the checkpoint, a plain value in the state")
            return
        self.found.values.append(path)
        self.found.apply.append(lambda: put(tree.decode(node, _inline_only)))

    # ---- leaves

    def tensor(self, said: str, tensor: torch.Tensor) -> None:
        """A tensor of the state: filled in place; on the meta device it gets memory first."""
        if not self.selection.wants(said):
            return
        local = self.placer.add(said, tensor)
        self.target(said, local)
        if tensor.device.type == "meta":
            self._meta.append((local, tensor))

    def target(self, said: str, local: LocalTensor) -> None:
        """Match a placed tensor with its stored one."""
        name = self.placer.names[said]
        entry = self.entries.get(name)
        if entry is None:
            self._absent.append((name, local))
            return
        self.found.used.add(entry.name)
        problem = misfit(local.info, entry, cast=self.cast)
        if problem is not None:
            self.found.misfits.append(f"{name}: {problem}")
            return
        _check_writable(name, local)
        if entry.dtype != local.info.dtype:
            self.found.cast.append(name)
        first = self.found.targets.get(local.info.name)
        if first is None or name == local.info.name:
            self.found.targets[name] = (local, entry)
        elif (entry.alias or entry.name) != (first[1].alias or first[1].name):
            self.compare(name, local, entry, first[1])

    def compare(self, name: str, local: LocalTensor, entry: TensorEntry, other: TensorEntry) -> None:
        """Two names of one memory that are stored apart must be equal: by their digests, or the second is read beside the first."""
        same = self.same_bytes(local, entry, other)
        if same is not None:
            if not same:
                self.found.misfits.append(f"{name}: the state ties it to {local.info.name}, the checkpoint has other values for it")
            return
        beside = LocalTensor(local.info, [Held(h.box, _real_like(h.memory, h.memory.dtype)) for h in local.parts], name)
        self.found.targets[name] = (beside, entry)

        def check() -> None:
            if not all(torch.equal(raw_view(a.memory), raw_view(b.memory)) for a, b in zip(local.parts, beside.parts, strict=True)):
                raise ShapeError(
                    "the state ties this tensor to another one, but the checkpoint has different values for the two",
                    where=f"tensor {name} and {local.info.name}",
                    hint="untie them in the model, or leave one out with only=",
                )

        self.found.apply.insert(0, check)

    def same_bytes(self, local: LocalTensor, one: TensorEntry, other: TensorEntry) -> bool | None:
        """Whether two stored tensors are equal where this rank needs them, by the digests of their chunks; None if these cannot tell."""
        if one.grid.cuts is None or (one.grid.cuts, one.dtype) != (other.grid.cuts, other.dtype):
            return None
        chunks = sorted({int(n) for held in local.parts for n in one.grid.overlapping(held.box)})
        pairs = zip(self.catalog.extents(one, chunks), self.catalog.extents(other, chunks), strict=True)
        digests = [(a.digest, b.digest) for a, b in pairs]
        return None if any(None in pair for pair in digests) else all(a == b for a, b in digests)

    def materialise(self, local: LocalTensor, tensor: torch.Tensor) -> None:
        """Give memory to a meta tensor, in place: every reference to it sees the new memory."""
        if tensor.device.type != "meta":
            return  # tied: done under another name
        real = _real_like(tensor, tensor.dtype)
        if isinstance(tensor, torch.nn.Parameter):
            real = torch.nn.Parameter(real, requires_grad=tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)  # swapped too
        try:
            torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        except RuntimeError as err:
            hint = "module.to_empty(device=...) before the load"
            raise StateError(f"a meta tensor cannot be given memory: {err}", where=f"tensor {local.said}", hint=hint) from err
        self.placer.refresh(local, tensor)

    def module(self, module: torch.nn.Module, node: Node, path: str) -> None:
        parts = tensors_of(module)
        copies = [at for name in copies_of(module, parts) if self.selection.wants(at := join(path, name))]
        if copies:
            raise StateError(
                f"the module's state_dict() gives copies of {len(copies)} tensors, which cannot be filled in place",
                where=f"tensor {copies[0]}",
                hint="load into module.state_dict() itself, and give that to module.load_state_dict()",
            )
        for name, tensor in parts.tensors.items():
            self.tensor(join(path, name), tensor)
        for name in parts.extra:
            said = join(path, name)
            if self.selection.wants(said):
                self.decoded(self.nodes.child(node, name, said), said, parts.owners[name].set_extra_state)

    def stateful(self, target: Any, node: Node, path: str) -> None:
        if self.selection.wants(path):
            self.decoded(node, path, target.load_state_dict, template=target.state_dict())

    def decoded(self, node: Node, path: str, put: Setter, template: object = None, device: str | torch.device = "cpu") -> None:
        """Rebuild a stored value, tensors included, and hand it over. ``template`` shows how its tensors are laid out now, ``device`` where
        those go that it lacks."""
        if node is MISSING:
            self.found.missing.append(path)
            return
        foreign = {str(tree.tag_of(leaf)) for _, leaf in tree.leaves(node)} & _OWN_WALKS
        if foreign:
            self.found.misfits.append(f"{path}: {_OF_KIND[min(foreign)]} in the checkpoint, an object with a state_dict in the state")
            return
        fresh: dict[str, torch.Tensor] = {}
        likes = dict(_tensors_in(template, path))
        for where, leaf in tree.leaves(node):
            if isinstance(leaf, dict) and "$tensor" in leaf:
                self.fresh(leaf["$tensor"], likes.get(f"{path}.{where}"), fresh, device)
        self.found.values.append(path)

        def special(kind: str, payload: Any) -> object:
            return fresh[payload] if kind == "$tensor" else _inline_only(kind, payload)

        self.found.apply.append(lambda: put(like(template, tree.decode(node, special))))

    def fresh(self, stored: str, now: torch.Tensor | None, fresh: dict[str, torch.Tensor], device: str | torch.device) -> None:
        """New memory for a tensor inside a stateful object: as it is stored, or laid out as the one that is there ``now``."""
        name = self.selection.renamed(stored)
        entry = self.referred(stored)
        if now is not None and (isinstance(now, DTensor) or self.placer.layout is not None):
            new = torch.empty_like(now)
        else:
            new = self.room_for(entry, device if now is None else _real_device(now))
        fresh[stored] = new
        if name not in self.placer.tensors:
            self.target(name, self.placer.add(name, new))

    def referred(self, stored: str) -> TensorEntry:
        """The stored tensor that a value of the checkpoint refers to."""
        entry = self.catalog.tensors.get(stored)
        if entry is None:
            raise CorruptError(
                f"a value of the checkpoint refers to the tensor {stored!r}, which the index does not have",
                where=self.catalog.url,
                hint="run `ckpt verify` to see what else is damaged, and load another step",
            )
        return entry

    def room_for(self, entry: TensorEntry, device: str | torch.device = "cpu") -> torch.Tensor:
        """Memory for a whole stored tensor, once it is known that all its bytes are there: an index may claim any size."""
        self.catalog.extents(entry, range(len(entry.grid)))
        return torch.empty(entry.logical or entry.shape, dtype=torch_dtype(entry.dtype), device=device)

    def per_rank(self, target: PerRank, path: str) -> None:
        if not self.selection.wants(path):
            return
        self.found.values.append(path)
        saved = sorted(rank for rank, nodes in self.catalog.ranks.items() if path in nodes)
        if not saved:
            self.found.missing.append(path)
            return
        ranks = self.placer.ranks
        if len(saved) == len(ranks):
            source = saved[ranks.index(self.placer.rank)]
            self.own(target, self.catalog.ranks[source][path], path)
        elif target.reshard is None:
            self.found.misfits.append(
                f"{path}: saved per rank by {len(saved)} ranks, loaded by {len(ranks)}; give PerRank(value, reshard=...) to say how"
            )
        else:
            self.reshard(target, path, saved)
        for rank in saved:
            self.found.used.update(_tensor_names(self.catalog.ranks[rank][path]))

    def own(self, target: PerRank, node: Node, path: str) -> None:
        def put(value: object) -> None:
            target.value = refill(target.value, value)

        self._rebuilt(node, path, put)

    def _rebuilt(self, node: Node, path: str, put: Setter) -> None:
        fresh = {name: self._own_tensor(name) for name in _tensor_names(node)}
        self.found.apply.append(lambda: put(tree.decode(node, lambda k, p: fresh[p] if k == "$tensor" else _inline_only(k, p))))

    def _own_tensor(self, stored: str) -> torch.Tensor:
        if stored in self._own:
            return self._own[stored]  # tied when it was saved
        entry = self.referred(stored)
        new = self._own[stored] = self.room_for(entry)
        local = self.placer.add_own(f"{stored}>", new)
        self.found.targets[own_name(f"{stored}>", self.placer.rank)] = (local, entry)
        return new

    def reshard(self, target: PerRank, path: str, saved: Sequence[int]) -> None:
        values: list[Any] = [None] * len(saved)
        for i, rank in enumerate(saved):
            self._rebuilt(self.catalog.ranks[rank][path], path, _item_setter(values, i))

        def put() -> None:
            assert target.reshard is not None
            value = target.reshard(values, self.placer.ranks.index(self.placer.rank), len(self.placer.ranks))
            target.value = refill(target.value, value)

        self.found.apply.append(put)

    # ---- optimizers

    def optimizer(self, optimizer: Optimizer, node: Node, path: str) -> None:
        prefix, groups_path = state_path(path), join(path, "param_groups")
        states = self.nodes.child(node, "state", prefix)
        groups = self.nodes.child(node, "param_groups", groups_path)
        options = self.stored_options(groups)
        if options:
            self.found.values.append(groups_path)
        for group, named in zip(optimizer.param_groups, params_of(optimizer, self.names, path), strict=True):
            wanted = []
            for name, param in named:
                whole = self.selection.wants(join(path, name)) or self.selection.wants(f"{prefix}.{name}")
                if not whole and not self.wants_state(optimizer, param, f"{prefix}.{name}", prefix):
                    continue
                stored = stored_param_name(self.placer, name, param)
                owner = _Param(optimizer.state, param, name, stored, prefix, on_host(group), whole)
                self.param_state(owner, self.nodes.child(states, stored, f"{prefix}.{stored}"))
                if whole:
                    wanted.append(stored)
            if wanted or not named:
                self.group_options(group, wanted, options, groups_path)

    def wants_state(self, optimizer: Optimizer, param: torch.Tensor, said: str, prefix: str) -> bool:
        """Whether a glob may select some of the state of a parameter that is not wanted as a whole."""
        keys = {key for state in self.states_below(prefix).values() for key in state} | set(optimizer.state.get(param, {}))
        return any(self.selection.wants(f"{said}.{key}") for key in keys)

    def stored_options(self, groups: Node) -> dict[str, Node]:
        if not isinstance(groups, dict):
            return {}
        return {self.selection.renamed(name): group["options"] for group in groups.get("$param_groups", []) for name in group["params"]}

    def group_options(self, group: dict[str, Any], names: Sequence[str], options: Mapping[str, Node], path: str) -> None:
        absent = [n for n in names if n not in options]
        self.found.missing += [f"{path} of {n}" for n in absent]
        found = {tree.text(options[n]): options[n] for n in names if n in options}
        if len(found) > 1:
            self.found.misfits.append(
                f"{path}: parameters of one group have different options in the checkpoint: {_differences(list(found.values()))}"
            )
        elif found and not absent:
            (node,) = found.values()
            self.found.apply.append(lambda: set_options(group, tree.decode(node, _inline_only)))  # type: ignore[arg-type]

    def param_state(self, owner: _Param, values: Node) -> None:
        """Bind the state of one parameter; what the optimizer has not created yet is created like the parameter."""
        now = owner.states.get(owner.param, {})
        tensors = {key for key, old in now.items() if isinstance(old, torch.Tensor)}
        there = self.states_below(owner.prefix).get(owner.stored, {})
        stored = {key: node for key, node in tree.pairs_of(values) or () if isinstance(key, str)}
        for key in dict.fromkeys([*now, *there, *stored]):
            if not owner.whole and not self.selection.wants(owner.said(key)):
                continue
            if key in tensors and (key in there or key not in stored):
                self.target(owner.said(key), self.placer.add_state(owner.said(key), now[key], owner.param, owner.name, owner.prefix))
            elif key in there:
                self.create_state(owner, key, there[key])
            else:
                self.decoded(stored.get(key, MISSING), owner.stored_path(key), _state_setter(owner, key), device=_real_device(owner.param))

    def create_state(self, owner: _Param, key: str, entry: TensorEntry) -> None:
        dtype = torch_dtype(entry.dtype)
        if self.lies_like(owner, entry):
            new = _real_like(owner.param, dtype)
        else:
            shape = () if self.placer.layout is not None else entry.logical or entry.shape
            host = owner.host and math.prod(shape) == 1
            new = torch.empty(shape, dtype=dtype, device="cpu" if host else _real_device(owner.param))
        self.target(owner.said(key), self.placer.add_state(owner.said(key), new, owner.param, owner.name, owner.prefix))
        put = _state_setter(owner, key)
        self.found.apply.append(lambda: put(new))

    def lies_like(self, owner: _Param, entry: TensorEntry) -> bool:
        """Whether a stored tensor of a parameter's state has an element for each of the parameter, so that it lies as that does."""
        placed = self.placer.param_shape(owner.name, owner.param)
        if self.placer.layout is None and not isinstance(owner.param, DTensor):
            return placed in (entry.shape, entry.logical)
        return len(entry.shape) == len(placed) and (entry.numel != 1 or math.prod(placed) == 1)

    def states_below(self, prefix: str) -> dict[str, dict[str, TensorEntry]]:
        """Stored tensors of an optimizer's state, by parameter and key."""
        if prefix not in self._by_param:
            found: dict[str, dict[str, TensorEntry]] = {}
            for name, entry in self.entries.items():
                if name.startswith(prefix + "."):
                    owner, _, key = name[len(prefix) + 1 :].rpartition(".")
                    found.setdefault(owner, {})[key] = entry
            self._by_param[prefix] = found
        return self._by_param[prefix]


def _check_writable(name: str, local: LocalTensor) -> None:
    for held in local.parts:
        if any(stride == 0 and size > 1 for size, stride in zip(held.box.shape, held.memory.stride(), strict=True)):
            text = "its elements share memory (it was expanded), so it cannot be loaded into"
            raise StateError(text, where=f"tensor {name}", hint="put tensor.clone() into the state")


def _differences(mappings: Sequence[Node]) -> str:
    """What differs between mapping nodes, for a message: ``lr (0.1 and 0.2)``."""
    texts = [{tree.shorten(k): tree.shorten(v) for k, v in tree.pairs_of(node) or ()} for node in mappings]
    told = {key: list(dict.fromkeys(t.get(key, "nothing") for t in texts)) for key in dict.fromkeys(k for t in texts for k in t)}
    return ", ".join(f"{key.strip(chr(34))} ({' and '.join(values)})" for key, values in told.items() if len(values) > 1)


def _item_setter(container: Any, key: Any) -> Setter:
    def put(value: object) -> None:
        container[key] = value

    return put


def _state_setter(owner: _Param, key: str) -> Setter:
    def put(value: object) -> None:
        owner.states[owner.param][key] = value

    return put


def _real_device(tensor: torch.Tensor) -> str | torch.device:
    """Where a tensor's memory is, or is to be if it has none yet."""
    if tensor.device.type != "meta":
        return tensor.device
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"


def _real_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(tensor.detach(), dtype=dtype, device=_real_device(tensor))


def _has_live(value: object) -> bool:
    """Whether a container holds anything that is loaded in place."""
    if isinstance(value, dict):
        return any(_has_live(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_live(v) for v in value)
    return isinstance(value, (torch.Tensor, PerRank, torch.nn.Module, Optimizer)) or is_stateful(value)


def _tensors_in(value: object, path: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in _tensors_in(v, join(path, k))]
    if isinstance(value, (list, tuple)):
        return [x for i, v in enumerate(value) for x in _tensors_in(v, join(path, i))]
    return []


_OF_KIND = {"$tensors": "a module", "$param_groups": "an optimizer", "$per_rank": "a value per rank"}
_OWN_WALKS = frozenset(_OF_KIND)
"""Kinds of node that only the same kind of object in the state can take."""


def _tensor_names(node: Node) -> list[str]:
    return [leaf["$tensor"] for _, leaf in tree.leaves(node) if isinstance(leaf, dict) and "$tensor" in leaf]


def _inline_only(kind: str, payload: Any) -> object:
    if kind == "$inline":
        return decode_inline(payload)
    raise FormatError(
        f"the checkpoint has a {kind} node ({payload!r:.80}) where plain values were expected",
        hint="the state was written by newer or other software, or is damaged: run `ckpt verify`",
    )
