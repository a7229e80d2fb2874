"""Which ranks take part in collective calls, and how they reach each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from .broadcast_tree import BroadcastTree
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
    tree: BroadcastTree | None = field(default=None, init=False)
    """Hands on what the leader has for all ranks; None for a single process."""

    def __post_init__(self) -> None:
        if self.store is not None:
            self.tree = BroadcastTree(self.store, self.ranks.index(self.rank), self.ranks)

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def size(self) -> int:
        return len(self.ranks)
