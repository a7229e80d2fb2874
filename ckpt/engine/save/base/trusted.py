"""Digests that hold for frozen tensors without being taken again, where the user vouches for them (``TrustFrozen``).

    save 1   XXH3-128 of each chunk ── kept with what torch knows of the tensor: memory, place in it, version
    save 2   all that as it was? ──► the digest is still right, by the word of the user ── the base has it? ──► a reference
             │ no                                                                          │ no
             └──────────────────────────► hashed ◄─────────────────────────────────────────┘
    save 10  all hashed, and compared with what was kept: another digest of a tensor that is as it was is an error

A digest that was not taken now is used for a reference alone, and never stored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt.adapters.shard_table import ShardTable
from ckpt.adapters.tensors import LocalShard
from ckpt.engine.save.plan import RankPlan
from ckpt.errors import ConsistencyError
from ckpt.layout.geometry import Box
from ckpt.policies.trust_frozen import TrustFrozen

log = logging.getLogger("ckpt")

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
