"""Moves what a rank has of exported tensors to its place in the files: into windows of other ranks, or straight into the file."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ckpt import settings
from ckpt.concurrency import Pending, run_tasks
from ckpt.dtypes import DType
from ckpt.net.peers import Peers
from ckpt.plan.layout.geometry import strided_blocks
from ckpt.plan.reads import group_sorted
from ckpt.plan.views import LogicalTensor, ViewPiece
from ckpt.state.tensors import LocalTensor, as_bytes, raw_view, reads_otherwise, torch_dtype, writable_bytes

from .buffered import in_stored_order
from .export_plan import WritePlan, WritePlanner, WriteWindow
from .selection import OutputTensor
from .target import FileSegment, OutputFile, slabs

Write = Callable[[int, int, memoryview], None]
"""Writes bytes of the file of a number from an offset on. May be called from several threads."""


@dataclass(eq=False)
class _Image:
    """A window that this rank puts together, and the bytes of each item that ranks have put there."""

    window: WriteWindow
    memory: torch.Tensor
    counted: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def part(self, segment: FileSegment, piece: ViewPiece, dtype: DType) -> torch.Tensor:
        """The memory that a piece belongs into."""
        start = segment.start - self.window.start
        segment_memory = self.memory[start : start + segment.length].view(torch_dtype(dtype)).view(segment.box.shape)
        return segment_memory[piece.box.relative_to(segment.box.offset).slices]


class Delivery:
    """One rank's share of an export. ``local`` are its tensors, tied ones under each of their names.

    ``counted`` has for each file and item the bytes of ranks' tensors that this one has handed to ``write``; ``writes`` how often it did,
    ``sent`` the bytes that went to other ranks.
    """

    def __init__(self, planner: WritePlanner, gathering: WritePlan, local: Mapping[str, LocalTensor], rank: int, write: Write) -> None:
        self.planner = planner
        self.gathering = gathering
        self.files: Sequence[OutputFile] = planner.files
        self.tensors: Mapping[str, OutputTensor] = planner.tensors
        self.local = local
        self.rank = rank
        self.writes = 0
        self.sent = 0
        self.counted: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._write = write
        self._lock = threading.Lock()

    def run(self, peers: Peers | None, threads: int, alive: Callable[[], None]) -> None:
        """Move and write all that is this rank's. ``alive`` is called often; an error of it ends the work."""
        if any(part.memory.is_cuda for tensor in self.local.values() for part in tensor.parts):
            torch.cuda.current_stream().synchronize()  # other threads, with streams of their own, read what this one has computed
        for f, rank in enumerate(self.gathering.heads):
            if rank == self.rank:
                self._put(f, 0, memoryview(self._head(f)))
        self._run_windows(peers, threads, alive)
        tasks = [partial(self._put_piece, f, i, p, alive) for f, i, p in self.planner.direct_pieces(self.gathering, self.rank)]
        run_tasks(tasks, threads, "ckpt-export")

    # ---- windows

    def _run_windows(self, peers: Peers | None, threads: int, alive: Callable[[], None]) -> None:
        rounds: dict[int, list[WriteWindow]] = defaultdict(list)
        for window in self.gathering.windows:
            if window.aggregator == self.rank or self.rank in window.sizes:
                rounds[window.round].append(window)
        writing: Pending[None] | None = None
        try:
            for number in range(self.gathering.rounds):
                images = self._round(rounds[number], peers, alive)
                if writing is not None:
                    writing.result()
                tasks = [partial(self._put_window, image, alive) for image in images]
                writing = Pending(partial(run_tasks, tasks, threads, "ckpt-export"), "ckpt-export")
        finally:
            if writing is not None:
                writing.wait()
        if writing is not None:
            writing.result()

    def _round(self, windows: Sequence[WriteWindow], peers: Peers | None, alive: Callable[[], None]) -> list[_Image]:
        """Exchange what belongs into these windows; those that this rank keeps, put together."""
        outgoing: dict[int, list[memoryview]] = defaultdict(list)
        incoming: dict[int, list[memoryview]] = defaultdict(list)
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        images = []
        for window in windows:
            if window.aggregator == self.rank:
                images.append(self._image(window))
                self._expect(images[-1], incoming, later)
            else:
                outgoing[window.aggregator] += [
                    self._values(piece, self._dtype(window, segment)) for rank, segment, piece in self._moves(window) if rank == self.rank
                ]
            alive()
        self.sent += sum(view.nbytes for views in outgoing.values() for view in views)
        if peers is not None:
            peers.exchange(outgoing, incoming, alive=alive)
        for target, data in later:
            raw_view(target).copy_(raw_view(data))
        return images

    def _expect(self, image: _Image, incoming: dict[int, list[memoryview]], later: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put what this rank has of its window there, and make room for what others have: in the window, or beside it for ``later``."""
        for rank, segment, piece in self._moves(image.window):
            target = image.part(segment, piece, self._dtype(image.window, segment))
            image.counted[segment.item] += target.nbytes
            if rank == self.rank:
                self._fill(piece, target)
                continue
            room = writable_bytes(target)
            if room is None:
                later.append((target, torch.empty(target.shape, dtype=target.dtype)))
                room = writable_bytes(later[-1][1])
            assert room is not None
            incoming[rank].append(room)

    def _dtype(self, window: WriteWindow, segment: FileSegment) -> DType:
        return self.tensors[self.files[window.file].items[segment.item].name].dtype

    def _moves(self, window: WriteWindow) -> Iterator[tuple[int, FileSegment, ViewPiece]]:
        """Who has what of a window, and for which of its segments."""
        for segment in window.segments:
            for move in self.planner.moves(window.file, segment):
                yield move.rank, segment, move.piece

    def _image(self, window: WriteWindow) -> _Image:
        """Memory for a window: zeros where no rank has anything, and the header of the file."""
        head = self._head(window.file) if self.gathering.heads[window.file] is None else b""
        full = sum(window.sizes.values()) == window.stop - window.start
        memory = (torch.empty if full else torch.zeros)(window.stop - window.start, dtype=torch.uint8)
        mine = head[window.start : window.stop]
        memory.numpy()[: len(mine)] = memoryview(mine)
        return _Image(window, memory)

    def _put_window(self, image: _Image, alive: Callable[[], None]) -> None:
        window, data = image.window, image.memory.numpy().data
        for start, stop in self._runs(window):
            self._put(window.file, start, data[start - window.start : stop - window.start])
        for item, nbytes in image.counted.items():
            self._count(window.file, item, nbytes)
        alive()

    def _runs(self, window: WriteWindow) -> list[tuple[int, int]]:
        """What of a window is written: all of it, or, if other ranks write between its segments, these."""
        if self.gathering.heads[window.file] is None:
            return [(window.start, window.stop)]
        starts = [segment.start for segment in window.segments]
        stops = [segment.start + segment.length for segment in window.segments]
        return [(starts[first], stop) for first, _, stop in group_sorted(starts, stops)]

    # ---- straight into the file

    def _put_piece(self, f: int, i: int, piece: ViewPiece, alive: Callable[[], None]) -> None:
        item = self.files[f].items[i]
        wanted = self.tensors[item.name]
        alone = LogicalTensor(shape=wanted.shape, pieces=(piece,))
        for box in slabs(piece.box, item.itemsize, (), settings.VALUE_BLOCK):
            (part,) = alone.overlapping(box)
            data = self._values(part, wanted.dtype)
            blocks = strided_blocks(wanted.shape, box)
            length = blocks.length * item.itemsize
            for n, start in enumerate(blocks.starts().tolist()):
                self._put(f, item.offset + start * item.itemsize, data[n * length : (n + 1) * length])
            self._count(f, i, len(data))
            alive()

    def _head(self, f: int) -> bytes:
        header = b""
        for offset, data in self.files[f].ends([]):
            assert offset == len(header)
            header += data
        return header

    # ---- bytes

    def _put(self, f: int, offset: int, data: memoryview) -> None:
        self._write(f, offset, data)
        with self._lock:
            self.writes += 1

    def _count(self, f: int, i: int, nbytes: int) -> None:
        with self._lock:
            self.counted[f][i] += nbytes

    def _values(self, piece: ViewPiece, dtype: DType) -> memoryview:
        """The bytes of a piece, in the order of its box."""
        # No copy if they lie like that in the tensor.
        source = self.local[piece.source].gather(piece.part)
        same = source.dtype == torch_dtype(dtype) and piece.axes == tuple(range(len(piece.part.shape)))
        if not same or source.device.type != "cpu" or not source.is_contiguous() or reads_otherwise(source):
            room = torch.empty(piece.box.shape, dtype=torch_dtype(dtype))
            self._fill(piece, room)
            source = room
        return as_bytes(source)

    def _fill(self, piece: ViewPiece, into: torch.Tensor) -> None:
        """Copy a piece into memory of the shape of its box, cast if that has another dtype."""
        source = self.local[piece.source].gather(piece.part)
        target = in_stored_order(piece, into)
        if source.dtype != target.dtype:
            target.copy_(source)
            return
        if reads_otherwise(source):
            source = source.resolve_conj().resolve_neg()
        raw_view(target).copy_(raw_view(source))
