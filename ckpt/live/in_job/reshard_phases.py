"""What each phase of a reshard gives the next one. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.tensors import LocalTensor
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """The old states of all ranks as one catalog, and this rank's part of it."""

    meeting: Meeting
    local: Mapping[str, LocalTensor]
    written: Sequence[tuple[str, torch.Tensor, int]]
    """Name, memory and autograd's count of writes of each part."""
    catalog: LiveCatalog
    holders: Mapping[int, Holder]

    def check_unchanged(self, targets: Iterable[LocalTensor]) -> None:
        """Raise ConsistencyError if the old state was written to since it was offered, but for memory that the new one shares."""
        shared = {part.memory.untyped_storage().data_ptr() for target in targets for part in target.parts}
        for name, memory, count in self.written:
            if memory._version != count and memory.untyped_storage().data_ptr() not in shared:
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
