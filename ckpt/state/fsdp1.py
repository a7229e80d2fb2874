"""Modules of FSDP version 1 (``FullyShardedDataParallel``): what of each original parameter lies in this rank's flat parameters.

Nothing is gathered: a flat parameter is the original ones one after another, cut into one range per rank, so each original parameter is a
``Flat`` tensor of given sizes, known on every rank by arithmetic. Invariant: this rank's own range is what FSDP says that it is, and a
difference is an error. Source: ``torch.distributed.fsdp._flat_param``, ``_ShardParamInfo`` and ``FlatParamHandle.shard``, torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import LayoutError, StateError
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, window_sizes
from ckpt.plan.layout.tensor_layout import TensorLayout

from .dtensor import mesh_of
from .sharded import Sharded

if TYPE_CHECKING:
    import torch
    from torch import nn

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
SHARD, COPIES = "shard", "copies"


@dataclass(eq=False, slots=True, kw_only=True)
class FlatPart(Sharded):
    """What a rank has of one original parameter. ``owner`` is the parameter that optimizers know: the flat one, or with ``use_orig_params``
    the original one. State of an optimizer for it has the shape ``alike`` and this parameter's elements from ``start`` on. Of what lies
    ``elsewhere`` too, in other cuts, this rank saves nothing."""

    owner: torch.Tensor
    alike: tuple[int, ...]
    start: int
    elsewhere: bool = False

    @property
    def count(self) -> int:
        """Elements of the parameter on this rank."""
        return self.memory.numel()

    def state(self, value: torch.Tensor, state_name: str) -> Sharded:
        """This parameter's part of a tensor that an optimizer keeps for the owner."""
        if tuple(value.shape) == self.alike:
            return self.elements(value)
        if value.numel() == 1:
            return self.number(value.clone())
        raise LayoutError(
            f"it has shape {tuple(value.shape)}, its flat parameter here {self.alike}: which elements are whose cannot be told",
            where=f"tensor {state_name}",
            hint="use fully_shard (FSDP version 2) with this optimizer",
        )

    def elements(self, value: torch.Tensor) -> Sharded:
        """This parameter's elements in a tensor of an optimizer's state; only ranks that have any take part."""
        memory = value.detach().view(-1).narrow(0, self.start, self.count)
        filled = self.layout.filled()
        if filled:
            return Sharded(memory, self.shape, TensorLayout(self.layout.mesh, self.layout.splits, filled))
        return Sharded(memory.view(self.shape), self.shape, self.layout)

    def number(self, value: torch.Tensor) -> Sharded:
        """A single number kept for this parameter, such as Adam's ``step``."""
        return Sharded(value.detach(), tuple(value.shape), TensorLayout(self.layout.mesh, (), self.layout.filled()))


