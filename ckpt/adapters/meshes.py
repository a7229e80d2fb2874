"""Which mesh a DTensor is really on. FSDP over tensor parallelism leaves a parameter that TP does not cut (a norm) on the FSDP
dimension's mesh alone, a different one on each TP rank, though all of these have the same parameter: it is replicated over the
rest of the mesh that the others are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh

from ckpt.layout.mesh import Mesh
from ckpt.layout.tensor_layout import TensorLayout

_known: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The same mesh as ours. It is remembered: torch lists a mesh's ranks anew each time, and every DTensor asks."""
    known = _known.get(mesh)
    if known is None:
        known = _known[mesh] = _mesh_of(mesh)
    return known


def _mesh_of(mesh: DeviceMesh) -> Mesh:
    sizes = tuple(int(n) for n in mesh.shape)
    names = tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(len(sizes))))
    return Mesh(names, sizes, tuple(mesh.mesh.flatten().tolist()))


def in_order(meshes: Iterable[DeviceMesh]) -> tuple[Mesh, ...]:
    """Ours of those that are named, each once, those with the most ranks first. The order is the same on all ranks of a mesh."""
    own = dict.fromkeys(mesh_of(mesh) for mesh in meshes if mesh.mesh_dim_names)
    return tuple(sorted(own, key=lambda m: (-len(m.ranks), m.names, tuple(m.ranks))))


def widened(layout: TensorLayout, meshes: Sequence[Mesh], rank: int) -> TensorLayout:
    """The layout on the largest of ``meshes`` that its mesh is a slice of, replicated over the other dimensions; itself if there
    is none."""
    for wide in meshes:
        if len(wide.names) > len(layout.mesh.names) and layout.mesh.is_slice_of(wide, rank):
            return replace(layout, mesh=wide)
    return layout
