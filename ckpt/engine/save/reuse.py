"""Which chunks of a rank are in the base already: the save refers to them, and writes the others.

    every tensor ──► may it be as it was? ──no──► written
                          │ yes: a candidate
                     XXH3-128 of each of its chunks
                          │
                     the base has name, box, dtype and these 128 bits? ──no──► written, and the header of its file keeps the 128 bits
                          │ yes
                     a reference to the file that has the bytes

Which tensors are candidates: ``candidates.py``.

This is done in the caller's thread, before anything is staged: what is referred to is neither copied nor written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ckpt import units
from ckpt.concurrency import run_tasks
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.load import open_together
from ckpt.errors import CkptError, MismatchError
from ckpt.formats.native.codecs import WITHOUT_ANCHOR
from ckpt.formats.native.paths import check_not_replaced, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.net.channel import Row
from ckpt.state.shard_table import ShardTable

from .base import AnchorChunks, Base, ChunkPlace, Referable, RememberedBase, SaveBase, WrittenChunks, encode_references, find_base
from .candidates import Trust
from .job import SaveJob
from .options import Extension
from .plan import RankPlan
from .tensor_source import ChunkSource
from .writer import EncodedWriter, RankWriter

log = logging.getLogger("ckpt")

GROUP = 64
"""Chunks that are hashed in one task."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reuse:
    """What a rank need not write. ``directory`` and ``id`` are those of the base; ``references``, and ``digests``, the XXH3-128 of chunks
    that are written, go by the numbers of the ``plan`` that was asked about."""

    plan: RankPlan
    directory: str = ""
    id: str = ""
    references: Mapping[int, Referable] = field(default_factory=dict)
    base: Base | None = None
    """None if there is none, or it cannot be read."""
    digests: Mapping[int, str] = field(default_factory=dict)
    nbytes: int = 0
    """Of the chunks that are referred to."""

    def remaining(self) -> list[int]:
        """Which chunks are written."""
        return [number for number in range(len(self.plan.chunks)) if number not in self.references]


@dataclass(frozen=True, kw_only=True, eq=False)
class Incremental(Extension):
    """Refers to what the base has, and stores differences from it where the codec makes some. ``plan`` is what was left to be written."""

    job: SaveJob
    backend: Backend
    reuse: Reuse
    plan: RankPlan

    def begin(self, row: Row) -> None:
        row["options"] += " reuse=True"
        if self.reuse.directory:  # all ranks must refer to one save of one base
            row["options"] += f" base={self.reuse.directory} {self.reuse.id}"
            row["base"] = [self.reuse.directory, self.reuse.id]

    def equip(self, writer: RankWriter) -> None:
        digests, base = self.reuse.digests, self.job.options.base
        writer.digests128 = {i: digests[n] for i, n in enumerate(self.plan.numbers) if n in digests}
        if isinstance(writer, EncodedWriter) and writer.codec in WITHOUT_ANCHOR and self.reuse.base is not None:
            required = base is not None and base.required
            writer.anchors = AnchorChunks(self.reuse.base, split_url(self.backend)[1], required=required)

    def written(self, row: Row, writer: RankWriter) -> None:
        if self.plan.has_128:
            row["has_128"] = True
        anchored = writer.anchored if isinstance(writer, EncodedWriter) else {}
        references = self.reuse.references
        if references or anchored:
            chunks = [(self.reuse.plan.chunks[n], chunk.file) for n, chunk in references.items()]
            anchors = [(self.plan.chunks[n], file) for n, file in sorted(anchored.items())]
            coded = any(chunk.coded for chunk in references.values())
            row["references"] = self.job.call.share(encode_references(chunks, anchors, coded=coded))

    def committed(self, writer: RankWriter) -> None:
        """Later saves may refer to this one, and need not read what this rank wrote of it."""
        written = WrittenChunks(
            files=writer.files,
            layouts=writer.layouts,
            digests=writer.stored if isinstance(writer, EncodedWriter) else writer.digests,
            strong_digests=writer.digests128,
            codecs=writer.codecs if isinstance(writer, EncodedWriter) else {},
        )
        (run, name), base = split_url(self.backend), self.reuse.base
        referred: dict[int, tuple[Referable, ChunkPlace]] = {}
        for number, chunk in self.reuse.references.items() if base is not None else ():
            if isinstance(base, RememberedBase) and number in base.referred:
                referred[number] = base.referred[number]
            elif base is not None and (whole := base.whole(self.reuse.plan, number)) is not None:
                referred[number] = chunk, whole
        url, run = self.backend.url, real_url(run)
        saved = RememberedBase(url=url, run=run, name=name, id=writer.id, plan=self.plan, written=written, referred=referred)
        self.job.cache.remember(saved, base)


