"""Transfers between any two layouts: ranks that exist only as numpy arrays give each other what the plan says, through packed pieces."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.catalog import Grid
from ckpt.errors import CoverageError, FormatError, NotFoundError
from ckpt.live.holdings import BoxMemory, Holdings, TensorParts
from ckpt.plan.layout.geometry import Box, find_fault
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.transfers import ALIGNMENT, RequestList, Share, TransferPlan, Want, plan_transfers
from tests.plan.layout_strategies import layouts, local_array, meshes, numbered, tensor_shapes, through_pieces

PIECE = 64
FILES = np.zeros(1, dtype=np.int32)


def want(name: str, number: int, itemsize: int, source: TensorLayout, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Want:
    tiling = source.tiling(shape)
    grid = Grid(cuts=tiling.cuts, boxes=tiling.boxes, files=FILES)
    return Want(name, number, itemsize, grid, tiling.holders, boxes)


def holdings(layout: TensorLayout, tensors: list[np.ndarray], rank: int) -> Holdings:
    """What the rank has, cut by the oracle."""
    held = {}
    for number, array in enumerate(tensors):
        local = local_array(layout, array, rank)
        if local is None:
            continue
        pieces = layout.pieces(array.shape, rank)
        parts = [BoxMemory(p.box, local[p.local.slices].reshape(p.box.shape)) for p in pieces]
        held[number] = TensorParts(array.ndim, array.itemsize, parts)
    return Holdings(tensors=held)


def carry(plan: TransferPlan, source: dict[int, Holdings], rank: int, targets: list[np.ndarray]) -> Counter[int]:
    """Do what a plan says: the global array of each target gets its boxes, −1 elsewhere. Bytes by holder."""
    sent: Counter[int] = Counter()
    for place, box in plan.own:
        array = targets[place]
        data = bytearray(box.numel * array.itemsize)
        source[rank].gather(plan.wants[place].number, box, memoryview(data))
        array[box.slices] = np.frombuffer(data, array.dtype).reshape(box.shape)
    for holder, share in plan.shares.items():
        asked = RequestList.from_bytes(share.requests.to_bytes())
        assert asked.to_bytes() == share.requests.packed and asked.digest == share.requests.digest
        for piece, rows in enumerate(asked.pieces):
            data = bytearray(PIECE + 8)
            length = source[holder].pack(asked, piece, memoryview(data))
            assert 0 < length <= plan.piece
            for request, at in zip(rows, asked.places(piece)[0], strict=True):
                place = int(share.wants[request])
                array = targets[place]
                box = asked.box(request, array.ndim)
                assert at % ALIGNMENT == 0
                assert (array[box.slices] == -1).all(), "taken twice"
                values = np.frombuffer(data, array.dtype, count=box.numel, offset=at)
                array[box.slices] = values.reshape(box.shape)
                sent[holder] += box.numel * array.itemsize
    return sent


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], TensorLayout, TensorLayout]:
    shape = draw(tensor_shapes())
    return shape, draw(layouts(draw(meshes()), shape)), draw(layouts(draw(meshes()), shape))


@settings(max_examples=150, deadline=None)
@given(pairs(), st.integers(1, 3), st.sampled_from([1, 2, 8]))
def test_every_rank_gets_what_its_layout_gives_it(
    pair: tuple[tuple[int, ...], TensorLayout, TensorLayout], count: int, itemsize: int
) -> None:
    shape, source, target = pair
    kind = np.dtype(f"i{itemsize}")
    arrays = [((numbered(shape) + 31 * i) % 100).astype(kind) for i in range(count)]
    held = {rank: holdings(source, arrays, rank) for rank in source.ranks()}
    for rank in sorted(target.ranks()):
        boxes = tuple(p.box for p in target.pieces(shape, rank))
        wants = [want(f"t{i}", i, itemsize, source, shape, boxes) for i in range(count)]
        plan = plan_transfers(wants, rank=rank, near=frozenset(list(source.ranks())[:2]), piece=PIECE)
        filled = [np.full(shape, -1, dtype=kind) for _ in arrays]
        sent = carry(plan, held, rank, filled)
        assert rank not in sent
        mine = sum(box.numel for box in boxes) * itemsize * count
        assert plan.needed == mine == sum(sent.values()) + sum(box.numel * itemsize for _, box in plan.own)
        for array, got in zip(arrays, filled, strict=True):
            expected = local_array(target, array, rank)
            assert expected is not None
            np.testing.assert_array_equal(through_pieces(target, got, rank), expected.astype(np.int64))


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_lost_holders_are_replaced_or_named(pair: tuple[tuple[int, ...], TensorLayout, TensorLayout]) -> None:
    shape, source, target = pair
    rank = min(target.ranks())
    boxes = tuple(p.box for p in target.pieces(shape, rank))
    plan = plan_transfers([want("t", 0, 2, source, shape, boxes)], rank=rank, piece=PIECE)
    for holder, share in plan.shares.items():
        pieces = range(len(share.requests.pieces))[::2]
        asked = sorted(_boxes(plan, share, pieces), key=str)
        sole = any(set(plan.wants[0].holders[c].tolist()) == {holder} for b in asked for c in plan.wants[0].grid.overlapping(b).tolist())
        if sole:
            with pytest.raises(CoverageError, match=f"only rank {holder} had"):
                plan.without(holder, share, pieces, {holder})
            continue
        others = plan.without(holder, share, pieces, {holder})
        assert holder not in others
        replaced = [b for s in others.values() for b in _boxes(plan, s, range(len(s.requests.pieces)))]
        assert sorted(replaced, key=str) == asked
        for other, s in others.items():
            for box in _boxes(plan, s, range(len(s.requests.pieces))):
                assert any(p.box.intersect(box) for p in source.pieces(shape, other))


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(1, 10), st.sampled_from(["far", "near", "domain"]))
def test_relays_share_the_sending_and_stand_in(pair: tuple[tuple[int, ...], TensorLayout, TensorLayout], count: int, where: str) -> None:
    """All requests of a plan are those of one without relays; each goes to a rank that has it, or to a relay in its name."""
    shape, source, target = pair
    boxes = tuple(p.box for p in target.pieces(shape, min(target.ranks())))
    wants = [want("t", 0, 2, source, shape, boxes)]
    stride = 100
    relays = [stride * (k + 1) for k in range(count)]
    close = frozenset(relays[0] + r for r in source.ranks()) if where != "far" else frozenset()
    near, domain = (close, frozenset()) if where == "near" else (frozenset(), close)
    plan = plan_transfers(wants, rank=-1, near=near, domain=domain, relays=relays, piece=PIECE)
    asked = [(holder, b) for holder, s in plan.shares.items() for b in _boxes(plan, s, range(len(s.requests.pieces)))]
    alone = plan_transfers(wants, rank=-1, piece=PIECE)
    expected = [b for s in alone.shares.values() for b in _boxes(alone, s, range(len(s.requests.pieces)))]
    assert sorted((b for _, b in asked), key=str) == sorted(expected, key=str)
    for holder, box in asked:
        assert any(p.box.intersect(box) for p in source.pieces(shape, holder % stride))
        assert where == "far" or holder in close
    for holder, share in plan.shares.items():
        left = plan.without(holder, share, range(len(share.requests.pieces)), {holder})
        assert holder not in left and sum(s.requests.total for s in left.values()) == share.requests.total


def _boxes(plan: TransferPlan, share: Share, pieces: range) -> list[Box]:
    return [share.requests.box(r, len(plan.wants[0].boxes[0].shape)) for p in pieces for r in share.requests.pieces[p]]


@given(tensor_shapes(max_side=12), st.sampled_from([1, 4, 16]))
def test_requests_tile_a_box_and_fit_a_piece(shape: tuple[int, ...], itemsize: int) -> None:
    if not math.prod(shape):
        return
    plan = plan_transfers([want("t", 0, itemsize, TensorLayout.replicated([5]), shape, (Box.whole(shape),))], rank=0, piece=PIECE)
    share = plan.shares[5]
    boxes = _boxes(plan, share, range(len(share.requests.pieces)))
    offsets, shapes = (np.array([getattr(b, side) for b in boxes]).reshape(len(boxes), len(shape)) for side in ("offset", "shape"))
    assert not shape or find_fault(shape, offsets, shapes) is None
    assert max(share.requests.nbytes) <= PIECE


def test_replicas_share_the_sending() -> None:
    """HSDP of 2 × 4 ranks gives to TP of 4: every sender gives as much as any other, to within a tenth."""
    source = TensorLayout(Mesh(("replica", "shard"), (2, 4), range(8)), (Shard(0, "shard"),))
    target = TensorLayout(Mesh(("dp", "tp"), (1, 4), range(8, 12)), (Shard(1, "tp"),))
    sent: Counter[int] = Counter()
    for rank in range(8, 12):
        wants = []
        for i in range(40):
            shape = (64 + 8 * (i % 3), 128)
            wants.append(want(f"t{i}", i, 2, source, shape, tuple(p.box for p in target.pieces(shape, rank))))
        plan = plan_transfers(wants, rank=rank, piece=1024)
        sent.update({holder: share.requests.total for holder, share in plan.shares.items()})
    assert len(sent) == 8 and max(sent.values()) <= 1.05 * sum(sent.values()) / 8


def test_small_tensors_of_many_receivers_spread_over_the_replicas() -> None:
    sent: Counter[int] = Counter()
    for rank in range(100, 164):
        plan = plan_transfers([want("t", 0, 4, TensorLayout.replicated(range(4)), (8,), (Box((0,), (8,)),))], rank=rank, piece=1024)
        sent.update({holder: share.requests.total for holder, share in plan.shares.items()})
    assert len(sent) == 4 and max(sent.values()) <= 1.10 * sum(sent.values()) / 4


def test_the_own_machine_comes_first() -> None:
    source = TensorLayout.replicated(range(4))
    wanted = [want("t", 0, 4, source, (256,), (Box((0,), (256,)),))]
    assert set(plan_transfers(wanted, rank=9, near=frozenset({2, 9}), piece=64).shares) == {2}
    assert set(plan_transfers(wanted, rank=9, near=frozenset({9}), piece=64).shares) == {0, 1, 2, 3}
    own = plan_transfers(wanted, rank=3, near=frozenset({2, 3}), piece=64)
    assert not own.shares and [copy.box for copy in own.own] == [Box((0,), (256,))]


def test_a_hole_in_the_source_is_an_error() -> None:
    grid = Grid(boxes=(np.array([[0]]), np.array([[3]])), files=FILES)
    with pytest.raises(CoverageError, match=r"3 of the 4 elements of \[0:4\].*tensor t"):
        plan_transfers([Want("t", 0, 4, grid, np.array([[1]]), (Box((0,), (4,)),))], rank=0)


def test_tensors_of_one_kind_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.plan import transfers

    calls = []
    monkeypatch.setattr(transfers, "_cut", lambda *a, real=transfers._cut: (calls.append(1), real(*a))[1])
    source, target = TensorLayout(Mesh.flat(range(4)), (Shard(0, Mesh.flat(range(4)).names[0]),)), Box((0, 0), (4, 8))
    grid = want("x", 0, 4, source, (8, 8), (target,)).grid
    holders = source.tiling((8, 8)).holders
    plan = plan_transfers([Want(f"t{i}", i, 4, grid, holders, (target,)) for i in range(50)], rank=9)
    assert len(calls) == 1 and plan.needed == 50 * 4 * 32


# ---- what a holder is asked for is not believed

LISTED = plan_transfers([want("t", 3, 4, TensorLayout.replicated([1]), (4, 6), (Box((1, 2), (2, 3)),))], rank=0).shares[1].requests


@given(st.integers(0, len(LISTED.packed) - 1), st.integers(0, 255))
def test_a_damaged_list_is_refused_or_finds_nothing(at: int, value: int) -> None:
    data = bytearray(LISTED.packed)
    data[at] = value
    array = numbered((4, 6)).astype(np.int32)
    held = Holdings(tensors={3: TensorParts(2, 4, [BoxMemory(Box.whole((4, 6)), array)])})
    try:
        asked = RequestList.from_bytes(bytes(data))
        for piece in range(len(asked.pieces)):
            assert held.pack(asked, piece, memoryview(bytearray(asked.piece))) <= asked.piece
    except (FormatError, NotFoundError):
        pass


@pytest.mark.parametrize("cut", [0, 5, 23, len(LISTED.packed) - 1])
def test_a_short_list_is_refused(cut: int) -> None:
    with pytest.raises(FormatError, match="not a list of requests"):
        RequestList.from_bytes(LISTED.packed[:cut])


def test_wide_numbers_survive() -> None:
    far = Box((1 << 40, 0), (1, 3))
    grid = Grid(boxes=(np.array([far.offset]), np.array([far.shape])), files=FILES)
    (share,) = plan_transfers([Want("t", 7, 4, grid, np.array([[1]]), (far,))], rank=0).shares.values()
    assert RequestList.from_bytes(share.requests.packed).box(0, 2) == far


def test_flat_sources_need_no_gather() -> None:
    """A flat ZeRO range gives boxes; what a TP rank wants of them is asked for box by box, each byte once."""
    source = TensorLayout(Mesh(("dp",), (3,), range(3)), (Flat("dp"),))
    target = TensorLayout(Mesh(("tp",), (2,), range(3, 5)), (Shard(1, "tp"),))
    array = numbered((7, 5)).astype(np.int64)
    held = {rank: holdings(source, [array], rank) for rank in range(3)}
    for rank, _ in itertools.product((3, 4), range(1)):
        plan = plan_transfers([want("t", 0, 8, source, (7, 5), tuple(p.box for p in target.pieces((7, 5), rank)))], rank=rank, piece=PIECE)
        got = np.full((7, 5), -1, dtype=np.int64)
        carry(plan, held, rank, [got])
        np.testing.assert_array_equal(through_pieces(target, got, rank), local_array(target, array, rank))
