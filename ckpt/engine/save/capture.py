"""Capture: when the bytes of a save in the background are copied out of the state.

    version of a parameter    7 ────────────────────────────────────────┐ 7 → 8
    training          save_async() │ forward │ backward │ optimizer.step() waits │ changes parameters
    ckpt-capture                   └── copy chunk after chunk into the stage ──► compare versions: still 7? ──► "captured"
    ckpt-save                          └── write each batch as soon as it is captured ──────────────────────────► "durable"

*Eager*: before the call returns. *Lazy* (DataStates-LLM, arXiv 2406.10707): during the next forward and backward pass, for what changes
only behind a fence (``state/collect.py``): parameters that an optimizer steps, and what it keeps for them. Everything else, which a loop
may change at any time, is captured before the call returns.

Invariant: what is captured lazily and changes before fails the save. That shows in three ways: torch has counted it (the version of the
tensor), the memory has moved, or samples of the bytes differ (:class:`Sample`). Only a sparse write that torch does not count and no sample
has met may remain unseen: it needs ``fence()``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckpt import settings
from ckpt.concurrency import run_tasks
from ckpt.errors import ConsistencyError
from ckpt.state import lazy
from ckpt.state.shard_table import ShardTable
from ckpt.state.tensors import raw_view, reads_otherwise
from ckpt.telemetry.spans import SaveMeter, Spans

from .plan import Batch
from .replicas import Replicas
from .staging import StagedBatches, in_trace
from .tensor_source import FENCE, ChunkSource, FragmentExchange
from .writer import MANY

if TYPE_CHECKING:
    import torch

# Samples of what is captured later: what it was at the call, to be compared with the bytes that were captured.
#
#     tensor     ████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░   128 bytes of each 32 KiB: 4 KiB of each MiB
#     copy       ████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░   the same places, right after the copy
#
# torch counts neither writes through ``tensor.data`` nor numpy's, and counts an operation only when it is over. A rewrite of a tensor
# changes its samples, whoever writes. If it was going on during the copy, part of the copy is new: then samples there are, or those of
# the tensor after the copy, for it goes on.
#
# Two lines of a cache that are neighbours cost one access, hence 128 bytes. Their distance, 257 times that, is odd in lines, so samples
# of rows whose length is a power of two are not all of the same columns. On a device all bytes are summed, too, which takes no host's
# time: that shows a sparse write.

WHOLE = 4096
"""A sample of fewer bytes is all of them."""
LINE = 128
STEP = 257 * LINE

_LINE = np.dtype(f"V{LINE}")
_MEMORY = ctypes.c_char * (1 << 62)  # one type for all lengths: making one takes longer than a sample


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Of one piece of memory, where it lies: bytes of ``lines`` of it, and on a device the ``sum`` of all."""

    lines: torch.Tensor
    sum: torch.Tensor | None

    def same(self, other: Sample) -> bool:
        """Whether both are of the same bytes; ``other`` may lie elsewhere."""
        both = self.sum is not None and other.sum is not None
        return lazy.torch.equal(self.lines.cpu(), other.lines.cpu()) and not (both and not lazy.torch.equal(self.sum, other.sum))  # type: ignore[arg-type]


