"""The group of ranks that save and load together, found from torch.distributed.

Control goes through the job's key-value store only: no collective that training could interleave with.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckpt.errors import UsageError
from ckpt.text.json_reader import parse_json

from .call import Call
from .liveness_links import LivenessLinks
from .members import Members
from .store import Store, group_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Group(Members):
    """The ranks of one process group, and the calls that they have made."""

    served: object = None
    """The job's own store. As long as it is referred to, its server runs, also after ``destroy_process_group``: a save may be going on."""
    own_stores: int = 0
    """How many parts of the store were set aside, for a Checkpointer's agreement on steps and the like."""

    def call(self, kind: str, url: str, timeout: float, *, overlaps: bool = False) -> Call:
        """Begin a collective call; every rank makes the same calls in the same order. ``overlaps``: an earlier one may go on in the
        background, on any rank."""
        self.calls += 1
        return Call(self, f"{self.calls}", kind, url, timeout, overlaps)

    def own_store(self) -> Store:
        """A part of the job's store that nobody else uses: the ranks of a group make them in the same order."""
        assert self.store is not None
        self.own_stores += 1
        return self.store.part(f"own/{self.own_stores}")

    def apart(self) -> Group:
        """The same ranks, for calls that go on beside those of this group. Made once for each purpose, by all ranks in the same order: what
        a call leaves in the store is deleted by the next one."""
        return Group(self.rank, self.ranks, self.own_store() if self.store is not None else None, self.served)

    def connect(self, call: Call, on_death: Callable[[int], None]) -> None:
        """Have the ranks notice at once when one of them dies, in this and all later calls; collective, a phase of ``call``."""
        if self.store is None:
            return
        with call.phase("connect"):
            position = self.ranks.index(self.rank)
            links = LivenessLinks(position, self.ranks, call.timeout, store=self.store.host, on_death=on_death)
            try:
                # In the leader's word, where the heads are would go to every rank; each needs one of them.
                if where := links.where():
                    self.store.set(f"liveness/{position}", json.dumps(where).encode())
                secret = call.lead({}, lambda rows: secrets.token_hex(16)) if call.is_leader else call.follow({})
                head = self.store.peek(f"liveness/{links.parent}")
                links.connect(bytes.fromhex(secret), parse_json(head) if head is not None else {"addresses": [], "network": ""})
            except BaseException:  # after Ctrl-C, too: no connection of half of the ranks stays open
                links.close()
                raise
            self.links = links


def warn_if_others_are_missing(group: Group) -> None:
    """Warn, once, of a launcher whose processes do not know each other: each of them would save alone, to the same place."""
    size = os.environ.get("WORLD_SIZE", "")
    if group.size > 1 or not size.isdecimal() or int(size) < 2 or "RANK" not in os.environ or _warned:
        return
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        _warned.append(size)
        log.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialized: this process saves alone, as if it were the only one", size
        )


_warned: list[str] = []
_groups: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()
_alone = threading.local()
"""The group of a thread that saves and loads without torch.distributed: threads do so independently of each other."""


def current_group(process_group: ProcessGroup | None = None) -> Group:
    """The group of ``process_group``, of torch.distributed's world, or of this process alone if torch.distributed is not in use."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if not hasattr(_alone, "group"):
            _alone.group = Group(0, (0,))
        alone: Group = _alone.group
        return alone
    pg = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    ranks = tuple(dist.get_process_group_ranks(pg))
    rank = dist.get_rank()
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not in the process group {list(ranks)[:8]}")
    known = _groups.get(pg)
    if known is None and len(ranks) == 1:  # nobody to talk to
        known = _groups[pg] = Group(rank, ranks)
    if known is None:
        base = dist.distributed_c10d._get_default_store()
        known = _groups[pg] = Group(rank, ranks, group_store(base, pg.group_name, rank), base)
    return known
