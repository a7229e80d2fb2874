"""Who has which parameters: groups of ranks, told by the names and shapes of a model's tensors and the number of groups.

(Sources: ``get_megatron_optimizer`` of Megatron-LM core/optimizer/__init__.py, core/distributed/distributed_data_parallel.py.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import FormatError
from ckpt.formats.dcp_container import DcpTensor
from ckpt.formats.external_elements import cast_bits, read_box
from ckpt.plan.layout.geometry import Box

from .buffers import BufferParam, BufferSegment, layout_in, pieces_of
from .names import (
    EMBEDDING,
    LAYER,
    NOT_TRAINED,
    ORDERS,
    OUTPUT,
    LocalParam,
    cut_of,
    depends_on_specification,
    expert_of,
    gated_layers,
    is_expert,
    local_shape,
    order_key,
)
from .pieces import PieceTable, SourcePiece
from .stored_buffers import HINT, BucketState, Buffer, FlatStates, GroupOf, Values, coalesced_layout, collect, members_of
from .training import MODEL

# Which layers a pipeline stage has, by Megatron-LM's arguments. Pure.
#
# The chunks of a pipeline are in order: the first chunk of every stage, then the second of every stage. Each has consecutive layers, so
# the numbers of layers in each say everything. (Source: ``get_transformer_layer_offset`` of Megatron-LM
# core/transformer/transformer_layer.py and core/transformer/pipeline_parallel_layer_layout.py.)

#     4 stages with 2 chunks each, 16 layers:     stage      0       1       2       3
#                                      chunk 0    layers     0-1     2-3     4-5     6-7
#                                      chunk 1    layers     8-9     10-11   12-13   14-15
#
# The list of counts is in the pipeline's order: chunk 0 of stages 0 to 3, then chunk 1. A layer's number is the sum of the counts before.


def layers_of_chunks(arguments: Mapping[str, Any], layers: int, stages: int, chunks: int = 1) -> list[int]:
    """How many layers each chunk has, in the pipeline's order; ``chunks`` is their number on each of the ``stages``."""
    plan = arguments.get("pipeline_model_parallel_layout")
    if plan is not None and stages > 1:
        counts = [part.count("t") for part in _unfolded(str(plan)).split("|")] if isinstance(plan, str) else []
    else:
        counts = _divided(arguments, layers, stages, chunks)
    if len(counts) != stages * chunks or sum(counts) != layers or min(counts) < 0:
        raise FormatError(
            f"{layers} layers on {stages} pipeline stages with {chunks} chunks each, in a way that is not known here",
            hint="the checkpoint's arguments do not say which stage has which layers",
        )
    return counts


