"""Takes that bring only what changed: bit for bit, few bytes, and never over another base than the holder's."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.live import Sink, Source
from ckpt.live.holdings import BoxMemory, Holdings, TensorParts
from ckpt.live.pieces import PieceComparer, apply_changes
from ckpt.live.pull import Holder, PiecePull, PullBase, Pulled, piece_boxes
from ckpt.live.server import PieceServer
from ckpt.plan.layout.geometry import Box
from ckpt.plan.transfers import Share, TransferPlan, plan_transfers
from tests.live.test_pieces import RECEIVER, SECRET, SOURCE, want
from tests.plan.layout_strategies import local_array

SHAPE = (96, 400)
TIMEOUT = 20


def version(number: int) -> list[np.ndarray]:
    """Three tensors; from one version to the next some elements of the first and all of the second change."""
    rng = np.random.default_rng(0)
    first, second, third = (rng.integers(0, 1 << 30, SHAPE).astype(np.int32) for _ in range(3))
    for n in range(1, number + 1):
        places = np.random.default_rng(n).choice(first.size, first.size // 100, replace=False)
        first.reshape(-1)[places] += 1
        second += 7
    return [first, second, third]


@cache
def holdings(rank: int, number: int) -> Holdings:
    (piece,) = SOURCE.pieces(SHAPE, rank)
    tensors = {}
    for n, array in enumerate(version(number)):
        local = local_array(SOURCE, array, rank)
        assert local is not None
        tensors[n] = TensorParts(2, 4, [BoxMemory(piece.box, np.ascontiguousarray(local))])
    return Holdings(tensors=tensors, is_sealed=True)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Holder]]:
    """Four ranks that have versions 1 and 2. They compare boxes where they lie, and pack those that are strided."""
    monkeypatch.setattr("ckpt.settings.WORTH_A_CALL", 256)
    started = {}
    for rank in range(4):
        versions = {f"v{n}": holdings(rank, n) for n in (1, 2)}
        started[rank] = PieceServer(partial(_of, versions), SECRET, 5.0, delta=True)
    yield {rank: Holder(rank=rank, addresses=tuple(s.addresses), network=s.network) for rank, s in started.items()}
    for server in started.values():
        server.close()


def _of(versions: dict[str, Holdings], name: str) -> Holdings:
    if name not in versions:
        raise NotFoundError(f"there is no {name}")
    return versions[name]


class Receiver:
    """Memory with a version, into which another one is taken."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays
        boxes = (Box((5, 3), (40, 390)), Box((45, 0), (40, SHAPE[1])))
        self.plan: TransferPlan = plan_transfers(
            [want(f"t{i}", i, 4, SOURCE, SHAPE, boxes) for i in range(3)], rank=RECEIVER, piece=32 << 10
        )
        self.boxes = boxes

    def fill(self, share: Share, piece: int, view: memoryview) -> None:
        for place, box, span in self._boxes(share, piece):
            np.frombuffer(view[span], np.int32).reshape(box.shape)[...] = self.arrays[place][box.slices]

    def place(self, share: Share, piece: int, view: memoryview) -> None:
        for place, box, span in self._boxes(share, piece):
            self.arrays[place][box.slices] = np.frombuffer(view[span], np.int32).reshape(box.shape)

    def _boxes(self, share: Share, piece: int) -> Iterator[tuple[int, Box, slice]]:
        for place, request, start, stop in piece_boxes(share, piece):
            yield place, share.requests.box(request, 2), slice(start, stop)

    def take(self, holders: dict[int, Holder], base: str | None) -> Pulled:
        of = None if base is None else PullBase(version=base, fill=self.fill)
        how = PiecePull(version="v2", rank=RECEIVER, secret=SECRET, timeout=5.0, shared=False, base=of)
        return how.run(self.plan, holders, self.place)

    def has(self, number: int) -> bool:
        wanted = version(number)
        return all(np.array_equal(a[b.slices], w[b.slices]) for a, w in zip(self.arrays, wanted, strict=True) for b in self.boxes)


def test_only_what_changed_travels(servers: dict[int, Holder]) -> None:
    """1 % of one tensor and all of another: of three, little more than one."""
    receiver = Receiver(version(1))
    pulled = receiver.take(servers, "v1")
    assert receiver.has(2) and not pulled.lost
    assert receiver.plan.needed / 3 < pulled.transferred < 1.06 * receiver.plan.needed / 3
    assert sum(pulled.received.values()) == receiver.plan.needed


def test_nothing_that_changed_takes_a_digest_for_each_piece(servers: dict[int, Holder]) -> None:
    receiver = Receiver(version(2))
    pulled = receiver.take(servers, "v2")
    assert receiver.has(2)
    assert pulled.transferred == 8 * sum(len(share.requests.pieces) for share in receiver.plan.shares.values())


@pytest.mark.parametrize("base", [None, "v0", "v7"])
def test_who_has_no_version_that_is_kept_gets_all(servers: dict[int, Holder], base: str | None) -> None:
    receiver = Receiver([np.full(SHAPE, -1, np.int32) for _ in range(3)])
    pulled = receiver.take(servers, base)
    assert receiver.has(2) and pulled.transferred >= receiver.plan.needed


