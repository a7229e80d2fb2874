"""The parameters in a file of Megatron-LM's format ``torch``: from numbers that count on one rank to those of the whole model. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import FormatError
from ckpt.formats.megatron.names import EMBEDDING, LAYER, NOT_TRAINED, OUTPUT, depends_on_specification, expert_name, expert_of, fused_norms
from ckpt.formats.megatron.params import LocalParam, cut_of, gated_layers, is_latent_cut, transposed_experts
from ckpt.formats.pickles.stored import StoredView

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
        raise FormatError(f"nobody knows how many experts {name} has", where=where)
    count = total // names.expert[1]
    numbers = range(names.expert[0] * count, (names.expert[0] + 1) * count)
    first, second = (math.prod(chunk[f"{head}mlp.experts.weight{i}"].shape) for i in (1, 2))
    layer = "linear_fc1" if old.endswith("weight1") else "linear_fc2"
    pattern = name[: name.index("mlp.experts.")] + "mlp.experts.local_experts.{}." + f"{layer}.weight"
    rank, ranks = names.expert_tensor
    cuts = transposed_experts(pattern, numbers, view.shape, hidden, rank, ranks, gated=first == 2 * second)
    param = LocalParam(
        dtype=view.dtype,
        numel=math.prod(view.shape),
        blocks=tuple(b for cut in cuts for b in cut.blocks),
        expert=names.expert[1] > 1,
    )
    return Local(view=view, param=param, shapes={cut.blocks[0].name: cut.shape for cut in cuts}, trained=True)


def _unknown(name: str, ranks: int, where: str) -> FormatError:
    return FormatError(
        f"nobody knows how {name} is spread over {ranks} tensor-parallel ranks",
        where=where,
        hint="save it as torch_dist (--ckpt-format torch_dist), which says so itself",
    )
