"""Optimizers of a state and of a checkpoint: state by parameter, created where it is not there yet, also of flat parameters of FSDP version
1; options by parameter too."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ckpt.catalog import TensorEntry
from ckpt.errors import MismatchError
from ckpt.plan import tree
from ckpt.plan.tree import MISSING, Node, join
from ckpt.plan.values import CLASS

from . import lazy
from .dtensor import is_dtensor, is_wrapper
from .flat_parameters import FlatPart
from .shard_table import StateOf
from .sharded import Sharded
from .subclasses import created
from .targets import Binder, Setter, inline_only, real_device, real_like
from .tensors import torch_dtype
from .torch_objects import GroupOptions, ParamNames, is_frozen, on_host, params_of, set_options, settle_numbers
from .walk import StatefulObject

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

# State that an optimizer keeps for a flat parameter of FSDP version 1: one tensor for all of its parameters, which are stored apart.


@dataclass(eq=False, kw_only=True)
class FlatState:
    """One key of the state of one flat parameter, while a load binds its parameters: ``now`` is what the optimizer has, if anything.

    ``filled`` is the tensor that is filled part by part; ``numbers`` are single numbers, one for each parameter, which must come out equal,
    as the optimizer has one for all.
    """

    states: MutableMapping[Any, Any]
    owner: torch.Tensor
    key: str
    now: torch.Tensor | None
    filled: torch.Tensor | None = None
    numbers: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def target(self, state_name: str, part: FlatPart, entry: TensorEntry | None, *, host: bool) -> Sharded:
        """Where the state of one of the parameters goes."""
        if self.now is not None and tuple(self.now.shape) != part.alike:
            number = self.now.detach().clone()
        elif self.now is None and entry is not None and entry.shape != part.shape and entry.numel == 1:
            number = lazy.torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu" if host else self.owner.device)
        else:
            if self.filled is None:
                dtype = None if entry is None else torch_dtype(entry.dtype)
                self.filled = lazy.torch.zeros(part.alike, dtype=dtype, device=self.owner.device) if self.now is None else self.now
            return part.elements(self.filled)
        self.numbers.append((state_name, number))
        return part.number(number)

    def apply(self) -> None:
        """Give the optimizer what was filled."""
        if self.numbers:
            (first, number), *others = self.numbers
            other = next((name for name, value in others if not lazy.torch.equal(value, number)), None)
            if other is not None:
                raise MismatchError(
                    f"it is {number.item()} and {other} is {dict(others)[other].item()}, but FSDP's flat parameter has one for both",
                    where=f"tensor {first}",
                    hint="build FSDP with use_orig_params=True",
                )
            self.filled = number if self.now is None else self.now.copy_(number)
        if self.now is None and self.filled is not None:
            self.states[self.owner][self.key] = self.filled


@dataclass(frozen=True, slots=True)
class _Param:
    """A parameter of an optimizer: its name in the state and in the checkpoint; ``host``: its single numbers are in host memory;
    ``complete``: all of its state is wanted."""

    states: MutableMapping[Any, Any]
    param: torch.Tensor
    """The optimizer's own: for what FSDP version 1 flattened, the flat one."""
    name: str
    stored: str
    prefix: str
    host: bool
    complete: bool
    part: FlatPart | None = None

    def state_name(self, key: str) -> str:
        return f"{self.prefix}.{self.name}.{key}"

    def stored_path(self, key: str) -> str:
        return f"{self.prefix}.{self.stored}.{key}"


