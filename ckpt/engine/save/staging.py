"""Staging: the bytes of a save, copied out of the state into host memory so that training may go on (DataStates-LLM, arXiv 2406.10707).

    arena, without a limit     │ image of file 0 ............ │ image of file 1 ...... │      every batch has a place of its own
    arena, with staging_bytes  │ half A: segments 0, 2, 4, … │ half B: segments 1, 3, … │   a half is filled while the other is written

    memory that is lent        │ file 0 ................... │      │ file 1 ............... │    what is captured is where it stays

    segment 2 waits until segment 0 is written:   capture 0 │ capture 1 │ (wait) │ capture 2 │ capture 3 │ …
                                                             write 0 ────────────► write 1 ──► write 2 ───► …

There is no deadlock: capturing waits for writing of an earlier segment only, and writing for capturing of the same one.

A storage in this machine's memory lends that of each file (``Backend.lend``): then there is no arena, and writing is hashing.

Invariants: one copy per byte, but for what is set aside before (``capture.py``); the arena is allocated once and used again by the next
save; a batch is written only after it was captured, and its memory is used again only after it was written. The image of a data file lies
in the arena as in the file: addresses and file offsets are congruent modulo the page, which direct I/O needs.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import finalize

from ckpt.engine.devices import no_memory, pin, watch_graphs
from ckpt.errors import UsageError
from ckpt.io_backends.protocol import Backend, LentMemory
from ckpt.state import lazy
from ckpt.state.collect import seen
from ckpt.telemetry.spans import Stall

from .plan import Batch

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


# What keeps a state as it is while it is captured: steps of optimizers, replays of CUDA graphs and ``fence`` wait for all captures of the
# process that go on, whatever they are for. And what keeps the background from slowing training down.

P = ParamSpec("P")
R = TypeVar("R")

# Ranges in the traces of profilers that the user runs, so that what a save does stands beside the kernels of training. Without
# torch.profiler and without CUDA nothing is recorded: what it costs then is a look at two flags.


def in_trace(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function's calls are a range ``name`` in traces of torch.profiler, and of NVTX where CUDA is in use."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
            profiled = lazy.imported and getattr(lazy.torch.autograd.profiler, "_is_profiler_enabled", False)
            nvtx = lazy.imported and lazy.torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            if not profiled and not nvtx:
                return function(*args, **kwargs)
            with ExitStack() as stack:
                if profiled:
                    stack.enter_context(lazy.torch.profiler.record_function(name))
                if nvtx:
                    lazy.torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
                    stack.callback(lazy.torch.cuda.nvtx.range_pop)
                return function(*args, **kwargs)

        return ranged

    return decorate


# How much of the interpreter a save in the background takes from training.
#
# Copying and hashing very many small tensors is Python, and Python threads take turns: work without a pause would leave a training loop of
# small operations a fifth of its speed. So the background rests after it, longer than it worked, unless somebody waits for it.

RESTS = 12
"""So many times as long as it worked."""
LONGEST = 0.05
"""Seconds of one rest."""


class CpuBackoff:
    """The pace of one save. Without haste, :meth:`work` rests after its block; ``haste`` is set when somebody waits, and ends all rests."""

    def __init__(self) -> None:
        self.haste = threading.Event()

    @contextmanager
    def work(self) -> Iterator[None]:
        # CPU time of this thread, not wall time: while it waits for storage or for the lock it takes nothing away
        # from training, and needs no rest for that.
        began = time.thread_time()
        yield
        if not self.haste.is_set():
            self.haste.wait(min(RESTS * (time.thread_time() - began), LONGEST))


class Outcome(Future[R]):
    """A future that remembers whether its error was reported to anybody. It cannot be cancelled: a save ends on all ranks or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.error_reported = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> R:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = self.error(timeout)
        self.error_reported = self.error_reported or error is not None
        return error

    def error(self, timeout: float | None = None) -> BaseException | None:
        """The error, for code that reports it to nobody."""
        try:
            return super().exception(timeout)
        except FuturesTimeoutError as err:  # a class of its own before Python 3.11
            raise TimeoutError(str(err)) from None


