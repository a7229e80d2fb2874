"""Modules of FSDP version 1 (``FullyShardedDataParallel``): what of each original parameter lies in this rank's flat parameters.

Nothing is gathered: a flat parameter is the original ones one after another, cut into one range per rank, so each original parameter is a
``Flat`` tensor of given sizes, known on every rank by arithmetic. Invariant: this rank's own range is what FSDP says that it is, and a
difference is an error. Source: ``torch.distributed.fsdp._flat_param``, ``_ShardParamInfo`` and ``FlatParamHandle.shard``, torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from ckpt.errors import LayoutError, StateError
from ckpt.needs import warn_if_untried
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Sizes, window_sizes
from ckpt.plan.layout.tensor_layout import TensorLayout

from . import lazy
from .dtensor import mesh_of
from .sharded import Sharded
from .walk import Compound

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


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
            f"it has shape {tuple(value.shape)}, its flat parameter here {self.alike}: the owners of its elements are unknown",
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


# Engines of DeepSpeed: ZeRO's fp32 partitions as ranges of the original parameters. deepspeed is recognised without being imported.
#
# ZeRO trains flat partitions of its own, and the module's parameters are made from these after each step: in stages 1 and 2 the
# parameters of a group lie one after another in a flat tensor that is cut evenly, in stage 3 each parameter is cut evenly, and a rank has
# its pieces one after another. So every parameter is a ``Flat`` tensor of sizes that each rank knows by arithmetic, as with FSDP version
# 1, and its values are the masters. Source: ``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``runtime/bf16_optimizer.py``, 0.19.8.

TRIED = "0.19"
_STAGES = {"DeepSpeedZeroOptimizer": 2, "DeepSpeedZeroOptimizer_Stage3": 3, "BF16_Optimizer": 1}
_SWAPPED = "states are swapped to NVMe"
_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

_engines: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""Engines by their modules, once they were in a state."""


class EngineState(Compound):
    """An engine as the values that it is made of, which a plain module and its optimizer under the same names can take."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.scaler = getattr(engine.optimizer, "loss_scaler", None)
        self.named = [(g, g["name"]) for g in getattr(engine.optimizer, "param_groups", ()) if "name" in g]  # experts' say how they are cut

    def parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"module": self.engine.module}
        optimizer = self.engine.optimizer
        base = optimizer.optimizer if type(optimizer).__name__ in _STAGES else optimizer
        if isinstance(base, lazy.Optimizer):
            parts["optimizer"] = base
        if self.engine.lr_scheduler is not None:
            parts["lr_scheduler"] = self.engine.lr_scheduler
        counters: dict[str, Any] = {name: getattr(self.engine, name) for name in _COUNTS}
        counters["loss_scale"] = {name: getattr(self.scaler, name) for name in _SCALES if hasattr(self.scaler, name)}
        return {**parts, "counters": counters}

    def slots(self) -> dict[str, Any]:
        return self.parts()

    def loaded(self, slots: dict[str, Any]) -> None:
        counters = slots["counters"]
        for names, values, target in ((_COUNTS, counters, self.engine), (_SCALES, counters["loss_scale"], self.scaler)):
            for name in names:
                if name in values and hasattr(target, name):
                    setattr(target, name, values[name])
        for group, name in self.named:
            group["name"] = name


def is_of_deepspeed(value: object, name: str) -> bool:
    """Whether it is a ``name`` of DeepSpeed, which is not imported for that."""
    return any(kind.__name__ == name and kind.__module__.startswith("deepspeed.") for kind in type(value).__mro__)


def module_of(engine: Any, path: str) -> nn.Module | None:
    """The module of an engine, which is known from now on by its parts; None if it is no engine."""
    if not is_of_deepspeed(engine, "DeepSpeedEngine"):
        return None
    optimizer, module = engine.optimizer, engine.module
    name = type(optimizer).__name__
    cut = engine.grid.model_parallel_size if is_of_deepspeed(engine, "PipelineEngine") else engine.mp_world_size
    problems = {
        "tensor parallelism: nothing says how its parameters are cut": cut > 1,
        "AutoEP: nothing says which experts of a stack are whose": any(is_of_deepspeed(m, "AutoEPMoELayer") for m in module.modules()),
        _SWAPPED: getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False),
        f"its optimizer is a {name}": is_of_deepspeed(optimizer, "DeepSpeedOptimizer") and name not in _STAGES,
    }
    problem = next((what for what, is_so in problems.items() if is_so), None)
    if problem is not None:
        read = "the weights that engine.save_16bit_model(folder) writes" if problem == _SWAPPED else "what it writes"
        hint = f"save with engine.save_checkpoint(folder); ckpt.open, ckpt.load and ckpt convert read {read}"
        raise StateError(f"this engine of DeepSpeed cannot be part of a state: {problem}", where=path, hint=hint)
    if module not in _engines:
        warn_if_untried("deepspeed", TRIED)
    _engines[module] = ref(engine)  # the one of this state: it may have had another before
    return module  # type: ignore[no-any-return]


def _zero_of(module: nn.Module) -> Any:
    """ZeRO's optimizer, which trains an engine's module; None without it."""
    engine = _engines[module]() if module in _engines else None
    return engine.optimizer if engine is not None and type(engine.optimizer).__name__ in _STAGES else None


def owners_of(module: nn.Module) -> tuple[Optimizer, list[list[torch.Tensor]]] | None:
    """The optimizer below ZeRO's, and the flat tensors that are the parameters of each of its groups; stage 3 gives it these one by one."""
    zero = _zero_of(module)
    if zero is None or _STAGES[type(zero).__name__] < 3:
        return None
    groups: list[list[torch.Tensor]] = [[] for _ in zero.optimizer.param_groups]
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        groups[zero.sub_group_to_group_id[number]].append(flat)
    return zero.optimizer, groups