class OptimizerBinder:
    """Binds the optimizers of one state. ``names`` are those of the parameters of its modules, by ``id``."""

    def __init__(self, binder: Binder, names: ParamNames) -> None:
        self.binder = binder
        self.names = names
        self.shard_table = binder.shard_table
        self.selection = binder.selection
        self.binding = binder.binding
        self._by_param: dict[str, dict[str, dict[str, TensorEntry]]] = {}
        self._flat: dict[tuple[int, str], FlatState] = {}

    def bind(self, optimizer: Optimizer, node: Node, path: str) -> None:
        prefix, groups_path = join(path, "state"), join(path, "param_groups")
        states = self.binder.nodes.child(node, "state", prefix)
        groups = self.binder.nodes.child(node, "param_groups", groups_path)
        stored = join(self.binder.nodes.origins.get(groups_path, groups_path).rpartition(".")[0], "state")
        options = self.stored_options(groups, prefix, stored)
        if options:
            self.binding.values.append(groups_path)
        if self.selection.wants(groups_path):
            self.options_without_parameters(optimizer, groups, groups_path)
        # The parameters have options there, and none has state: it was saved before its first step, and goes back to that.
        unused = bool(options) and not self.states_below(prefix) and not any(key for key, _ in tree.pairs_of(states) or ())
        for group, named in zip(optimizer.param_groups, params_of(optimizer, self.names, path), strict=True):
            wanted = []
            for name, placed in named:
                part = placed if isinstance(placed, FlatPart) else None
                param = placed.owner if isinstance(placed, FlatPart) else placed
                if self.selection.trainable and is_frozen(placed):
                    stored = self.shard_table.stored_name(name, placed)
                    self.binding.used.update(entry.name for entry in self.states_below(prefix).get(stored, {}).values())
                    self.binding.values.append(f"{prefix}.{stored}")
                    continue
                complete = self.selection.wants(join(path, name)) or self.selection.wants(f"{prefix}.{name}")
                if not complete and not self.wants_state(optimizer, param, f"{prefix}.{name}", prefix):
                    continue
                stored = self.shard_table.stored_name(name, placed)
                if unused and complete and stored in options:
                    self.binding.apply.append(partial(optimizer.state.pop, param, None))
                    wanted.append(stored)
                    continue
                # Where single numbers belong once the options that the checkpoint has for the parameter are set.
                host = on_host(_options(options[stored]) if stored in options else group)
                owner = _Param(optimizer.state, param, name, stored, prefix, host, complete, part)
                self.param_state(owner, self.binder.nodes.child(states, stored, f"{prefix}.{stored}"))
                if complete:
                    wanted.append(stored)
            if wanted:
                self.group_options(optimizer, group, wanted, options, groups_path)

    def wants_state(self, optimizer: Optimizer, param: torch.Tensor, state_name: str, prefix: str) -> bool:
        """Whether a glob may select some of the state of a parameter that is not wanted as a whole."""
        keys = {key for state in self.states_below(prefix).values() for key in state} | set(optimizer.state.get(param, {}))
        return any(self.selection.wants(f"{state_name}.{key}") for key in keys)

    def stored_options(self, groups: Node, prefix: str, stored: str) -> dict[str, Node]:
        """Options by parameter; groups that name parameters within the module do so below ``stored``, the state's path there."""
        if isinstance(groups, list):
            named = [(name, plain) for plain, names in map(_plain_group, groups) for name in names]
            return {self.selection.renamed(f"{stored}.{name}").removeprefix(f"{prefix}."): plain for name, plain in named}
        if not isinstance(groups, dict):
            return {}
        return {self.selection.renamed(name): group["options"] for group in groups.get("$param_groups", []) for name in group["params"]}

    def group_options(
        self, optimizer: Optimizer, group: dict[str, Any], names: Sequence[str], options: Mapping[str, Node], path: str
    ) -> None:
        absent = [n for n in names if n not in options]
        self.binding.missing += [f"{path} of {n}" for n in absent]
        by_text = {tree.text(options[n]): options[n] for n in names if n in options}
        if len(by_text) > 1:
            alike = {text: [n for n in names if n in options and tree.text(options[n]) == text] for text in by_text}
            fewest = min(alike.values(), key=len)
            whose = f"{fewest[0]!r}" + (f" and {len(fewest) - 1} more" if len(fewest) > 1 else "")
            self.binding.misfits.append(
                f"{path}: parameters of one group have different options in the checkpoint: {_differences(list(by_text.values()))}; "
                f"give the optimizer another group for {whose}"
            )
        elif by_text and not absent:
            (node,) = by_text.values()
            self.take_options(optimizer, group, node, path)

    def options_without_parameters(self, optimizer: Optimizer, groups: Node, path: str) -> None:
        """Groups that have no parameters, and so no names, go by their order; ranks with other groups may have another number of them."""
        empty = [group for group in optimizer.param_groups if not group["params"]]
        stored = [group["options"] for group in groups.get("$param_groups", []) if not group["params"]] if isinstance(groups, dict) else []
        if len(empty) == len(stored):
            for group, node in zip(empty, stored, strict=True):
                self.take_options(optimizer, group, node, path)

    def take_options(self, optimizer: Optimizer, group: dict[str, Any], node: Node, path: str) -> None:
        here, there = _TELLING & group.keys(), _TELLING & _options(node).keys()
        if not there <= here:  # the state of another kind of optimizer would be of no use
            what = f"in the checkpoint: {sorted(there) or 'none'}, in the state {sorted(here) or 'none'}"
            self.binding.misfits.append(f"{path}: options of another kind of optimizer {what}")
            return
        target = GroupOptions(group)
        self.binding.options.append(
            StatefulObject(path=path, target=target, take=lambda: set_options(group, _options(node)), old=target.state_dict())
        )
        self.binding.apply.append(lambda: settle_numbers(optimizer, group))

    def param_state(self, owner: _Param, values: Node) -> None:
        """Bind the state of one parameter; what the optimizer has not created yet is created like the parameter."""
        if owner.part is not None and not owner.part.count:
            return  # ranks that have elements of it have its state
        now = owner.states.get(owner.param, {})
        tensors = {key for key, old in now.items() if isinstance(old, lazy.Tensor)}
        there = self.states_below(owner.prefix).get(owner.stored, {})
        stored = {key: node for key, node in tree.pairs_of(values) or () if isinstance(key, str)}
        wrapped = {key for key, child in stored.items() if type(child) is dict and CLASS in child}  # tensors made of others
        wrapped |= {key for key in tensors if type(now[key]) not in lazy.PLAIN and is_wrapper(now[key])}
        there = {key: entry for key, entry in there.items() if key.partition("#")[0] not in wrapped} if wrapped else there
        # Each key of a parameter's state is in up to three places: the live optimizer (``now``), the stored tensors
        # (``there``) and the stored plain values (``stored``). What decides:
        #
        # now tensor, there         load into the live tensor
        # there only                create a tensor like the parameter, load into it
        # stored only               decode the value and set it
        # now tensor, nowhere else  missing in the checkpoint
        for key in dict.fromkeys([*now, *there, *stored]):
            if not owner.complete and not self.selection.wants(owner.state_name(key)):
                continue
            if key in wrapped:
                self.wrapper_state(owner, key, now.get(key), stored.get(key, MISSING))
            elif owner.part is not None and (key in there or (key in tensors and key not in stored)):
                self.flat_state(owner, owner.part, key, now.get(key) if key in tensors else None, there.get(key))
            elif key in tensors and (key in there or key not in stored):
                self.binder.target(
                    owner.state_name(key),
                    self.shard_table.add(owner.state_name(key), now[key], StateOf(owner.param, owner.name, owner.prefix)),
                )
            elif key in there:
                self.create_state(owner, key, there[key])
            else:
                self.binder.decoded(
                    stored.get(key, MISSING), owner.stored_path(key), _state_setter(owner, key), device=real_device(owner.param)
                )

    def wrapper_state(self, owner: _Param, key: str, now: Any, node: Any) -> None:
        """State that is a tensor made of others: filled in place, or made as the checkpoint says."""
        name = owner.state_name(key)
        if now is None:
            fields = self.binder.fields_of(name)
            now = created(
                node, {f: (e.shape, torch_dtype(e.dtype)) for f, e in fields.items()}, owner.param, real_device(owner.param), name
            )
            put = _state_setter(owner, key)
            self.binding.apply.append(lambda: put(now))
        elif not is_wrapper(now) and node is not MISSING:
            self.binding.misfits.append(f"{name}: a {node[CLASS]} in the checkpoint, a plain tensor or value in the state")
            return
        self.binder.wrapper(name, now, node, StateOf(owner.param, owner.name, owner.prefix))

    def create_state(self, owner: _Param, key: str, entry: TensorEntry) -> None:
        dtype = torch_dtype(entry.dtype)
        if self.lies_like(owner, entry):
            new = real_like(owner.param, dtype)
        else:
            shape = () if self.shard_table.layout is not None else entry.logical or entry.shape
            host = owner.host and math.prod(shape) == 1
            new = lazy.torch.empty(shape, dtype=dtype, device="cpu" if host else real_device(owner.param))
        place = self.shard_table.add(owner.state_name(key), new, StateOf(owner.param, owner.name, owner.prefix))
        self.binder.target(owner.state_name(key), place)
        put = _state_setter(owner, key)
        self.binding.apply.append(lambda: put(new))

    def flat_state(self, owner: _Param, part: FlatPart, key: str, now: torch.Tensor | None, entry: TensorEntry | None) -> None:
        flat = self._flat.get((id(owner.param), key))
        if flat is None:
            flat = self._flat[id(owner.param), key] = FlatState(states=owner.states, owner=owner.param, key=key, now=now)
            self.binding.apply.append(flat.apply)
        state_name = owner.state_name(key)
        self.binder.target(state_name, self.shard_table.add(state_name, flat.target(state_name, part, entry, host=owner.host)))

    def lies_like(self, owner: _Param, entry: TensorEntry) -> bool:
        """Whether a stored tensor of a parameter's state has an element for each of the parameter, so that it lies as that does."""
        placed = self.shard_table.param_shape(owner.name, owner.param)
        if self.shard_table.layout is None and not is_dtensor(owner.param):
            return placed in (entry.shape, entry.logical)
        return len(entry.shape) == len(placed) and (entry.numel != 1 or math.prod(placed) == 1)

    def states_below(self, prefix: str) -> dict[str, dict[str, TensorEntry]]:
        """Stored tensors of an optimizer's state, by parameter and key."""
        if prefix not in self._by_param:
            by_param: dict[str, dict[str, TensorEntry]] = {}
            for name, entry in self.binder.entries.items():
                if name.startswith(prefix + "."):
                    owner, _, key = name[len(prefix) + 1 :].rpartition(".")
                    by_param.setdefault(owner, {})[key] = entry
            self._by_param[prefix] = by_param
        return self._by_param[prefix]


