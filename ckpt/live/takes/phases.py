"""The values between the steps of a take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.adapters.binding.targets import Binding
from ckpt.live.catalog import LiveCatalog
from ckpt.live.filling import FillPlan
from ckpt.live.offered import OfferedVersion
from ckpt.live.pull import Pulled
from ckpt.live.segments.mapped import LocalHolder
from ckpt.plan.transfers import Share, TransferPlan

SOURCE = "source"
"""What reports call the source among those who gave bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedTake:
    """A version that fits on every rank."""

    offered: OfferedVersion
    catalog: LiveCatalog
    binding: Binding
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    objects: bool
    """Whether a rank has objects that may refuse their state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedTake:
    """What comes from whom: from ``mapped`` segments of this machine, and what is ``left`` in pieces."""

    matched: MatchedTake
    plan: FillPlan
    mapped: Mapping[int, LocalHolder]
    left: TransferPlan
    why_whole: str | None
    """Why no changes can come, but all bytes; None if they can, empty if the source never sends them."""

    @property
    def mapped_bytes(self) -> int:
        return sum(self.plan.transfers.shares[rank].requests.total for rank in self.mapped)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedTake:
    """All that this rank needs is here, and compared with its digests; or, in place, will come. ``is_relayed``: others read the pieces."""

    planned: PlannedTake
    is_relayed: bool
    pieces: Sequence[tuple[Share, int, memoryview]]
    pulled: Pulled
    left: TransferPlan | None
    """What comes during the switch, in place."""

    def came_from(self, pulled: Pulled) -> dict[str, int]:
        """Bytes of this rank by whom they came from."""
        came = Counter({SOURCE: self.planned.mapped_bytes})
        for rank, count in pulled.received.items():
            offer = self.planned.matched.offered.relays.offer_of(rank)
            came[SOURCE if offer is None else offer.sink] += count
        return {who: count for who, count in came.items() if count}

    def came_whole(self, pulled: Pulled) -> dict[str, int]:
        """Bytes of this rank that came whole where changes could have, by why."""
        why = self.planned.why_whole
        if why is None:
            return dict(pulled.dense)
        return {why: sum(pulled.received.values())} if why and pulled.received else {}


@dataclass(frozen=True, kw_only=True, eq=False)
class SwitchedTake:
    """The state of every rank is the version. ``began``: when this one's began to be. The counts of bytes are those of all ranks."""

    began: float
    pulled: Pulled
    took_from: Mapping[str, int]
    dense: Mapping[str, int]
