"""What torch's own objects hold. Modules: parameters and persistent buffers by name, whatever wraps them. Optimizers: state by parameter
name, never by index, and parameter groups as options of named parameters. And the part of a state that a save takes."""

from __future__ import annotations

import os
import pickletools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from ckpt import units
from ckpt.errors import MismatchError, StateError, UsageError
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.tree import MAX_DEPTH, MISSING, Missing, Node, child_path, items_of, join, mapping_node, pairs_of, refers, tag_of
from ckpt.plan.values import LABEL, StatePart

from . import lazy
from .dtensor import dtensor_types, in_order, is_dtensor
from .flat_parameters import FSDP1, FlatPart, engine_parts, expert_paths, flat_parts, is_of_deepspeed, module_of, own_tensors, owners_of
from .tensors import local_of
from .walk import values_in

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attribute names that torch.compile, activation checkpointing and FSDP1 put into parameter names."""


@dataclass(eq=False, slots=True)
class ModuleTensors:
    """``tensors`` by name (parameters themselves, not detached copies), and ``extra`` states of submodules by name. ``flat`` are the
    parameters that FSDP version 1 keeps in flat ones."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    flat: dict[str, FlatPart] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    """Submodule of each tensor or extra state."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, torch.compile and the like, in whatever order they wrap it."""
    while True:
        if isinstance(module, (lazy.torch.nn.parallel.DistributedDataParallel, lazy.torch.nn.DataParallel)):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), lazy.Module):
            module = inner
        else:
            return module


def clean_name(name: str) -> str:
    """A name without the segments that wrappers add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def tensors_of(module: nn.Module) -> ModuleTensors:
    """Everything that ``module.state_dict()`` would have, without copying."""
    module = unwrap(module)
    parts, fsdp = ModuleTensors(), sys.modules.get(FSDP1)
    entries: Iterable[tuple[str, str, object, nn.Module]]
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in module.modules()):
        entries = _of_flat(module, flat_parts(module), {}, parts.flat)
    elif "deepspeed" in sys.modules and (flat := engine_parts(module)):
        entries = _of_flat(module, flat, expert_paths(module), parts.flat)
    else:
        entries = []
        owners = {clean_name(name): owner for name, owner in module.named_modules(remove_duplicate=False)}  # what is wrapped comes last
        for key, value in module.state_dict(keep_vars=True).items():
            name = clean_name(key)
            prefix, _, attribute = name.rpartition(".")
            while prefix not in owners:  # a module may add names of several segments, as ``weight.absmax``
                prefix = prefix.rpartition(".")[0]
            entries.append((name, attribute, value, owners[prefix]))
    for name, attribute, value, owner in entries:
        parts.owners[name] = owner
        if isinstance(value, lazy.Tensor) and attribute != EXTRA_STATE:
            parts.tensors[name] = value
        else:
            parts.extra[name] = value
    return parts


def refuses_pickles(owner: nn.Module) -> bool:
    """Whether a module of TransformerEngine refuses pickles of recipes that have a state. It ignores all others then."""
    if os.environ.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") == "1":
        return False
    if not any(base.__module__.startswith("transformer_engine.") for base in type(owner).__mro__):
        return False
    release = str(getattr(sys.modules.get("transformer_engine"), "__version__", "0")).split(".")
    return [int(number) for number in release[:2] if number.isdecimal()] >= [2, 18]


EXTRA_STATE = "_extra_state"
"""What torch calls the extra state of a module in its ``state_dict``."""
_ONE_STORAGE = re.compile(rb"\]q\x00(X.{4}[0-9]+)q\x01a\.", re.DOTALL)
"""The list of storages in a storage that torch has pickled: one, whose name is its address in memory."""


def without_addresses(value: Any) -> Any:
    """An extra state of bytes that are a pickle, as TransformerEngine's, where each storage is named ``0``: else the bytes of equal states
    would differ from process to process. The pickle means the same, and nothing is unpickled. All other values stay as they are."""
    if not isinstance(value, lazy.Tensor) or value.dtype != lazy.torch.uint8 or value.dim() != 1 or value.is_meta:
        return value
    data = value.detach().numpy(force=True).tobytes()
    if not data.startswith(b"\x80") or _ONE_STORAGE.search(data) is None:  # the opcode PROTO
        return value
    try:
        opcodes = [(opcode.name, argument, at or 0) for opcode, argument, at in pickletools.genops(data)]
    except (ValueError, UnicodeError):  # other bytes
        return value
    parts = list[bytes]()
    for (opcode, argument, start), end in zip(opcodes, [*(at for _, _, at in opcodes[1:]), len(data)], strict=True):
        if isinstance(argument, bytes) and (name := _ONE_STORAGE.search(argument)) is not None:
            storage = argument.replace(name[1], b"X\1\0\0\0" + b"0", 2)  # where it is referred to, and in the list: both before the data
            parts.append(b"\x8e" + len(storage).to_bytes(8, "little") + storage)  # BINBYTES8
        elif opcode != "FRAME":  # which gives a length, and may be left out
            parts.append(data[start:end])
    return lazy.torch.frombuffer(bytearray(b"".join(parts)), dtype=lazy.torch.uint8)


def _of_flat(
    module: nn.Module, parts: Mapping[tuple[int, str], FlatPart], paths: Mapping[str, str], flat: dict[str, FlatPart]
) -> Iterator[tuple[str, str, object, nn.Module]]:
    """Name, attribute, value and owner of all else where FSDP version 1 wraps a module or a part of it, whose ``state_dict`` would gather
    everything, or DeepSpeed; ``flat`` takes the ``parts`` by name. ``paths`` of submodules lead to others in the whole model, and so do
    those below them."""
    of_module: dict[int, dict[str, FlatPart]] = {}
    for (number, attribute), part in parts.items():
        of_module.setdefault(number, {})[attribute] = part
    for path, owner in module.named_modules(remove_duplicate=False):
        local = next((p for p in paths if f"{path}.".startswith(f"{p}.")), "")
        start = clean_name(paths[local] + path.removeprefix(local) if local else path)
        start += "." if start else ""
        own = of_module.get(id(owner), {})
        flat |= {start + attribute: part for attribute, part in own.items()}
        for key, value in own_tensors(owner):
            if key not in own:  # else FSDP shows the parameter, or what it gathered of it
                yield clean_name(start + key), key, value, owner


def added_by(module: nn.Module, parts: ModuleTensors) -> list[str]:
    """Names of tensors that the module's ``state_dict`` has beside parameters and buffers."""
    plain = {name: t for name, t in parts.tensors.items() if not isinstance(t, lazy.Parameter)}
    own = {id(t) for t in (*module.parameters(), *module.buffers())} if plain else ()
    return [name for name, t in plain.items() if id(t) not in own]