def _divided(arguments: Mapping[str, Any], layers: int, stages: int, chunks: int) -> list[int]:
    first, last = arguments.get("decoder_first_pipeline_num_layers"), arguments.get("decoder_last_pipeline_num_layers")
    total, less = layers, [0] * stages
    if arguments.get("account_for_embedding_in_pipeline_split"):
        total, less[0] = total + 1, 1
    if arguments.get("account_for_loss_in_pipeline_split"):
        total, less[-1] = total + 1, less[-1] + 1
    if first is None and last is None:
        per_stage = [total // stages] * stages
    else:
        middle = stages - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        per_stage = [rest // middle if middle else 0] * stages
        per_stage[0] = per_stage[0] if first is None else first
        per_stage[-1] = per_stage[-1] if last is None else last
    counts = [n // chunks for n in per_stage] * chunks
    counts[0] -= less[0]
    counts[-1] -= less[-1]
    return counts


def _unfolded(plan: str) -> str:
    """``Et*3|(tt|)*29,m|L`` with what is repeated written out."""
    plan = plan.replace(",", "").replace(" ", "")
    plan = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), plan)
    return re.sub(r"([A-Za-z|])\*(\d+)", lambda m: m[1] * int(m[2]), plan)


_NONE = -1
"""The number of no layer."""
_COMPARED = 32
_COMPARED_NUMEL = 1 << 14


class ParallelLayout:
    """How the parameters of the model in ``table`` are spread over ``groups`` of ranks; the ranks of each have the same parameters."""

    def __init__(self, table: PieceTable, arguments: Mapping[str, Any], groups: Collection[GroupOf]) -> None:
        self.table = table
        self.arguments = arguments
        entries = {n[len(MODEL) :]: e for n, e in table.entries.items() if n.startswith(MODEL)}
        self.entries = {n: e for n, e in entries.items() if not n.endswith(NOT_TRAINED)}
        self.gated = gated_layers({n: e.shape for n, e in entries.items()})
        self.tied = OUTPUT not in entries
        chains = sorted({g.chain for g in groups})
        if len(chains) > 2 or (len(chains) == 2 and not any(map(is_expert, entries))):
            self.refuse(f"{len(chains)} optimizers in a chain")
        self.apart = len(chains) == 2  # experts have buffers of their own
        dense = sum(g.chain == chains[0] for g in groups)
        self.tensor_parallel = table.parts(f"{MODEL}{EMBEDDING}", 0)
        self.stages = dense // self.tensor_parallel
        if not self.stages or dense % self.tensor_parallel:
            self.refuse(f"{dense} groups of ranks of {self.tensor_parallel} each")
        second = next((n for n in entries if is_expert(n) and n.endswith(".linear_fc2.weight")), None)
        self.expert_tensor_parallel = table.parts(f"{MODEL}{second}", 1)
        owners = sum(g.chain == chains[-1] for g in groups) if self.apart else self.stages * self.expert_tensor_parallel
        self.expert_parallel = owners // (self.stages * self.expert_tensor_parallel)
        if owners % (self.stages * self.expert_tensor_parallel):
            self.refuse(f"{owners} groups of ranks with the same experts")
        self._by_layer: dict[int, list[str]] = {}
        self._expert_numbers: dict[str, int] = {}
        for name in self.entries:
            match = LAYER.fullmatch(name)
            self._by_layer.setdefault(_NONE if match is None else int(match[2]), []).append(name)
            expert = None if match is None else expert_of(match[3])
            if expert is not None:
                self._expert_numbers[name] = expert.number
        self._chunks = 1  # on each stage, as the groups of dense parameters tell, which come first
        self.experts = 1 + max(self._expert_numbers.values(), default=-1)
        if self.experts % self.expert_parallel:
            self.refuse(f"{self.experts} experts on {self.expert_parallel} ranks")

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(f"the flat buffers of the optimizer cannot be distinguished: {what}", where=self.table.backend.url, hint=HINT)

    # ---- parameters of a group

    def paired(self, group: GroupOf, own: Mapping[int, Buffer]) -> Iterator[tuple[list[str], Buffer]]:
        """The names of the parameters of each buffer of a group, in any order."""
        experts = self.apart and group.chain > 0
        ranks = self.expert_tensor_parallel * self.expert_parallel if experts else self.tensor_parallel
        stage = group.rank // ranks
        owner = group.rank // self.expert_tensor_parallel % self.expert_parallel if experts else None
        kinds = len({b.dtype for b in own.values()}) or 1
        chunks = self._chunks if experts else len(own) // kinds
        if stage >= self.stages or sorted(own) != list(range(len(own))):
            self.refuse(f"{len(own)} buffers on stage {stage} of {self.stages}")
        named = [self._names_on(stage, chunk, chunks, owner) for chunk in range(chunks)]
        if experts:  # a chunk without experts has no buffer of them
            named = [names for names in named if names]
        else:
            self._chunks = chunks
        if len(named) * kinds != len(own):
            self.refuse(f"{len(own)} buffers of {kinds} dtypes on stage {stage} of {self.stages}, for {len(named)} parts of the model")
        for number, buffer in sorted(own.items()):
            yield [n for n in named[number // kinds] if self._weight(n).dtype.name == buffer.dtype], buffer

    def _weight(self, name: str) -> Any:
        return self.entries[EMBEDDING if name == OUTPUT and self.tied else name]

    def _names_on(self, stage: int, chunk: int, chunks: int, owner: int | None) -> list[str]:
        """The names of a chunk's parameters: those of experts that expert-parallel rank ``owner`` has, or all others if that is None."""
        layers = 1 + max(self._by_layer, default=-1)
        counts = layers_of_chunks(self.arguments, layers, self.stages, chunks)
        at, last = chunk * self.stages + stage, len(counts) - 1
        outside = [n for n in self._by_layer.get(_NONE, ()) if at == (0 if n.startswith("embedding.") else last)]
        mine = range(sum(counts[:at]), sum(counts[: at + 1]))
        candidates = [*outside, *(n for i in mine for n in self._by_layer.get(i, ()))]
        numbers = self._expert_numbers if self.apart else {}
        each = self.experts // self.expert_parallel
        names = [n for n in candidates if owner == (numbers[n] // each if n in numbers else None)]
        if self.tied and last and at == last and owner is None:
            names.append(OUTPUT)
        return names

    def ordered(self, group: GroupOf, names: Sequence[str], order: tuple[str, bool]) -> list[LocalParam]:
        """The parameters of these names as the ranks of a group have them, in an order of the model."""
        try:
            in_order = sorted(names, key=lambda n: order_key(n, order))
        except KeyError as err:
            self.refuse(f"nobody knows where {err.args[0]} comes in the model's order")
        return [self._param(group, name) for name in in_order]

    def _param(self, group: GroupOf, name: str) -> LocalParam:
        entry, expert = self._weight(name), is_expert(name)
        ranks = self.expert_tensor_parallel if expert else self.tensor_parallel
        rank = group.rank % ranks
        shared = self.tied and self.stages > 1 and name in (EMBEDDING, OUTPUT)
        target = EMBEDDING if name == OUTPUT and self.tied else name
        cut_latent = depends_on_specification(name) and self.table.parts(f"{MODEL}{name}", 0) > 1  # each rank stored its own rows
        try:
            local = local_shape(target, entry.shape, ranks, cut_latent=cut_latent)
            if local is None:
                self.refuse(f"{name} {list(entry.shape)} cannot be divided by {ranks}")
            cut = cut_of(target, local, rank, ranks, gated=target in self.gated, cut_latent=cut_latent)
        except KeyError:
            self.refuse(f"nobody knows how {name} is cut")
        return LocalParam(dtype=entry.dtype.name, numel=math.prod(local), blocks=cut.blocks, shared=shared, expert=expert)

    def are_weights(self, params: Sequence[LocalParam], starts: Sequence[int], segments: Sequence[BufferSegment]) -> bool:
        """Whether the master parameters that begin at ``starts`` are the weights. Small ones are looked at: they tell most orders apart."""
        pairs = sorted(zip(params, starts, strict=True), key=lambda pair: pair[0].numel)
        small = [pair for pair in pairs[:_COMPARED] if pair[0].numel <= _COMPARED_NUMEL]
        own = [pair for pair in small if not pair[0].shared]  # of shared ones, one copy alone is the weight
        return all(self.is_weight(*piece) for param, start in own for piece in pieces_of(param, start, segments))

    def is_weight(self, name: str, piece: SourcePiece) -> bool:
        """Whether a piece of the master parameters of ``name`` is that part of the weight."""
        entry, box = self.entries[name], Box(piece.offset, piece.shape)
        weights = read_box(self.table, entry, box)
        masters = self.table.read_piece(name, piece)
        bits = cast_bits(masters.view(np.float32), entry.dtype.name) if piece.source.dtype == "float32" else None
        return bits is not None and np.array_equal(bits, weights)


# Optimizer states in ``torch_dist`` that follow the flat buffers: ``dp_reshardable`` and ``dp_zero_gather_scatter``.
#
# Nothing says which parameter lies where: that follows from the model's parameters, their order, and the sizes of the buckets. The order
# depends on the layer specification, which is not stored; unless exactly one order fits what is stored, the state is refused.
# (Source: ``DistributedOptimizer.sharded_state_dict`` of Megatron-LM core/optimizer/distrib_optimizer.py.)

# How a flat buffer finds its parameters, with nothing but names and shapes to go by:
#
#     model's tensors      -> groups of ranks that share a buffer (dense, experts; tensor and pipeline parallelism)   ParallelLayout
#     one group's names    -> candidate orders: norms apart or fused, experts one by one or by layer                  names.ORDERS
#     order + buckets      -> where each parameter begins                                                              buffers
#     compare              -> the stored sizes, and the edges of stored pieces, must fit; if several orders do,
#                             the stored masters must be the weights
#     exactly one is left  -> its pieces go into the table. None, or more than one that differ: the state is refused


def add_bucket_space(table: PieceTable, tensors: Mapping[str, DcpTensor], values: Values, arguments: Mapping[str, Any]) -> BucketState:
    """Add the optimizer's tensors to a table that has the model's; gives all that was stored of the buffers."""
    collected = collect(table, tensors, values)
    buffers = collected.buffers
    spread = ParallelLayout(table, arguments, buffers)
    states = FlatStates(table)
    for group, own in sorted(buffers.items()):
        for number, (names, buffer) in enumerate(spread.paired(group, own)):
            for param, start in _chosen(spread, group, number, names, buffer, arguments):
                states.add(param, start, buffer.segments)
    states.finish()
    return collected


def _chosen(
    spread: ParallelLayout, group: GroupOf, number: int, names: Sequence[str], buffer: Buffer, arguments: Mapping[str, Any]
) -> list[tuple[LocalParam, int]]:
    """The parameters of a buffer and where they begin, in the one order of the model that fits what is stored."""
    by_buffer: dict[Any, tuple[list[LocalParam], list[int]]] = {}
    for order in ORDERS:
        params = spread.ordered(group, names, order)
        starts = _starts(members_of(params), buffer, arguments)
        if starts is not None and _boundaries_fit(params, starts, buffer):
            by_buffer.setdefault(tuple((p.blocks, start) for p, start in zip(params, starts, strict=True)), (params, starts))
    if len(by_buffer) > 1:
        segments = buffer.segments.get("param", [])
        by_buffer = {key: own for key, own in by_buffer.items() if spread.are_weights(*own, segments)}
    if len(by_buffer) != 1:
        spread.refuse(f"{len(by_buffer)} orders of the parameters fit buffer {number} of group {group.rank}")
    return list(zip(*next(iter(by_buffer.values())), strict=True))


def _starts(members: Sequence[BufferParam], buffer: Buffer, arguments: Mapping[str, Any]) -> list[int] | None:
    if buffer.buckets:
        layout = layout_in(members, buffer.buckets)
        return None if layout is None else [slot.start for slot in layout.slots]
    layout = coalesced_layout(members, buffer.used, arguments)
    return None if layout is None else [layout.compact(slot) for slot in layout.slots]


def _boundaries_fit(params: Sequence[LocalParam], starts: Sequence[int], buffer: Buffer) -> bool:
    """Whether every parameter begins and ends where a stored piece does: ranks store what they have of each by itself."""
    if not buffer.buckets:
        return True
    edges = [{edge for s in segments for edge in (s.start, s.stop)} for segments in buffer.segments.values()]
    wanted = {edge for p, start in zip(params, starts, strict=True) for edge in (start, start + p.numel)}
    return all(wanted <= known for known in edges)
