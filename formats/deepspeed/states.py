"""Optimizer states of one data-parallel rank: the file ``…_optim_states.pt`` of ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt.formats.pickles.stand_ins import Made, StoredView

from .directory import PickledFile

MASTER = "master"
"""Key of the full-precision parameter in an optimizer's state; DeepSpeed keeps it beside that."""

_EVENLY = "single_partition_of_fp32_groups"
_EACH = "fp32_flat_groups"
_OTHERWISE = {
    "zero_hpz_partition_size": (1, "a secondary partition (hpZ)"),
    "mics_shard_size": (-1, "a partition over groups of ranks (MiCS)"),
}
"""Settings whose value, unless it is this one, makes partitions that are not known here."""


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """What one rank has. ``keys`` has for each flat group the values of each key: flat tensors, scalar tensors, anything else."""

    file: PickledFile
    zero: int
    """3 if every parameter is cut, else 1 or 2: parameters are flattened, and that is cut."""
    counts: tuple[int, ...]
    """Ranks that each flat group is cut for; one number in ZeRO-3."""
    masters: tuple[StoredView, ...]
    keys: tuple[Mapping[str, Any], ...]
    options: tuple[Mapping[Any, Any], ...]
    """Of each parameter group."""
    members: tuple[tuple[int, ...], ...]
    """The flat groups of each parameter group."""
    gaps: tuple[tuple[int, ...], ...] | None
    slices: tuple[Mapping[str, tuple[int, int]], ...] | None
    """Where the file says that fragments lie, for each flat group: start and number of elements by parameter."""
    others: Mapping[Any, Any]
    """All that belongs to no parameter: the loss scaler, for example."""
    unknown: tuple[str, ...]
    """Entries of the file that are not known, and not read."""


_TAKEN = frozenset({_EVENLY, _EACH, "base_optimizer_state", "base_optimizer_state_step", "optimizer_state_dict", "param_groups"})
_ENTRIES = frozenset({"optimizer_state_dict", "ds_config", "ds_version"})
"""Of the file; the last two are in the model's file too."""
_LAYOUT = frozenset({"param_slice_mappings", "partition_count", "group_paddings", "param_alignment_paddings", "ds_version", "zero_stage"})


def others_of(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """What of ZeRO's optimizer is neither about parameters nor about where they lie."""
    return {k: v for k, v in content.items() if k not in _TAKEN and k not in _LAYOUT}


def read_states(file: PickledFile) -> RankStates:
    """Take a file apart."""
    content = file.mapping(file.root.get("optimizer_state_dict"), "'optimizer_state_dict'")
    zero = file.number(content["zero_stage"], "'zero_stage'") if "zero_stage" in content else (3 if _EACH in content else 1)
    key = {1: _EVENLY, 2: _EVENLY, 3: _EACH}.get(zero)
    if key is None or key not in content:
        listed = ", ".join(map(str, list(content)[:8])) or "nothing"
        file.unknown(f"there are optimizer states of ZeRO stage {zero} with {listed}")
    _check_partitions(file, content)
    masters = tuple(file.flat(m, f"{key}[{i}]") for i, m in enumerate(file.sequence(content[key], key)))
    base = file.meaning(content.get("base_optimizer_state" if zero < 3 else "optimizer_state_dict"))
    options, members, keys = _of_optimizer(file, base, content, len(masters))
    counts = content.get("partition_count", 1)
    return RankStates(
        file=file,
        zero=zero,
        counts=tuple(file.number(n, "'partition_count'") for n in (file.sequence(counts, "") if type(counts) is not int else [counts])),
        masters=masters,
        keys=keys,
        options=options,
        members=members,
        gaps=_gaps(file, content.get("param_alignment_paddings")),
        slices=None if _round_robin(file) else _slices(file, content.get("param_slice_mappings")),
        others=others_of(content) | _others_of_base(file, base),
        unknown=tuple(sorted(str(key) for key in file.root.keys() - _ENTRIES)),
    )


def _others_of_base(file: PickledFile, base: Any) -> dict[str, Any]:
    """What the optimizer itself has besides groups and states."""
    if isinstance(base, list):
        return {}
    more = {k: v for k, v in file.mapping(base, "the optimizer's state").items() if k not in ("param_groups", "state")}
    return {"base_optimizer_state": more} if more else {}


def _check_partitions(file: PickledFile, content: Mapping[Any, Any]) -> None:
    if content.get("ds_zero_partition_groups"):
        file.unknown("there are partitions over groups of ranks (AutoEP)")
    config = file.meaning(file.root.get("ds_config"))
    if not isinstance(config, dict):
        return
    if config.get("use_data_before_expert_parallelism"):
        file.unknown("there are experts in the order of use_data_before_expert_parallelism")
    zero = file.meaning(config.get("zero_optimization"))
    if not isinstance(zero, dict):
        return
    for name, (usual, what) in _OTHERWISE.items():
        if zero.get(name) not in (usual, None):
            file.unknown(f"there is {what}, {name}={zero[name]}")
    offload = file.meaning(zero.get("offload_optimizer"))
    if isinstance(offload, dict) and offload.get("device") == "nvme":
        file.unknown("there are optimizer states on NVMe")


def _of_optimizer(
    file: PickledFile, base: Any, content: Mapping[Any, Any], flat: int
) -> tuple[tuple[Mapping[Any, Any], ...], tuple[tuple[int, ...], ...], tuple[Mapping[str, Any], ...]]:
    """Options, flat groups of each parameter group, and states of each flat group."""
    if isinstance(base, list):  # elastic checkpoints have the states alone
        step = content.get("base_optimizer_state_step")
        states = [file.mapping(state, "'base_optimizer_state'") for state in base]
        lean = tuple(state | ({"step": step} if step is not None and "step" not in state else {}) for state in states)
        return (), tuple((i,) for i in range(flat)), lean
    optimizer = file.mapping(base, "the optimizer's state")
    groups = [file.mapping(g, "a parameter group") for g in file.sequence(optimizer.get("param_groups"), "'param_groups'")]
    members = tuple(tuple(file.number(n, "'params'") for n in file.sequence(g.get("params"), "'params'")) for g in groups)
    if sorted(n for member in members for n in member) != list(range(flat)):
        file.damaged(f"the parameter groups have flat groups {members}, and there are {flat}")
    by_number = file.mapping(optimizer.get("state"), "'state'")
    owner = {n: group for group, member in zip(groups, members, strict=True) for n in member}
    odd = [n for n in by_number if n not in owner]
    if odd:
        file.unknown(f"the optimizer has a state {odd[0]!r} of no parameter")
    keys = []
    for n in range(flat):
        state = dict(file.optional(by_number.get(n), f"state {n}"))
        if state and "step" not in state and "step" in owner[n]:
            state["step"] = owner[n]["step"]
        keys.append(state)
    return tuple({k: v for k, v in g.items() if k != "params"} for g in groups), members, tuple(keys)


def _gaps(file: PickledFile, value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    what = "'param_alignment_paddings'"
    return tuple(tuple(file.number(n, what) for n in file.sequence(group, what)) for group in file.sequence(value, what))


def _round_robin(file: PickledFile) -> bool:
    """Whether parameters were flattened in another order than their own: DeepSpeed 0.19 writes its slice mappings as if they were not,
    while ``param_shapes`` has the order in which the elements lie."""
    config = file.meaning(file.root.get("ds_config"))
    zero = file.meaning(config.get("zero_optimization")) if isinstance(config, dict) else None
    return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))