def copies_of(module: nn.Module, parts: ModuleTensors) -> list[str]:
    """Names of tensors that the module's ``state_dict`` makes anew each time, so that filling them would not change the module."""
    added = added_by(module, parts)
    again = tensors_of(module).tensors if added else {}

    def is_copy(name: str) -> bool:
        if name not in again:
            return True
        a, b = local_of(parts.tensors[name]), local_of(again[name])
        return a is not b and a.numel() > 0 and (a.device.type == "meta" or a.data_ptr() != b.data_ptr())

    return list(filter(is_copy, added))


def frozen_beside(module: nn.Module, parts: ModuleTensors) -> frozenset[str]:
    """Names of tensors that belong to frozen parameters without being some: the scales of quantised weights. A submodule adds them to its
    ``state_dict``, and has no parameter that is trained."""
    trained = {name: [p.requires_grad for p in parts.owners[name].parameters(recurse=False)] for name in added_by(module, parts)}
    return frozenset(name for name, each in trained.items() if each and not any(each))


def is_offloaded(module: nn.Module) -> bool:
    """Whether hooks of accelerate have values of the module (``cpu_offload``, ``disk_offload``, ``device_map=``), and bring these into it
    for each forward pass, whatever it has by then. Its own tensors are on the meta device between."""
    hooks = (hook for m in module.modules() if (hook := getattr(m, "_hf_hook", None)) is not None)
    return any(getattr(each, "offload", False) for hook in hooks for each in getattr(hook, "hooks", (hook,)))


# One look over the containers of a state before they are walked: whether that can be, and which modules, optimizers and meshes are in them.
#
# Of a container's values only those are looked at whose class may hide something: a dict may have many thousand tensors.

_CONTAINERS = (dict, list, tuple)


