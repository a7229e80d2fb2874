"""Modules: their parameters and persistent buffers by name, whatever wraps them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from .fsdp1 import FlatPart, flat_parts, is_wrapped, own_tensors
from .tensors import local_of

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
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
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
    if is_wrapped(module):
        return _of_flat(module)
    module_tensors = ModuleTensors()
    owners = {clean_name(name): owner for name, owner in module.named_modules(remove_duplicate=False)}  # what is wrapped comes last
    for key, value in module.state_dict(keep_vars=True).items():
        name = clean_name(key)
        prefix, _, attribute = name.rpartition(".")
        while prefix not in owners:  # a module may add names of several segments, as ``weight.absmax``
            prefix = prefix.rpartition(".")[0]
        module_tensors.owners[name] = owners[prefix]
        if isinstance(value, torch.Tensor) and attribute != "_extra_state":
            module_tensors.tensors[name] = value
        else:
            module_tensors.extra[name] = value
    return module_tensors


def _of_flat(module: nn.Module) -> ModuleTensors:
    """The same where FSDP version 1 wraps it or a part of it: its ``state_dict`` would gather everything."""
    module_tensors = ModuleTensors()
    of_module: dict[int, dict[str, FlatPart]] = {}
    for (number, attribute), part in flat_parts(module).items():
        of_module.setdefault(number, {})[attribute] = part
    for path, owner in module.named_modules(remove_duplicate=False):
        start = f"{clean_name(path)}." if clean_name(path) else ""
        parts = of_module.get(id(owner), {})
        module_tensors.flat |= {start + attribute: part for attribute, part in parts.items()}
        for key, value in own_tensors(owner):
            if key in parts:
                continue  # FSDP shows the parameter, or what it gathered of it
            name = clean_name(start + key)
            module_tensors.owners[name] = owner
            if isinstance(value, torch.Tensor) and key != "_extra_state":
                module_tensors.tensors[name] = value
            else:
                module_tensors.extra[name] = value
    return module_tensors


def added_by(module: nn.Module, parts: ModuleTensors) -> list[str]:
    """Names of tensors that the module's ``state_dict`` has beside parameters and buffers."""
    plain = {name: t for name, t in parts.tensors.items() if not isinstance(t, nn.Parameter)}
    own = {id(t) for t in (*module.parameters(), *module.buffers())} if plain else ()
    return [name for name, t in plain.items() if id(t) not in own]


def copies_of(module: nn.Module, parts: ModuleTensors) -> list[str]:
    """Names of tensors that the module's ``state_dict`` makes anew each time, so that filling them would not change the module."""
    added = added_by(module, parts)
    again = tensors_of(module).tensors if added else {}
    return [name for name in added if name not in again or not _same_memory(parts.tensors[name], again[name])]


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


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = local_of(a), local_of(b)
    return a is b or a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())
