"""What each phase of a reshard gives the next one. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.memory import raw_view, reads_otherwise
from ckpt.adapters.tensors import LocalTensor
from ckpt.engine.save.samples import Sample, sample_of
from ckpt.errors import ConsistencyError
from ckpt.live.catalog import LiveCatalog
from ckpt.live.client import Holder
from ckpt.live.filling import FillPlan
from ckpt.live.pull import Pulled


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Which ranks have an old state, which a new one, and which are on this rank's machine."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    near: Set[int]
    secret: bytes


class OldMemory:
    """Memory of the old state, and what tells that it was written to since: autograd's count of writes, or another address, or other bytes
    in a sample, as neither ``tensor.data`` nor numpy counts."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._before = self._count_and_address(), self._sample()

    def changed(self) -> bool:
        counted, sample = self._before
        if self._count_and_address() != counted:
            return True  # and there may be nothing to sample
        return sample is not None and not sample.same(sample_of(raw_view(self.memory)))

    def _count_and_address(self) -> tuple[int, int]:
        return 0 if self.memory.is_inference() else self.memory._version, self.memory.data_ptr()

    def _sample(self) -> Sample | None:
        return None if reads_otherwise(self.memory) else sample_of(raw_view(self.memory))


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """The old states of all ranks as one catalog, and this rank's part of it."""

    meeting: Meeting
    local: Mapping[str, LocalTensor]
    before: Sequence[tuple[str, OldMemory]]
    """What each part was like, by name."""
    catalog: LiveCatalog
    holders: Mapping[int, Holder]

    def check_unchanged(self, targets: Iterable[LocalTensor]) -> None:
        """Raise ConsistencyError if the old state was written to since it was offered, but for memory that the new one shares."""
        shared = {part.memory.untyped_storage().data_ptr() for target in targets for part in target.parts}
        for name, part in self.before:
            if part.memory.untyped_storage().data_ptr() not in shared and part.changed():
                raise ConsistencyError(
                    f"tensor {name} of the old state was changed while it was resharded, so what came of it may be a mix",
                    hint="let nothing write to the old state before the call returns, and reshard again",
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """The old state fits the new ones of all ranks; ``binding`` and ``plan`` are None on a rank that leaves."""

    offered: Offered
    binding: Binding | None
    plan: FillPlan | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Moved:
    """All tensors have their bytes; ``setters`` give the new state its values."""

    fitted: Fitted
    setters: Sequence[Callable[[], None]]
    copied: int
    pulled: Pulled
