"""The parameters in a file of Megatron-LM's format ``torch``, from numbers that count on one rank to those of the whole model; and
optimizers that are not distributed. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.stand_ins import StoredView

from .buffers import BufferSegment
from .names import (
    EMBEDDING,
    LAYER,
    NOT_TRAINED,
    OUTPUT,
    LocalParam,
    cut_of,
    depends_on_specification,
    expert_name,
    expert_of,
    fused_norms,
    gated_layers,
    is_decayed,
    is_latent_cut,
    transposed_experts,
)
from .pieces import InArchive, PieceTable, whole_piece
from .stored_buffers import HINT, FlatStates
from .training import COMMON_STEP, STATE

_TRANSPOSED = re.compile(r"mlp\.experts\.weight([12])")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkNames:
    """Where a chunk of the model belongs: its first layer, and rank and number of ranks of each kind of parallelism.

    ``tied``: its output layer is a copy of the embedding. ``shared``: the embedding has such a copy.
    """

    first_layer: int
    tensor: tuple[int, int]
    expert: tuple[int, int]
    expert_tensor: tuple[int, int]
    tied: bool
    shared: bool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """A parameter of a file: its bytes, what it is, and the whole shapes of the tensors it is a part of. ``trained``: it has a gradient."""

    view: StoredView
    param: LocalParam
    shapes: Mapping[str, tuple[int, ...]]
    trained: bool


def local_params(chunk: Mapping[str, StoredView], names: ChunkNames, where: str) -> list[Local]:
    """The parameters of a chunk in the model's order."""
    experts = _experts_of(chunk)
    called = {old: _called(old, experts, names) for old in chunk}
    fused = fused_norms(called.values())
    gated = gated_layers({called[old]: view.shape for old, view in chunk.items()})
    params = []
    for old, view in chunk.items():
        transposed = _TRANSPOSED.search(old)
        name = fused[called[old]]
        if transposed is not None:
            params.append(_of_experts(name, view, chunk, old, names, where))
            continue
        expert = ".mlp.experts." in name
        rank, ranks = names.expert_tensor if expert else names.tensor
        target = EMBEDDING if name == OUTPUT and names.tied else name
        cut_latent = _is_cut(old, chunk, ranks, names.arguments) if depends_on_specification(name) else False
        try:
            cut = cut_of(target, view.shape, rank, ranks, gated=target in gated, cut_latent=bool(cut_latent))
        except KeyError:
            raise _unknown(name, ranks, where) from None
        if cut_latent is None:
            raise _unknown(name, ranks, where)
        shared = names.shared and name in (EMBEDDING, OUTPUT)
        apart = expert and names.expert[1] > 1
        param = LocalParam(dtype=view.dtype, numel=math.prod(view.shape), blocks=cut.blocks, shared=shared, expert=apart)
        params.append(Local(view=view, param=param, shapes={target: cut.shape}, trained=not name.endswith(NOT_TRAINED)))
    return params


def _is_cut(name: str, chunk: Mapping[str, StoredView], ranks: int, arguments: Mapping[str, Any]) -> bool | None:
    if ranks == 1:
        return False
    head = name[: name.rindex(".self_attention.")] + ".self_attention."
    return is_latent_cut(name, {n: v.shape for n, v in chunk.items() if n.startswith(head)}, ranks, arguments)


def _experts_of(chunk: Iterable[str]) -> dict[str, int]:
    """How many experts each layer of a chunk has, by the beginning of its names."""
    experts: dict[str, int] = {}
    for name in chunk:
        match = LAYER.fullmatch(name)
        expert = None if match is None else expert_of(match[3])
        if match is not None and expert is not None:
            head = match[1] + match[2]
            experts[head] = max(experts.get(head, 0), expert.number + 1)
    return experts


