"""The distributed optimizer of Megatron-LM's format ``torch``: flat buffers in ``distrib_optim.pt``, and the groups of parameters.

(Sources: ``get_parameter_state_dp_zero`` and ``load_state_dict`` of core/optimizer/distrib_optimizer.py, ``ChainedOptimizer`` of
core/optimizer/optimizer.py.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ckpt.converters.selection import OutputTensor
from ckpt.converters.target import FileItem, OutputFile
from ckpt.errors import UsageError
from ckpt.formats.megatron.buffers import BufferParam
from ckpt.formats.megatron.names import NOT_TRAINED, is_decayed, is_expert
from ckpt.formats.megatron.stored_buffers import job_layout
from ckpt.formats.megatron.training import KEYS
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.state.targets import inline_only
from ckpt.state.tensors import torch_dtype
from ckpt.state.torch_objects import decode_inline

from .megatron_parts import ModelRank, RankParam, Ranks
from .torch_file import ArchivePlan, StorageStub

# The state of a distributed optimizer of Megatron, in whichever of its formats it is written: tensors of parameters, and groups that say
# the step.
#
# (Source: Megatron-LM core/optimizer/distrib_optimizer.py.)

STATES: Mapping[str, str] = {key: KEYS[key] for key in ("param", "exp_avg", "exp_avg_sq")}
"""What Megatron calls the tensors that it has of each parameter, and what a catalog calls them."""
HEAD = "optimizer.state."
VERSION = 3.0
"""Of the order of queries, keys and values that is written; Megatron's ``checkpoint_version``."""
RELEASE = "release"
"""What Megatron-LM calls a checkpoint that is of no iteration: a training begins with it."""
Group = Mapping[str, tree.Node]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """``states`` by Megatron's key and by parameter; ``groups`` are nodes: their options, and the step."""

    states: Mapping[str, Mapping[str, OutputTensor]]
    groups: Sequence[Group]


def optimizer_of(
    tensors: Mapping[str, OutputTensor],
    parameters: Mapping[str, OutputTensor],
    state: tree.Node,
    *,
    root: str,
    fits: Callable[[Group], bool],
) -> Optimizer | None:
    """The optimizer of ``parameters``, which lie below the key ``root`` of the ``state``. None if something is missing that Megatron asks
    for: one of ``STATES`` of a parameter that is trained, groups that ``fits`` says yes to, or one step for all parameters of a group."""
    trained = {name: wanted for name, wanted in parameters.items() if not name.endswith(NOT_TRAINED)}
    by_key: dict[str, dict[str, OutputTensor]] = {key: {} for key in STATES}
    for key, called in STATES.items():
        for name, wanted in trained.items():
            own = tensors.get(f"{HEAD}{root}.{name}.{called}")
            if own is None or own.shape != wanted.shape:
                return None
            by_key[key][name] = own
    groups = _groups(state.get("optimizer") if isinstance(state, dict) else None)
    return Optimizer(states=by_key, groups=groups) if groups and all(map(fits, groups)) else None


def _groups(node: tree.Node) -> list[Group]:
    """The groups in the node of an optimizer, each with its step; empty if they are not Megatron's."""
    if not isinstance(node, dict) or tree.tag_of(node) is not None:
        return []
    steps = {p: _step(child) for p, child in tree.pairs_of(node.get("state")) or () if isinstance(p, str)}
    named, plain = node.get("param_groups"), node.get("groups")
    if isinstance(named, dict) and "$param_groups" in named:
        asked = [(group["options"], group["params"]) for group in named["$param_groups"]]
    else:
        asked = [(options, ()) for options in plain] if isinstance(plain, list) else []
    groups: list[Group] = []
    for options, params in asked:
        step_values = {steps.get(p) for p in params} - {None} or {*steps.values()} - {None}  # a group may have no parameters
        if len(step_values) != 1 or not isinstance(options, dict) or tree.tag_of(options) is not None:
            return []
        groups.append({**options, "step": step_values.pop()})
    return groups


