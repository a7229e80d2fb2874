"""Capture: when the bytes of a save in the background are copied out of the state.

    version of a parameter    7 ────────────────────────────────────────┐ 7 → 8
    training          save_async() │ forward │ backward │ optimizer.step() waits │ changes parameters
    ckpt-capture                   └── copy chunk after chunk into the stage ──► compare versions: still 7? ──► "captured"
    ckpt-save                          └── write each batch as soon as it is captured ──────────────────────────► "durable"

*Eager*: before the call returns. *Lazy* (DataStates-LLM, arXiv 2406.10707): during the next forward and backward pass, which do not change
parameters; an optimizer's step waits for the rest. What a forward pass may change is set aside before the call returns: buffers of
modules, and small tensors that belong to no module or optimizer.

Invariant: a tensor that torch knows to have changed (its version) or moved before it was captured fails the save. What torch does not
count (``tensor.data``, numpy views of the same memory, fused optimizer kernels called without their optimizer) needs ``fence()``.

torch counts a change only when the operation is over. So before versions are compared, operations that were going on while a tensor was
captured must have ended: where a training loop may change tensors by itself, capturing ends with a grace period (``quiescence.py``). It
is over at once if the program waits for the save, as in ``fence()``. Else, after some time, the memory is hashed where it lies, and the
save commits only if the captured bytes have the same digests: an operation that goes on has come further meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import xxhash

from ckpt.adapters.shard_table import ShardTable
from ckpt.concurrency.workers import run_tasks
from ckpt.errors import ConsistencyError
from ckpt.settings import limits
from ckpt.tracing.profiling import in_trace
from ckpt.tracing.spans import Spans

from .flat_merge import FragmentExchange
from .meter import SaveMeter
from .plan import Batch, RankPlan
from .quiescence import GracePeriod
from .replicas import Replicas
from .staging import StagedBatches
from .tensor_source import ChunkSource
from .writer import MANY

PATIENCE = 0.1
"""Seconds that operations of the thread that saves have to end, or to come further, before bytes have to tell: a loaded machine may let a
thread wait for some time."""
SHORT = 0.002
"""The same where that thread waits for the save, and others are most likely at rest."""


class Capture:
    """Copies one rank's share of a state into a stage. ``done`` is set when the state may change again, or capturing failed."""

    def __init__(
        self,
        plan: RankPlan,
        shard_table: ShardTable,
        source: ChunkSource,
        stage: StagedBatches,
        fragments: FragmentExchange | None,
        replicas: Replicas | None,
        spans: Spans,
        meter: SaveMeter,
        filled: Callable[[int, int], None] | None = None,
    ) -> None:
        """``filled`` hears of each range of a file that was captured in the background, right after the copy, as long as nobody waits."""
        self.plan = plan
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
        self.doubtful: AbstractSet[str] = frozenset()
        """Tensors that no optimizer's step changes, but perhaps the training loop itself."""
        self._digests: dict[int, int] = {}
        """XXH3-64 of chunks, by number, as they were in the state after all was captured: of some, all, or none of the doubtful ones."""
        self._caller = threading.get_ident()
        self._streams = _side_streams(shard_table)
        self._follow()

    # ---- in the caller's thread

    def capture_volatile(self) -> None:
        """Capture what a forward pass may change, or set it aside, and note what everything else is like."""
        with self.spans.span("stage"):
            self._what_may_change()

    def _what_may_change(self) -> None:
        # Two kinds of tensors. What is not in ``eager`` is captured later, so its version is noted now. What is in it
        # is copied now: into the arena where a batch has nothing else (``_captured_now``), else into a clone.
        # Addresses are noted last, since a clone has one of its own.
        eager = self._eager()
        # What is done to a DTensor shows in its own version, not in that of its local tensor.
        memories = [(name, part.memory) for name, local in self.shard_table.tensors.items() for part in local.parts]
        self._versions = [(n, t, t._version) for n, t in [*memories, *self.shard_table.originals()] if n not in eager]
        self.doubtful = {name for name, *_ in self._versions} - self.shard_table.optimizer_updated
        self.source.clone_volatile(eager - self._captured_now(eager))
        self._follow()
        self.source.note_addresses()

    def _captured_now(self, names: AbstractSet[str]) -> AbstractSet[str]:
        """Capture the batches that have nothing but these tensors; the names of those that nobody reads from the state after that."""
        # Others need a copy beside the arena: where the place in it may have to be written first, what shares a batch
        # with something that can wait, and what is compared with other ranks or sent to them but is not written here.
        # And all that is on a GPU: a clone there is queued behind the training's work, while a copy to the host would
        # keep the caller waiting for that work.
        #
        # With a GPU, or a stage smaller than the state, nothing is captured in the call: the first would wait for the
        # training's kernels, the second for the writing of an earlier segment.
        if self._streams or any(s.waits_for is not None for s in self.stage.segments):
            return frozenset()
        now: list[Batch] = []
        later: set[str] = set()
        for batch in (batch for batches in self.plan.batches for batch in batches):
            inside = {self.plan.chunks[n].name for n in batch.numbers}
            if inside <= names:
                now.append(batch)
            else:
                later |= inside
        with self._aside():
            self.stage.capture(now, lambda batch, room: self.source.fill_batch(batch, room, 0))
        self.meter.add(captured=sum(batch.length for batch in now))
        if self.replicas is not None:
            later |= self.replicas.elsewhere()
        return {name for name in names if name not in later and not self.plan.assignments[name].merged}

    def _follow(self) -> None:
        """Let the side streams come after all that the caller has queued."""
        for stream in self._streams:
            # The copy must see what kernels that were queued before the call will have written. Kernels that are
            # queued later may run at the same time: those of a forward and backward pass do not touch what is copied.
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """This thread's copies from devices go through the side streams, and have arrived at the end of the block."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams:
                stream.synchronize()

    def _eager(self) -> set[str]:
        shard_table, stepped, forwarded = self.shard_table, self.shard_table.optimizer_updated, self.shard_table.forward_mutable
        eager = set()
        for name, local in shard_table.tensors.items():
            memories = [part.memory for part in local.parts]
            # An optimizer's tensors change only in its step, which waits. Of the others, buffers may change in the
            # next forward pass, and small tensors are cheap to copy: both are captured at once. Inference tensors
            # have no version counter, so a change of one could not be noticed later.
            small = name not in stepped and (name in forwarded or sum([m.nbytes for m in memories]) < limits.SMALL_COPY)
            if small or any(m.is_inference() for m in memories):
                eager.add(name)
        return eager

    # ---- in any thread

    @in_trace("ckpt.capture")
    def run(self, threads: int, beat: Callable[[], None]) -> None:
        """Capture everything. Raises, and tells the writers, if anything changed meanwhile."""
        batches = [batch for batches in self.plan.batches for batch in batches]
        try:
            # Other ranks wait for fragments, so these are taken first.
            if self.fragments is not None:
                with self._aside():
                    self.fragments.take()
            # Several threads capture only where every batch has a place of its own. In a stage of two halves the
            # order of segments is what keeps capturing and writing from waiting for each other in a circle.
            if threads > 1 and all(s.waits_for is None for s in self.stage.segments):
                step = -(-len(batches) // threads)
                parts = [batches[i : i + step] for i in range(0, len(batches), step)]
                run_tasks([partial(self.stage.capture, part, self._fill) for part in parts], threads, "ckpt-capture")
            else:
                self.stage.capture(batches, self._fill)
            if self.replicas is not None:
                with self.spans.span("hash"), self._aside():
                    self.replicas.hash(threads if not self._streams else 1, beat)
            self._outwait(batches, beat)
            self._check_unchanged()
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
        with self.stage.throttle.work() if many else nullcontext(), self.spans.span("capture", batch.length):
            if self._streams:
                with self._aside():
                    self.source.fill_batch(batch, room, 0)
            else:
                self.source.fill_batch(batch, room, 0, None if self._filled is None else self._tell_filled)
        self.meter.add(captured=batch.length)

    def _tell_filled(self, start: int, stop: int) -> None:
        if self._filled is not None and not self.stage.throttle.hurried:
            self._filled(start, stop)

    def _outwait(self, batches: Sequence[Batch], beat: Callable[[], None]) -> None:
        """End when operations of other threads on doubtful tensors, if they began before this call, are over and counted; or hash what they
        would have changed."""
        # How a change is ruled out that torch has not counted yet, since the operation is still running:
        #
        #  capture ends ── every other thread was seen waiting for a save? ── yes ─► compare versions, done
        #                    │ no, after PATIENCE or SHORT seconds
        #                    └─ hash the doubtful chunks where they lie ──► later, compare with what was written
        #
        # The hash is taken after the copy. If an operation was under way during the copy, it has written more bytes
        # until the hash, and the two differ.
        if not self.doubtful:
            return
        period = GracePeriod()
        if period.elapsed():
            return
        with self.spans.span("settle"):
            began, pause = time.monotonic(), 0.0005
            while time.monotonic() - began < (SHORT if period.passed(self._caller) else PATIENCE):
                time.sleep(pause)
                if period.elapsed():
                    return
                pause = min(2 * pause, 0.01)
        mixed = frozenset(self.fragments.mixed.values()) if self.fragments is not None else frozenset()
        for number in (number for batch in batches for number in batch.numbers):
            # Chunks with fragments of other ranks have no counterpart in this rank's memory.
            if number not in mixed and self.plan.chunks[number].name in self.doubtful and not period.elapsed():
                with self.spans.span("hash", self.source.nbytes(number)), self._aside():
                    self._digests[number] = xxhash.xxh3_64_intdigest(self.source.view(number))
                beat()
        time.sleep(pause)

    def compare(self, written: Sequence[int]) -> None:
        """Raise ConsistencyError if captured bytes, whose digests are ``written`` by chunk number, are not what was in the state later."""
        changed = [self.plan.chunks[number].name for number, digest in self._digests.items() if written[number] != digest]
        if changed:
            raise _changed(list(dict.fromkeys(changed)))

    def _check_unchanged(self) -> None:
        changed = list(dict.fromkeys(name for name, tensor, version in self._versions if tensor._version != version))
        if changed:
            raise _changed(changed)


def _changed(names: Sequence[str]) -> ConsistencyError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ConsistencyError(
        f"tensor {names[0]}{more} was changed before it was captured",
        hint="call fence(), of the save's handle or of the publication, before you change the state by hand "
        '(an optimizer\'s step does so by itself), or capture with capture="eager"',
    )


def _side_streams(shard_table: ShardTable) -> list[torch.cuda.Stream]:
    """For each device a stream for copies from it, behind what the caller has queued so far; none if all memory is on the host."""
    devices = {p.memory.device for local in shard_table.tensors.values() for p in local.parts if p.memory.is_cuda}
    return [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
