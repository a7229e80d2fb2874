"""Which tensors may be as they were in an earlier save, and whose digests need not be taken again: what a job remembers of its tensors.

To ask costs nothing. Candidates are a module's parameters without gradients, and tensors whose version, by which torch counts changes, and
memory are those of the save before. In the first save of a process all are that no optimizer changes. The answer is never trusted: versions
do not see writes through ``.data`` or numpy, so the digest alone decides. What turns out to have changed
again and again is not asked for any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpt.errors import ConsistencyError
from ckpt.plan.layout.geometry import Box
from ckpt.state.shard_table import ShardTable
from ckpt.state.tensors import LocalShard

from .plan import RankPlan

if TYPE_CHECKING:
    import torch

    from ckpt.policies.save import TrustFrozen

log = logging.getLogger("ckpt")

TRIES = 2
"""A candidate that had changed so many times in a row is none any more."""

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
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = part.memory
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, tensor.dtype, tuple(tensor.shape), tensor.stride()


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