def _called(old: str, experts: Mapping[str, int], names: ChunkNames) -> str:
    """The name with numbers of the whole model."""
    match = LAYER.fullmatch(old)
    if match is None:
        return old
    inner, expert = match[3], expert_of(match[3])
    if expert is not None:
        inner = expert_name(names.expert[0] * experts[match[1] + match[2]] + expert.number, expert.rest)
    return f"{match[1]}{int(match[2]) + names.first_layer}.{inner}"


def _of_experts(name: str, view: StoredView, chunk: Mapping[str, StoredView], old: str, names: ChunkNames, where: str) -> Local:
    """All local experts, which GroupedMLP has in one parameter."""
    head = old[: old.index("mlp.experts.")]
    router = chunk.get(f"{head}mlp.router.weight")
    total = names.arguments.get("num_experts") if router is None else router.shape[0]
    hidden = names.arguments.get("hidden_size") if router is None else router.shape[1]
    if not isinstance(total, int) or not isinstance(hidden, int) or total % names.expert[1]:
        raise FormatError(f"it is not known how many experts {name} has", where=where)
    count = total // names.expert[1]
    numbers = range(names.expert[0] * count, (names.expert[0] + 1) * count)
    first, second = (math.prod(chunk[f"{head}mlp.experts.weight{i}"].shape) for i in (1, 2))
    layer = "linear_fc1" if old.endswith("weight1") else "linear_fc2"
    pattern = name[: name.index("mlp.experts.")] + "mlp.experts.local_experts.{}." + f"{layer}.weight"
    rank, ranks = names.expert_tensor
    cuts = transposed_experts(pattern, numbers, view.shape, hidden, rank, ranks, gated=first == 2 * second)
    param = LocalParam(
        dtype=view.dtype, numel=math.prod(view.shape), blocks=tuple(b for cut in cuts for b in cut.blocks), expert=names.expert[1] > 1
    )
    return Local(view=view, param=param, shapes={cut.blocks[0].name: cut.shape for cut in cuts}, trained=True)


def _unknown(name: str, ranks: int, where: str) -> FormatError:
    return FormatError(
        f"it is not known how {name} is spread over {ranks} tensor-parallel ranks",
        where=where,
        hint="save it as torch_dist (--ckpt-format torch_dist), which records it",
    )


# Optimizers that are not distributed, in Megatron-LM's format ``torch``: torch's own states by number, and the parameters in full
# precision by group.
#
# (Sources: ``Float16OptimizerWithFloat16Params`` and ``FP32Optimizer`` of Megatron-LM core/optimizer/optimizer.py.)

MASTERS = "fp32_from_fp16_params"
_FULL = "float32"


class Value(NamedTuple):
    """A state that is no tensor, and the number of the archive that has it."""

    archive: int
    value: Any


