"""How one take brings pieces of other machines here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.coordination.rows import Row
from ckpt.live.client import Holder
from ckpt.live.filling import Filling, is_packable, resolved
from ckpt.live.pieces.dense import DTYPES, NOT_KEPT
from ckpt.live.pull import PiecePull, PlaceBoxes, PullBase, Pulled
from ckpt.plan.transfers import Share, TransferPlan

from .meter import TakeMeter
from .phases import MatchedTake, PlannedTake


@dataclass(frozen=True, kw_only=True, eq=False)
class Puller:
    """How pieces of other machines are taken."""

    secret: bytes
    timeout: float
    threads: int
    receiver: int
    """A number that no rank of the source has."""
    local: str | None
    """The name of this machine, where memory of its other processes may be mapped."""
    base: str | None
    """The version that the state is, whole; None if it is none,"""
    no_base: str
    """and why (``pieces.dense``)."""
    alive: Callable[[], None]
    meter: TakeMeter

    def pull(
        self,
        planned: PlannedTake,
        plan: TransferPlan,
        filling: Filling,
        place: PlaceBoxes,
        room: Callable[[int], memoryview] | None = None,
    ) -> Pulled:
        """Take the pieces of a plan, as ``PiecePull.run``; only what changed in them where that can be."""
        if not plan.shares:
            return Pulled()
        offered = planned.matched.offered

        def counted(share: Share, piece: int, view: memoryview) -> None:
            place(share, piece, view)
            self.meter.add(share.requests.bytes_of(piece))

        how = PiecePull(
            version=offered.manifest.name,
            rank=self.receiver,
            secret=self.secret,
            timeout=self.timeout,
            threads=self.threads,
            alive=self.alive,
            shared=self.local is not None,
            room=room,
            spans=self.meter.spans,
            base=PullBase(version=self.base, fill=filling.pack) if self.base is not None and planned.why_whole is None else None,
        )
        holders = {rank: _holder(rank, row) for rank, row in offered.holders.items()}
        return how.run(plan, offered.relays.holders(holders), counted)

    def why_whole(self, matched: MatchedTake) -> str | None:
        """As ``PlannedTake.why_whole``."""
        offered, catalog = matched.offered, matched.catalog
        if not any(row["delta"] for row in offered.holders.values()):
            return ""
        if self.base is None:
            return self.no_base
        if self.base not in offered.kept:
            return NOT_KEPT
        return None if is_packable(resolved(matched.binding.targets.values(), catalog)[0]) else DTYPES


def _holder(rank: int, row: Row) -> Holder:
    return Holder(rank=rank, addresses=tuple((str(host), int(port)) for host, port in row["addresses"]), network=str(row["network"]))
