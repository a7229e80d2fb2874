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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt import units
from ckpt.catalog import DataFile
from ckpt.concurrency import run_tasks
from ckpt.errors import CkptError, ConsistencyError, MismatchError
from ckpt.formats.native.datafiles.references import check_not_replaced, split_url
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.plan.layout.geometry import Box
from ckpt.policies.save import TrustFrozen
from ckpt.state.shard_table import ShardTable
from ckpt.state.tensors import LocalShard

from .base import Base, BaseLookup, Referable, RememberedBase, SaveBase, WrittenChunks
from .plan import Chunk, RankPlan
from .tensor_source import ChunkSource

# Digests that hold for frozen tensors without being taken again, where the user vouches for them (``TrustFrozen``).
#
#     save 1   XXH3-128 of each chunk ── kept with what torch knows of the tensor: memory, place in it, version
#     save 2   all that as it was? ──► the digest is still right, by the word of the user ── the base has it? ──► a reference
#              │ no                                                                          │ no
#              └──────────────────────────► hashed ◄─────────────────────────────────────────┘
#     save 10  all hashed, and compared with what was kept: another digest of a tensor that is as it was is an error
#
# A digest that was not taken now is used for a reference alone, and never stored.

UNCOUNTED = -1
"""The version of tensors of inference mode, whose changes torch does not count."""


class _Hashed(NamedTuple):
    """What torch knew of a tensor when its chunks were hashed, and their digests."""

    identity: tuple[object, ...]
    digests: dict[Box, str]


@dataclass(eq=False)
class TrustedDigests:
    """What a job remembers of the tensors that it trusts."""

    tensors: dict[str, _Hashed] = field(default_factory=dict)
    since: int = 0
    """How many saves have trusted digests since all were taken."""
    idle: bool = False
    """Whether the log was told that the names of the policy cover nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trust:
    """Whom one save trusts. ``identities``: what torch knows now of each tensor that may be trusted."""

    remembered: TrustedDigests
    identities: Mapping[str, tuple[object, ...]]
    hashes_all: bool

    @classmethod
    def of(
        cls,
        policy: TrustFrozen,
        remembered: TrustedDigests,
        shard_table: ShardTable,
        asked: Collection[str],
        versions: Mapping[str, tuple[object, ...]],
    ) -> Trust:
        """``asked``: the candidates of this save; ``versions`` of all tensors."""
        # Parameters without gradients alone: fused optimizers and the kernels of batch normalization write to tensors and count nothing.
        # What overlaps another tensor changes with it, and the versions of the two are counted apart.
        frozen = shard_table.frozen - shard_table.trainable - _overlapping(shard_table)
        names = [name for name in asked if name in frozen and policy.covers(name) and _is_counted(versions[name])]
        if not names and policy.names != "*" and not remembered.idle:
            remembered.idle = True
            log.warning("TrustFrozen(names=%r) covers no frozen parameter of this rank: all of its bytes are hashed", policy.names)
        identities = {name: (versions[name], *map(_memory, shard_table.tensors[name].parts)) for name in names}
        return cls(remembered=remembered, identities=identities, hashes_all=remembered.since >= policy.hash_every - 1)

    def known(self, plan: RankPlan, numbers: Collection[int]) -> dict[int, str]:
        """Digests that need not be taken, by numbers of chunks."""
        known: dict[int, str] = {}
        for number in () if self.hashes_all else numbers:
            name, _, box = plan.chunks[number]
            hashed = self.remembered.tensors.get(name)
            digest = hashed.digests.get(box) if hashed is not None and hashed.identity == self.identities.get(name) else None
            if digest is not None:
                known[number] = digest
        return known

    def learn(self, plan: RankPlan, taken: Mapping[int, str], *, trusted: bool, url: str) -> None:
        """Remember digests that were taken now. ``trusted``: whether others were not."""
        wrong, before = dict[str, None](), self.remembered.tensors
        for number, digest in taken.items():
            name, _, box = plan.chunks[number]
            identity = self.identities.get(name)
            if identity is None:
                continue
            hashed = before.get(name)
            if hashed is None or hashed.identity != identity:
                hashed = before[name] = _Hashed(identity, {})
            if hashed.digests.setdefault(box, digest) != digest:
                wrong[name] = None
        saves, self.remembered.since = self.remembered.since, self.remembered.since + 1 if trusted else 0
        if wrong:
            for name in wrong:
                del before[name]
            raise ConsistencyError(
                f"{len(wrong):,} tensors that TrustFrozen vouches for were written to past torch, such as {next(iter(wrong))}: "
                f"up to {saves} saves before this one may have their old bytes",
                where=url,
                hint="leave these names out of TrustFrozen(names=), or write to them without .data and numpy; the next save hashes them",
            )


def _is_counted(version: tuple[object, ...]) -> bool:
    return not any(UNCOUNTED in entry if isinstance(entry, tuple) else entry == UNCOUNTED for entry in version)


def _overlapping(shard_table: ShardTable) -> set[str]:
    """Names of the tensors that have some of their memory in common with another one."""
    names, starts, ends = list[str](), list[int](), list[int]()
    for name, tensor in shard_table.tensors.items():
        for _, memory in tensor.parts:
            if memory.numel():
                address, extent = memory.data_ptr(), memory.nbytes
                if not memory.is_contiguous():
                    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
                    extent = (last + 1) * memory.itemsize
                names.append(name)
                starts.append(address)
                ends.append(address + extent)
    order = np.argsort(starts, kind="stable")
    start, end = np.array(starts, dtype=np.uint64)[order], np.array(ends, dtype=np.uint64)[order]
    # By their starts: one reaches into the next, or begins before the furthest end so far.
    overlaps = np.zeros(len(order), dtype=bool)
    overlaps[:-1] |= start[1:] < end[:-1]
    overlaps[1:] |= start[1:] < np.maximum.accumulate(end)[:-1]
    return {names[i] for i in order[overlaps].tolist()}


def _memory(part: LocalShard) -> tuple[object, ...]:
    """Where a tensor's elements are. The reference does not keep the memory, but its number is not given to other memory meanwhile."""
    tensor = part.memory
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, tensor.dtype, tuple(tensor.shape), tensor.stride()


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
