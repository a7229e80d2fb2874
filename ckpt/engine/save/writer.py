"""Writes one rank's data files: chunks are hashed, coded where that is asked for, and written block by block, by a few threads, from the
state's own memory or from the stage that holds a copy of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.concurrency import Pending, run_tasks
from ckpt.errors import CkptError
from ckpt.formats.native.codecs import WITHOUT_ANCHOR, encode, encode_difference
from ckpt.formats.native.datafile import DataFilePlan, plan_coded_file
from ckpt.formats.native.writer import WriteJournal
from ckpt.io_backends.protocol import Backend, LentMemory, Writer
from ckpt.net.channel import Row
from ckpt.state import lazy
from ckpt.telemetry.spans import SaveMeter, Spans

from .base import AnchorChunks
from .plan import Batch, RankPlan
from .staging import StagedBatches
from .tensor_source import ChunkSource, FragmentExchange

if TYPE_CHECKING:
    import torch

MANY = 8
"""A batch of so many chunks is mostly Python."""
COMMITS = 4
"""Files of one rank that are made durable at once."""
SLOWEST = 10e6
"""Bytes a second: storage that makes a file durable more slowly than this counts as hanging."""


@dataclass(kw_only=True, eq=False)
class RankWriter:
    """Writes one rank's data files of one save."""

    backend: Backend
    plan: RankPlan
    source: ChunkSource
    id: str
    position: int
    """Place of the rank among those that take part: what the checkpoint knows it by."""
    threads: int
    meter: SaveMeter = field(default_factory=SaveMeter)
    spans: Spans = field(default_factory=partial(Spans, on=False))
    beat: Callable[[], None] = lambda: None
    """Gives a sign of life."""
    alive_while: Callable[[Callable[[], None], float], None] = lambda work, seconds: work()
    """Gives them while something runs that cannot, for at most some seconds."""
    stage: StagedBatches | None = None
    """None if the state keeps still until the save is over."""
    fragments: FragmentExchange | None = None
    digests128: dict[int, str] = field(default_factory=dict)
    """XXH3-128 of some chunks before coding, in hex, by their numbers in the plan."""

    def __post_init__(self) -> None:
        self.journal = WriteJournal(self.backend)
        self.files: list[DataFile] = []
        """Those that are written."""
        self.layouts: list[tuple[int, DataFilePlan]] = []
        """Of each file: number of its first chunk, and where each is."""
        self.digests: list[int] = [0] * len(self.plan.chunks)
        """XXH3-64 of each chunk, by its number in the plan."""
        self._mixed = frozenset(self.fragments.mixed.values()) if self.fragments is not None else frozenset()
        self._local = threading.local()

    def run(self) -> None:
        """Write and make durable. On failure every file that was made is removed."""
        commits: list[tuple[Writer, Pending[None]]] = []
        try:
            try:
                # File after file: the next one is written while up to COMMITS earlier ones are made durable. An fsync
                # waits for the device, so several of them at once take hardly longer than one.
                for number in range(len(self.plan.batches)):
                    writer, plan, header = self._file(number)
                    commits.append((writer, Pending(partial(self._commit, writer, plan), "ckpt-sync")))
                    if len(commits) >= COMMITS:
                        commits[-COMMITS][1].wait()
                    self.files.append(plan.row(header))
                    self.layouts.append((self.plan.groups[number].start if self.plan.groups else plan.first, plan))
            finally:
                for _, commit in commits:
                    commit.wait()
            for _, commit in commits:
                commit.result()
        except BaseException:
            for writer, _ in commits:
                with suppress(CkptError):
                    writer.abort()
            self.journal.discard()
            raise

    def row(self) -> Row:
        """What the leader has to know of the files."""
        return {"files": [[f.path, f.size, f.header, f.digest] for f in self.files], "replicas": {}}

    def _file(self, number: int) -> tuple[Writer, DataFilePlan, bytes]:
        """Write one file, all but making it durable."""
        plan = self.plan.files[number].labelled(self.id)
        lent = self.stage.lent[number] if self.stage is not None and self.stage.lent else None
        with self.open(plan, lent) as writer:
            run_tasks([partial(self._batch, writer, batch) for batch in self.plan.batches[number]], self.threads, "ckpt-write")
            # The header has the digests of all chunks, so it is written last, into room that the plan has left at
            # byte 0. Until then the file is not a valid one, and no commit record names it.
            return writer, plan, self._header(writer, plan, plan.first, self.digests[plan.first : plan.first + len(plan.offsets)])

    def _header(self, writer: Writer, plan: DataFilePlan, first: int, digests: Sequence[int]) -> bytes:
        """Write the header of a file whose first chunk is number ``first``."""
        known = self.digests128
        strong = {n - first: known[n] for n in range(first, first + len(digests)) if n in known} if known else {}
        header = plan.encode_header(digests, strong)
        writer.write(0, [header])
        return header

    @contextmanager
    def open(self, plan: DataFilePlan, lent: LentMemory | None = None) -> Iterator[Writer]:
        """A new file, which is forgotten if the block fails; in the storage's own memory, if it has lent some."""
        with self.journal.making(plan.path):
            writer = self.backend.create(plan.path, plan.size) if lent is None else self.backend.create_in(plan.path, lent)
        try:
            yield writer
        except BaseException:
            with suppress(CkptError):
                writer.abort()
            raise

    def _commit(self, writer: Writer, plan: DataFilePlan) -> None:
        with self.journal.making(plan.path), self.spans.span("sync", plan.size):
            self.alive_while(writer.commit, plan.size / SLOWEST)

    # ---- one batch

    def _batch(self, writer: Writer, batch: Batch) -> None:
        staged = self.staged(batch) if self._mixed or self.stage is not None else None
        self.beat()
        # In the background, small chunks are worked on in a pace that leaves training its speed.
        paced = nullcontext() if self.stage is None or len(batch.numbers) < MANY else self.stage.backoff.work()
        with paced, self.spans.span("write", batch.length):
            if len(batch.numbers) == 1:
                number = batch.numbers[0]
                self._large(writer, batch.start, number, self.source.view(number) if staged is None else staged)
            else:
                if (data := staged) is None:  # the bytes of small chunks, copied next to each other
                    scratch: torch.Tensor | None = getattr(self._local, "scratch", None)
                    if scratch is None:
                        scratch = self._local.scratch = lazy.torch.empty(settings.CACHE_BLOCK, dtype=lazy.torch.uint8)
                    self.source.fill_batch(batch, scratch, 0)
                    for number in self._mixed.intersection(batch.numbers) if self._mixed else ():
                        begin = sum(batch.lengths[: batch.numbers.index(number)])
                        self.source.patch(number, scratch[begin : begin + self.source.nbytes(number)])
                    data = scratch.numpy().data[: batch.length]
                at = 0
                for number, length in zip(batch.numbers, batch.lengths, strict=True):
                    self.digests[number] = xxhash.xxh3_64_intdigest(data[at : at + length])
                    at += length
                writer.write(batch.start, [data])
                self.meter.add(written=batch.length)
                self.beat()
        if self.stage is not None:
            self.stage.release(batch)

    def staged(self, batch: Batch) -> memoryview | None:
        """The bytes of a batch in the stage, complete; None if there is no stage. Waits for capture and for other ranks' fragments."""
        mixed = [n for n in batch.numbers if n in self._mixed] if self._mixed else []
        if mixed and self.fragments is not None:
            self.fragments.wait()
        if self.stage is None:
            return None
        self.stage.wait(batch)
        room = self.stage.room(batch)
        for number in mixed:
            begin = sum(batch.lengths[: batch.numbers.index(number)])
            self.source.patch(number, room[begin : begin + self.source.nbytes(number)])
        return room.numpy().data

    def _large(self, writer: Writer, offset: int, number: int, data: memoryview) -> None:
        # Hash and write block by block: a block that was just hashed is still in the cache when it is copied to the
        # page cache or the network, so memory is read once instead of twice.
        digest = xxhash.xxh3_64()
        step = max(settings.CACHE_BLOCK, writer.block_size)
        at, end = 0, step - offset % step  # blocks end where pages end, for direct I/O, or where parts of an upload do
        while at < len(data):
            block = data[at:end]
            writer.write_hashed(offset + at, block, digest.update)
            self.meter.add(written=len(block))
            self.beat()
            at, end = end, end + step
        self.digests[number] = digest.intdigest()