def _plain_group(node: Node) -> tuple[Node, list[str]]:
    """Options and parameters of a group as ``torch.distributed.checkpoint`` stores it: a mapping, with parameters by name."""
    pairs = [(k, v) for k, v in tree.pairs_of(node) or () if isinstance(k, str)]
    names = next((v for k, v in pairs if k == "params" and isinstance(v, list)), [])
    options = [(k, v) for k, v in pairs if k not in ("params", "param_names")]
    return tree.mapping_node(options), [name for name in names if isinstance(name, str)]


def _options(node: Node) -> dict[str, Any]:
    return cast(dict[str, Any], tree.decode(node, inline_only))


_TELLING = frozenset({"betas", "momentum", "alpha", "rho", "etas", "lambd", "beta2_decay", "max_iter", "lr_decay"})
"""Options that one kind of optimizer has and another has not."""


def _differences(mappings: Sequence[Node]) -> str:
    """What differs between mapping nodes, for a message: ``lr (0.1 and 0.2)``."""
    texts = [{tree.shorten(k): tree.shorten(v) for k, v in tree.pairs_of(node) or ()} for node in mappings]
    by_key = {key: list(dict.fromkeys(t.get(key, "nothing") for t in texts)) for key in dict.fromkeys(k for t in texts for k in t)}
    return ", ".join(f"{key.strip(chr(34))} ({' and '.join(values)})" for key, values in by_key.items() if len(values) > 1)


def _state_setter(owner: _Param, key: str) -> Setter:
    def put(value: object) -> None:
        owner.states[owner.param][key] = value

    return put