class PlainStates:
    """Collects the states in the files of ranks. Those with an element for each of the parameter go to ``states``; others, such as the
    step, belong to a parameter as a whole, and every rank that has a part of it must say the same."""

    def __init__(self, states: FlatStates) -> None:
        self.states = states
        self.values: dict[str, dict[str, Value]] = {}
        """By parameter and key, once ``finish`` was called."""
        self._scalars: dict[tuple[str, str], list[InArchive]] = {}

    @property
    def _table(self) -> PieceTable:
        return self.states.table

    def add(self, number: int, params: Sequence[LocalParam], value: Any) -> None:
        """Add what the archive of this number has as ``optimizer``, of parameters in the model's order."""
        archive = self._table.archives[number]
        meaning = archive.values.meaning
        root = meaning(value)
        optimizers = list(root) if isinstance(root, (list, tuple)) else [root]
        for optimizer in optimizers:
            content = meaning(optimizer)
            inner = meaning(content.get("optimizer", content)) if isinstance(content, dict) else None
            by_number = meaning(inner.get("state")) if isinstance(inner, dict) else None
            if not by_number or not isinstance(inner, dict):
                continue  # the states of a distributed optimizer are in a file of their own, which another rank may have
            groups = [meaning(group) for group in meaning(inner["param_groups"])]
            owned = {n for group in groups for n in meaning(group["params"])}
            odd = [n for n in by_number if n not in owned and n != COMMON_STEP]
            if odd:
                raise FormatError(f"the optimizer has a state {odd[0]!r} of no parameter", where=archive.where, hint=HINT)
            masters = [meaning(group) for group in meaning(content.get(MASTERS, []))]
            for place, group in enumerate(groups):
                numbers, own = meaning(group["params"]), _members(group, params, apart=len(optimizers) > 1)
                if len(own) != len(numbers):
                    what = f"group {place} of the optimizer has {len(numbers)} parameters, not {len(own)}"
                    raise FormatError(what, where=archive.where, hint=HINT)
                full = _masters(own, masters[place], archive.where) if masters else {}
                for n, (index, param) in zip(numbers, enumerate(own), strict=True):
                    states = {k: meaning(v) for k, v in (meaning(by_number.get(n)) or {}).items()}
                    if index in full:
                        states["param"] = meaning(full[index])
                    self._add(number, param, states, archive.where)

    def _add(self, number: int, param: LocalParam, states: Mapping[str, Any], where: str) -> None:
        segments = {}
        for key, value in states.items():
            if not isinstance(value, StoredView):
                for name in _names(param):
                    self._say(name, key, Value(number, value))
            elif not value.shape and (key == "step" or param.numel != 1):
                for name in _names(param):
                    self._scalars.setdefault((name, key), []).append(InArchive(number, value))
            else:
                source = InArchive(number, value)
                if source.numel != param.numel:
                    what = f"{key} of {param.blocks[0].name} has {source.numel} elements, not {param.numel}"
                    raise FormatError(what, where=where, hint="states without an element for each of the parameter are not read")
                segments[key] = [BufferSegment(0, source.numel, source, 0)]
        self.states.add(param, 0, segments)

    def _say(self, name: str, key: str, value: Value) -> None:
        known = self.values.setdefault(name, {}).setdefault(key, value)
        if isinstance(value.value, (int, float, str)) and known.value != value.value:
            raise CorruptError(
                f"{key} of {name} is {known.value} on one rank and {value.value} on another",
                where=self._table.archives[value.archive].where,
                hint="the files are of different saves",
            )

    def finish(self) -> None:
        """Read the steps, and put other scalars into the table, as tensors."""
        steps = [(name, source) for (name, key), own in self._scalars.items() if key == "step" for source in own]
        read = self._table.read_scalars([source for _, source in steps])
        for (name, source), step in zip(steps, read, strict=True):
            self._say(name, "step", Value(source.archive, step))
        for (name, key), own in self._scalars.items():
            if key != "step":
                self._table.add(f"{STATE}{name}.{key}", own[0].dtype, (), [whole_piece(source, ()) for source in own])


def _masters(params: Sequence[LocalParam], masters: Any, where: str) -> dict[int, Any]:
    """Those of a group, by place: its parameters in low precision have one each, in their order."""
    places = [place for place, param in enumerate(params) if param.dtype != _FULL]
    if len(masters) != len(places):
        what = f"a group has {len(masters)} parameters in full precision, not {len(places)}"
        raise FormatError(what, where=where, hint=HINT)
    return dict(zip(places, masters, strict=True))


def _names(param: LocalParam) -> Iterator[str]:
    yield from dict.fromkeys(block.name for block in param.blocks)


def _members(group: Mapping[str, Any], params: Sequence[LocalParam], *, apart: bool) -> list[LocalParam]:
    """The parameters of a group, in the model's order: by weight decay, and whether they are of experts."""
    decay, experts = group.get("wd_mult", 1.0) > 0, bool(group.get("is_expert_parallel"))
    return [
        p
        for p in params
        if is_decayed(p.blocks[0].name, len(p.blocks[0].shape)) == decay and (p.expert == experts or not (apart or experts))
    ]