def _step(node: tree.Node) -> int | float | None:
    """The step of one parameter, which torch's optimizers keep in a tensor."""
    # A whole number is an int: what fused optimizers take.
    step_node = tree.find(node, ["step"])
    if isinstance(step_node, dict) and "$inline" in step_node:
        value = decode_inline(step_node["$inline"])
        step_node = value.item() if value.numel() == 1 else None
    if isinstance(step_node, float) and step_node.is_integer():
        return int(step_node)
    return step_node if isinstance(step_node, (int, float)) else None


_TOLD_APART_BY = ("wd_mult", "lr_mult", "is_decoupled_lr")


def is_identified(group: Group) -> bool:
    """Whether a group has what Megatron knows its groups by when it loads them, and no tensors that are not there."""
    return all(key in group for key in _TOLD_APART_BY) and all(tree.tag_of(v) == "$inline" or not tree.refers(v) for v in group.values())


def groups_of(optimizer: Optimizer, ranks: Ranks) -> Any:
    """What ``model_optim_rng.pt`` has under ``optimizer``: a list of two where experts have an optimizer of their own."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    decoded = [{key: tree.decode(node, inline_only) for key, node in group.items()} for group in optimizer.groups]
    for group in sorted(decoded, key=lambda g: bool(g.get("is_expert_parallel"))):
        kinds.setdefault(tuple(group[key] for key in _TOLD_APART_BY), group)
    dense = [{**group, "is_expert_parallel": False} for group in kinds.values()]
    if not ranks.experts_apart:
        return {"optimizer": {"param_groups": dense}}
    routed = {is_decayed(name, len(w.shape)) for name, w in ranks.model.items() if is_expert(name)}
    experts = [{**g, "is_expert_parallel": True} for g in dense if (g["wd_mult"] > 0) in routed and not g["is_decoupled_lr"]]
    return [{"optimizer": {"param_groups": dense}}, {"optimizer": {"param_groups": experts}}]


def buffers_file(path: str, at: ModelRank, ranks: Ranks, optimizer: Optimizer, tensors: dict[str, OutputTensor]) -> OutputFile | None:
    """The ``distrib_optim.pt`` of a rank; what it is made of is added to ``tensors``. None if other ranks have all of it."""
    owned = (ranks.owns_dense(at), ranks.owns_experts(at))
    if not any(owned):
        return None
    file = _Buffers(path, at, ranks, optimizer)
    if not ranks.experts_apart:
        return file.written(file.part(None), tensors)
    return file.written([file.part(bool(i)) if own else None for i, own in enumerate(owned)], tensors)


class _Buffers:
    """Lays the buffers of one rank out."""

    def __init__(self, path: str, at: ModelRank, ranks: Ranks, optimizer: Optimizer) -> None:
        self.path = path
        self.stage = at.pipeline
        self.ranks = ranks
        self.arguments = ranks.arguments
        self.chunks = ranks.chunks(at)
        self.states = {key: ranks.over(own).chunks(at) for key, own in optimizer.states.items()}
        self.stands: list[StorageStub] = []
        self.members: list[list[tuple[int, OutputTensor]]] = []
        """For each stand, what it is made of, and at which element each begins."""

    def part(self, experts: bool | None) -> dict[Any, Any]:  # noqa: FBT001  None: all parameters
        """The buffers of one optimizer: for each chunk and dtype, numbered."""
        content: dict[Any, Any] = {"buckets_coalesced": True}
        for number, chunk in enumerate(self.chunks):
            trained = [p for p in chunk if not p.name.endswith(NOT_TRAINED)]
            wanted = [i for i, p in enumerate(trained) if experts is None or p.of_expert == experts]
            for dtype in dict.fromkeys(trained[i].dtype for i in wanted):
                own = [i for i in wanted if trained[i].dtype == dtype]
                grad = torch_dtype(dtype) if self.arguments.get("accumulate_allreduce_grads_in_fp32") is False else torch.float32
                content[len(content) - 1] = {(torch_dtype(dtype), grad): self._buffer(number, [trained[i] for i in own], own)}
        return content

    def _buffer(self, number: int, params: Sequence[RankParam], places: Sequence[int]) -> dict[str, Any]:
        members = [BufferParam(math.prod(p.shape), self.ranks.is_shared(p)) for p in params]
        layout = job_layout(members, self.arguments, bucketed=self.stage == number == 0)
        if layout is None:
            hint = "--arg ddp_bucket_size=…, or leave the optimizer out: --no-optimizer"
            raise UsageError("the size of the buckets of the optimizer's buffers is unknown", where=self.ranks.where, hint=hint)
        buffer: dict[str, Any] = {}
        for key, chunks in self.states.items():
            parts = [chunks[number][place] for place in places]
            kinds = {p.dtype.name for p in parts}
            if len(kinds) > 1:
                raise UsageError(f"{key} has several dtypes: {', '.join(sorted(kinds))}", where=self.ranks.where, hint="--no-optimizer")
            made = [
                (layout.compact(slot), OutputTensor(name=f"{self.path}:{number}.{key}.{p.name}", view=p.view, dtype=p.dtype))
                for slot, p in zip(layout.slots, parts, strict=True)
            ]
            buffer[key] = StorageStub(len(self.stands), parts[0].dtype, (layout.used,))
            self.stands.append(buffer[key])
            self.members.append(sorted(made, key=lambda m: m[0]))
        return {**buffer, "numel_unpadded": layout.used}

    def written(self, value: Any, tensors: dict[str, OutputTensor]) -> OutputFile:
        archive = ArchivePlan(value, self.stands)
        items: list[FileItem] = []
        for stand, start, own in zip(self.stands, archive.starts, self.members, strict=True):
            size = stand.dtype.itemsize
            items += [FileItem(w.name, Box.whole(w.shape), start + size * first, size) for first, w in own]
            tensors.update({w.name: w for _, w in own})
        gaps = list(self._gaps(archive, items))

        def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
            left = iter(zip(items, digests, strict=True))
            crcs = []
            for stand, start, own in zip(self.stands, archive.starts, self.members, strict=True):
                parts = [(item.offset - start, item.length, crc) for item, crc in (next(left) for _ in own)]
                crcs.append(crc_of_parts(parts, stand.nbytes))
            return [*archive.ends(crcs), *gaps]

        return OutputFile(path=self.path, size=archive.size, items=tuple(items), ends=ends)

    def _gaps(self, archive: ArchivePlan, items: Sequence[FileItem]) -> Iterator[tuple[int, bytes]]:
        """The zeros between parameters: where each begins is aligned."""
        rest = iter(items)
        for start, own in zip(archive.starts, self.members, strict=True):
            at = start
            for item in (next(rest) for _ in own):
                if item.offset > at:
                    yield at, bytes(item.offset - at)
                at = item.offset + item.length


# ---------------------------------------------------------------------------------------------------- CRC-32 from those of parts
#
# A zip member's CRC-32 comes from those of its parts, so that parts need not be read in order (source: ``crc32_combine`` of zlib).
# A CRC is a polynomial over GF(2); zero bytes that follow multiply it by a power of x.

_POLYNOMIAL = 0xEDB88320


def joined_crc(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes with the CRC-32 ``first``, followed by ``length`` bytes with the CRC-32 ``second``."""
    power = 3  # of two: bits of a byte
    while length:
        if length & 1:
            first = _times(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


def crc_of_parts(parts: Iterable[tuple[int, int, int]], length: int) -> int:
    """The CRC-32 of ``length`` bytes that are zeros but for ``parts``: where each begins, its length, and its CRC-32, in order."""
    total = at = 0
    for start, size, crc in parts:
        total = joined_crc(joined_crc(total, zlib.crc32(bytes(start - at)), start - at), crc, size)
        at = start + size
    return joined_crc(total, zlib.crc32(bytes(length - at)), length - at)


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """The matrix that ``2 ** power`` zero bits make."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