def engine_parts(module: nn.Module) -> dict[tuple[int, str], FlatPart]:
    """What of an engine's module is partitioned, or only on some ranks, by the ``id`` of the submodule that has each and its attribute
    there."""
    engine = _engines[module]() if module in _engines else None
    if engine is None:
        return {}
    zero = _zero_of(module)
    parts = {} if zero is None else {id(param): part for param, part in _parts(zero)}
    places = [(id(m), name, tensor) for m in module.modules() for name, tensor in _stored(m)]
    tensor: Any
    for _, _, tensor in places:
        if id(tensor) in parts:
            continue
        if hasattr(tensor, "ds_tensor"):  # not trained, in stage 3
            if hasattr(tensor.ds_tensor, "ds_quant_scale"):
                hint = "set zero_quantized_nontrainable_weights to false"
                raise StateError("DeepSpeed has quantised a parameter that is not trained", where=f"parameter {tensor.ds_id}", hint=hint)
            ranks = _ranks(zero.dp_process_group)
            sizes = window_sizes(tensor.ds_tensor.ds_numel, 0, tensor.ds_numel, len(ranks))
            parts[id(tensor)] = _zero_part(tensor.ds_tensor, tensor, tuple(tensor.ds_shape), ranks, sizes, 0)
        elif (group := _group_of(engine, tensor)) is not None:
            shape, ranks = tuple(tensor.shape), _ranks(group)
            layout = TensorLayout(Mesh((COPIES,), (len(ranks),), tuple(ranks)))
            parts[id(tensor)] = FlatPart(tensor.detach(), shape, layout, owner=tensor, alike=shape, start=0)
    for _, _, tensor in places:
        if getattr(tensor, "ds_pipe_replicated", False):
            parts[id(tensor)].elsewhere = True
    return {(number, name): parts[id(t)] for number, name, t in places if id(t) in parts}


