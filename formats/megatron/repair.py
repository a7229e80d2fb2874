"""Where the true elements of an optimizer state are that Megatron-Core 0.15 to 0.19 wrote as ``fully_reshardable``, displaced by padding.

See ``buffers.shifts`` for what went wrong. Nearly all elements are in the checkpoint, in the wrong places; those that are not are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import FormatError, UsageError
from ckpt.geometry import Box, box_to_flat, flat_to_boxes

from .buffers import BUCKET_DIVISOR, BufferLayout, Segment, buffer_layout, pieces_of, shifts
from .catalog import MegatronCatalog
from .flat import members_of
from .names import EMBEDDING, ORDERS
from .params import Block, LocalParam
from .pieces import Piece, PieceTable
from .spread import Spread
from .stored_buffers import Buffer, GroupOf
from .training import KEYS, MODEL, STATE


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """``pieces``: by name of a tensor of the optimizer's state, the boxes of it and the elements that they truly are. ``lost``: the boxes
    that no file has, of a tensor's master and moments alike, by name of the parameter."""

    pieces: Mapping[str, tuple[Piece, ...]]
    lost: Mapping[str, tuple[Box, ...]]


def repaired_states(catalog: MegatronCatalog, *, bucket_size: int | None, data_parallel: int, divisor: int = BUCKET_DIVISOR) -> Repaired:
    """Undo the displacement.

    Args:
        bucket_size: ``--ddp-bucket-size`` of the job in elements, or what Megatron takes by default: max(40,000,000, 1,000,000 · ranks).
            None if gradients were not reduced with overlap, so that there was one bucket.
        data_parallel: data-parallel ranks that shared a buffer, context parallelism included.
        divisor: 65536 if buckets were padded for high bus bandwidth.

    Raises:
        UsageError: the checkpoint is not of this form, or the sizes are not those of the job: repaired masters would not be the weights.
        FormatError: it is spread in a way that is not known here.
    """
    if catalog.suspect is None:
        raise UsageError("this optimizer state is not of a form that was displaced", where=catalog.url, hint="only fully_reshardable was")
    return _Repair(catalog, bucket_size, data_parallel, divisor).run()


class _Repair:
    def __init__(self, catalog: MegatronCatalog, bucket_size: int | None, data_parallel: int, divisor: int) -> None:
        self.catalog = catalog
        self.table: PieceTable = catalog.table
        self.sizes = (bucket_size, data_parallel, divisor)
        said = catalog.arguments
        self.stages = _count(said, "pipeline_model_parallel_size")
        self.chunks = _count(said, "virtual_pipeline_model_parallel_size")
        if _count(said, "expert_model_parallel_size") > 1:
            raise FormatError("experts on several ranks are not repaired", where=catalog.url, hint="load an earlier checkpoint")
        self.pieces: dict[str, list[Piece]] = {}
        self.lost: dict[str, list[Box]] = {}

    def run(self) -> Repaired:
        embedding = self.table.entries[f"{MODEL}{EMBEDDING}"]
        tensor = len({int(o) for o in embedding.grid.all_boxes()[0][:, 0]})
        groups = [GroupOf(0, n) for n in range(self.stages * tensor)]
        spread = Spread(self.table, self.catalog.arguments, groups)
        kinds = dict.fromkeys(e.dtype.name for n, e in self.table.entries.items() if n.startswith(MODEL))
        for group in groups:
            stage = group.rank // tensor
            own = {n: Buffer(dtype=kind) for n, kind in enumerate([*kinds] * self.chunks)}
            for number, (names, _) in enumerate(spread.paired(group, own)):
                self._buffer(spread, group, names, single=stage > 0 or number >= len(kinds), last=stage == self.stages - 1)
        return Repaired(pieces={n: tuple(p) for n, p in self.pieces.items()}, lost={n: tuple(b) for n, b in self.lost.items()})

    def _buffer(self, spread: Spread, group: GroupOf, names: list[str], *, single: bool, last: bool) -> None:
        bucket_size, data_parallel, divisor = self.sizes
        for order in ORDERS:
            params = spread.ordered(group, names, order)
            layout = buffer_layout(
                members_of(params), bucket_size=None if single else bucket_size, data_parallel=data_parallel, divisor=divisor
            )
            segments = self._segments(params, layout, copies=last and self.stages > 1)
            starts = [layout.compact(slot) for slot in layout.slots]
            if spread.are_weights(params, starts, segments["param"]):
                break
        else:
            raise UsageError(
                "the repaired masters would not be the weights, so the buckets had other sizes",
                where=self.catalog.url,
                hint="give bucket size and data-parallel size as the job had them",
            )
        for param, start in zip(params, starts, strict=True):
            if param.shared and last and self.stages > 1:
                continue  # the first stage has it
            for key, own in segments.items():
                for name, piece in pieces_of(param, start, own):
                    self.pieces.setdefault(f"{STATE}{name}.{KEYS[key]}", []).append(piece)
        self._losses(params, layout)

    def _segments(self, params: list[LocalParam], layout: BufferLayout, *, copies: bool) -> dict[str, list[Segment]]:
        """The buffer without its padding, as far as it was written: by Megatron's key."""
        found: dict[str, list[Segment]] = {key: [] for key in ("param", "exp_avg", "exp_avg_sq")}
        for param, slot in zip(params, layout.slots, strict=True):
            if param.shared and copies:
                continue
            for block in param.blocks:
                for key, segments in found.items():
                    segments += self._written(f"{STATE}{block.name}.{KEYS[key]}", block, slot.start + block.start, layout.used)
        for segments in found.values():
            segments.sort(key=lambda s: s.start)
        return found

    def _written(self, name: str, block: Block, start: int, used: int) -> list[Segment]:
        """The segments that were written as a block from ``start`` on. Beyond ``used`` are zeros for what was not there."""
        found, elements, own = [], 0, Box(block.offset, block.shape)
        for piece in self.table.pieces(name):
            box = Box(piece.offset, piece.shape)
            flat = box_to_flat(block.shape, box.relative_to(block.offset)) if own.contains(box) else None
            if flat is not None:
                elements += box.numel
                low, high = start + flat[0], min(start + flat[1], used)
                found += [Segment(low, high, piece.source, piece.start)] if low < high else []
        if elements != block.numel:
            raise FormatError(f"{name} is stored in other parts than ranks have", where=self.catalog.url)
        return found

    def _losses(self, params: list[LocalParam], layout: BufferLayout) -> None:
        for shift in shifts(layout, [p.numel for p in params]):
            for block in params[shift.member].blocks if shift.found is None else ():
                low, high = max(shift.start, block.start), min(shift.stop, block.start + block.numel)
                if low < high:
                    boxes = flat_to_boxes(block.shape, low - block.start, high - block.start)
                    self.lost.setdefault(block.name, []).extend(b.shifted(block.offset) for b in boxes)


def _count(arguments: Mapping[str, Any], name: str) -> int:
    said = arguments.get(name)
    return said if isinstance(said, int) and said > 0 else 1
