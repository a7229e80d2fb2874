"""The bytes of this rank's chunks, from the state's own memory; and the edges of flat shards, which ranks send each other.

Invariant: nothing here changes the state's memory, and nothing here waits for another rank: what other ranks have of a merged chunk is put
into it by whoever received it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt import settings
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan.layout.geometry import row_major_strides
from ckpt.state import lazy
from ckpt.state.tensors import LocalShard, LocalTensor, as_bytes, raw_view

from .plan import Batch, RankPlan

if TYPE_CHECKING:
    import torch

    from ckpt.net.peers import Peers

FENCE = (
    "call fence(), of the save's handle or of the publication, or ckpt.fence(), right before the line that changes it: only an optimizer's "
    'step waits by itself, no write through .data, clipping, swap of weights or load; or capture with capture="eager"'
)
"""What to do so that a tensor does not change before it is captured."""

_move_small = ctypes.PyDLL(None).memmove  # does not let go of the interpreter, which costs more than copying so little
_move_small.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_small.restype = None


@dataclass(eq=False)
class ChunkSource:
    """Reads chunks of one rank out of the tensors of its state."""

    plan: RankPlan
    tensors: Mapping[str, LocalTensor]
    received: dict[int, list[tuple[int, int, memoryview]]] = field(default_factory=dict)
    """What other ranks sent of merged chunks, by chunk number."""
    _addresses: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def note_addresses(self) -> None:
        """From now on a tensor whose memory is freed or moved is an error."""
        self._addresses = {name: _addresses(local) for name, local in self.tensors.items()}

    def tensor(self, name: str) -> LocalTensor:
        """A tensor whose memory is where it was."""
        local = self.tensors[name]
        # A freed tensor's memory may belong to another tensor by now, whose version says nothing about the first one.
        # So the address is compared on each access, beside the version at the end.
        if self._addresses and self._addresses[name] != _addresses(local):
            raise ConsistencyError(f"the memory of tensor {name} was freed or moved before it was captured", hint=FENCE)
        return local

    def clone(self, names: AbstractSet[str]) -> None:
        """Read these tensors from a copy that is made now."""
        copies = {}
        for name in names:
            local = self.tensors[name]
            parts = [LocalShard(part.box, part.memory.clone()) for part in local.parts]
            copies[name] = LocalTensor(local.info, parts, local.state_name)
        self.tensors = {**self.tensors, **copies}

    def view(self, number: int) -> memoryview:
        """The bytes of a chunk: its own memory where that is contiguous on the host, a copy elsewhere."""
        chunk = self.plan.chunks[number]
        if not chunk.box.numel:
            return memoryview(b"")
        if self.plan.assignments[chunk.name].merged:
            chunk_bytes = lazy.torch.empty(self.nbytes(number), dtype=lazy.torch.uint8)
            self.fill(number, chunk_bytes)
            self.patch(number, chunk_bytes)
            return as_bytes(chunk_bytes)
        local = self.tensor(chunk.name)
        if len(local.parts) == 1 and local.parts[0].box == chunk.box:
            return as_bytes(local.parts[0].memory)  # most chunks are all that a rank has of a tensor
        return as_bytes(local.gather(chunk.box))

    def nbytes(self, number: int) -> int:
        chunk = self.plan.chunks[number]
        return chunk.box.numel * self.tensors[chunk.name].info.dtype.itemsize

    def fill_batch(
        self, batch: Batch, into: torch.Tensor, at: int, filled: Callable[[int, int], None] | None = None, skipped: Container[int] = ()
    ) -> None:
        """Copy the chunks of a batch, but not the ``skipped`` ones, to ``into``, bytes on the host, from byte ``at`` on. ``filled`` hears
        of each range of the batch's file that is there; long chunks are then copied in steps, still in the cache when it does."""
        base, offset, reported = into.data_ptr(), batch.start - at, at
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            if number in skipped:
                if filled is not None and reported < at:
                    filled(offset + reported, offset + at)
                at += length
                reported = at
                continue
            address, end = self.address(number), at + length
            if address and filled is not None and length > settings.CACHE_BLOCK:
                while at < end:
                    # More is not in the cache any more; less costs more waits for the interpreter's lock.
                    step = min(settings.CACHE_BLOCK - (offset + at) % settings.CACHE_BLOCK, end - at)
                    ctypes.memmove(base + at, address + length - (end - at), step)
                    at += step
                    filled(offset + reported, offset + at)
                    reported = at
            elif address:
                # ``PyDLL`` keeps the interpreter lock, ``ctypes.memmove`` lets it go. For short copies handing the
                # lock over and back costs more than the copy.
                (_move_small if length < settings.SMALL_COPY else ctypes.memmove)(base + at, address, length)
            elif length:
                self.fill(number, into[at:end])
            at = end
        if filled is not None and reported < at:
            filled(offset + reported, offset + at)

    def address(self, number: int) -> int:
        """Where a chunk is that is all that this rank has of its tensor and can be copied as it is; 0 for others."""
        name, _, box = self.plan.chunks[number]
        parts = (self.tensor(name) if self._addresses else self.tensors[name]).parts
        if len(parts) != 1:
            return 0
        box_here, memory = parts[0]
        if box_here.shape != box.shape or box_here.offset != box.offset or not (memory.is_cpu and memory.is_contiguous()):
            return 0
        return 0 if memory.is_conj() or memory.is_neg() else memory.data_ptr()

    def fill(self, number: int, into: torch.Tensor) -> None:
        """Copy one chunk to ``into``, which has as many bytes; of a merged chunk what this rank has of it."""
        for memory, target in self.pieces(number, into):
            target.copy_(memory, non_blocking=into.is_pinned())

    def pieces(self, number: int, into: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank has of a chunk, as raw memory, and where each piece of it belongs in ``into``, the bytes of the chunk."""
        chunk = self.plan.chunks[number]
        local = self.tensor(chunk.name)
        raw = into.view(lazy.RAW[local.info.dtype.itemsize])
        if self.plan.assignments[chunk.name].merged:
            start, stop = self.flat_range(number)
            for first, last, memory in flat_parts(local, start, stop):
                yield memory, raw[first - start : last - start]
            return
        target = raw.view(chunk.box.shape)
        for box, memory in local.pieces(chunk.box):
            # A lazily conjugated or negated tensor must be resolved: its memory holds other values than it stands for.
            resolved = memory.resolve_conj().resolve_neg() if memory.is_complex() or memory.is_neg() else memory
            yield raw_view(resolved), target[box.relative_to(chunk.box.offset).slices]

    def patch(self, number: int, into: torch.Tensor) -> None:
        """Copy what other ranks sent of a merged chunk to its place in ``into``."""
        start, _ = self.flat_range(number)
        size = self.tensors[self.plan.chunks[number].name].info.dtype.itemsize
        for first, last, data in self.received.get(number, ()):
            into[(first - start) * size : (last - start) * size].numpy().data[:] = data

    def flat_range(self, number: int) -> tuple[int, int]:
        """First and last element of a merged chunk in the flattening of its tensor: its box spans whole rows."""
        chunk = self.plan.chunks[number]
        shape = self.tensors[chunk.name].info.shape
        start = sum(o * s for o, s in zip(chunk.box.offset, row_major_strides(shape), strict=True))
        return start, start + chunk.box.numel

    def fragment(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the flattening of a tensor that this rank holds, as bytes on its device."""
        local = self.tensor(name)
        size = local.info.dtype.itemsize
        whole = lazy.torch.empty((stop - start) * size, dtype=lazy.torch.uint8, device=local.parts[0].memory.device)
        done = 0
        for first, last, memory in flat_parts(local, start, stop):
            whole[(first - start) * size : (last - start) * size].view(lazy.RAW[size]).copy_(memory)
            done += last - first
        if done != stop - start:
            raise CoverageError(f"this rank has {done} of the elements {start} to {stop} that it should send", where=f"tensor {name}")
        return whole


def _addresses(local: LocalTensor) -> tuple[int, ...]:
    return tuple([part.memory.data_ptr() for part in local.parts])  # a list: there are very many, of one part each


def flat_parts(local: LocalTensor, start: int, stop: int) -> list[tuple[int, int, torch.Tensor]]:
    """What a rank has of the elements ``[start, stop)`` of a tensor that is cut into flat ranges: first, last, and raw memory."""
    strides = row_major_strides(local.info.shape)
    overlaps = []
    for part in local.parts:
        at = sum(o * s for o, s in zip(part.box.offset, strides, strict=True))
        first, last = max(at, start), min(at + part.box.numel, stop)
        if first < last:
            overlaps.append((first, last, raw_view(part.memory).reshape(-1)[first - at : last - at]))
    return overlaps


# Merging: ranks send each other the edges of flat shards, so that every stored chunk is whole rows (docs/decisions.md).
#
# A flat shard begins and ends anywhere in the flattening of a tensor, here of 4 rows of 6 elements over 3 ranks:
#
#     row 0   000000      rank 0 has elements 0 to 7, rank 1 has 8 to 15, rank 2 has 16 to 23
#     row 1   001111      rank 0 sends its 2 elements of row 1 to rank 1, which writes rows 1 and 2
#     row 2   111122      rank 2 sends its 2 elements of row 2 to rank 1
#     row 3   222222      stored: row 0 by rank 0, rows 1 to 2 by rank 1, row 3 by rank 2: three boxes instead of six
#
# Boundaries move to the nearest whole row, so who writes a mixed row follows from the plan (``plan/ownership.py``), which every rank
# has, and nobody asks. Fragments are copied out of the state before it may change; they travel beside the writing, and only a mixed chunk
# waits for them.
#
# ByteCheckpoint moves whole tensors to one rank (v1) or stores up to 2d-1 boxes per shard (arXiv 2407.20143, section 3.2). Here less than a
# row moves at each boundary between two ranks.


class FragmentExchange:
    """The fragments of one rank and one save. ``take`` them before the state changes, and ``settle`` them; ``run`` moves them; who writes
    a mixed chunk waits."""

    def __init__(self, plan: RankPlan, source: ChunkSource, peers: Peers) -> None:
        self.plan = plan
        self.source = source
        self.peers = peers
        wanted = {(f.name, f.chunk) for f in plan.receives}
        self.mixed = {(c.name, c.number): i for i, c in enumerate(plan.chunks) if (c.name, c.number) in wanted}
        """Number in this rank's plan of each chunk that gets fragments."""
        self.moved = 0
        """Bytes that this rank sent."""
        self._fragments: list[torch.Tensor] | None = None
        """Copies of what is sent, on the devices where it lies in the state."""
        self._outgoing: dict[int, list[memoryview]] = {}
        self._taken = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def take(self) -> None:
        """Copy what other ranks need out of the state. On a device the copy is only queued."""
        self._fragments = [self.source.fragment(f.name, f.start, f.stop) for f in self.plan.sends]

    def settle(self) -> None:
        """Have the copies, which are made now if they were not, on the host."""
        try:
            if self._fragments is None:
                self.take()
            for f, fragment in zip(self.plan.sends, self._fragments or (), strict=True):
                data = fragment.cpu().numpy().data
                self._outgoing.setdefault(f.target, []).append(data)
                self.moved += len(data)
            self._fragments = None
        except BaseException as err:
            self._error = err
            raise
        finally:
            self._taken.set()

    def run(self, alive: Callable[[], None]) -> None:
        """Send and receive, once all is taken. Raises what the transport raises, and so do all that wait."""
        try:
            # Nothing is sent before everything was copied out of the state. So the exchange, once it has begun, waits
            # for the network alone, and never for a capture that waits for training.
            self._taken.wait()
            if self._error is not None:
                raise self._error
            incoming: dict[int, list[memoryview]] = {}
            received: dict[int, list[tuple[int, int, memoryview]]] = {}
            for f in self.plan.receives:
                nbytes = (f.stop - f.start) * self.source.tensors[f.name].info.dtype.itemsize
                room = lazy.torch.empty(nbytes, dtype=lazy.torch.uint8).numpy().data
                incoming.setdefault(f.source, []).append(room)
                received.setdefault(self.mixed[f.name, f.chunk], []).append((f.start, f.stop, room))
            self.peers.exchange(self._outgoing, incoming, alive=alive)
            self._outgoing.clear()
            self.source.received = received
        except BaseException as err:
            self._error = err
            raise
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait until all fragments are here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