def _stored(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and persistent buffers of a module itself."""
    left_out = module._non_persistent_buffers_set
    yield from ((n, t) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None and n not in left_out)


def _group_of(engine: Any, tensor: Any) -> Any:
    """The group of the ranks that have a whole tensor, where these are not all: an expert's, or those of a stage of a pipeline."""
    if not getattr(tensor, "allreduce", True):
        return engine.expert_data_parallel_group[tensor.group_name]
    return engine.grid.get_data_parallel_group() if is_of_deepspeed(engine, "PipelineEngine") else None


def expert_paths(module: nn.Module) -> dict[str, str]:
    """Paths of this rank's experts, which it counts from 0, and those that they have among the experts of all ranks, as DeepSpeed stores
    them."""
    engine, paths = _engines[module]() if module in _engines else None, dict[str, str]()
    if engine is None or not engine.has_moe_layers:
        return paths
    for path, experts in module.named_modules(remove_duplicate=False):
        if is_of_deepspeed(experts, "Experts"):
            count, name = experts.num_local_experts, next(p.group_name for p in experts.parameters())
            first = lazy.torch.distributed.get_rank(engine.expert_parallel_group[name]) * count
            paths |= {f"{path}.deepspeed_experts.{i}": f"{path}.deepspeed_experts.{first + i}" for i in range(count)}
    return paths


def _parts(zero: Any) -> Iterator[tuple[torch.Tensor, FlatPart]]:
    stage = _STAGES[type(zero).__name__]
    if stage == 3:
        for number, (params, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
            ranks, start = _ranks(zero._get_sub_group_process_group(number)), 0
            for param in params:
                if getattr(param, "_z3_optimizer", zero) is not zero:
                    raise _of_another()
                each = param.partition_numel()
                yield param, _zero_part(flat, flat, tuple(param.ds_shape), ranks, window_sizes(each, 0, param.ds_numel, len(ranks)), start)
                start += each
        return
    flats = zero.single_partition_of_fp32_groups if stage == 2 else zero.fp32_groups_flat_partition
    groups = zero.round_robin_bit16_groups if stage == 2 else zero.bf16_groups
    for number, (params, flat) in enumerate(zip(groups, flats, strict=True)):
        ranks = _ranks(zero.real_dp_process_group[number])
        ends = itertools.accumulate((p.numel() for p in params), initial=0)
        offsets = getattr(zero, "round_robin_bit16_offsets", [[]])
        begins = ranks.index(lazy.torch.distributed.get_rank()) * flat.numel()
        for param, offset in zip(params, offsets[number] if any(offsets) else ends, strict=False):
            sizes = window_sizes(flat.numel(), offset, param.numel(), len(ranks))
            part = _zero_part(flat, flat, tuple(param.shape), ranks, sizes, max(offset - begins, 0))
            stated = getattr(param, "_hp_mapping", None)
            if stated is not None and stated.hp_fragment.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                raise _of_another()
            if stated is not None and (stated.hp_fragment_address.start, stated.hp_fragment_address.numel) != (part.start, part.count):
                text = f"DeepSpeed says that this rank has {stated.hp_fragment_address}, its sizes say {part.count} from {part.start} on"
                raise StateError(text, where="ZeRO's partitions", hint=f"use DeepSpeed {TRIED}")
            yield param, part


def _of_another() -> StateError:
    return StateError("another engine trains the module now", where="ZeRO's partitions", hint="put that engine into the state")


def _zero_part(flat: torch.Tensor, owner: torch.Tensor, shape: tuple[int, ...], ranks: Sequence[int], sizes: Sizes, start: int) -> FlatPart:
    size = sizes[ranks.index(lazy.torch.distributed.get_rank())]
    start = start if size else 0
    layout = TensorLayout(Mesh((SHARD,), (len(ranks),), tuple(ranks)), (Flat(SHARD, sizes),))
    memory = flat.detach().narrow(0, start, size)
    return FlatPart(memory, shape, layout, counted=(flat,), owner=owner, alike=tuple(flat.shape), start=start)


def _ranks(group: Any) -> list[int]:
    return lazy.torch.distributed.get_process_group_ranks(group)


def partition_again(module: nn.Module) -> None:
    """Free what stage 3 has gathered: it would hide what is loaded into the partitions."""
    zero = _zero_of(module)
    if zero is not None and hasattr(zero, "checkpoint_event_prologue"):
        zero.checkpoint_event_prologue()


def refresh(module: nn.Module) -> None:
    """Make the module's parameters from the partitions that were loaded. Collective."""
    zero = _zero_of(module)
    if zero is None:
        return
    if _STAGES[type(zero).__name__] < 3:
        zero.update_lp_params()
        return
    groups = zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups, strict=True)
    for flat, masters, pieces in groups:
        flat.data.copy_(masters.data)
        for piece, new in zip(pieces, zero.unflatten(flat, pieces), strict=True):
            piece.data = new.data
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    zero.checkpoint_event_epilogue()