def test_another_base_than_it_is_called_is_refused(servers: dict[int, Holder], caplog: pytest.LogCaptureFixture) -> None:
    """One element of the state was changed after it was taken: its piece comes whole, and it is said."""
    arrays = version(1)
    arrays[2][50, 50] ^= 1
    receiver = Receiver(arrays)
    with caplog.at_level(logging.WARNING, "ckpt"):
        pulled = receiver.take(servers, "v1")
    assert receiver.has(2) and not pulled.lost
    assert [r.message for r in caplog.records if "no longer those of version v1" in r.message]


@given(st.data())
def test_damaged_changes_are_refused_or_noticed(data: st.DataObject) -> None:
    receiver = Receiver(version(1))
    requests = receiver.plan.shares[0].requests
    piece = data.draw(st.integers(0, len(requests.pieces) - 1))
    changes = PieceComparer().changes(holdings(0, 1), holdings(0, 2), requests, piece)
    if not isinstance(changes, bytes):
        return
    damaged = bytearray(changes)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    wanted = memoryview(bytearray(requests.places(piece)[1]))
    holdings(0, 2).pack(requests, piece, wanted)
    for sent in (bytes(damaged), changes):
        into = memoryview(bytearray(len(wanted)))
        holdings(0, 1).pack(requests, piece, into)
        try:
            right = apply_changes(memoryview(sent), into, requests, piece, "here")
        except CkptError:
            right = False
        assert not right or into == wanted
        assert right or sent != changes


def test_changes_of_a_box_that_is_longer_are_refused() -> None:
    requests = Receiver(version(1)).plan.shares[0].requests
    into = memoryview(bytearray(requests.places(0)[1]))
    far = struct.pack("<BxxxII", 4, 1, 4) + struct.pack("<Ii", 1 << 20, 5)
    boxes = len(requests.pieces[0])
    sent = bytes(8) + struct.pack("<IB", len(far), 4) + far + struct.pack("<IB", 0, 4) * (boxes - 1)
    with pytest.raises(CorruptError, match="a change of element 1,048,576 of a run of"):
        apply_changes(memoryview(sent), into, requests, 0, "here")


# ---- sources and sinks


def changed(state: dict[str, torch.Tensor], step: int) -> None:
    flat = state["w"].view(-1)
    places = torch.from_numpy(np.random.default_rng(step).choice(len(flat), len(flat) // 100, replace=False))
    flat[places] *= -1
    state["bias"].add_(1)


@pytest.mark.parametrize("switch", ["double", "in-place"])
def test_a_sink_gets_what_changed_since_its_version(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", "off")
    state = {"w": torch.randn(1000, 1500).bfloat16(), "bias": torch.zeros(7), "fixed": torch.randn(200, 300)}
    dense = sum(t.nbytes for t in state.values())
    into = {name: torch.full_like(t, 9) for name, t in state.items()}
    with (
        Source("tcp://127.0.0.1:0/a", state, delta=True, keep=2, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, into, switch=switch, job=ckpt.Job(timeout=TIMEOUT)) as sink,  # type: ignore[arg-type]
    ):
        transferred, whole = [], []
        for step in range(1, 5):
            changed(state, step)
            source.publish(step, capture="eager").result()
            if step == 3:
                into["w"][5, 5] += 1  # somebody changes the state: its piece comes whole
            sink.take(newer_than=sink.version)
            assert all(torch.equal(into[name], t) for name, t in state.items())
            assert sink.report is not None
            transferred.append(sink.report.transferred / dense)
            whole.append(dict(sink.report.dense))
        assert transferred[0] >= 1 and max(transferred[1], transferred[3]) < 0.03 and 1 < transferred[2] < 1.05
        assert whole[0] == {"first version": dense} and whole[2].pop("state was changed") < dense
        assert whole[1:] == [{}] * 3  # a tensor of which all changes is dense within its piece
        for step in (5, 6, 7):
            changed(state, step)
            source.publish(step, capture="eager").result()
        sink.take(newer_than=sink.version)  # what it has is kept no longer
        assert sink.report.transferred >= dense and all(torch.equal(into[name], t) for name, t in state.items())
        assert sink.report.dense == source.report().sinks[0].dense == {"base not kept": dense}
        for tensor in state.values():
            tensor.mul_(-3.1)
        source.publish(8, capture="eager").result()
        sink.take(newer_than=sink.version)
        assert all(torch.equal(into[name], t) for name, t in state.items()) and sink.report.dense == {"changes no shorter": dense}


def test_a_sink_of_another_dtype_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", "off")
    state = {"w": torch.randn(300, 500)}
    into = {"w": torch.zeros(300, 500, dtype=torch.bfloat16)}
    with (
        Source("tcp://127.0.0.1:0/a", state, delta=True, job=ckpt.Job(timeout=TIMEOUT)) as source,
        Sink(source.address, into, cast=True, job=ckpt.Job(timeout=TIMEOUT)) as sink,
    ):
        for step in (1, 2):
            source.publish(step, capture="eager").result()
            sink.take(newer_than=sink.version)
            assert sink.report is not None and sink.report.transferred >= 300 * 500 * 4
            assert torch.equal(into["w"], state["w"].bfloat16())
            assert sink.report.dense == {"first version" if step == 1 else "other dtypes": 300 * 500 * 4}
