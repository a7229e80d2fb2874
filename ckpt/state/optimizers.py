"""Optimizers: state by parameter name, never by index, and parameter groups as options of named parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.errors import MismatchError, StateError
from ckpt.plan.tree_decoding import Node

from . import lazy
from .fsdp1 import FlatPart
from .modules import ModuleTensors, tensors_of
from .zero import is_of_deepspeed, module_of, owners_of

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

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
