"""Which mesh a DTensor is really on. FSDP over tensor parallelism leaves a parameter that TP does not cut (a norm) on the FSDP
dimension's mesh alone, a different one on each TP rank, though all of these have the same parameter: it is replicated over the
rest of the mesh that the others are on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckpt.layout import TensorLayout
from ckpt.mesh import Mesh

from .dtensor import DTensor

_known: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The same mesh as ours. It is remembered: torch lists a mesh's ranks anew each time, and every DTensor asks."""
    found = _known.get(mesh)
    if found is None:
        found = _known[mesh] = _mesh_of(mesh)
    return found


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    sizes = tuple(int(n) for n in mesh.shape)
    names = tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(len(sizes))))
    return Mesh(names, sizes, tuple(mesh.mesh.flatten().tolist()))


def meshes_in(state: object) -> tuple[Mesh, ...]:
    """The named meshes of all DTensors of a state, those with the most ranks first. The order is the same on all ranks of a mesh."""
    found = {mesh: None for mesh in _device_meshes(state) if mesh.mesh_dim_names}
    meshes = dict.fromkeys(mesh_of(mesh) for mesh in found)
    return tuple(sorted(meshes, key=lambda m: (-len(m.ranks), m.names, tuple(m.ranks))))


def _device_meshes(state: object) -> Iterator[DeviceMesh]:
    if isinstance(state, DTensor):
        yield state.device_mesh
    elif isinstance(state, torch.nn.Module):
        yield from _device_meshes([*state.parameters(), *state.buffers()])
    elif isinstance(state, Optimizer):
        yield from _device_meshes([group["params"] for group in state.param_groups])
    elif isinstance(state, dict):
        yield from _device_meshes(list(state.values()))
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _device_meshes(value)


def widened(layout: TensorLayout, meshes: Sequence[Mesh], rank: int) -> TensorLayout:
    """The layout on the largest of ``meshes`` that its mesh is a slice of, replicated over the other dimensions; itself if there
    is none."""
    for wide in meshes:
        if len(wide.names) > len(layout.mesh.names) and _is_slice(layout.mesh, wide, rank):
            return replace(layout, mesh=wide)
    return layout


@lru_cache(maxsize=1024)
def _is_slice(mesh: Mesh, wide: Mesh, rank: int) -> bool:
    """Whether ``mesh`` is what is left of ``wide`` when the dimensions that it lacks are fixed at the rank's coordinates."""
    where = wide.coordinate(rank)
    if where is None or not set(mesh.names) <= set(wide.names):
        return False
    left = wide.array()[tuple(slice(None) if name in mesh.names else at for name, at in zip(wide.names, where, strict=True))]
    kept = [name for name in wide.names if name in mesh.names]
    return bool(np.array_equal(left.transpose([kept.index(name) for name in mesh.names]), mesh.array()))