@dataclass(eq=False, slots=True)
class StateScan:
    """``modules`` and ``optimizers`` with their paths; ``meshes`` of all DTensors, as ``in_order`` gives them."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    meshes: tuple[Mesh, ...] = ()


def check_state(state: object) -> None:
    if not isinstance(state, dict):
        raise UsageError(f"the state must be a dict, not {type(state).__name__}", hint='pass {"model": model, "optimizer": optimizer}')


def scan_state(state: object) -> StateScan:
    check_state(state)
    assert isinstance(state, dict)
    scan = StateScan()
    meshes: dict[int, DeviceMesh] = {}
    _look(state, "", frozenset(), scan, meshes)
    if meshes:
        scan.meshes = in_order(meshes.values())
    return scan


def plain_parameters(state: object) -> dict[str, str]:
    """What ranks compare of the modules' plain parameters, which every rank has that no layout is given for: a digest of their names, and
    what to say of them. Empty if a library's engine knows where they lie."""
    modules = scan_state(state).modules
    if any(type(module).__module__.startswith("deepspeed") for _, module in modules):
        return {}
    names = [
        join(path, name)
        for path, module in modules
        for name, p in module.named_parameters()
        if type(p) in lazy.PLAIN and not hasattr(p, "global_shape") and not hasattr(p, "__create_chunk_list__")
    ]
    shown = f"{units.plural(len(names), 'parameter')} from {names[0]} to {names[-1]}" if names else "none"
    return {"parameters": xxhash.xxh3_64_hexdigest("\n".join(sorted(names)).encode()), "shown": shown}


def _look(value: Any, path: str, around: frozenset[int], scan: StateScan, meshes: dict[int, DeviceMesh]) -> None:
    if id(value) in around:
        raise StateError(f"{_shown(path)} contains itself: {type(value).__name__}", hint="remove the reference that leads back")
    if len(around) >= MAX_DEPTH:
        raise StateError(f"{_shown(path)} lies more than {MAX_DEPTH} containers deep", hint="flatten the state")
    values = value.values() if isinstance(value, dict) else value
    with_mesh = dtensor_types()
    known = (*_CONTAINERS, lazy.Module, lazy.Optimizer, *with_mesh)
    telling = {kind for kind in {*map(type, values)} if issubclass(kind, known)}
    if not telling:
        return
    inside = around | {id(value)}
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if type(child) not in telling:
            continue
        tensors: Iterable[object] = ()
        if isinstance(child, lazy.Module):
            tensors = (*child.parameters(), *child.buffers()) if with_mesh else ()
            scan.modules.append((join(path, key), child))
        elif isinstance(child, lazy.Optimizer):
            scan.optimizers.append((join(path, key), child))
            tensors = (param for group in child.param_groups for param in group["params"]) if with_mesh else ()
        elif isinstance(child, _CONTAINERS):
            _look(child, join(path, key), inside, scan, meshes)
        else:
            tensors = (child,)
        for tensor in tensors:
            if type(tensor) not in lazy.PLAIN and is_dtensor(tensor):
                meshes.setdefault(id(tensor.device_mesh), tensor.device_mesh)


def _shown(path: str) -> str:
    return f"the value at {path[:79]!r}{'…' * (len(path) > 79)}"


# Takes a part of a state while it is collected: which tensors, and what is left of the nodes of all else.
#
# Names are selected as a load with the same ``only=`` and ``trainable=`` selects them, so such a load of a whole checkpoint into the same
# state reads what such a save writes.
#
#     tensors, objects     are left out where they are met, and leave ``LEFT_OUT`` in their place
#     plain values         are cut from the encoded state afterwards, with all containers of which nothing is left

_LEFT = "$left_out"
LEFT_OUT: Mapping[str, bool] = {_LEFT: True}
"""The node of what does not belong to the part."""


def is_frozen(value: object) -> bool:
    """Whether training does not change a tensor: a parameter without ``requires_grad``."""
    owner = value.owner if isinstance(value, FlatPart) else value
    return isinstance(owner, lazy.Parameter) and not owner.requires_grad


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
        self.trains = self.trains or (isinstance(owner, lazy.Tensor) and owner.requires_grad)

    def wants_some(self, path: str, state: object) -> bool:
        """Whether the part has an object: it is selected itself, or something in its ``state_dict`` is."""
        inside = [at for at, _ in values_in(state, path) if self.wants(at)]  # all, since ``idle`` has to know
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
            raise StateError(f"the key {LABEL!r} of a state marks a checkpoint as a part", where=LABEL, hint="give the value another key")
        return mapping_node([*(pairs_of(self.left(state)) or []), (LABEL, self.part.to_node())])

    def left(self, state: Node) -> Node:
        """What is left of the state of a walk."""
        left = self._cut(state, "", {id(node) for node in self._decided})
        return {} if isinstance(left, Missing) else left

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


