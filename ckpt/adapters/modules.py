"""Modules: their parameters and persistent buffers by name, whatever wraps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attribute names that torch.compile, activation checkpointing and FSDP1 put into parameter names."""


@dataclass(eq=False, slots=True)
class ModuleTensors:
    """``tensors`` by name (parameters themselves, not detached copies), and ``extra`` states of submodules by name."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    owners: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Submodule and attribute of each tensor or extra state."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and the like."""
    while isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        module = module.module
    return module


def clean_name(name: str) -> str:
    """A name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)


def tensors_of(module: nn.Module) -> ModuleTensors:
    """Everything that ``module.state_dict()`` would have, without copying."""
    found = ModuleTensors()
    module = unwrap(module)
    owners = dict(module.named_modules(remove_duplicate=False))
    for key, value in module.state_dict(keep_vars=True).items():
        prefix, _, attribute = key.rpartition(".")
        name = clean_name(key)
        if prefix in owners:
            found.owners[name] = (owners[prefix], attribute)
        if isinstance(value, torch.Tensor) and attribute != "_extra_state":
            found.tensors[name] = value
        else:
            found.extra[name] = value
    return found


def replace(owner: nn.Module, attribute: str, tensor: torch.Tensor) -> None:
    """Put a tensor with memory in the place of one on the meta device."""
    old = owner._parameters.get(attribute)
    if old is not None:
        owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        owner._buffers[attribute] = tensor


def modules_in(state: object, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules of a nested state, with the path of each."""
    from ckpt.tree import join

    if isinstance(state, nn.Module):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from modules_in(value, join(path, key))
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from modules_in(value, join(path, i))
