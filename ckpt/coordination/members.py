"""Which ranks take part in collective calls, and how they reach each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from .channel import WrittenKeys
from .liveness_links import LivenessLinks
from .store import Store


@dataclass(eq=False)
class Members:
    """The ranks that take part, as global ranks; the first is the leader. ``store`` is None for a single process."""

    rank: int
    ranks: tuple[int, ...]
    store: Store | None = None
    calls: int = field(default=0, kw_only=True)
    """How many calls they have made. Every rank makes the same ones in the same order, so the number names a call."""
    keys: WrittenKeys = field(default_factory=WrittenKeys, kw_only=True)

    links: LivenessLinks | None = field(default=None, kw_only=True)
    """Connections that notice who dies, where the ranks have made them."""

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def size(self) -> int:
        return len(self.ranks)