# Optimizers.

_HINT = (
    'put the engine itself into the state ({"engine": engine}), or save with engine.save_checkpoint(folder); ckpt.open, ckpt.load and '
    "ckpt convert read what that writes"
)


def refuse_partitioned(tensor: torch.Tensor, name: str) -> None:
    """ZeRO leaves empty parameters in the module between steps, or makes them from its partitions after each step, whatever was loaded."""
    partitioned = hasattr(tensor, "ds_shape") and tensor.ds_shape != tensor.shape
    if partitioned or hasattr(tensor, "_hp_mapping") or hasattr(tensor, "_z3_optimizer"):
        what = "the parameter is one of DeepSpeed's ZeRO, which keeps the values in partitions of its own"
        raise StateError(what, where=f"tensor {name}", hint=_HINT)
    zero3 = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero3 is not None and zero3.Init.param_id and tensor.shape == (0,) and _is_shared_nothing(tensor):
        what = "the empty tensor shares its memory: DeepSpeed's ZeRO-3 leaves that of a parameter between steps"
        raise StateError(what, where=f"tensor {name}", hint=f"{_HINT}; store a clone() of it if it is empty indeed")


def _is_shared_nothing(tensor: torch.Tensor) -> bool:
    """Whether it shares a storage of no bytes with another tensor, as what ``state_dict()`` gives of a partitioned parameter."""
    storage = tensor.untyped_storage()
    return not storage.nbytes() and lazy.torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor's and that of ``storage``


def refuse_zero(value: object, path: str) -> None:
    if "deepspeed" in sys.modules and is_of_deepspeed(value, "DeepSpeedOptimizer"):
        raise StateError("an optimizer of DeepSpeed cannot be part of a state without its engine", where=path, hint=_HINT)


@dataclass(eq=False, slots=True)
class ParamNames:
    """``whole``: ``id(parameter)`` → name in the state. ``flat``: what FSDP version 1 has in one parameter of an optimizer, by that one's
    ``id``: each part once, with its first name; ZeRO's of DeepSpeed too. ``owners``: the parameters of an optimizer, by its ``id`` and
    group, where its groups do not have them. ``engines``: DeepSpeed's among the modules, by ``id``."""

    plain: dict[int, str] = field(default_factory=dict)
    flat: dict[int, dict[int, tuple[str, FlatPart]]] = field(default_factory=dict)
    owners: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)
    engines: set[int] = field(default_factory=set)


def names_in(modules: Iterable[tuple[str, torch.nn.Module]], parts: dict[int, ModuleTensors] | None = None) -> ParamNames:
    """Names of all parameters of a state's modules; their tensors are left in ``parts`` by id of the module. A tied parameter has its
    first name."""
    names = ParamNames()
    for path, module in modules:
        if "deepspeed" in sys.modules and (inner := module_of(module, path)) is not None:
            names.engines.add(id(module))
            module, path = inner, f"{path}.module"
            if (owners := owners_of(inner)) is not None:
                names.owners[id(owners[0])] = owners[1]
        module_tensors = tensors_of(module)
        for name, tensor in module_tensors.tensors.items():
            refuse_partitioned(tensor, f"{path}.{name}" if path else name)
        if parts is not None:
            parts[id(module)] = module_tensors
        for name, tensor in module_tensors.tensors.items():
            names.plain.setdefault(id(tensor), f"{path}.{name}" if path else name)
        for name, part in module_tensors.flat.items():
            names.flat.setdefault(id(part.owner), {}).setdefault(id(part), (f"{path}.{name}" if path else name, part))
    return names