@dataclass(eq=False)
class CaptureFence:
    """What a state's changes wait for while it is captured in the background. ``captured`` is a :class:`concurrent.futures.Future` without
    a result; it raises what went wrong."""

    stall: Stall
    """How long this rank has waited: in the call, in ``fence``, ``wait`` and ``result``, and optimizers in ``step``."""
    backoff: CpuBackoff
    captured: Outcome[None] = field(default_factory=lambda: Outcome[None]())

    @in_trace("ckpt.wait")
    def wait(self) -> None:
        """Wait until the state may change again. Raises what capturing raised."""
        self.backoff.haste.set()
        with self.stall:
            self.captured.result()

    def up(self, *, on_devices: bool) -> None:
        """From now on everything waits that may change the state. ``on_devices``: some of it is on GPUs."""
        if lazy.imported:  # else there is no optimizer
            watch_steps()
        if on_devices:
            watch_graphs(fence)
        with _lock:
            _capturing.add(self)

    def down(self, error: BaseException | None) -> None:
        """The state may change again: it is captured, or that failed."""
        with _lock:
            _capturing.discard(self)
        if error is None:
            self.captured.set_result(None)
        else:
            self.captured.set_exception(error)


_capturing: set[CaptureFence] = set()
_lock = threading.Lock()
"""Of ``_capturing``."""


def fence() -> None:
    """Wait until every save in the background of this process has captured its state. Raises nothing: the saves' handles do."""
    with _lock:
        fences = list(_capturing)
    if fences:
        _outwait(fences)


@in_trace("ckpt.wait")
def _outwait(fences: Sequence[CaptureFence]) -> None:
    for each in fences:
        each.backoff.haste.set()
        with each.stall:
            each.captured.error()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seen.add(optimizer)
    fence()


@cache
def watch_steps() -> None:
    """Make every optimizer's step wait for what is being captured.

    Once for the life of the process: torch goes through its table of hooks while a step waits in one of them, so that no hook may be
    removed from there, or added, at the end of a capture.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)


def _forget_parent() -> None:
    """In a forked child no thread of the parent goes on: there is nothing to wait for."""
    global _lock
    _lock = threading.Lock()
    _capturing.clear()


os.register_at_fork(after_in_child=_forget_parent)


PAGE = 4096


class Arena:
    """Page-aligned host memory that grows to what the largest save needed; pinned if tensors of a GPU are copied into it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._unpin: finalize[..., Arena] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def reserve(self, nbytes: int, device: torch.device | None = None) -> torch.Tensor:
        """At least ``nbytes`` of memory, uint8 ``[n]``, pinned if it is for a GPU. What an earlier call gave may be the same memory."""
        if self._memory is None or self.nbytes < nbytes or (device is not None and self._unpin is None):
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            self._memory = None  # freed before the new one is made
            memory = _pages(nbytes, forked=device is None)
            if device is not None:
                self._unpin = finalize(self, pin(memory, device))
                self._unpin.atexit = False  # CUDA may have ended by then
            self._memory = memory
        return self._memory