class Samples:
    """Those of one save's chunks, and of tensors that it only hashes."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._chunks: dict[int, bytes | list[Sample]] = {}
        self._tensors: dict[str, list[Sample]] = {}

    def take(self, batch: Batch, room: torch.Tensor, names: Container[str]) -> None:
        """Sample those chunks of a batch whose tensors are not among ``names``."""
        chunks, at = self.source.plan.chunks, 0
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            if length and chunks[number].name not in names:
                address = self.source.address(number)
                pieces = () if address else self.source.pieces(number, room[at : at + length])
                self._chunks[number] = _lines_at(address, length) if address else [sample_of(memory) for memory, _ in pieces]
            at += length

    def take_tensors(self, names: Iterable[str]) -> None:
        """Sample these tensors, as far as this rank has them."""
        for name in names:
            self._tensors[name] = [sample_of(raw_view(part.memory)) for part in self.source.tensor(name).parts if part.memory.numel()]

    def changed(self, batch: Batch, room: torch.Tensor) -> list[str]:
        """Names of the tensors that have, or had when the batch was copied to ``room``, other bytes than at the call."""
        at, names = 0, []
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            taken = self._chunks.get(number)
            if isinstance(taken, bytes):
                address = self.source.address(number)
                same = taken == _lines_at(room.data_ptr() + at, length) and taken == _lines_at(address, length)
            else:
                pieces = self.source.pieces(number, room[at : at + length]) if taken else ()
                same = all(
                    before.same(sample_of(copy)) and before.same(sample_of(memory))
                    for before, (memory, copy) in zip(taken or (), pieces, strict=True)
                )
            if not same:
                names.append(self.source.plan.chunks[number].name)
            at += length
        return names

    def changed_tensors(self) -> list[str]:
        """The same for the tensors, as they are now."""
        before, self._tensors = self._tensors, {}
        now = Samples(self.source)
        now.take_tensors(before)
        return [name for name, each in before.items() if not all(a.same(b) for a, b in zip(each, now._tensors[name], strict=True))]


def _lines_at(address: int, nbytes: int) -> bytes:
    """The sample of contiguous memory of the host."""
    if nbytes <= WHOLE:
        return ctypes.string_at(address, nbytes)
    memory: Any = _MEMORY.from_address(address)
    lines: bytes = np.ndarray(((nbytes - LINE) // STEP + 1,), _LINE, memory, 0, (STEP,)).tobytes()
    return lines


def sample_of(raw: torch.Tensor) -> Sample:
    """The sample of memory of any strides, on any device, in the order of its elements."""
    size = raw.element_size()
    if raw.numel() * size <= WHOLE:
        lines = raw.clone(memory_format=lazy.torch.contiguous_format).view(-1)
    else:
        count, step, line = (raw.numel() * size - LINE) // STEP + 1, STEP // size, LINE // size
        if raw.is_contiguous():
            flat = raw.view(-1)
            lines = flat.as_strided((count, line), (step, 1), flat.storage_offset()).reshape(-1).clone()
        else:
            places = (lazy.torch.arange(count, device=raw.device)[:, None] * step + lazy.torch.arange(line, device=raw.device)).view(-1)
            lines = raw[lazy.torch.unravel_index(places, raw.shape)]
    return Sample(lines.view(lazy.torch.uint8), _sum(raw) if _summed(raw) else None)  # bytes, since no NaN equals itself


def _summed(raw: torch.Tensor) -> bool:
    return raw.device.type != "cpu"


def _sum(raw: torch.Tensor) -> torch.Tensor:
    """Of all elements as integers."""
    integers = lazy.torch.view_as_real(raw).view(lazy.RAW[8]) if raw.is_complex() else raw
    return integers.sum(dtype=lazy.torch.int64)


T = TypeVar("T")

_WORTH_A_THREAD = 16 * settings.MIB
"""Bytes to copy in the call for which one more thread is started."""


class Capture:
    """Copies one rank's share of a state into a stage. ``done`` is set when the state may change again, or capturing failed."""

    def __init__(
        self,
        source: ChunkSource,
        shard_table: ShardTable,
        stage: StagedBatches,
        spans: Spans,
        meter: SaveMeter,
        *,
        fragments: FragmentExchange | None = None,
        replicas: Replicas | None = None,
        filled: Callable[[int, int], None] | None = None,
    ) -> None:
        """``filled`` hears of each range of a file that was captured, right after the copy, from any thread; in the background only as
        long as nobody waits."""
        self.plan = source.plan
        self.shard_table = shard_table
        self.source = source
        self.stage = stage
        self.fragments = fragments
        self.replicas = replicas
        self.spans = spans
        self.meter = meter
        self._filled = filled
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._samples = Samples(source)
        self._kept: dict[int, int] = {}
        """Numbers and bytes of the chunks that were captured in the call."""
        self._batches = [batch for batches in self.plan.batches for batch in batches]
        self._is_short = any(segment.waits_for is not None for segment in stage.segments)
        """The stage is smaller than the state, so that capturing has to wait for the writing of earlier segments."""
        # For each device a stream for copies from it, behind what the caller has queued so far; none if all memory is on the host.
        self._streams = [lazy.torch.cuda.Stream(device) for device in shard_table.devices]  # type: ignore[no-untyped-call]
        if self._streams:
            self._follow()

    # ---- in the caller's thread

    def capture_unfenced(self, fenced: AbstractSet[str], threads: int, beat: Callable[[], None]) -> None:
        """Capture what may change before anything waits, or set it aside, and note what everything else is like."""
        unfenced = self._unfenced(fenced)
        now = self._direct(unfenced)
        if now:
            self._capture_now(now, threads, beat)
        with self.spans.span("stage"):
            if self.fragments is not None:
                self.fragments.take()
            if cloned := unfenced - now:  # set aside what will be read of these
                read = {chunk.name for chunk in self.plan.chunks}
                self.source.clone(cloned & (read if self.replicas is None else read | self.replicas.elsewhere()))
            # What is done to a DTensor shows in its own version, not in that of its local tensor.
            memories = [(name, part.memory) for name, local in self.shard_table.tensors.items() for part in local.parts]
            self._versions = [(n, t, t._version) for n, t in [*memories, *self.shard_table.originals()] if n not in unfenced]
            for batch in self._batches:
                self._samples.take(batch, self.stage.room(batch), unfenced)
            if self.replicas is not None:
                self._samples.take_tensors(self.replicas.elsewhere() - unfenced)
            if self._streams:
                self._follow()
            # Addresses are noted last, since a clone has one of its own.
            self.source.note_addresses()

    def _unfenced(self, fenced: AbstractSet[str]) -> set[str]:
        """What nothing waits for before it changes. Of the rest, what has no version counter, or is not in memory as it reads; and what
        is so small that its sample would be all of it, where that costs no clone."""
        tensors = self.shard_table.tensors
        small = 0 if self._streams or self._is_short else WHOLE
        return {
            name
            for name, local in tensors.items()
            if name not in fenced
            or sum([p.memory.nbytes for p in local.parts]) <= small
            or any(p.memory.is_inference() or reads_otherwise(p.memory) for p in local.parts)
        }

    def _direct(self, names: AbstractSet[str]) -> AbstractSet[str]:
        """Those that are captured where they belong. Others need a clone: in a stage smaller than the state the first would wait for the
        writing of an earlier segment."""
        if self._is_short:
            return frozenset()
        if not self._streams:
            return names
        # A clone on a device is queued behind the training's work, while a copy to the host keeps the caller waiting for that work. But
        # a device may have no memory for clones that are large.
        forwarded, tensors = self.shard_table.forward_mutable, self.shard_table.tensors
        return {n for n in names if n not in forwarded and sum([part.memory.nbytes for part in tensors[n].parts]) >= settings.SMALL_COPY}

    def _capture_now(self, names: AbstractSet[str], threads: int, beat: Callable[[], None]) -> None:
        """Capture these chunks, a batch's others later, and hash what other ranks write of them."""
        parts: list[tuple[Batch, dict[int, int]]] = []
        for batch in self._batches:
            sizes = zip(batch.numbers, batch.lengths, strict=True)
            inside = {n: length for n, length in sizes if self.plan.chunks[n].name in names}
            if inside:
                parts.append((batch, inside))
                self._kept.update(inside)

        def copy(few: Sequence[tuple[Batch, dict[int, int]]]) -> None:
            nbytes = sum(length for _, inside in few for length in inside.values())
            with self.spans.span("capture", nbytes), self._aside():
                for batch, inside in few:
                    others = {*batch.numbers}.difference(inside)
                    self.source.fill_batch(batch, self.stage.opened(batch), 0, self._on_filled, others)
            for batch, inside in few:
                if len(inside) == len(batch.numbers):
                    self.stage.arrived(batch)
            self.meter.add(captured=nbytes)
            beat()

        total = sum(batch.length for batch, _ in parts)
        self._share(parts, min(threads, 1 + total // _WORTH_A_THREAD), copy)
        if self.replicas is not None:
            with self._aside():
                self.replicas.hash(threads if not self._streams else 1, beat, names)

    def _share(self, items: Sequence[T], threads: int, work: Callable[[Sequence[T]], None]) -> None:
        """Neighbours for each of some threads."""
        step = max(-(-len(items) // threads), 1)
        run_tasks([partial(work, items[i : i + step]) for i in range(0, len(items), step)], threads, "ckpt-capture")

    def _follow(self) -> None:
        """Let the side streams come after all that the caller has queued."""
        for stream in self._streams:
            # The copy must see what kernels that were queued before the call will have written. Kernels that are
            # queued later may run at the same time: those of a forward and backward pass do not touch what is copied.
            stream.wait_stream(lazy.torch.cuda.current_stream(stream.device))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """This thread's copies from devices go through the side streams, and have arrived at the end of the block."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(lazy.torch.cuda.stream(stream))
            yield
            for stream in self._streams:
                stream.synchronize()

    # ---- in any thread

    @in_trace("ckpt.capture")
    def run(self, threads: int, beat: Callable[[], None]) -> None:
        """Capture everything. Raises, and tells the writers, if anything changed meanwhile."""
        try:
            # Other ranks wait for fragments, so these are settled first.
            if self.fragments is not None:
                with self._aside():
                    self.fragments.settle()
            # Several threads capture only where every batch has a place of its own. In a stage of two halves the
            # order of segments is what keeps capturing and writing from waiting for each other in a circle.
            self._share(self._batches, 1 if self._is_short else threads, lambda few: self.stage.capture(few, self._fill))
            if self.replicas is not None:
                with self.spans.span("hash"), self._aside():
                    self.replicas.hash(threads if not self._streams else 1, beat)
                    _refuse(self._samples.changed_tensors())
            _refuse([name for name, tensor, version in self._versions if tensor._version != version])
        except BaseException as err:
            self.error = err
            self.stage.fail(err)
            raise
        finally:
            self.done.set()

    def result(self) -> None:
        """Wait until everything is captured and, where it has to be, hashed. Raises what capturing raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error

    def _fill(self, batch: Batch, room: torch.Tensor) -> None:
        many = len(batch.numbers) >= MANY
        kept = sum([self._kept[n] for n in batch.numbers if n in self._kept])
        with self.stage.backoff.work() if many else nullcontext(), self.spans.span("capture", batch.length - kept):
            with self._aside():
                self.source.fill_batch(batch, room, 0, self._on_filled, self._kept)
            with self._aside():
                _refuse(self._samples.changed(batch, room))
        self.meter.add(captured=batch.length - kept)

    @property
    def _on_filled(self) -> Callable[[int, int], None] | None:
        return None if self._filled is None or self._streams else self._tell_filled

    def _tell_filled(self, start: int, stop: int) -> None:
        if self._filled is not None and not self.stage.backoff.haste.is_set():
            self._filled(start, stop)


def _refuse(changed: Sequence[str]) -> None:
    """Raise if a tensor has changed too early."""
    names = list(dict.fromkeys(changed))
    if names:
        others = f", and so were {len(names) - 1} others" if len(names) > 1 else ""
        raise ConsistencyError(f"tensor {names[0]} was changed before it was captured{others}", hint=FENCE)
