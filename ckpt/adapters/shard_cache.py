"""ShardCache that earlier walks found, by name: the second save of a state need not derive layouts again.

Invariant: a remembered shard is used only if everything it was derived from is the same: class, dtype and shape of the tensor, its
DTensor mesh and placements, and the context (rank, ranks, layout, meshes).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ckpt.layout.geometry import Box
from ckpt.layout.layout import Layout
from ckpt.layout.mesh import Mesh
from ckpt.plan.ownership import TensorSpec

from .dtensor import is_dtensor


@dataclass(frozen=True, slots=True, eq=False)
class CachedShard:
    """The place of one tensor. ``box`` is all that this rank holds, as one block of the whole local tensor."""

    key: Hashable
    info: TensorSpec
    box: Box
    alive: object
    """Keeps what the key knows by its id."""


@dataclass(eq=False)
class ShardCache:
    """Remembers one shard per name. ``infos`` makes equal :class:`TensorSpec` values one object, so that tables compare quickly."""

    known: dict[str, CachedShard] = field(default_factory=dict)
    _context: tuple[int, tuple[int, ...], Layout | None, tuple[Mesh, ...]] | None = None

    def settle(self, rank: int, ranks: tuple[int, ...], layout: Layout | None, meshes: tuple[Mesh, ...]) -> None:
        """Forget everything unless the context is the same as last time."""
        context = (rank, ranks, layout, meshes)
        old = self._context
        if old is None or old[2] is not layout or (old[0], old[1], old[3]) != (rank, ranks, meshes):
            self.known.clear()
        self._context = context


def key_of(tensor: torch.Tensor) -> Hashable:
    """What the place of a tensor depends on; None for classes that are not plain. It knows objects by their ids: see ``alive_of``."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return None if tensor.is_nested else (kind, tensor.dtype, tensor.shape, tensor.layout)
    if is_dtensor(tensor):
        spec, local = getattr(tensor, "_spec", None), getattr(tensor, "_local_tensor", None)
        if spec is not None and type(local) is torch.Tensor:
            return kind, tensor.dtype, tensor.shape, local.shape, local.layout, id(spec.mesh), id(spec.placements)
    return None


def alive_of(tensor: torch.Tensor) -> object:
    """What has to stay alive for a key to stay true."""
    return (tensor._spec.mesh, tensor._spec.placements) if is_dtensor(tensor) else None


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that has a key, without autograd."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.detach() if local.requires_grad else local