def find_reuse(job: SaveJob, backend: Backend, shard_table: ShardTable, source: ChunkSource) -> Reuse:
    """What of the plan of ``source`` is in the base."""
    plan, base, threads = source.plan, job.options.base, job.options.threads
    seen = job.cache.seen_in(real_url(split_url(backend)[0]))
    asked = seen.candidates(shard_table)
    settle_devices(devices_of(shard_table.tensors[name] for name in asked), job.call.url)
    trust = None
    if job.options.trust is not None:
        trust = Trust.of(job.options.trust, seen.trusted, shard_table, asked, seen.versions)
    numbers = [n for n, c in enumerate(plan.chunks) if c.name in asked and c.box.numel and not plan.assignments[c.name].merged]
    chunks, alike = None, dict[int, Referable]()
    try:
        if base is not None:
            together = partial(open_together, job.call, sources=None, name="base")
            chunks = find_base(base, plan, backend, job.cache.bases, together)
            alike = chunks.shared(plan, numbers, max(threads, backend.io_hints.concurrency))
            check_not_replaced({chunk.file.path for chunk in alike.values()}, chunks.name, split_url(backend)[1])
            if base.required and plan.chunks and not chunks.has_any(plan):
                what = "what reuse= names has none of this state's tensors: another name, dtype or shape each"
                raise MismatchError(what, where=base.url, hint="name another step as reuse=")
    except CkptError as err:
        if base is None or base.required:
            raise
        log.warning("nothing of %s is referred to, and all is written: %s", base.url, err)
        chunks, alike = None, {}
    known = trust.known(plan, numbers) if trust is not None else {}
    trusted = {n: digest for n, digest in known.items() if n in alike and alike[n].digest == digest}
    taken: dict[int, str] = {}
    hashed = [n for n in numbers if n not in trusted]
    run_tasks([partial(_hash, source, hashed[i : i + GROUP], taken) for i in range(0, len(hashed), GROUP)], threads, "ckpt-hash")
    digests = trusted | taken
    seen.learn(asked, {(plan.chunks[n].name, plan.chunks[n].number): digest for n, digest in digests.items()})
    if trust is not None:
        trust.learn(plan, taken, trusted=bool(trusted), url=backend.url)
    if base is None:
        return Reuse(plan=plan, digests=digests)
    if chunks is None:
        return Reuse(plan=plan, directory=split_url(open_backend(base.url))[1], id=base.id or "", digests=digests)
    equal = {n: chunk for n, chunk in alike.items() if chunk.digest == digests[n]}
    _note_unmatched(base, plan, chunks, [n for n in numbers if n not in alike])
    return Reuse(
        plan=plan,
        directory=chunks.name,
        id=chunks.id,
        references=equal,
        base=chunks,
        digests={n: digest for n, digest in digests.items() if n not in equal},
        nbytes=sum(plan.specs[n].nbytes for n in equal),
    )


def _note_unmatched(base: SaveBase, plan: RankPlan, chunks: Base, numbers: Sequence[int]) -> None:
    """Say how much of what may be as it was is written all the same, since the base cannot tell."""
    sizes: Counter[str] = Counter()
    for n in numbers:
        why = chunks.unmatched(plan, n)
        if why is not None:
            sizes[why] += plan.specs[n].nbytes
    for why, size in sizes.items():
        log.warning("%s of tensors that may be as they were in %s are written again: %s", units.size(size), base.url, why)


def _hash(source: ChunkSource, numbers: Sequence[int], digests: dict[int, str]) -> None:
    for number in numbers:
        digests[number] = xxhash.xxh3_128_hexdigest(source.view(number))