def handles_of(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Name, FSDP module and handle of each flat parameter in a module; none without FSDP version 1, which is not imported for that."""
    fsdp = sys.modules.get(FSDP1)
    if fsdp is None:
        return []
    wrappers = [(n, m) for n, m in module.named_modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    return [(name, wrapper, wrapper._handle) for name, wrapper in wrappers if wrapper._handle is not None]


def reshard(module: nn.Module) -> None:
    """Free what FSDP gathered for a forward pass, and may have kept for the next: it would hide what is loaded into the ranges."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    for _, wrapper, handle in handles_of(module):
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
            _reshard(wrapper, handle, True)


def flat_parts(module: nn.Module) -> dict[tuple[int, str], FlatPart]:
    """The original parameters in the flat ones, by the ``id`` of the module that has each and its attribute there. Tied ones are one
    object."""
    by_owner: dict[tuple[int, str], FlatPart] = {}
    for name, wrapper, handle in handles_of(module):
        flat = handle.flat_param
        where = f"FSDP module {name or type(wrapper.module).__name__}"
        if handle._training_state.name != "IDLE":
            hint = "save and load between steps, outside summon_full_params"
            raise StateError(f"FSDP is in the middle of something ({handle._training_state.name})", where=where, hint=hint)
        if any(extension is not None for extension in flat._param_extensions):
            hint = "use fully_shard (FSDP version 2) for FSDP over tensor parallelism"
            raise StateError("FSDP version 1 over DTensors cannot be stored", where=where, hint=hint)
        mesh, local = _mesh(wrapper, handle), _local(handle)
        owners = flat._params if handle._use_orig_params else [flat] * len(flat._param_infos)
        rows = zip(flat._param_infos, flat._shapes, _starts(flat), flat._shard_param_infos, owners, strict=True)
        for info, shape, start, shard, owner in rows:
            part = by_owner[id(info.module), info.param_name] = _part(handle, mesh, local, tuple(shape), start, owner)
            part.counted = (flat, owner)  # FSDP gives them this memory by ``.data``, so each counts for itself
            if handle.uses_sharded_strategy and (shard.numel_in_shard or 0) != part.count:
                text = f"FSDP says that this rank has {shard.numel_in_shard or 0} elements of {info.param_name}, its sizes say {part.count}"
                raise StateError(text, where=where, hint="this version of torch flattens otherwise: use fully_shard")
        for tied in flat._shared_param_infos:
            by_owner[id(tied.module), tied.param_name] = by_owner[id(tied.prim_module), tied.prim_param_name]
    return by_owner


def own_tensors(module: nn.Module) -> Iterator[tuple[str, object]]:
    """What ``state_dict`` of one module, without its children and hooks, has beside the flat parameter; FSDP's hooks would gather that."""
    from torch.distributed.fsdp._flat_param import FlatParameter

    values: dict[str, object] = {}
    module._save_to_state_dict(values, "", keep_vars=True)
    yield from ((k, v) for k, v in values.items() if not isinstance(v, FlatParameter))


def _local(handle: Any) -> torch.Tensor:
    """This rank's range of a flat parameter, in full precision, also while the parameter stands for what was gathered."""
    flat = handle.flat_param
    kept: torch.Tensor | None = getattr(flat, "_local_shard", None)
    if kept is None or (flat.dtype == kept.dtype and (handle.is_sharded(flat) or not handle.uses_sharded_strategy)):
        kept = flat
    return kept.detach()


def _starts(flat: Any) -> list[int]:
    """Where each original parameter begins in the whole flat parameter, which may have padding between them."""
    ends = itertools.accumulate(flat._numels_with_padding)
    rows = zip(flat._numels_with_padding, ends, flat._is_padding_mask, strict=True)
    return [end - numel for numel, end, is_padding in rows if not is_padding]


def _part(handle: Any, mesh: Mesh, local: torch.Tensor, shape: tuple[int, ...], start: int, owner: torch.Tensor) -> FlatPart:
    flat, numel = handle.flat_param, math.prod(shape)
    alone = owner is not flat
    if not handle.uses_sharded_strategy:
        memory = local.view(-1).narrow(0, start, numel).view(shape)
        alike = shape if alone else tuple(local.shape)
        return FlatPart(memory, shape, TensorLayout(mesh), owner=owner, alike=alike, start=0 if alone else start)
    each, ranks = local.numel(), mesh.size(SHARD)
    # Rank r has elements [r * each, (r + 1) * each) of the flat parameter. Moved by ``start`` and clipped to the
    # parameter, these bounds are the cuts of the original parameter between the ranks:
    #
    #  flat parameter   |---- w1 -----|-- pad --|---------- w2 -----------|
    #  ranks            |----- 0 ------|----- 1 ------|----- 2 ------|----- 3 ------|
    #  cuts of w2                               0     a              b    n
    #                                           rank 1 has [0, a), rank 2 [a, b), rank 3 [b, n)
    sizes = window_sizes(each, start, numel, ranks)
    at, size = max(start - handle.rank * each, 0), sizes[handle.rank]
    memory = local.narrow(0, at if size else 0, size)
    layout = TensorLayout(mesh, (Flat(SHARD, sizes),))
    alike = (size,) if alone else (each,)
    return FlatPart(memory, shape, layout, owner=owner, alike=alike, start=0 if alone or not size else at)


def _mesh(wrapper: Any, handle: Any) -> Mesh:
    """Ranks by the part that they have; for hybrid sharding also a first dimension, over which the parts are the same."""
    from torch.distributed import get_process_group_ranks

    shards = get_process_group_ranks(handle.process_group)
    grid = wrapper._device_mesh is not None and wrapper._device_mesh.ndim == 2  # of parts of one rank FSDP says NO_SHARD
    if not grid and not wrapper.sharding_strategy.name.lstrip("_").startswith("HYBRID"):
        return Mesh((SHARD,), (len(shards),), tuple(shards))
    if wrapper._device_mesh is not None:
        return Mesh((COPIES, SHARD), tuple(wrapper._device_mesh.shape), mesh_of(wrapper._device_mesh).ranks)
    copies = get_process_group_ranks(wrapper._inter_node_pg)  # as FSDP assumes, nodes are alike: what is beside this rank is so everywhere
    ranks = [node - shards[handle.rank] + rank for node in copies for rank in shards]
    return Mesh((COPIES, SHARD), (len(copies), len(shards)), tuple(ranks))
