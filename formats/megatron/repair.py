"""Where the true elements of an optimizer state are that Megatron-Core 0.15 to 0.19 wrote as ``fully_reshardable``, displaced by padding.

See ``buffers.shifts`` for what went wrong. Nearly all elements are in the checkpoint, in the wrong places; those that are not are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import FormatError, UsageError
from ckpt.formats.external import ExternalFile, WithFile
from ckpt.formats.external_elements import read_box
from ckpt.plan.layout.geometry import Box, box_to_flat, flat_to_boxes

from .buffers import BufferLayout, BufferSegment, buffer_layout, pieces_of, shifts
from .names import EMBEDDING, ORDERS, OUTPUT, LocalParam, ParamBlock, is_expert
from .parallel_layout import ParallelLayout
from .pieces import InFile, PieceTable, SourcePiece
from .stored_buffers import Buckets, Buffer, GroupOf, count, members_of
from .training import KEYS, MODEL, STATE, MegatronCatalog

# The writer took parameter x from place ``slot.start`` of a buffer in which it lies at ``compact(slot)``, without the padding of buckets:
#
#     the buffer            |------ c ------|------ b ------|------ a ------|               one bucket each, p elements of padding
#     places taken for it   |------ c ------|pp|------ b ------|pp|------ a ------|
#
#     the file's "b"        b[p:], then a[:p]
#     the file's "a"        a[2p:], then what lay beyond the buffer's end
#     in no file            b[:p] and a[p:2p]
#
# 1. Lay the buffer out as the job had it (order of parameters, bucket size, ranks): none of these is stored, so candidates are tried.
# 2. What each name has is put back as segments of the true buffer; ``pieces_of`` reads each parameter from its true place.
# 3. A candidate is believed if a sample of the repaired masters rounds to the weights, and what lies beyond the buffer's end is zero.
#    ``pipeline.repair`` then compares all masters.


_KEYS = ("param", "exp_avg", "exp_avg_sq")
_SAMPLES = 64
"""Parameters of a buffer that are looked at to tell orders and sizes of buckets apart."""
_SAMPLE = 1024
"""Elements of each."""
_WINDOW = 1 << 20
"""Elements that are read at a time."""


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """``pieces``: by name of a tensor of the optimizer's state, the boxes of it and the elements that they truly are. ``lost``: the boxes
    that no file has, of a tensor's master and moments alike, by name of the parameter."""

    pieces: Mapping[str, tuple[SourcePiece, ...]]
    lost: Mapping[str, tuple[Box, ...]]


def repaired_states(catalog: MegatronCatalog, buckets: Buckets, arguments: Mapping[str, Any] | None = None) -> Repaired:
    """Undo the displacement of a job with these buckets. A sample of the repaired masters is compared with the weights. ``arguments``: of
    the job, where the checkpoint's own are to be replaced."""
    if catalog.suspect is None:
        raise UsageError("this optimizer state is not of a form that was displaced", where=catalog.url, hint="only fully_reshardable was")
    return _Repair(catalog, buckets, catalog.arguments if arguments is None else arguments).run()


class _Laid(NamedTuple):
    """The parameters of a buffer in one order: where they were, where they begin without padding, and by Megatron's key what is stored of
    it, and what was written beyond its end."""

    order: tuple[str, bool]
    params: list[LocalParam]
    layout: BufferLayout
    starts: list[int]
    segments: Mapping[str, Sequence[BufferSegment]]
    beyond: Mapping[str, Sequence[BufferSegment]]


