"""``python -m benchmarks.live_steps``: what each step of a push costs, in CPU time of one process, beside a copy of the same bytes.

On a busy machine wall times of many processes say little. Here all steps run in one process, in turn with torch's ``copy_`` of the same
tensors, and only their CPU time counts. *publish* is the caller's: what a trainer is blocked for, with ``fence()`` a second later. The rest
are the steps that follow: *hash* and *seal* the segment; a sink that maps it *checks* and *copies*, and lets go of it; or the pieces come
over TCP, both ends together, and are *placed*. *plain sockets* send the same bytes from the same memory into the same, and check nothing.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ckpt.adapters.tensors import LocalShard, LocalTensor
from ckpt.dtypes import DTYPES
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.live import Source
from ckpt.live.catalog import LiveCatalog
from ckpt.live.client import Holder
from ckpt.live.filling import Filling, plan_filling
from ckpt.live.pull import PiecePull
from ckpt.live.segments.mapped import LocalHolder, SegmentShare
from ckpt.live.segments.published import PublishedSegment, SegmentLayout
from ckpt.live.segments.reader import MappedSegment, SegmentMappings
from ckpt.live.segments.segment import MemorySegment, digest_of_digests
from ckpt.live.server import PieceServer
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Joined
from ckpt.plan.transfers import Share

ROWS, COLUMNS = 1000, 2500
SECRET = "benchmark"
TIMEOUT = 60.0
RECEIVER = 9


class Clock:
    """CPU seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def step(self, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        began = clock()
        yield
        self.seconds.setdefault(name, []).append(clock() - began)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="MB of the state")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    count = max(1, arguments.mb * 1_000_000 // (2 * ROWS * COLUMNS))
    old = {f"w{n:03}": torch.randn(ROWS, COLUMNS).bfloat16() for n in range(count)}
    new = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
    clock = Clock()
    weights = torch.nn.ParameterDict(old)
    state = {"model": weights, "optimizer": torch.optim.SGD(weights.parameters())}
    with Source("tcp://127.0.0.1:0/steps", state, secret=SECRET, timeout=TIMEOUT) as source:
        for number in range(arguments.rounds + 1):
            _publish(clock, source, number, old, new)
    _take(clock, arguments.rounds + 1, old, new)
    median = {name: statistics.median(times[1:] or times) for name, times in clock.seconds.items()}
    print(f"{count * 2 * ROWS * COLUMNS / 1e6:.0f} MB of bfloat16 in {count} tensors; CPU ms, medians of {arguments.rounds}")
    for name, seconds in median.items():
        print(f"{name:28} {1e3 * seconds:8.1f} {seconds / median['copy_']:8.2f}")


def _publish(clock: Clock, source: Source, number: int, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    with clock.step("copy_"):
        for name, tensor in old.items():
            _ = new[name].copy_(tensor)
    with clock.step("publish, eager: all threads"):
        publication = source.publish(2 * number, capture="eager")
    publication.result()
    began = time.thread_time()
    publication = source.publish(2 * number + 1, capture="lazy")
    blocked = time.thread_time() - began
    time.sleep(1)
    began = time.thread_time()
    publication.fence()
    clock.seconds.setdefault("publish, lazy: the caller", []).append(blocked + time.thread_time() - began)
    publication.result()


def _take(clock: Clock, rounds: int, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    layout = TensorLayout.replicated((0,))
    infos = {name: TensorSpec(name, DTYPES["bfloat16"], (ROWS, COLUMNS), layout) for name in old}
    catalog = LiveCatalog.of(Joined(tensors=infos, assignments={}, aliases={}), {}, url="live", world_size=1)
    (box,) = (piece.box for piece in layout.pieces((ROWS, COLUMNS), 0))
    targets = [(LocalTensor(infos[n], [LocalShard(box, tensor)], n), catalog.tensors[n]) for n, tensor in new.items()]
    plan = plan_filling(targets, catalog, rank=RECEIVER, near=frozenset())
    placed = SegmentLayout.of(infos.values(), 0)
    segment = MemorySegment(placed.nbytes)
    share = SegmentShare.of(plan, 0, placed)
    current: list[PublishedSegment] = []
    server = PieceServer(lambda version: current[-1].holdings(), SECRET.encode(), TIMEOUT)
    holders = {0: Holder(rank=0, addresses=tuple(server.addresses), network=server.network)}
    memory = torch.from_numpy(segment.data)
    mappings = SegmentMappings()
    rooms = [memoryview(bytearray(b"\1") * plan.transfers.piece) for _ in plan.transfers.shares[0].requests.pieces]  # used, as a sink's are
    for number in range(rounds):
        if number:
            with clock.step("renew"):
                segment.renew()
        for where in placed.all():
            memory[where.start : where.start + where.nbytes].copy_(old[where.tensor.name].view(torch.uint8).view(-1))
        with clock.step("hash and seal"):
            digests = segment.seal()
        with clock.step("mapped: check"):
            mapped = LocalHolder(0, MappedSegment(segment.address(), digest_of_digests(digests), mappings), placed, share)
            mapped.check(lambda: None)
        _clear(new)
        with clock.step("mapped: copy"):
            mapped.copy(plan, lambda nbytes: None)
        _compare(old, new)
        with clock.step("mapped: let go"):
            del mapped
            mappings.end()
        current[:] = [PublishedSegment(segment, placed, digests, "here")]
        current[0].numbers = catalog.numbers
        pieces: list[tuple[Share, int, memoryview]] = []
        free = rooms.copy()
        with clock.step("TCP: send and receive"):
            pull = PiecePull(version="v", rank=RECEIVER, secret=SECRET.encode(), timeout=TIMEOUT, shared=False, room=partial(_room, free))
            pull.run(plan.transfers, holders, lambda *piece, into=pieces: into.append(piece))
        _clear(new)
        with clock.step("TCP: place"):
            filling = Filling(plan)
            for piece in pieces:
                filling.place(*piece)
        _compare(old, new)
        with clock.step("plain sockets, same memory"):
            _send_plainly(segment.data.data, rooms)
    server.close()
    mappings.close()


def _send_plainly(data: memoryview, rooms: Sequence[memoryview]) -> None:
    """The same bytes from the same memory into the same, nothing checked."""
    with socket.create_server(("127.0.0.1", 0)) as port, socket.create_connection(port.getsockname()) as one, port.accept()[0] as other:
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        left = len(data)
        for room in rooms:
            view = room[: min(len(room), left)]
            left -= len(view)
            while view:
                view = view[other.recv_into(view) :]
        sender.join()


def _room(free: list[memoryview], length: int) -> memoryview:
    return free.pop()[:length]


def _clear(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.zero_()


class WrongBytesError(RuntimeError):
    """A step brought other bytes."""


def _compare(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    if not all(torch.equal(tensor, new[name]) for name, tensor in old.items()):
        raise WrongBytesError("what arrived is not what was sent")


if __name__ == "__main__":
    main()
