"""Which files of a directory make a DeepSpeed checkpoint, by what they are called.

(Source of the names: ``deepspeed/runtime/engine.py`` and ``runtime/pipe/module.py`` of DeepSpeed 0.5 to 0.19.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.concurrency import map_tasks
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.external import SingleFile
from ckpt.formats.stand_ins import Made, Size, StoredView, counts
from ckpt.formats.torch_archive import Archive, open_archive
from ckpt.io_backends.checks import path_problem
from ckpt.io_backends.registry import join_url, open_backend

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


LATEST = "latest"
UNIVERSAL = "zero/"
"""Directory of a universal checkpoint with a directory per parameter."""

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt")
_STATES = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{2,6})(-model_\d+)?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_NOT_READ = {
    re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt"): "optimizer states of experts without ZeRO",
    re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt"): "experts as DeepSpeed before 0.5.9 wrote them",
    re.compile(r"offloaded_tensors/"): "optimizer states that were swapped out to other files",
}
_MAX_TAG = 4096


@dataclass(frozen=True, kw_only=True)
class Directory:
    """The files of one checkpoint. A pipeline stage is what DeepSpeed calls ``mp_rank``; ``dp`` counts data-parallel ranks."""

    models: Mapping[tuple[int, int], str]
    """By stage and rank. Only ZeRO-3 has files of other ranks than 0."""
    states: Mapping[tuple[int, int], str]
    """Optimizer states, by stage and rank."""
    layers: Mapping[int, str]
    experts: tuple[str, ...]
    universal: bool

    @property
    def stages(self) -> list[int]:
        return sorted({stage for stage, _ in self.models})

    def ranks(self, stage: int) -> list[str]:
        """The optimizer states of a stage, by rank."""
        paths = {rank: path for (at, rank), path in self.states.items() if at == stage}
        gap = next((rank for rank in range(len(paths)) if rank not in paths), None)
        if gap is not None:
            raise CorruptError(
                f"optimizer states of rank {gap} are missing, those of rank {max(paths)} are there",
                where=next(iter(paths.values())),
                hint="a process did not save, or files were not copied: get them",
            )
        return [paths[rank] for rank in range(len(paths))]


def is_checkpoint(backend: Backend, names: Sequence[str]) -> bool:
    """Whether the names below a URL are those of a checkpoint, or of a directory whose ``latest`` names one."""
    if isinstance(backend, SingleFile):
        return False
    if any(_MODEL.fullmatch(name) for name in names):
        return True
    tag = _latest(backend) if LATEST in names else None
    return tag is not None and any(_MODEL.fullmatch(name) for name in backend.list_dir(tag))


def resolve(backend: Backend) -> Backend:
    """The directory of the checkpoint: that of the tag that ``latest`` names, if the one given is only its parent."""
    names = backend.list_dir()
    if any(_MODEL.fullmatch(name) for name in names):
        return backend
    tag = _latest(backend)
    if tag is None:
        raise NotFoundError("`latest` names no checkpoint", where=backend.url, hint="open the directory of a tag")
    return open_backend(join_url(backend.url, tag))


def _latest(backend: Backend) -> str | None:
    try:
        if backend.size(LATEST) > _MAX_TAG:
            return None
        tag = backend.read(LATEST).decode("utf-8").strip()
    except (NotFoundError, UnicodeDecodeError):
        return None
    return None if path_problem(tag) else tag


def read_directory(names: Iterable[str], where: str) -> Directory:
    """Sort the files of a checkpoint."""
    models: dict[tuple[int, int], str] = {}
    states: dict[tuple[int, int], str] = {}
    layers: dict[int, str] = {}
    experts = []
    names = list(names)
    for name in names:
        for pattern, what in _NOT_READ.items():
            if pattern.fullmatch(name):
                hint = "load it with DeepSpeed, and save it with ckpt or the weights with engine.save_16bit_model(folder)"
                raise FormatError(f"{what} are not read ({name})", where=where, hint=hint)
        if match := _MODEL.fullmatch(name):
            key = (int(match[2]), int(match[1] or 0))
            if key in models:
                _two_saves(models[key], name, where)
            models[key] = name
        elif match := _STATES.fullmatch(name):
            key = (int(match[3]), int(match[2]))
            if key in states:
                _two_saves(states[key], name, where)
            states[key] = name
        elif match := _LAYER.fullmatch(name):
            if match[2] or int(match[1]) in layers:
                raise FormatError(
                    f"{name} is a layer that was cut for tensor parallelism, and DeepSpeed does not say how",
                    where=where,
                    hint="make a universal checkpoint of it (deepspeed.checkpoint.ds_to_universal) and open that",
                )
            layers[int(match[1])] = name
        elif match := _EXPERT.fullmatch(name):
            experts.append(name)
    return Directory(models=models, states=states, layers=layers, experts=tuple(sorted(experts)), universal=UNIVERSAL in names)


def _two_saves(one: str, other: str, where: str) -> NoReturn:
    raise CorruptError(f"{one} and {other} are of different saves", where=where, hint="remove the files of one of them")


# The object in one file of DeepSpeed, with checks on what is taken out of it.

_THREADS = 16


class PickledFile:
    """``whole`` is what was saved, with stand-ins; ``file`` the number of the file."""

    def __init__(self, archive: Archive, path: str, file: int) -> None:
        self.archive = archive
        self.path = path
        self.file = file
        self.where = archive.where
        self.whole = archive.values.meaning(archive.load())

    @property
    def root(self) -> dict[Any, Any]:
        """What was saved, which has to be a mapping."""
        return self.mapping(self.whole, "its contents")

    def damaged(self, what: str) -> NoReturn:
        raise CorruptError(what, where=self.where, hint="the file is damaged, or of a version of DeepSpeed that is not known here")

    def unknown(self, what: str) -> NoReturn:
        raise FormatError(f"{what}, which is not known here", where=self.where, hint="load it with DeepSpeed and save it with ckpt")

    def mapping(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or what was one."""
        meant = self.archive.values.meaning(value)
        return meant if isinstance(meant, dict) else self.damaged(f"{what} should be a mapping, not {_kind(value)}")

    def optional(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or an empty one for None."""
        return {} if value is None else self.mapping(value, what)

    def sequence(self, value: Any, what: str) -> list[Any]:
        """A list or tuple."""
        meant = self.archive.values.meaning(value)
        return list(meant) if isinstance(meant, (list, tuple)) else self.damaged(f"{what} should be a list, not {_kind(value)}")

    def number(self, value: Any, what: str) -> int:
        """A whole number that is not negative; that of an enumeration, if it is one."""
        if type(value) is Made and len(value.args) == 1:
            (value,) = value.args
        return value if type(value) is int and value >= 0 else self.damaged(f"{what} should be a number, not {_kind(value)}")

    def meaning(self, value: Any) -> Any:
        return self.archive.values.meaning(value)

    def flat(self, value: Any, what: str) -> StoredView:
        """A tensor of one dimension whose elements lie one after another."""
        meant = self.archive.values.meaning(value)
        if type(meant) is not StoredView or len(meant.shape) != 1 or (meant.shape[0] > 1 and meant.strides != (1,)) or meant.lazy:
            self.damaged(f"{what} should be a flat tensor, not {_kind(value)}")
        return meant

    def shapes(self, value: Any, what: str) -> dict[str, tuple[int, ...]]:
        """Parameters and their shapes, in order."""
        shapes = {}
        for name, shape in self.mapping(value, what).items():
            shape = self.archive.values.meaning(shape)
            if type(name) is not str or not name or type(shape) not in (tuple, list, Size):
                self.damaged(f"{what} should be names and shapes")
            try:
                shapes[name] = counts(shape)
            except ValueError as err:
                self.damaged(f"{what} has a shape of {name} that is none ({err})")
            if math.prod(shapes[name]) >= 1 << 58:
                self.damaged(f"{what} has a shape {list(shapes[name])} that no parameter has")
        return shapes


def open_files(backend: Backend, paths: Iterable[str]) -> list[PickledFile]:
    """The objects of many files, several at a time."""
    numbered = list(enumerate(paths))
    return map_tasks(lambda n: PickledFile(open_archive(backend, n[1]), n[1], n[0]), numbered, _THREADS, "ckpt-open")


def _kind(value: Any) -> str:
    return f"{value.name or 'an object'}" if type(value) is Made else type(value).__name__


# Optimizer states of one data-parallel rank: the file ``…_optim_states.pt`` of ZeRO-1, 2 and 3.

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
    counts, paddings, what = content.get("partition_count", 1), content.get("param_alignment_paddings"), "'param_alignment_paddings'"
    gaps = None
    if paddings is not None:
        gaps = tuple(tuple(file.number(n, what) for n in file.sequence(group, what)) for group in file.sequence(paddings, what))
    return RankStates(
        file=file,
        zero=zero,
        counts=tuple(file.number(n, "'partition_count'") for n in (file.sequence(counts, "") if type(counts) is not int else [counts])),
        masters=masters,
        keys=keys,
        options=options,
        members=members,
        gaps=gaps,
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
