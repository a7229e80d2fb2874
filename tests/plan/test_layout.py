"""Layouts against arrays that are really cut: pieces, memory shapes, tilings and holders agree with numpy and with DTensor."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import LayoutError
from ckpt.plan.layout.geometry import Box, cells
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout, Tiling
from tests.plan.layout_strategies import local_array, meshes, numbered, placed_tensors, through_pieces


def world(layout: TensorLayout) -> range:
    """All ranks of the layout, and some that are not in it."""
    return range(max(layout.mesh.ranks) + 3)


def cells_of(tiling: Tiling) -> list[Box]:
    """The cells, in the order of ``holders``."""
    offsets, shapes = cells(tiling.cuts) if tiling.cuts is not None else tiling.boxes or ((), ())
    return [Box(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), shapes.tolist(), strict=True)]


def holders_by_oracle(layout: TensorLayout, shape: tuple[int, ...]) -> list[set[int]]:
    """For each element of the tensor, row-major, the ranks that have it."""
    found: list[set[int]] = [set() for _ in range(math.prod(shape))]
    for rank in world(layout):
        local = local_array(layout, numbered(shape), rank)
        for element in [] if local is None else local.ravel().tolist():
            found[element].add(rank)
    return found


# --------------------------------------------------------------------------------------------------------------- any layout


@given(placed_tensors())
def test_pieces_and_memory_are_what_the_splits_leave(placed: tuple[TensorLayout, tuple[int, ...]]) -> None:
    layout, shape = placed
    for rank in world(layout):
        expected = local_array(layout, numbered(shape), rank)
        if expected is None:
            assert layout.pieces(shape, rank) == []
            assert rank not in layout.ranks()
            continue
        assert rank in layout.ranks()
        assert layout.local_shape(shape, rank) == expected.shape
        assert np.array_equal(through_pieces(layout, numbered(shape), rank), expected)
        assert all(p.box.numel == p.local.numel > 0 for p in layout.pieces(shape, rank))


@given(placed_tensors())
def test_cells_tile_the_tensor_and_know_their_holders(placed: tuple[TensorLayout, tuple[int, ...]]) -> None:
    layout, shape = placed
    tiling = layout.tiling(shape)
    boxes, ids, expected = cells_of(tiling), numbered(shape), holders_by_oracle(layout, shape)
    assert len(boxes) == len(tiling.holders)
    times = np.zeros(shape, dtype=np.int64)
    for box, holders in zip(boxes, tiling.holders.tolist(), strict=True):
        times[box.slices] += 1
        assert len(set(holders)) == len(holders)
        assert set(holders) <= layout.ranks()
        for element in ids[box.slices].ravel().tolist():
            assert set(holders) == expected[element]
    assert (times == 1).all()


@given(placed_tensors())
def test_a_cell_lies_in_one_piece_of_each_holder(placed: tuple[TensorLayout, tuple[int, ...]]) -> None:
    """A writer takes a chunk from one block of memory."""
    layout, shape = placed
    tiling = layout.tiling(shape)
    for box, holders in zip(cells_of(tiling), tiling.holders.tolist(), strict=True):
        for rank in holders if box.numel else []:
            assert sum(p.box.contains(box) for p in layout.pieces(shape, rank)) == 1


@given(placed_tensors())
def test_every_tensor_has_a_cell(placed: tuple[TensorLayout, tuple[int, ...]]) -> None:
    """Also one without elements: the format has no grid without chunks, and explicit boxes only for tensors with dimensions."""
    layout, shape = placed
    tiling = layout.tiling(shape)
    assert len(tiling.holders) > 0
    assert (tiling.cuts is None) != (tiling.boxes is None)
    if tiling.boxes is not None:
        assert shape != ()


@given(placed_tensors())
def test_json_round_trip(placed: tuple[TensorLayout, tuple[int, ...]]) -> None:
    layout, _ = placed
    again = TensorLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.to_json() == layout.to_json()
    assert list(again.mesh.ranks) == list(layout.mesh.ranks)


# --------------------------------------------------------------------------------------------------------------------- mesh


@given(meshes())
def test_coordinates_are_row_major(mesh: Mesh) -> None:
    for at, rank in zip(itertools.product(*map(range, mesh.sizes)), mesh.ranks, strict=True):
        assert mesh.coordinate(rank) == at
        assert mesh.array()[at] == rank
    assert mesh.coordinate(max(mesh.ranks) + 1) is None


@pytest.mark.parametrize("ranks", [range(1, 9, 2), (1, 3, 5, 7), [1, 3, 5, 7]], ids=["range", "tuple", "list"])
def test_ranks_with_gaps_may_be_spelled_in_any_way(ranks: Any) -> None:
    layout = TensorLayout(Mesh(("dp",), (4,), ranks), (Shard(0, "dp"),))
    same = TensorLayout(Mesh(("dp",), (4,), (1, 3, 5, 7)), (Shard(0, "dp"),))
    assert (layout, hash(layout)) == (same, hash(same))
    again = TensorLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.pieces((8,), 5) == layout.pieces((8,), 5) != []


def test_consecutive_ranks_are_one_mesh_however_spelled() -> None:
    assert Mesh(("a",), (3,), (2, 3, 4)) == Mesh(("a",), (3,), range(2, 5))
    assert Mesh(("a", "b"), (2, 2)) == Mesh.of({"a": 2, "b": 2}) == Mesh(("a", "b"), (2, 2), (0, 1, 2, 3))
    assert Mesh.flat((5, 3)).coordinate(3) == (1,)


@pytest.mark.parametrize(
    ("names", "sizes", "ranks"),
    [
        (("a",), (2, 2), ()),
        (("a", "a"), (2, 2), ()),
        (("a",), (0,), ()),
        (("a",), (3,), (0, 1)),
        (("a",), (3,), (0, 1, 1)),
        (("a",), (2,), (4, 5, 6)),
    ],
)
def test_what_is_no_mesh(names: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="mesh"):
        Mesh(names, sizes, ranks)


# ---------------------------------------------------------------------------------------------------------- cases by hand


def parts(layout: TensorLayout, size: int) -> list[list[int]]:
    """Rows of a vector of ``size`` that each rank has, in memory order."""
    return [through_pieces(layout, numbered((size,)), r).tolist() for r in layout.mesh.ranks]


def test_uneven_shards_are_those_of_torch_chunk() -> None:
    layout = TensorLayout(Mesh.of({"dp": 4}), (Shard(0, "dp"),))
    assert parts(layout, 9) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]
    assert parts(layout, 5) == [[0, 1], [2, 3], [4], []]


def test_given_sizes() -> None:
    layout = TensorLayout(Mesh.of({"dp": 3}), (Shard(0, "dp", (1, 0, 4)),))
    assert parts(layout, 5) == [[0], [], [1, 2, 3, 4]]


def test_fused_qkv_with_fewer_key_heads() -> None:
    """Four query heads, two key and two value heads of one row each, over two ranks."""
    layout = TensorLayout(Mesh.of({"tp": 2}), (Interleaved(0, "tp", (4, 2, 2)),))
    assert parts(layout, 8) == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_neighbouring_parts_are_one_piece() -> None:
    """A group on one rank, or groups that meet, would otherwise be stored as several chunks."""
    alone = TensorLayout(Mesh.of({"tp": 1}), (Interleaved(0, "tp", (4, 2, 2)),))
    assert [p.box for p in alone.pieces((8, 3), 0)] == [Box((0, 0), (8, 3))]
    assert alone.tiling((8, 3)).cuts == ((0, 8), (0, 3))
    two = TensorLayout(Mesh.of({"tp": 2}), (Interleaved(0, "tp", (1, 4)),))
    assert [p.box for p in two.pieces((5,), 0)] == [Box((0,), (3,))]


def test_gate_and_up() -> None:
    layout = TensorLayout(Mesh.of({"tp": 2}), (Interleaved(0, "tp", 2),))
    assert parts(layout, 8) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_fsdp_over_tp() -> None:
    layout = TensorLayout(Mesh.of({"dp": 2, "tp": 2}), (Shard(0, "tp"), Shard(0, "dp")))
    assert parts(layout, 8) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert parts(layout, 5) == [[0, 1], [3], [2], [4]]


def test_fsdp_over_fused_qkv() -> None:
    layout = TensorLayout(Mesh.of({"dp": 2, "tp": 2}), (Interleaved(0, "tp", (4, 2, 2)), Shard(0, "dp")))
    assert parts(layout, 8) == [[0, 1], [2, 3], [4, 6], [5, 7]]


def test_flat_ranges_cut_rows() -> None:
    layout = TensorLayout(Mesh.of({"dp": 2}), (Flat("dp"),))
    assert layout.local_shape((3, 3), 0) == (5,)
    assert [p.box for p in layout.pieces((3, 3), 0)] == [Box((0, 0), (1, 3)), Box((1, 0), (1, 2))]
    assert [p.local for p in layout.pieces((3, 3), 1)] == [Box((0,), (1,)), Box((1,), (3,))]


def test_flat_over_columns_counts_within_the_columns() -> None:
    layout = TensorLayout(Mesh.of({"dp": 2, "tp": 2}), (Shard(1, "tp"), Flat("dp")))
    found = [through_pieces(layout, numbered((2, 4)), r).tolist() for r in range(4)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    found = [through_pieces(layout, numbered((3, 2)), r).tolist() for r in range(4)]
    assert found == [[0, 2], [1, 3], [4], [5]]


def test_a_rank_that_takes_no_part_has_no_memory() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 2})
    staged = TensorLayout(mesh, (Shard(0, "dp"),), (("pp", (1,)),))
    assert staged.ranks() == {2, 3}
    assert staged.local_shape((4, 3), 0) == (0, 0)
    assert staged.local_shape((4, 3), 2) == (2, 3)
    assert TensorLayout(mesh, (Flat("dp"),)).local_shape((4, 3), 9) == (0,)


# --------------------------------------------------------------------------------------------------------- what is refused


MESH = Mesh.of({"dp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("splits", "at", "message"),
    [
        ((Shard(0, "cp"),), (), "no dimension 'cp'"),
        ((), (("pp", (0,)),), "no dimension 'pp'"),
        ((Shard(0, "tp"), Shard(1, "tp")), (), "used twice"),
        ((Shard(0, "tp"),), (("tp", (0,)),), "used twice"),
        ((Flat("tp"), Shard(0, "dp")), (), "last split"),
        ((), (("tp", (2,)),), "coordinate"),
        ((), (("tp", (-1,)),), "coordinate"),
        ((), (("tp", (0, 0)),), "coordinate"),
        ((), (("tp", ()),), "coordinate"),
    ],
)
def test_layouts_that_cannot_be(splits: Any, at: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        TensorLayout(MESH, splits, at)


@pytest.mark.parametrize(
    ("splits", "shape"),
    [
        ((Shard(2, "tp"),), (4, 4)),
        ((Shard(-3, "tp"),), (4, 4)),
        ((Shard(0, "tp"),), ()),
        ((Shard(0, "tp", (1, 2)),), (4, 4)),
        ((Shard(0, "tp", (1, 2, 1)),), (4, 4)),
        ((Interleaved(1, "tp", (2, 1)),), (4, 4)),
        ((Interleaved(0, "tp", 3), Flat("dp")), (16, 4)),
    ],
)
def test_splits_that_do_not_fit_the_shape(splits: Any, shape: tuple[int, ...]) -> None:
    layout = TensorLayout(MESH, splits)
    with pytest.raises(LayoutError):
        layout.tiling(shape)
    with pytest.raises(LayoutError):
        layout.pieces(shape, 0)


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 5))
def test_flat_over_groups_is_right_or_refused(size: int, parts: int, groups: int) -> None:
    """Whatever is not refused has to be right."""
    layout = TensorLayout(Mesh.of({"tp": 2, "dp": parts}), (Interleaved(0, "tp", groups), Flat("dp")))
    for rank in layout.mesh.ranks:
        expected = local_array(layout, numbered((size, 2)), rank)
        found = None
        with suppress(LayoutError):
            found = through_pieces(layout, numbered((size, 2)), rank)
        assert np.array_equal(found, expected) if found is not None else groups > 1


# -------------------------------------------------------------------------------------------------------------------- DTensor


def dtensor_worlds(sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Each rank of a mesh in turn, in this process: nothing is communicated."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    names = ("pp", "dp", "tp")[-len(sizes) :]
    for rank in range(math.prod(sizes)):
        dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
        try:
            yield rank, init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
        finally:
            dist.destroy_process_group()


def as_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().to_local().numpy()


@pytest.mark.parametrize("shape", [(8,), (7,), (1,), (8, 6), (5, 7), (3, 5, 4)], ids=str)
def test_pieces_are_the_memory_of_a_dtensor(shape: tuple[int, ...]) -> None:
    import torch
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as TorchShard

    from ckpt.state.tensors import dtensor_layout

    array = numbered(shape)
    options = [Replicate(), *(TorchShard(d) for d in range(len(shape)))]
    compared = 0
    for rank, mesh in dtensor_worlds((3, 2)):
        for placements in itertools.product(options, repeat=2):
            real = distribute_tensor(torch.from_numpy(array), mesh, placements, src_data_rank=None)
            layout = dtensor_layout("w", real)
            assert np.array_equal(through_pieces(layout, array, rank), as_numpy(real)), placements
            compared += 1
    assert compared == 6 * len(options) ** 2


@pytest.mark.parametrize("rows", [16, 12, 9, 7, 3, 1])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (3, 2), (2, 4), (2, 2, 2)], ids=str)
def test_pieces_are_the_memory_of_fsdp_over_tp(rows: int, sizes: tuple[int, ...]) -> None:
    """What fully_shard leaves of a tensor-parallel weight, even or not; three dimensions are HSDP over tensor parallelism."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from ckpt.state.tensors import dtensor_layout

    array = numbered((rows, 2)).astype(np.float32)
    for rank, mesh in dtensor_worlds(sizes):
        linear = torch.nn.Linear(2, rows, bias=False)
        linear.weight = torch.nn.Parameter(torch.from_numpy(array))
        parallelize_module(linear, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fully_shard(linear, mesh=mesh["pp", "dp"] if len(sizes) == 3 else mesh["dp"])
        layout = dtensor_layout("w", linear.weight)
        assert any(type(p).__name__ == "_StridedShard" for p in linear.weight.placements)
        assert Shard(0, "tp") == layout.splits[0]
        assert np.array_equal(through_pieces(layout, array.astype(np.int64), rank), as_numpy(linear.weight))


@pytest.mark.parametrize("placed", ["S2,S", "S2,R", "S3,R", "S3,S", "S2,C", "S4,S,S", "S2,S,S", "S,S2,S", "R,S2,S", "S4,S2,S", "S2,C,S"])
def test_pieces_are_the_memory_of_strided_shards(placed: str) -> None:
    """Placements as DTensor itself applies them, from left to right, also with split factors that no other shard explains."""
    import torch
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    from ckpt.state.tensors import dtensor_layout

    known = {"R": Replicate(), "S": TorchShard(0), "C": TorchShard(1)} | {f"S{n}": _StridedShard(0, split_factor=n) for n in (2, 3, 4)}
    placements = [known[p] for p in placed.split(",")]
    array = numbered((48, 4))
    for rank, mesh in dtensor_worlds((2,) * len(placements)):
        real = distribute_tensor(torch.from_numpy(array), mesh, placements, src_data_rank=None)
        assert np.array_equal(through_pieces(dtensor_layout("w", real), array, rank), as_numpy(real))


def test_uneven_strided_shards_that_fsdp_would_not_make_are_refused() -> None:
    """DTensor cuts 9 rows otherwise than FSDP over tensor parallelism does; what is not FSDP's must not pass as such."""
    import torch
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from ckpt.state.tensors import from_dtensor

    array, refused = numbered((9, 2)), []
    for rank, mesh in dtensor_worlds((4, 2)):
        placements = [_StridedShard(0, split_factor=2), TorchShard(0)]
        real = distribute_tensor(torch.from_numpy(array), mesh, placements, src_data_rank=None)
        try:
            local = from_dtensor("w", real, rank)
        except LayoutError:
            refused.append(rank)
            continue
        for part in local.parts:
            assert np.array_equal(part.memory.numpy(), array[part.box.slices])
    assert refused == [6, 7]


def test_flat_ranges_of_given_sizes() -> None:
    """A tensor inside of a flat parameter: the range of one rank may be empty, and state that only the others have says so."""
    mesh = Mesh.of({"dp": 3})
    layout = TensorLayout(mesh, (Flat("dp", (4, 0, 2)),))
    assert [[p.box for p in layout.pieces((2, 3), rank)] for rank in range(3)] == [
        [Box((0, 0), (1, 3)), Box((1, 0), (1, 1))],
        [],
        [Box((1, 1), (1, 2))],
    ]
    assert [layout.local_shape((2, 3), rank) for rank in range(3)] == [(4,), (0,), (2,)]
    assert TensorLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert TensorLayout(mesh, layout.splits, (("dp", (0, 2)),)).ranks() == {0, 2}
    with pytest.raises(LayoutError, match="used twice"):
        TensorLayout(mesh, layout.splits, (("dp", (0, 1)),))
    with pytest.raises(LayoutError, match="add up to 7"):
        layout.pieces((7,), 0)