def _slices(file: PickledFile, value: Any) -> tuple[Mapping[str, tuple[int, int]], ...] | None:
    if value is None:
        return None
    what = "'param_slice_mappings'"
    slices = []
    for group in file.sequence(value, what):
        rows = {}
        for name, address in file.mapping(group, what).items():
            if type(address) is not Made or not {"start", "numel"} <= address.attributes().keys():
                file.damaged(f"{what} should be addresses of fragments")
            attributes = address.attributes()
            rows[name] = (file.number(attributes["start"], what), file.number(attributes["numel"], what))
        slices.append(rows)
    return tuple(slices)


def in_one_order(ranks: Sequence[RankStates]) -> list[RankStates]:
    """The flat groups of every rank in the order of the first rank's, where names of groups tell.

    Experts of layers with different expert parallelism are in groups of their own, which DeepSpeed 0.19 orders by a set of their names
    (``split_params_into_different_moe_groups_for_optimizer``): differently in every process.
    """
    wanted = _labels(ranks[0])
    return [_ordered(rank, wanted) if sorted(_labels(rank)) == sorted(wanted) else rank for rank in ranks]


def _labels(rank: RankStates) -> list[tuple[str, int]]:
    """The name of each group, and how many before it have the same; nothing if there are none."""
    names = [str(options.get("name", "")) for options in rank.options]
    labelled = all(names) and rank.members == tuple((i,) for i in range(len(rank.masters))) and len(rank.counts) == len(names)
    return [(name, names[:i].count(name)) for i, name in enumerate(names)] if labelled else []


def _ordered(rank: RankStates, wanted: Sequence[tuple[str, int]]) -> RankStates:
    labels = _labels(rank)
    order = [labels.index(label) for label in wanted]
    if order == sorted(order):
        return rank
    return replace(
        rank,
        counts=tuple(rank.counts[i] for i in order),
        masters=tuple(rank.masters[i] for i in order),
        keys=tuple(rank.keys[i] for i in order),
        options=tuple(rank.options[i] for i in order),
        gaps=None if rank.gaps is None else tuple(rank.gaps[i] for i in order),
        slices=None if rank.slices is None else tuple(rank.slices[i] for i in order),
    )


def same_groups(ranks: Sequence[RankStates]) -> None:
    """Raise CorruptError unless all ranks have the same kind and number of partitions."""
    first = ranks[0]
    for rank in ranks[1:]:
        if (rank.zero, rank.counts, len(rank.masters)) != (first.zero, first.counts, len(first.masters)):
            rank.file.damaged(f"this rank has {len(rank.masters)} flat groups of ZeRO-{rank.zero}, another has others")
