"""What a take did, for the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.live.versions import Version
from ckpt.tracing.spans import SpanTable

from .phases import SOURCE, StagedTake, SwitchedTake


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """What a take did on this rank. Bytes: ``needed`` by its state, as the source has them; ``mapped``: copied from memory of other
    processes of this machine; ``received`` from other ranks of the source, by rank; ``relayed`` from other sinks, by their names;
    ``transferred`` came for these over the network or in slots: fewer, where only changes came. ``lost``: ranks of the source, and
    ``lost_relays``: sinks, that others stood in for, and why. ``took_from``: bytes of all ranks of the sink by whom they came from,
    ``"source"`` or another sink. ``dense``: of these, what came whole from a source with ``delta=True``, by why: ``"first version"``,
    ``"base not kept"`` (the source keeps the version no more that this sink had), ``"changes no shorter"``, ``"state was changed"`` (by
    somebody else), ``"state was torn"``, ``"other dtypes"``, ``"base has other tensors"``, ``"shared memory"``.
    ``waited``: seconds for the version to be there, ``seconds`` for the rest, of which ``switch`` for the copy into the state.
    ``spans.sums`` has the seconds and bytes of its phases: ``match``, ``plan``, ``pull`` (one for each connection to a rank), ``verify``
    (within ``pull``, but for memory of this machine) and ``switch``; none with ``CKPT_SPANS=off``.
    ``missing``, ``unexpected``, as for ``ckpt.load``."""

    version: Version
    needed: int
    mapped: int
    received: Mapping[int, int]
    relayed: Mapping[str, int]
    transferred: int
    lost: Mapping[int, str]
    lost_relays: Mapping[str, str]
    took_from: Mapping[str, int]
    dense: Mapping[str, int]
    waited: float
    seconds: float
    switch: float
    spans: SpanTable
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(
        cls,
        staged: StagedTake,
        switched: SwitchedTake,
        *,
        waited: float,
        seconds: float,
        switch: float,
        spans: SpanTable,
    ) -> TakeReport:
        """Of a take that has ended."""
        matched = staged.planned.matched
        offered, pulled = matched.offered, switched.pulled
        lost = {rank: (offered.relays.offer_of(rank), str(err)) for rank, err in pulled.lost.items()}
        return cls(
            version=offered.version,
            needed=staged.planned.plan.transfers.needed,
            mapped=staged.planned.mapped_bytes,
            received={rank: count for rank, count in pulled.received.items() if rank in offered.holders},
            relayed={who: count for who, count in staged.came_from(pulled).items() if who != SOURCE},
            transferred=pulled.transferred,
            lost={rank: why for rank, (offer, why) in lost.items() if offer is None},
            lost_relays={offer.sink: why for offer, why in lost.values() if offer is not None},
            took_from=switched.took_from,
            dense=switched.dense,
            waited=waited,
            seconds=seconds,
            switch=switch,
            spans=spans,
            missing=matched.missing,
            unexpected=matched.unexpected,
        )
