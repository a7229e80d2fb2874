"""Optimizer states in ``torch_dist`` that follow the flat buffers: ``dp_reshardable`` and ``dp_zero_gather_scatter``.

Nothing says which parameter lies where: that follows from the model's parameters, their order, and the sizes of the buckets. The order
depends on the layer specification, which is not stored; unless exactly one order fits what is stored, the state is refused.
(Sources: ``get_megatron_optimizer`` of Megatron-LM core/optimizer/__init__.py, core/distributed/distributed_data_parallel.py.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ckpt.errors import FormatError
from ckpt.formats.dcp.metadata import StoredTensor
from ckpt.formats.elements import cast_bits, read_box
from ckpt.geometry import Box

from .buffers import BufferLayout, Member, layout_in, pieces_of
from .flat import FlatStates, coalesced_layout
from .names import EMBEDDING, LAYER, NOT_TRAINED, ORDERS, OUTPUT, expert_of, is_expert, order_key
from .params import LocalParam, cut_of, gated_layers, local_shape
from .pieces import Piece, PieceTable
from .stages import layers_of_chunks
from .stored_buffers import HINT, Buffer, Buffers, GroupOf, Values, collect
from .training import MODEL, Group

_COMPARED = 32
_COMPARED_NUMEL = 1 << 14


def add_bucket_space(table: PieceTable, tensors: Mapping[str, StoredTensor], values: Values, arguments: Mapping[str, Any]) -> list[Group]:
    """Add the optimizer's tensors to a table that has the model's; gives the optimizer's parameter groups.

    Raises:
        FormatError: the layout of the buffers cannot be told from what is stored.
    """
    buffers, groups = collect(table, tensors, values)
    model = _Model(table, arguments, buffers)
    states = FlatStates(table)
    for group, own in sorted(buffers.items()):
        for number, (params, buffer) in enumerate(model.paired(group, own)):
            layout = model.chosen(group, number, params, buffer)
            _add_buffer(states, *layout, buffer)
    states.finish()
    return groups


def _add_buffer(states: FlatStates, params: Sequence[LocalParam], layout: BufferLayout, buffer: Buffer) -> None:
    for param, slot in zip(params, layout.slots, strict=True):
        states.add(param, slot.start if buffer.buckets else layout.compact(slot), buffer.segments)


# -------------------------------------------------------------------------------------------------- what the model says


class _Model:
    """The parameters of the model and how they are spread, told by the names and shapes of its tensors and the number of groups."""

    def __init__(self, table: PieceTable, arguments: Mapping[str, Any], buffers: Buffers) -> None:
        self.table = table
        self.arguments = arguments
        entries = {n[len(MODEL) :]: e for n, e in table.entries.items() if n.startswith(MODEL)}
        self.entries = {n: e for n, e in entries.items() if not n.endswith(NOT_TRAINED)}
        self.gated = gated_layers({n: e.shape for n, e in entries.items()})
        self.tied = OUTPUT not in entries
        chains = sorted({g.chain for g in buffers})
        if len(chains) > 2 or (len(chains) == 2 and not any(map(is_expert, entries))):
            self.refuse(f"{len(chains)} optimizers in a chain")
        self.apart = len(chains) == 2  # experts have buffers of their own
        dense = sum(g.chain == chains[0] for g in buffers)
        self.tensor_parallel = self._parts(EMBEDDING, 0)
        self.stages = dense // self.tensor_parallel
        if not self.stages or dense % self.tensor_parallel:
            self.refuse(f"{dense} groups of ranks of {self.tensor_parallel} each")
        second = next((n for n in entries if is_expert(n) and n.endswith(".linear_fc2.weight")), None)
        self.expert_tensor_parallel = 1 if second is None else self._parts(second, 1)
        groups = sum(g.chain == chains[-1] for g in buffers) if self.apart else self.stages * self.expert_tensor_parallel
        self.expert_parallel = groups // (self.stages * self.expert_tensor_parallel)
        if groups % (self.stages * self.expert_tensor_parallel):
            self.refuse(f"{groups} groups of ranks with the same experts")
        self.experts = 1 + max((e.number for n in entries if (m := LAYER.fullmatch(n)) and (e := expert_of(m[3]))), default=-1)
        if self.experts % self.expert_parallel:
            self.refuse(f"{self.experts} experts on {self.expert_parallel} ranks")

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(f"the flat buffers of the optimizer cannot be told apart: {what}", where=self.table.backend.url, hint=HINT)

    def _parts(self, name: str, axis: int) -> int:
        entry = self.entries.get(name)
        return 1 if entry is None else len({int(o) for o in entry.grid.all_boxes()[0][:, axis]})

    # ---- parameters of a group

    def paired(self, group: GroupOf, own: Mapping[int, Buffer]) -> Iterator[tuple[list[str], Buffer]]:
        """The names of the parameters of each buffer of a group, in any order."""
        experts = self.apart and group.chain > 0
        ranks = self.expert_tensor_parallel * self.expert_parallel if experts else self.tensor_parallel
        stage = group.rank // ranks
        kinds = len({b.dtype for b in own.values()})
        chunks, rest = divmod(len(own), kinds or 1)
        if rest or stage >= self.stages or sorted(own) != list(range(len(own))):
            self.refuse(f"{len(own)} buffers of {kinds} dtypes on stage {stage} of {self.stages}")
        for number, buffer in sorted(own.items()):
            owner = group.rank // self.expert_tensor_parallel % self.expert_parallel if experts else None
            names = self._names_on(stage, number // kinds, chunks, owner)
            yield [n for n in names if self._weight(n).dtype.name == buffer.dtype], buffer

    def _weight(self, name: str) -> Any:
        return self.entries[EMBEDDING if name == OUTPUT and self.tied else name]

    def _names_on(self, stage: int, chunk: int, chunks: int, owner: int | None) -> list[str]:
        """The names of a chunk's parameters: those of experts that expert-parallel rank ``owner`` has, or all others if that is None."""
        layers = 1 + max((int(m[2]) for n in self.entries if (m := LAYER.fullmatch(n)) is not None), default=-1)
        counts = layers_of_chunks(self.arguments, layers, self.stages, chunks)
        at, last = chunk * self.stages + stage, len(counts) - 1
        mine = range(sum(counts[:at]), sum(counts[: at + 1]))
        found = []
        for name in self.entries:
            match = LAYER.fullmatch(name)
            here = int(match[2]) in mine if match is not None else at == (0 if name.startswith("embedding.") else last)
            if here and self._is_of(name, match, owner):
                found.append(name)
        if self.tied and last and at == last and owner is None:
            found.append(OUTPUT)
        return found

    def _is_of(self, name: str, match: re.Match[str] | None, owner: int | None) -> bool:
        if not self.apart or match is None or not is_expert(name):
            return owner is None
        expert = expert_of(match[3])
        return expert is not None and owner == expert.number // (self.experts // self.expert_parallel)

    def chosen(self, group: GroupOf, number: int, names: Sequence[str], buffer: Buffer) -> tuple[list[LocalParam], BufferLayout]:
        """The parameters of a buffer in the model's order, and where they lie: the one order that fits what is stored."""
        found: dict[Any, tuple[list[LocalParam], BufferLayout]] = {}
        for order in ORDERS:
            params = self._params(group, sorted(names, key=lambda n: self._key(n, order)))
            members = [Member(p.numel, p.shared) for p in params]
            layout = layout_in(members, buffer.buckets) if buffer.buckets else coalesced_layout(members, buffer.used, self.arguments)
            if layout is not None and _boundaries_fit(params, layout, buffer):
                found.setdefault(tuple((p.blocks[0].name, slot) for p, slot in zip(params, layout.slots, strict=True)), (params, layout))
        if len(found) > 1:
            found = {k: v for k, v in found.items() if self._are_weights(v[0], v[1], buffer)}
        if len(found) != 1:
            self.refuse(f"{len(found)} orders of the parameters fit buffer {number} of group {group.rank}")
        return next(iter(found.values()))

    def _key(self, name: str, order: tuple[str, bool]) -> tuple[int, ...]:
        try:
            return order_key(name, order)
        except KeyError:
            self.refuse(f"nobody knows where {name} comes in the model's order")

    def _params(self, group: GroupOf, names: Sequence[str]) -> list[LocalParam]:
        return [self._param(group, name) for name in names]

    def _param(self, group: GroupOf, name: str) -> LocalParam:
        entry, expert = self._weight(name), is_expert(name)
        ranks = self.expert_tensor_parallel if expert else self.tensor_parallel
        rank = group.rank % ranks
        shared = self.tied and self.stages > 1 and name in (EMBEDDING, OUTPUT)
        target = EMBEDDING if name == OUTPUT and self.tied else name
        try:
            local = local_shape(target, entry.shape, ranks)
            if local is None:
                self.refuse(f"{name} {list(entry.shape)} cannot be divided by {ranks}")
            cut = cut_of(target, local, rank, ranks, gated=target in self.gated)
        except KeyError:
            self.refuse(f"nobody knows how {name} is cut")
        return LocalParam(dtype=entry.dtype.name, numel=math.prod(local), blocks=cut.blocks, shared=shared, expert=expert)

    def _are_weights(self, params: Sequence[LocalParam], layout: BufferLayout, buffer: Buffer) -> bool:
        """Whether the master parameters, taken so, are the weights: of small parameters, which tell most orders apart."""
        segments = buffer.segments.get("param", [])
        pairs = sorted(zip(params, layout.slots, strict=True), key=lambda pair: pair[0].numel)
        for param, slot in pairs[:_COMPARED]:
            if param.numel <= _COMPARED_NUMEL and not param.shared:  # of shared ones, one copy alone is the weight
                for name, piece in pieces_of(param, slot.start if buffer.buckets else layout.compact(slot), segments):
                    if not self._is_weight(name, piece):
                        return False
        return True

    def _is_weight(self, name: str, piece: Piece) -> bool:
        entry, box = self.entries[name], Box(piece.offset, piece.shape)
        weights = read_box(self.table, entry, box)
        masters = self.table.read_piece(name, piece)
        bits = cast_bits(masters.view(np.float32), entry.dtype.name) if piece.source.dtype == "float32" else None
        return bits is not None and np.array_equal(bits, weights)


def _boundaries_fit(params: Sequence[LocalParam], layout: BufferLayout, buffer: Buffer) -> bool:
    """Whether every parameter begins and ends where a stored piece does: ranks store what they have of each by itself."""
    if not buffer.buckets:
        return True
    edges = [{edge for s in segments for edge in (s.start, s.stop)} for segments in buffer.segments.values()]
    wanted = {edge for p, slot in zip(params, layout.slots, strict=True) for edge in (slot.start, slot.start + p.numel)}
    return all(wanted <= known for known in edges)
