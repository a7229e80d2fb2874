"""Which chunks of a rank are in the base already: the save refers to them, and writes the others.

    every tensor ──► may it be as it was? ──no──► written
                          │ yes: a candidate
                     XXH3-128 of each of its chunks
                          │
                     the base has name, box, dtype and these 128 bits? ──no──► written, and the header of its file keeps the 128 bits
                          │ yes
                     a reference to the file that has the bytes

To ask costs nothing. Candidates are a module's parameters without gradients, and tensors whose version, by which torch counts changes, and
memory are those of the save before. In the first save of a process all are that no optimizer changes. The answer is never trusted: versions
do not see writes through ``.data`` or numpy, so the digest alone decides. What turns out to have changed
again and again is not asked for any more.

This is done in the caller's thread, before anything is staged: what is referred to is neither copied nor written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash

from ckpt.adapters.shard_table import ShardTable
from ckpt.catalog import DataFile
from ckpt.concurrency.workers import run_tasks
from ckpt.engine.save.plan import Chunk, RankPlan
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.errors import CkptError, MismatchError
from ckpt.formats.native.datafiles.references import check_not_replaced, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.text import units

from .base_chunks import Base, BaseLookup, Referable, RememberedBase, SaveBase, WrittenChunks
from .trusted import Trust, TrustedDigests

log = logging.getLogger("ckpt")

GROUP = 64
"""Chunks that are hashed in one task."""
TRIES = 2
"""A candidate that had changed so many times in a row is none any more."""


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

    @property
    def rows(self) -> list[tuple[Chunk, DataFile]]:
        """The chunks that are referred to, and the file that has each."""
        return [(self.plan.chunks[n], chunk.file) for n, chunk in self.references.items()]

    @property
    def coded(self) -> bool:
        """Whether a chunk that is referred to is coded."""
        return any(chunk.coded for chunk in self.references.values())

    def remaining(self) -> list[int]:
        """Which chunks are written."""
        return [number for number in range(len(self.plan.chunks)) if number not in self.references]

    def remembered(self, backend: Backend, id: str, plan: RankPlan, written: WrittenChunks) -> RememberedBase:
        """The save, which is committed with this ``id``, as a base of later ones. ``plan``: what was written by."""
        run, name = split_url(backend)
        base, referred = self.base, {}
        for number, chunk in self.references.items() if base is not None else ():
            if isinstance(base, RememberedBase) and number in base.referred:
                referred[number] = base.referred[number]
            elif base is not None and (whole := base.whole(self.plan, number)) is not None:
                referred[number] = chunk, whole
        return RememberedBase(url=backend.url, run=real_url(run), name=name, id=id, plan=plan, written=written, referred=referred)


@dataclass(eq=False)
class SeenVersions:
    """What a job remembers of its tensors between saves: to know which may be as they were."""

    versions: dict[str, tuple[object, ...]] = field(default_factory=dict)
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    """XXH3-128 of candidates' chunks in the last save."""
    changes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """How many times in a row a candidate had changed after all; those of equal versions apart from the others."""
    trusted: TrustedDigests = field(default_factory=TrustedDigests)

    def candidates(self, shard_table: ShardTable) -> dict[str, bool]:
        """Names of the tensors that may be as they were in the save before, each with whether its version is. Keeps what they are now."""
        now: dict[str, tuple[object, ...]] = {}
        for name, local in shard_table.tensors.items():
            now[name] = tuple([_version(part.memory) for part in local.parts])
        for name, tensor in shard_table.originals():  # what is done to a DTensor shows in its own version alone
            now[name] = (*now.get(name, ()), _version(tensor)[1])
        trained = shard_table.optimizer_updated - shard_table.frozen
        before, self.versions = self.versions, now
        asked = {}
        for name, version in now.items():
            same = version == before.get(name)
            may_be = same or name in shard_table.frozen or (name not in before and name not in trained)
            if may_be and name not in shard_table.own and self.changes[name, same] < TRIES:
                asked[name] = same
        return asked

    def learn(self, asked: Mapping[str, bool], digests: dict[tuple[str, int], str]) -> None:
        """Remember which candidates had changed; ``digests`` are those of their chunks."""
        changed = {key[0] for key, digest in digests.items() if self.digests.get(key, digest) != digest}
        for name in {key[0] for key in digests}:
            key = name, asked[name]
            self.changes[key] = self.changes[key] + 1 if name in changed else 0
        self.digests = digests


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is and how often it was changed; tensors of inference mode are not counted."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def find_reuse(
    lookup: BaseLookup,
    plan: RankPlan,
    source: ChunkSource,
    asked: Mapping[str, bool],
    seen: SeenVersions,
    threads: int,
    trust: Trust | None = None,
) -> Reuse:
    """What of a plan is in the base. ``asked``: the candidates (``SeenVersions``); ``trust``: whose digests need not be taken."""
    numbers = [n for n, c in enumerate(plan.chunks) if c.name in asked and c.box.numel and not plan.assignments[c.name].merged]
    base, backend = lookup.base, lookup.backend
    chunks, alike = None, dict[int, Referable]()
    try:
        if base is not None:
            chunks = lookup.find(base, plan)
            alike = chunks.shared(plan, numbers, max(threads, backend.io_hints.concurrency))
            check_not_replaced({chunk.file.path for chunk in alike.values()}, chunks.name, split_url(backend)[1])
            if base.required and plan.chunks and not chunks.has_any(plan):
                what = "the base has none of this state's tensors: another name, dtype or shape each"
                raise MismatchError(what, where=base.url, hint="name another base")
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