# Writes one rank's data files with coded chunks (docs/format.md, codecs). What a chunk takes is known only when it is coded, so a file
# is laid out when all of its chunks are.


@dataclass(kw_only=True, eq=False)
class EncodedWriter(RankWriter):
    """A :class:`RankWriter` that codes what is worth it. Memory: the coded chunks of one file, at most 128 MiB, beside the state.

    ``digests`` of tensors that other ranks have too are those of the bytes before coding: that is what replicas are compared by.
    """

    codec: str
    anchors: AnchorChunks | None = None
    """From which chunks are stored as differences, where that is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anchored: dict[int, DataFile] = {}
        """The file that has the anchor of each chunk which is stored as a difference, by its number in the plan."""
        self.codecs: dict[int, str] = {}
        """Of the chunks that are stored coded, by their numbers in the plan."""
        self.stored = [0] * len(self.plan.chunks)
        """XXH3-64 of each chunk as the file has it, by its number in the plan."""
        self._compared = {name for name, _ in self.plan.replicated}

    def row(self) -> Row:
        return super().row() | {"coded": len(self.codecs)}

    def _file(self, number: int) -> tuple[Writer, DataFilePlan, bytes]:
        group, batches = self.plan.groups[number], self.plan.batches[number]
        blobs: dict[int, tuple[str | None, memoryview]] = {}
        run_tasks([partial(self._encode, batch, blobs) for batch in batches], self.threads, "ckpt-code")
        numbers = range(group.start, group.stop)
        plan = plan_coded_file(
            self.plan.specs[group],
            [blobs[i][0] for i in numbers],
            [len(blobs[i][1]) for i in numbers],
            id=self.id,
            rank=self.position,
            number=number,
            has_128=self.plan.has_128 or any(i in self.anchored for i in numbers),
        )
        with self.open(plan) as writer:
            blocks = [partial(self._store, writer, int(plan.offsets[k]), blobs[i][1]) for k, i in enumerate(numbers)]
            run_tasks(blocks, self.threads, "ckpt-write")
            header = self._header(writer, plan, group.start, self.stored[group])
        self.codecs |= {i: codec for i, (codec, _) in blobs.items() if codec is not None}
        return writer, plan, header

    def _encode(self, batch: Batch, blobs: dict[int, tuple[str | None, memoryview]]) -> None:
        number = batch.numbers[0]
        staged = self.staged(batch) if self._mixed or self.stage is not None else None
        raw = self.source.view(number) if staged is None else staged
        with self.spans.span("encode", len(raw)):
            codec, blob = self._coded(number, raw)
            # What is staged makes room for what comes, so it cannot be kept as it is.
            stored = blob if blob is not None else raw if staged is None else memoryview(bytes(raw))
            self.stored[number] = self.digests[number] = xxhash.xxh3_64_intdigest(stored)
            if blob is not None and self.plan.chunks[number].name in self._compared:
                self.digests[number] = xxhash.xxh3_64_intdigest(raw)
        self.meter.add(saved=len(raw) - len(stored))
        blobs[number] = (None if blob is None else codec, stored)
        self.beat()
        if self.stage is not None:
            self.stage.release(batch)

    def _coded(self, number: int, raw: memoryview) -> tuple[str, memoryview | None]:
        """The codec, and what it makes of a chunk; None if that is not worth it."""
        itemsize = self.plan.specs[number].dtype.itemsize
        anchor = self.anchors.read(self.plan, number) if self.anchors is not None else None
        if anchor is not None and (blob := encode_difference(raw, anchor[0], itemsize)) is not None:
            self.anchored[number] = anchor[1]
            self.digests128[number] = xxhash.xxh3_128_hexdigest(raw)
            return self.codec, blob
        codec = WITHOUT_ANCHOR.get(self.codec, self.codec)
        return codec, encode(codec, raw, itemsize) if len(raw) else None

    def _store(self, writer: Writer, offset: int, data: memoryview) -> None:
        step = max(settings.CACHE_BLOCK, writer.block_size)
        with self.spans.span("write", len(data)):
            for at in range(0, len(data), step):
                writer.write(offset + at, [data[at : at + step]])
                self.meter.add(written=len(data[at : at + step]))
                self.beat()
