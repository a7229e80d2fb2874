"""One look over the containers of a state before it is walked: whether it can be walked at all, which modules, optimizers
and meshes are in it.

Of a container's values only those are looked at whose class may hide something: a dict may have many thousand tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckpt.errors import StateError, UsageError
from ckpt.layout.mesh import Mesh
from ckpt.tree import MAX_DEPTH, join

from .dtensor import dtensor_types, is_dtensor
from .meshes import in_order

_CONTAINERS = (dict, list, tuple)
_TELLING = (*_CONTAINERS, nn.Module, Optimizer)


@dataclass(eq=False, slots=True)
class StateScan:
    """``modules`` and ``optimizers`` with their paths; ``meshes`` of all DTensors, as :func:`.meshes.in_order` gives them."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    meshes: tuple[Mesh, ...] = ()


def check_state(state: object) -> None:
    if not isinstance(state, dict):
        raise UsageError(f"the state must be a dict, not {type(state).__name__}", hint='pass {"model": model, "optimizer": optimizer}')


def scan_state(state: object) -> StateScan:
    """Look over a state."""
    check_state(state)
    assert isinstance(state, dict)
    scan = StateScan()
    meshes: dict[int, DeviceMesh] = {}
    _look(state, "", frozenset(), scan, meshes)
    scan.meshes = in_order(meshes.values())
    return scan


def _look(value: Any, path: str, around: frozenset[int], scan: StateScan, meshes: dict[int, DeviceMesh]) -> None:
    if id(value) in around:
        raise StateError(f"{_at(path)} contains itself: {type(value).__name__}", hint="remove the reference that leads back")
    if len(around) >= MAX_DEPTH:
        raise StateError(f"{_at(path)} lies more than {MAX_DEPTH} containers deep", hint="flatten the state")
    values = value.values() if isinstance(value, dict) else value
    telling = {kind for kind in {*map(type, values)} if issubclass(kind, (*_TELLING, *dtensor_types()))}
    if not telling:
        return
    inside = around | {id(value)}
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        if type(child) not in telling:
            continue
        if is_dtensor(child):
            meshes.setdefault(id(child.device_mesh), child.device_mesh)
        elif isinstance(child, nn.Module):
            _note(meshes, [*child.parameters(), *child.buffers()])
            scan.modules.append((join(path, key), child))
        elif isinstance(child, Optimizer):
            scan.optimizers.append((join(path, key), child))
            for group in child.param_groups:
                _note(meshes, group["params"])
        else:
            _look(child, join(path, key), inside, scan, meshes)


def _note(meshes: dict[int, DeviceMesh], tensors: Iterable[object]) -> None:
    for tensor in tensors:
        if is_dtensor(tensor):
            meshes.setdefault(id(tensor.device_mesh), tensor.device_mesh)


def _at(path: str) -> str:
    return f"the value at {path[:79]!r}{'…' * (len(path) > 79)}"