def _pages(nbytes: int, *, forked: bool) -> torch.Tensor:
    """Fresh memory; ``forked``: forked children have it, too, each its own: where a device writes, pages must not move at a fork."""
    size = max(-(-nbytes // PAGE), 1) * PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise no_memory(size, str(err)) from err
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults when it is first written
    if hasattr(mmap, "MADV_DONTFORK") and not forked:
        memory.madvise(mmap.MADV_DONTFORK)
    return lazy.torch.frombuffer(memory, dtype=lazy.torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Batches that lie together in the arena: byte ``start`` of their file is at ``at``."""

    batches: Sequence[Batch]
    start: int
    at: int
    waits_for: int | None
    """Number of the segment that must be written before this one may be captured; None if the memory is nobody else's."""


def lay_out(files: Sequence[Sequence[Batch]], budget: int | None) -> tuple[list[Segment], int]:
    """Where each batch lies in the arena, and how many bytes that takes: everything at once if ``budget`` allows it, else two halves in
    turns."""
    # First try: one segment per file, everything at once. Each begins at the page of its first byte, so that the
    # address and the file offset of any byte are equal modulo the page.
    segments: list[Segment] = []
    at = 0
    for batches in files:
        if batches:
            start = batches[0].start // PAGE * PAGE
            segments.append(Segment(batches, start, at, None))
            at += _pages_of(start, batches[-1])
    if budget is None or at <= budget:
        return segments, at
    # Second try: cut the batches into segments of at most half the budget, and let them alternate between the two
    # halves. Segment n reuses the memory of segment n - 2, so it waits until that one is written.
    half = budget // 2 // PAGE * PAGE
    segments = []
    for batches in files:
        first = 0
        while first < len(batches):
            start, last = batches[first].start // PAGE * PAGE, first
            while last < len(batches) and _pages_of(start, batches[last]) <= half:
                last += 1
            if last == first:
                least = 2 * _pages_of(start, batches[first])
                raise UsageError(f"staging_bytes={budget} is too small: this state needs at least {least}")
            number = len(segments)
            segments.append(Segment(batches[first:last], start, number % 2 * half, number - 2 if number > 1 else None))
            first = last
    return segments, 2 * half


def _pages_of(start: int, last: Batch) -> int:
    return -(-(last.start + last.length - start) // PAGE) * PAGE


def borrow(backend: Backend, sizes: Sequence[int]) -> Sequence[LentMemory]:
    """The storage's own memory for files of these sizes; empty if it lends none."""
    lent: list[LentMemory] = []
    try:
        for size in sizes:
            memory = backend.lend(size)
            if memory is None:
                break
            lent.append(memory)
    except BaseException:
        for memory in lent:
            memory.close()
        raise
    return lent


class StagedBatches:
    """The batches of one save on their way through the arena. One thread captures; writers wait for each batch and release it."""

    def __init__(self, segments: Sequence[Segment], memories: Sequence[torch.Tensor], lent: Sequence[LentMemory] = ()) -> None:
        """``memories``: for each segment what it lies in. ``lent``: for each file, if it is the storage's."""
        self.memories = memories
        self.lent = lent
        self.backoff = CpuBackoff()
        self.segments = segments
        self._segment_of = {id(batch): number for number, segment in enumerate(segments) for batch in segment.batches}
        self._captured: set[int] = set()
        self._left = [len(s.batches) for s in segments]
        self._condition = threading.Condition()
        self._error: BaseException | None = None

    @classmethod
    def in_lent(cls, files: Sequence[Sequence[Batch]], lent: Sequence[LentMemory]) -> StagedBatches:
        """Each batch where it stays."""
        filled = [(batches, memory.memory) for batches, memory in zip(files, lent, strict=True) if batches]
        memories = [lazy.torch.frombuffer(memory, dtype=lazy.torch.uint8) for _, memory in filled]
        return cls([Segment(batches, 0, 0, None) for batches, _ in filled], memories, lent)

    def room(self, batch: Batch) -> torch.Tensor:
        """The memory of a batch: uint8 ``[its length]``."""
        number = self._segment_of[id(batch)]
        segment = self.segments[number]
        at = segment.at + batch.start - segment.start
        return self.memories[number][at : at + batch.length]

    def opened(self, batch: Batch) -> torch.Tensor:
        """The same, to be written to."""
        if self.lent:
            self.lent[batch.file].open(batch.start, batch.length)
        return self.room(batch)

    def capture(self, batches: Iterable[Batch], fill: Callable[[Batch, torch.Tensor], None]) -> None:
        """Copy batches into the arena by ``fill(batch, room)``, as soon as there is room for them; those already captured are skipped.

        Raises whatever ``fill`` raises, and tells the writers.
        """
        try:
            for batch in batches:
                if id(batch) not in self._captured:
                    before = self.segments[self._segment_of[id(batch)]].waits_for
                    if before is not None:
                        self._await(lambda before=before: self._left[before] == 0)  # type: ignore[misc]
                    fill(batch, self.opened(batch))
                    self.arrived(batch)
        except BaseException as err:
            self.fail(err)
            raise

    def arrived(self, batch: Batch) -> None:
        with self._condition:
            self._captured.add(id(batch))
            self._condition.notify_all()

    def wait(self, batch: Batch) -> None:
        """Wait until a batch is captured. Raises what capturing raised."""
        if id(batch) not in self._captured:
            self._await(lambda: id(batch) in self._captured)

    def release(self, batch: Batch) -> None:
        """The batch is written: its memory may be used again."""
        with self._condition:
            self._left[self._segment_of[id(batch)]] -= 1
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all waiting with an error."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def close(self) -> None:
        """The save is over: give back what became no file."""
        for memory in self.lent:
            memory.close()

    def _await(self, holds: Callable[[], bool]) -> None:
        with self._condition:
            self._condition.wait_for(lambda: holds() or self._error is not None)
            if self._error is not None:
                raise self._error
