"""Replicas of tensors in any layout, on ranks that are none: equal bytes agree whatever the layout, one changed byte is named."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
import xxhash
from hypothesis import given as cases
from hypothesis import strategies as st

from ckpt import settings
from ckpt.dtypes import DTYPES
from ckpt.engine.save.plan import chunks_of
from ckpt.engine.save.replicas import Replicas, replica_problems
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec, assign, replicated_chunks
from ckpt.state.tensors import LocalTensor, parts_of
from tests.plan.layout_strategies import coordinate_of, local_array, numbered, placed_tensors

Digests = dict[str, str]


def digests_of(spec: TensorSpec, rank: int, changed: int | None) -> dict[str, Digests]:
    """What a rank says of its replicas; on the one that is ``changed`` this element of the rank's memory is another one."""
    array = local_array(spec.layout, numbered(spec.shape), rank)
    assert array is not None
    memory = torch.from_numpy(np.ascontiguousarray(array).copy())
    if changed is not None:
        memory.view(-1)[changed] = -1
    local = LocalTensor(spec, parts_of(spec, memory, rank), spec.name)
    assignments = assign([spec])
    chunks = chunks_of(assignments, rank)
    replicas = Replicas(assignments, replicated_chunks(assignments, rank), lambda _: local, rank, chunks)
    replicas.hash(1, lambda: None)
    written = [xxhash.xxh3_64_intdigest(local.gather(c.box).contiguous().numpy().tobytes() if c.box.numel else b"") for c in chunks]
    return {ranks: dict(digests) for ranks, digests in replicas.digests(written).items()}


def problems_of(spec: TensorSpec, changed: tuple[int, int] | None = None) -> list[str]:
    rows: dict[str, list[tuple[list[int], Digests]]] = defaultdict(list)
    for rank in sorted(spec.layout.ranks()):
        element = changed[1] if changed is not None and changed[0] == rank else None
        for ranks, digests in digests_of(spec, rank, element).items():
            rows[ranks].append(([rank], digests))
    return [text for variants in rows.values() for text in replica_problems(variants)]


@cases(placed_tensors(), st.data())
def test_replicas_of_any_layout_are_compared(case: tuple[TensorLayout, tuple[int, ...]], data: st.DataObject) -> None:
    layout, shape = case
    spec = TensorSpec("w", DTYPES["int64"], shape, layout)
    before, settings.UNDIVIDED = settings.UNDIVIDED, data.draw(st.sampled_from([16, settings.UNDIVIDED]))
    try:
        assert problems_of(spec) == []
        holds = {r: local.size for r in sorted(layout.ranks()) if (local := local_array(layout, numbered(shape), r)) is not None}
        rank = data.draw(st.sampled_from([r for r, size in holds.items() if size] or [-1]))
        if rank < 0:
            return
        found = problems_of(spec, (rank, data.draw(st.integers(0, holds[rank] - 1))))
    finally:
        settings.UNDIVIDED = before
    cut = {s.over for s in layout.splits}
    where, at = coordinate_of(layout.mesh, rank), dict(layout.at)
    assert where is not None
    others = [
        other
        for other in layout.ranks() - {rank}
        if all((coordinate_of(layout.mesh, other) or {})[name] == where[name] for name in where if name in cut)
    ]
    assert bool(found) is bool(others), at
    assert all(text.startswith("tensor w") and f"rank {rank}" in text for text in found) or len(others) == 1


def test_a_flat_range_that_ends_left_of_where_it_begins() -> None:
    """It is three boxes, of which the last ends before the first one begins."""
    layout = TensorLayout(Mesh(("dp", "tp"), (3, 2)), (Flat("dp", (185, 92, 11)),))
    spec = TensorSpec("w", DTYPES["int64"], (24, 12), layout)
    assert problems_of(spec) == []
    assert all("rank 2 ≠ rank 3" in text for text in problems_of(spec, (3, 5)))