class _Repair:
    def __init__(self, catalog: MegatronCatalog, buckets: Buckets, arguments: Mapping[str, Any]) -> None:
        self.catalog = catalog
        self.table: PieceTable = catalog.table
        self.buckets = buckets
        self.arguments = arguments
        kinds = ("pipeline", "virtual_pipeline", "expert")
        self.stages, self.chunks, experts = (count(arguments, f"{kind}_model_parallel_size") or 1 for kind in kinds)
        names = [n[len(MODEL) :] for n in self.table.entries if n.startswith(MODEL)]
        routed = next((n for n in names if is_expert(n) and n.endswith(".linear_fc2.weight")), None)
        self.experts = experts if routed is not None else 1
        self.tensor, self.expert_tensor = self.table.parts(f"{MODEL}{EMBEDDING}", 0), self.table.parts(f"{MODEL}{routed}", 1)
        self.spread = ParallelLayout(self.table, arguments, self._groups())
        self.trained = {n for n in names if f"{STATE}{n}.{KEYS['param']}" in self.table.entries} | ({OUTPUT} - set(names))
        self.pieces: dict[str, list[SourcePiece]] = {}
        self.lost: dict[str, list[Box]] = {}

    def _groups(self) -> list[GroupOf]:
        """The groups of ranks that shared buffers."""
        # Experts on several ranks had buffers of their own.
        dense = [GroupOf(0, n) for n in range(self.stages * self.tensor)]
        if self.experts == 1:
            return dense
        return dense + [GroupOf(1, n) for n in range(self.stages * self.experts * self.expert_tensor)]

    def run(self) -> Repaired:
        kinds = dict.fromkeys(e.dtype.name for n, e in self.table.entries.items() if n.removeprefix(MODEL) in self.trained)
        for group in self._groups():
            own = {n: Buffer(dtype=kind) for n, kind in enumerate([*kinds] * self.chunks)}
            stage = group.rank // (self.experts * self.expert_tensor if group.chain else self.tensor)
            for number, (names, _) in enumerate(self.spread.paired(group, own)):
                trained = [n for n in names if n in self.trained]
                self._buffer(group, trained, single=stage > 0 or number >= len(kinds), copies=0 < stage == self.stages - 1)
        return Repaired(pieces={n: tuple(p) for n, p in self.pieces.items()}, lost={n: tuple(b) for n, b in self.lost.items()})

    def _buffer(self, group: GroupOf, names: Sequence[str], *, single: bool, copies: bool) -> None:
        """``single``: its parameters are not cut into buckets. ``copies``: what the first stage has too was not written."""
        candidates: dict[Any, _Laid] = {}
        for order in ORDERS:
            laid = self._laid(group, names, order, single=single, copies=copies)
            candidates.setdefault(tuple(p.blocks for p in laid.params), laid)
        laid = self._chosen(list(candidates.values()))
        numels = [p.numel for p in laid.params]
        for param, start in zip(laid.params, laid.starts, strict=True):
            for key, own in laid.segments.items() if not (param.shared and copies) else ():
                for name, piece in pieces_of(param, start, own):
                    self.pieces.setdefault(f"{STATE}{name}.{KEYS[key]}", []).append(piece)
        for shift in shifts(laid.layout, numels):
            param = laid.params[shift.member]
            if shift.written_as is None and not (param.shared and copies):
                self._lose(param, shift.start, shift.stop)

    def _laid(self, group: GroupOf, names: Sequence[str], order: tuple[str, bool], *, single: bool, copies: bool) -> _Laid:
        size, ranks, divisor = self.buckets
        if group.chain:
            ranks = max(1, ranks * self.tensor // (self.experts * self.expert_tensor))
        params = self.spread.ordered(group, names, order)
        layout = buffer_layout(members_of(params), bucket_size=None if single else size, data_parallel=ranks, divisor=divisor)
        starts = [layout.compact(slot) for slot in layout.slots]
        written = self._segments(params, layout, copies=copies)
        inside = {key: [s._replace(stop=min(s.stop, layout.used)) for s in own if s.start < layout.used] for key, own in written.items()}
        beyond = {key: [_behind(s, layout.used) for s in own if s.stop > layout.used] for key, own in written.items()}
        return _Laid(order, params, layout, starts, inside, beyond)

    def _segments(self, params: Sequence[LocalParam], layout: BufferLayout, *, copies: bool) -> dict[str, list[BufferSegment]]:
        """The buffer without its padding, as it was written, also beyond its end: by Megatron's key."""
        by_key: dict[str, list[BufferSegment]] = {key: [] for key in _KEYS}
        for param, slot in zip(params, layout.slots, strict=True):
            if param.shared and copies:
                continue
            for block in param.blocks:
                for key, segments in by_key.items():
                    segments += self._written(f"{STATE}{block.name}.{KEYS[key]}", block, slot.start + block.start)
        for segments in by_key.values():
            segments.sort(key=lambda s: s.start)
        return by_key

    def _written(self, name: str, block: ParamBlock, start: int) -> list[BufferSegment]:
        """The segments that were written as a block from ``start`` on."""
        runs, elements, own = [], 0, Box(block.offset, block.shape)
        for piece in self.table.pieces(name) if name in self.table.entries else ():
            box = Box(piece.offset, piece.shape)
            flat = box_to_flat(block.shape, box.relative_to(block.offset)) if own.contains(box) else None
            if flat is not None:
                elements += box.numel
                runs += [BufferSegment(start + flat[0], start + flat[1], piece.source, piece.start)] if box.numel else []
        if elements != block.numel:
            raise FormatError(f"{name} is stored in other parts than ranks have", where=self.catalog.url)
        return runs

    def _lose(self, param: LocalParam, start: int, stop: int) -> None:
        for block in param.blocks:
            low, high = max(start, block.start), min(stop, block.start + block.numel)
            if low < high:
                boxes = flat_to_boxes(block.shape, low - block.start, high - block.start)
                self.lost.setdefault(block.name, []).extend(b.shifted(block.offset) for b in boxes)
                for key in _KEYS:
                    self.pieces.setdefault(f"{STATE}{block.name}.{KEYS[key]}", [])  # of some tensors nothing is left

    # ---- which order the model had

    def _chosen(self, candidates: Sequence[_Laid]) -> _Laid:
        fitting = [laid for laid in candidates if self._fits(laid, candidates) and self._is_zero_beyond(laid)]
        if not fitting:
            raise UsageError(
                "the repaired masters would not be the weights, so the buckets had other sizes",
                where=self.catalog.url,
                hint="give bucket size and data-parallel size as the job had them",
            )
        if len(fitting) > 1:
            fused = self.arguments.get("transformer_impl") == "transformer_engine"
            stated = ("fused" if fused else "local", bool(self.arguments.get("moe_grouped_gemm")))
            fitting = [laid for laid in fitting if laid.order == stated]
        if len(fitting) != 1:
            raise FormatError("several orders of the model's parameters fit what is stored", where=self.catalog.url)
        return fitting[0]

    def _fits(self, laid: _Laid, others: Sequence[_Laid]) -> bool:
        """Whether masters are weights, in a sample of the parameters that orders place differently, or of all if there is one order."""
        own = [(p, s) for p, s in zip(laid.params, laid.starts, strict=True) if not p.shared]  # of shared ones, one copy is the weight
        if len(others) > 1:
            common = set.intersection(*({(p.blocks, s) for p, s in zip(one.params, one.starts, strict=True)} for one in others))
            own = [(p, s) for p, s in own if (p.blocks, s) not in common]
        every = max(1, len(own) // _SAMPLES)
        return all(self.spread.is_weight(*sample) for p, s in own[::every] for sample in _samples(p, s, laid.segments["param"]))

    def _is_zero_beyond(self, laid: _Laid) -> bool:
        """Whether all that was written beyond the end of the buffer is zero, as it is where nothing was there to write."""
        # If it is not, it lies elsewhere in truth. Elements that a repair calls lost prove nothing, for they get what fits.
        return not any(
            self.table.read_piece(key, SourcePiece((0,), (min(_WINDOW, s.stop - at),), s.source, s.at + at - s.start)).any()
            for key, segments in laid.beyond.items()
            for s in segments
            for at in range(s.start, s.stop, _WINDOW)
        )


def _behind(segment: BufferSegment, end: int) -> BufferSegment:
    """The part of a segment that begins at ``end`` or later."""
    start = max(segment.start, end)
    return segment._replace(start=start, at=segment.at + start - segment.start)


def _samples(param: LocalParam, start: int, segments: Sequence[BufferSegment]) -> Iterator[tuple[str, SourcePiece]]:
    """The first elements of each piece of a parameter, which are in one row."""
    for name, piece in pieces_of(param, start, segments):
        if piece.shape:
            row = (*(1 for _ in piece.shape[1:]), min(piece.shape[-1], _SAMPLE))
            yield name, piece._replace(shape=row)


# A Megatron checkpoint with its optimizer's state read from where it truly lies, and with something in the place of what is lost.

FILLED = "elements-that-were-lost"
"""The file in memory that has them."""
_SIZE = 4


class RepairedTensor(NamedTuple):
    """How many elements of a tensor of the optimizer's state lay elsewhere, and how many nowhere: masters among these are the weights,
    moments zero."""

    tensor: str
    mended: int
    filled: int


def repaired_catalog(catalog: MegatronCatalog, repaired: Repaired) -> tuple[MegatronCatalog, tuple[RepairedTensor, ...]]:
    """The repaired checkpoint, and what was done to which tensor.

    Memory: 4 bytes for each element of a master that is lost.
    """
    table, filling = catalog.table, _Filling(catalog.table, repaired.lost)
    pieces = {name: [*own, *filling.pieces(name)] for name, own in repaired.pieces.items()}
    data = filling.data()
    backend = WithFile(table.backend, FILLED, data)
    made = table.with_pieces(backend, [ExternalFile(FILLED, len(data))], pieces)
    changed = [RepairedTensor(n, _moved(own, table.pieces(n)), filling.count(n)) for n, own in sorted(repaired.pieces.items())]
    mended = MegatronCatalog(
        table=made,
        format=catalog.format,
        state=catalog.state,
        world_size=catalog.world_size,
        arguments=catalog.arguments,
        notes=catalog.notes,
        opaque=catalog.opaque,
    )
    return mended, tuple(m for m in changed if m.mended or m.filled)


class _Filling:
    """What lost elements become: masters one after another, behind zeros for the longest box of a moment."""

    def __init__(self, table: PieceTable, lost: Mapping[str, Sequence[Box]]) -> None:
        self._table = table
        self._lost = lost
        self._zeros = max((b.numel for boxes in lost.values() for b in boxes), default=0) * _SIZE
        self._masters: list[npt.NDArray[np.float32]] = []
        self._end = self._zeros

    def count(self, name: str) -> int:
        """The elements of a state that are lost."""
        return sum(b.numel for b in self._boxes(name))

    def _boxes(self, name: str) -> Sequence[Box]:
        return self._lost.get(name[len(STATE) :].rpartition(".")[0], ())

    def pieces(self, name: str) -> Iterator[SourcePiece]:
        """The boxes of a state that are lost, in the file. Called once for each state."""
        for box in self._boxes(name):
            start = 0
            if name.endswith(".master"):
                start = self._end
                self._masters.append(self._weights(name[len(STATE) : -len(".master")], box))
                self._end += box.numel * _SIZE
            yield SourcePiece(box.offset, box.shape, InFile(FILLED, "float32", start, box.numel))

    def _weights(self, name: str, box: Box) -> npt.NDArray[np.float32]:
        entry = self._table.entries[f"{MODEL}{name}"]
        bits = read_box(self._table, entry, box)
        if entry.dtype.name == "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        if entry.dtype.name not in ("float16", "float32"):
            raise FormatError(f"no master can be made of the weight {name}, which is {entry.dtype.name}", where=self._table.backend.url)
        return bits.view(entry.dtype.name).astype(np.float32)

    def data(self) -> bytes:
        """The file, once all pieces were asked for."""
        return b"".join([bytes(self._zeros), *(m.astype("<f4").tobytes() for m in self._masters)])


def _moved(pieces: Sequence[SourcePiece], stored: Sequence[SourcePiece]) -> int:
    """The elements of pieces that are not read where the tensor itself was stored."""
    return sum(Box(p.offset, p.shape).numel for p in pieces if not any(_is_part(p, s) for s in stored))


def _is_part(piece: SourcePiece, stored: SourcePiece) -> bool:
    own, box = Box(stored.offset, stored.shape), Box(piece.offset, piece.shape)
    flat = box_to_flat(own.shape, box.relative_to(own.offset)) if own.contains(box) else None
    return flat is not None and piece.source == stored.source and piece.start == stored.start + flat[0]
