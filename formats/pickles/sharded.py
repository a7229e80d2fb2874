"""One rank's part of a sharded tensor, out of a pickled ShardedTensor or DTensor: the boxes that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

from ckpt.plan.layout.partition import Interval, joined, slice_of

from .stand_ins import Made, Meanings, StoredPart, StoredView, counts, shape_of

_MAX_GROUPS = 1 << 16
"""Intervals that one dimension of a part may consist of, and boxes of a part: more than there are tensor-parallel ranks."""


def sharded_tensor(v: Meanings, made: Made) -> StoredPart:
    """A ``ShardedTensor``: its state is (local shards, metadata of all, process group, sharding spec, whether it checks on init)."""
    shards, metadata, *_ = made.state
    described = metadata.attributes()
    boxes = []
    for shard in shards:
        fields = shard.attributes()
        placed = fields["metadata"].attributes()
        view = _view(v, fields["tensor"], counts(placed["shard_sizes"]))
        boxes.append((counts(placed["shard_offsets"]), view))
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape_of(described["size"], 16), boxes=tuple(boxes))


def dtensor(v: Meanings, made: Made) -> StoredPart:
    """A ``DTensor``: its local tensor, and a spec with the mesh, this rank's place on it, and a placement for each mesh dimension.

    (Source of what placements mean: ``_compute_local_shape_and_global_offset`` of torch/distributed/tensor/_utils.py.)
    """
    state = made.attributes()
    spec = state["_spec"].attributes()
    shape, where = shape_of(made.args[2], 16), _coordinate(v, spec["mesh"])
    mesh = _mesh_shape(v, spec["mesh"])
    _check_order(v, spec.get("shard_order"))
    intervals: list[tuple[Interval, ...]] = [((0, n),) if n else () for n in shape]
    for placement, parts, at in zip(spec["placements"], mesh, where, strict=True):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            v.refuse(f"a DTensor with the placement {kind}")
        fields = placement.attributes()
        (dim,) = counts([fields["dim"]])
        (groups,) = counts([fields["split_factor"]]) if kind == "_StridedShard" else (1,)
        if at >= parts or dim >= len(shape) or not groups:
            v.damaged(f"a DTensor at place {at} of {parts}, cut along dimension {dim} in {groups} groups")
        if groups * max(1, len(intervals[dim])) > _MAX_GROUPS:
            v.refuse(f"a DTensor that is cut in {groups:,} groups")
        intervals[dim] = _part(intervals[dim], groups, parts, at)
    return StoredPart(dtype=v.dtype_name(made.args[1]), shape=shape, boxes=_boxes(v, state["_local_tensor"], intervals))


def _check_order(v: Meanings, order: Any) -> None:
    """Mesh dimensions that cut the same dimension have to do so one after another, as ``_part`` is applied."""
    for entry in order or ():
        _, dims = entry.args if isinstance(entry, Made) else entry
        if list(counts(dims)) != sorted(counts(dims)):
            v.refuse(f"a DTensor whose dimensions were cut over the mesh dimensions {list(dims)} in that order")


def _part(intervals: tuple[Interval, ...], groups: int, parts: int, at: int) -> tuple[Interval, ...]:
    """What is left to place ``at`` of ``parts`` of what was held: its part of each of the groups."""
    # Both are as of torch.chunk: the last ones may have less, or nothing. With FSDP over tensor parallelism there is
    # a group for each tensor-parallel rank.
    size = sum(stop - start for start, stop in intervals)
    step = -(-size // groups)
    taken: list[Interval] = []
    for first in range(0, size, step or 1):
        length = min(step, size - first)
        part = -(-length // parts)
        begin = min(at * part, length)
        taken += slice_of(intervals, first + begin, first + min(begin + part, length))
    return joined(taken)


def _boxes(v: Meanings, local: Any, intervals: Sequence[tuple[Interval, ...]]) -> tuple[tuple[tuple[int, ...], StoredView], ...]:
    """The boxes of the whole tensor that the local one is, and the part of it that each is."""
    view = _view(v, local, tuple(sum(stop - start for start, stop in own) for own in intervals))
    if math.prod(len(own) for own in intervals) > _MAX_GROUPS:
        v.refuse("a DTensor with very many boxes")
    if not all(intervals):
        return ((tuple(own[0][0] if own else 0 for own in intervals), view),)
    boxes = []
    for cell in product(*(_placed(own) for own in intervals)):
        first = view.offset + sum(at * stride for (at, _), stride in zip(cell, view.strides, strict=True))
        part = replace(view, offset=first, shape=tuple(stop - start for _, (start, stop) in cell))
        boxes.append((tuple(start for _, (start, _) in cell), part))
    return tuple(boxes)


def _placed(intervals: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Where each interval begins in the local tensor."""
    starts = accumulate((stop - start for start, stop in intervals), initial=0)
    return list(zip(starts, intervals, strict=False))


def _view(v: Meanings, value: Any, shape: tuple[int, ...]) -> StoredView:
    view = v.meaning(value)
    if type(view) is not StoredView or view.shape != shape:
        v.damaged(f"a part of a tensor that should have the shape {list(shape)} and has not")
    return view


def _coordinate(v: Meanings, mesh: Made) -> tuple[int, ...]:
    coordinate = mesh.attributes().get("_coordinate_on_dim")
    if coordinate is None:
        v.refuse("a DTensor that does not say where on the mesh its rank was")
    return counts(coordinate)


def _mesh_shape(v: Meanings, mesh: Made) -> tuple[int, ...]:
    """How many ranks each dimension of a DeviceMesh has: torch 2.9 and later keep a layout, earlier ones a tensor of ranks."""
    fields = mesh.attributes()
    if type(fields.get("_layout")) is Made:
        layout = fields["_layout"].attributes()
        if "axes" in layout:
            sizes = [counts(axis.attributes()["shape"]) for axis in layout["axes"]]
            return tuple(_product(s) for s in sizes)
        if "shape" in layout:
            return tuple(n if type(n) is int else _product(counts(n)) for n in layout["shape"])
    ranks = v.meaning(fields.get("mesh", fields.get("_mesh")))
    if type(ranks) is not StoredView:
        v.refuse("a DTensor whose mesh has no shape that is known")
    return ranks.shape


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for n in sizes:
        product *= n
    return product