def params_of(optimizer: Optimizer, names: ParamNames, path: str) -> list[list[tuple[str, torch.Tensor | FlatPart]]]:
    """Name and parameter of every parameter, by group; those of a flat parameter one by one."""
    groups, owners = [], names.owners.get(id(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"] if owners is None else owners[index]
        given = group.get("param_names") or ()
        named: list[tuple[str, torch.Tensor | FlatPart]] = []
        for position, param in enumerate(params):
            if id(param) in names.flat:
                named += names.flat[id(param)].values()
                continue
            name = names.plain.get(id(param), given[position] if position < len(given) else None)
            if name is None:
                raise StateError(
                    f"parameter {position} of group {index} (shape {tuple(param.shape)}) has no name",
                    where=path,
                    hint='put its module into the same state ({"model": model, "optimizer": optimizer}), '
                    "or build the optimizer from model.named_parameters()",
                )
            named.append((name, param))
        groups.append(named)
    return groups


def check_keys(optimizer: Optimizer, names: ParamNames, path: str) -> None:
    """Raise StateError if an optimizer keeps state that belongs to none of its parameters, or under keys that give no names."""
    given = names.owners.get(id(optimizer)) or [group["params"] for group in optimizer.param_groups]
    params = {id(p) for group in given for p in group}
    for owner, state in optimizer.state.items():
        if id(owner) not in params and state:
            what = f"a parameter of shape {tuple(owner.shape)}" if isinstance(owner, lazy.Tensor) else repr(owner)
            hint = "keep it in a group's options or in a parameter's state, or put it into the state beside the optimizer"
            raise StateError(f"the optimizer has state for {what}, which is in none of its groups", where=path, hint=hint)
        wrong = [key for key in state if not isinstance(key, str) or not key or "." in key or key.startswith("$")]
        if wrong:
            hint = "use strings without dots and $"
            raise StateError(f"the key {wrong[0]!r} of the optimizer's state gives no name", where=path, hint=hint)


def inline(value: object, path: str) -> Node:
    """The node of a small tensor that is kept in the JSON, such as a learning rate that is a tensor."""
    if not isinstance(value, lazy.Tensor):
        return None
    if value.numel() > 64:
        raise StateError(f"a tensor of {value.numel()} elements among the options", where=path, hint="options may have at most 64")
    from base64 import b64encode

    from .tensors import as_bytes, dtype_of, local_of

    return {"$inline": [dtype_of(value, path).name, list(value.shape), b64encode(as_bytes(local_of(value))).decode()]}


def decode_inline(payload: Any) -> torch.Tensor:
    from base64 import b64decode

    name, shape, raw = payload
    data = bytearray(b64decode(raw))
    dtype = getattr(lazy.torch, name)
    return (lazy.torch.frombuffer(data, dtype=lazy.torch.uint8).view(dtype) if data else lazy.torch.empty(0, dtype=dtype)).reshape(shape)


@dataclass(frozen=True, eq=False, slots=True)
class GroupOptions:
    """The options of one parameter group, as an object that can take back what it had."""

    group: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.group.items() if key not in ("params", "param_names")}

    def load_state_dict(self, options: Mapping[str, Any]) -> None:
        for key in self.state_dict().keys() - options.keys():
            del self.group[key]
        set_options(self.group, options)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put loaded options into a group; a learning rate that is a tensor keeps its identity, for compiled and captured steps."""
    for key, value in options.items():
        old = group.get(key)
        if isinstance(old, lazy.Tensor):
            try:
                old.detach().copy_(value if isinstance(value, lazy.Tensor) else lazy.torch.as_tensor(value))
            except (TypeError, ValueError, RuntimeError) as err:
                raise MismatchError(
                    f"the option {key!r} of the optimizer is a tensor in the state, and {value!r:.80} in the checkpoint",
                    hint="build the optimizer as it was built for the save",
                ) from err
        else:
            group[key] = value


def settle_numbers(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Move single numbers of the state to where the group's options want them: a fused step needs them on the device."""
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        device = lazy.torch.device("cpu") if on_host(group) else param.device
        step = state.get("step")
        if isinstance(step, lazy.Tensor) and step.numel() == 1 and "cuda" in (step.device.type, device.type) and step.device != device:
            state["step"] = step.to(device)


def on_host(group: Mapping[str, Any]) -> bool:
    """Whether torch keeps single numbers of the state (Adam's ``step``) in host memory for this group (torch/optim/adam.py,
    _init_group)."""
    return not (group.get("capturable") or group.get("fused"))
