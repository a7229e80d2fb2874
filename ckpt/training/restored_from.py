"""Where the state came from that a job goes on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.text import units


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredFrom:
    """What :meth:`ckpt.Checkpointer.restore` has loaded; ``str`` of it says it in words.

    ``url``: a copy of it that any process can open; None if only this job can, since its files are spread over machines and the step is
    not at the root. ``sources``: the bytes of data files that this rank has read, by where they were: ``memory of this host``,
    ``disk of host b``, ``parity`` (computed from what other machines have), ``root``. Empty without a tier that is spread over machines.
    """

    step: int
    url: str | None
    sources: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        where = self.url if self.url is not None else f"step {self.step}, which only this job can open"
        if not self.sources:
            return where
        return f"{where}: {', '.join(f'{place} {units.size(nbytes)}' for place, nbytes in self.sources.items())}"


def merged_sources(sources: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of several tiers, the nearest first, by place; what was computed from parity and the root last."""
    merged: Counter[str] = Counter()
    for places in sources:
        merged.update(places)
    last = {place: merged.pop(place) for place in ("parity", "root") if place in merged}
    return {**merged, **last}
