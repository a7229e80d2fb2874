"""Which tensors say themselves where they lie, and the meshes of DTensors. DTensor is not imported here: that takes half a second, and
where nothing else has imported it there is none."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from ckpt.errors import LayoutError, MismatchError, UsageError
from ckpt.plan import tree
from ckpt.plan.layout.layout import Layout
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.tree import Node

from . import lazy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


_types: tuple[type[DTensor], ...] = ()


def dtensor_types() -> tuple[type[DTensor], ...]:
    """The class alone; nothing if no object of this process can be one."""
    global _types
    if not _types:
        _types = (kind,) if (kind := getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)) is not None else ()
    return _types


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _types or dtensor_types())


def is_sharded_tensor(value: object) -> bool:
    """Whether it is a ``ShardedTensor``; its module is not imported for that."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


STATED_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def states_boxes(tensor: torch.Tensor) -> bool:
    """Whether a tensor states its boxes (``sharded.py``). Cheap: ``hasattr`` makes no ``__dict__`` of a tensor that has none."""
    kind = type(tensor)
    # Plain ones first: a state has very many of these.
    local = tensor if kind is lazy.Tensor or kind is lazy.Parameter else tensor._local_tensor if is_dtensor(tensor) else tensor
    has_fields = hasattr(local, STATED_FIELDS[0]) and all(hasattr(local, name) for name in STATED_FIELDS)
    return has_fields or hasattr(local, "__create_chunk_list__")


def holder_of(tensor: torch.Tensor) -> torch.Tensor:
    """What has the attributes of a tensor that states its boxes."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


# Which mesh a DTensor is really on. FSDP over tensor parallelism leaves a parameter that TP does not cut (a norm) on the FSDP
# dimension's mesh alone, a different one on each TP rank, though all of these have the same parameter: it is replicated over the
# rest of the mesh that the others are on.

_known: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The same mesh as ours. It is remembered: torch lists a mesh's ranks anew each time, and every DTensor asks."""
    known = _known.get(mesh)
    if known is None:
        sizes = tuple(int(n) for n in mesh.shape)
        names = tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(len(sizes))))
        known = _known[mesh] = Mesh(names, sizes, tuple(mesh.mesh.flatten().tolist()))
    return known


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


# Where a rank sits in the mesh of its job, and which of the ranks are to have states of their own.
#
# Ranks that differ in the mesh dimensions ``over`` have states that differ; they are numbered by these dimensions, row-major. Ranks of one
# number are replicas of each other. So tensor-parallel ranks share what is distinct over ``"dp"``.

MeshLike: TypeAlias = "Layout | Mesh | DeviceMesh | Mapping[str, int]"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCoordinate:
    """A rank's coordinates ``at`` in a mesh; ``number`` of ``count`` along the dimensions ``over``."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    over: tuple[str, ...]

    @property
    def number(self) -> int:
        number = 0
        for name in self.over:
            axis = self.names.index(name)
            number = number * self.sizes[axis] + self.at[axis]
        return number

    @property
    def count(self) -> int:
        return math.prod(self.sizes[self.names.index(name)] for name in self.over)

    def node(self) -> dict[str, Any]:
        """As plain values, for the checkpoint."""
        return {"names": list(self.names), "sizes": list(self.sizes), "at": list(self.at), "over": list(self.over)}

    @classmethod
    def of(cls, node: Node) -> MeshCoordinate:
        """The seat that a saved value has under the key ``seat``."""
        saved = tree.find(node, ["seat"])
        try:
            seat = cls(**{key: tuple(saved[key]) for key in ("names", "sizes", "at", "over")})  # type: ignore[index]
            if not 0 <= seat.number < seat.count:
                raise ValueError(seat)
        except (TypeError, KeyError, ValueError, IndexError) as err:
            raise MismatchError("the checkpoint has something else there: it does not say for which coordinates a rank saved it") from err
        return seat


class StateSharding:
    """The mesh of a job and the dimensions over which states differ.

    Args:
        mesh: all ranks of the job; left out, they are one dimension, and ``over`` is that.
        over: names of dimensions.
    """

    def __init__(self, mesh: MeshLike | None, over: str | Sequence[str] | None, argument: str) -> None:
        if (mesh is None) != (over is None):
            raise UsageError(f"mesh and {argument} go together", hint=f'mesh={{"dp": 4, "tp": 2}}, {argument}="dp"; or neither of the two')
        self.mesh = None
        if mesh is not None:
            self.mesh = mesh_of(mesh) if isinstance(mesh, lazy.DeviceMesh) else mesh.mesh if isinstance(mesh, Layout) else Mesh.of(mesh)
        self.over = () if over is None else (over,) if isinstance(over, str) else tuple(over)
        if self.mesh is not None:
            for name in self.over:
                self.mesh.axis(name)

    def seat(self, rank: int, ranks: Sequence[int]) -> MeshCoordinate:
        """The seat of one of the job's ranks."""
        mesh, over = self.mesh or Mesh.flat(ranks), self.over if self.mesh is not None else ("ranks",)
        if set(mesh.ranks) != set(ranks):
            hint = "give the whole mesh, not a slice of it, with the sizes that it has in this job"
            raise LayoutError(f"the mesh {mesh} is not of the {len(ranks)} ranks that make the call", hint=hint)
        return MeshCoordinate(names=mesh.names, sizes=mesh.sizes, at=mesh.place(rank), over=over)


def holders(nodes: Mapping[int, Node], key: str) -> tuple[int, dict[int, int]]:
    """How many distinct states were saved, and for each number the first rank whose node has ``key``."""
    first_ranks: dict[int, int] = {}
    counts = set()
    for rank, node in nodes.items():
        seat = MeshCoordinate.of(node)
        counts.add(seat.count)
        if tree.find(node, [key]) is not tree.MISSING:
            first_ranks.setdefault(seat.number, rank)
    if len(counts) > 1:
        raise MismatchError(f"ranks saved it with different meshes: of {' and '.join(map(str, sorted(counts)))} distinct states")
    return counts.pop(), first_ranks


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor, or the local one of a DTensor, is made of other tensors."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    kind = type(local)
    if kind in lazy.PLAIN or not isinstance(local, lazy.Tensor) or not hasattr(kind, "__tensor_flatten__"):
        return False
    return not (is_dtensor(local) or local.is_nested or kind.__name__ == "AsyncCollectiveTensor")
