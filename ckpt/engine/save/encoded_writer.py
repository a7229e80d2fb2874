"""Writes one rank's data files with coded chunks (docs/format.md, codecs). What a chunk takes is known only when it is coded, so a file
is laid out when all of its chunks are."""

from __future__ import annotations

from functools import partial

import xxhash

from ckpt.catalog import DataFile
from ckpt.concurrency.workers import run_tasks
from ckpt.formats.native.coding.codecs import WITHOUT_ANCHOR, encode, encode_difference
from ckpt.formats.native.datafiles.datafile import DataFilePlan, plan_coded_file
from ckpt.io_backends.protocol import Writer
from ckpt.settings import limits

from .base.anchors import AnchorChunks
from .plan import Batch
from .writer import RankWriter, WriteInput


class EncodedWriter(RankWriter):
    """A :class:`RankWriter` that codes what is worth it. Memory: the coded chunks of one file, at most 128 MiB, beside the state.

    ``digests`` of tensors that other ranks have too are those of the bytes before coding: that is what replicas are compared by.
    """

    def __init__(self, given: WriteInput, codec: str, anchors: AnchorChunks | None = None) -> None:
        super().__init__(given)
        self.codec = WITHOUT_ANCHOR.get(codec, codec)
        """Of chunks that have no anchor, or do not gain by it."""
        self.anchored: dict[int, DataFile] = {}
        """The file that has the anchor of each chunk which is stored as a difference, by its number in the plan."""
        self._difference = codec
        self._anchors = anchors
        self._strong = dict(given.digests128)
        self.digests128 = self._strong
        self.codecs: dict[int, str] = {}
        """Of the chunks that are stored coded, by their numbers in the plan."""
        self.stored = [0] * len(self.plan.chunks)
        """XXH3-64 of each chunk as the file has it, by its number in the plan."""
        self._compared = {name for name, _ in self.plan.replicated}

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
            run_tasks(
                [partial(self._store, writer, int(plan.offsets[k]), blobs[i][1]) for k, i in enumerate(numbers)], self.threads, "ckpt-write"
            )
            header = plan.encode_header(self.stored[group], self.strong_digests(group.start, len(numbers)))
            writer.write(0, [header])
        self.codecs |= {i: codec for i, (codec, _) in blobs.items() if codec is not None}
        return writer, plan, header

    def _encode(self, batch: Batch, blobs: dict[int, tuple[str | None, memoryview]]) -> None:
        number = batch.numbers[0]
        staged = self.staged(batch)
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
        self.alive.beat()
        if self.stage is not None:
            self.stage.release(batch)

    def _coded(self, number: int, raw: memoryview) -> tuple[str, memoryview | None]:
        """The codec, and what it makes of a chunk; None if that is not worth it."""
        itemsize = self.plan.specs[number].dtype.itemsize
        anchor = self._anchors.read(self.plan, number) if self._anchors is not None else None
        if anchor is not None and (blob := encode_difference(raw, anchor[0], itemsize)) is not None:
            self.anchored[number] = anchor[1]
            self._strong[number] = xxhash.xxh3_128_hexdigest(raw)
            return self._difference, blob
        return self.codec, encode(self.codec, raw, itemsize) if len(raw) else None

    def _store(self, writer: Writer, offset: int, data: memoryview) -> None:
        step = max(limits.CACHE_BLOCK, writer.block_size)
        with self.spans.span("write", len(data)):
            for at in range(0, len(data), step):
                writer.write(offset + at, [data[at : at + step]])
                self.count(len(data[at : at + step]))
