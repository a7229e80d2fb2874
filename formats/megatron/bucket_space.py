"""Optimizer states in ``torch_dist`` that follow the flat buffers: ``dp_reshardable`` and ``dp_zero_gather_scatter``.

Nothing says which parameter lies where: that follows from the model's parameters, their order, and the sizes of the buckets. The order
depends on the layer specification, which is not stored; unless exactly one order fits what is stored, the state is refused.
(Source: ``DistributedOptimizer.sharded_state_dict`` of Megatron-LM core/optimizer/distrib_optimizer.py.)
"""

# How a flat buffer finds its parameters, with nothing but names and shapes to go by:
#
#     model's tensors      -> groups of ranks that share a buffer (dense, experts; tensor and pipeline parallelism)   ParallelLayout
#     one group's names    -> candidate orders: norms apart or fused, experts one by one or by layer                  names.ORDERS
#     order + buckets      -> where each parameter begins                                                              buffers
#     compare              -> the stored sizes, and the edges of stored pieces, must fit; if several orders do,
#                             the stored masters must be the weights
#     exactly one is left  -> its pieces go into the table. None, or more than one that differ: the state is refused

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.formats.dcp.metadata import DcpTensor

from .buffers import BufferParam, layout_in
from .flat import FlatStates, coalesced_layout, members_of
from .names import ORDERS
from .parallel_layout import ParallelLayout
from .params import LocalParam
from .pieces import PieceTable
from .stored_buffers import BucketState, Buffer, GroupOf, Values, collect


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
