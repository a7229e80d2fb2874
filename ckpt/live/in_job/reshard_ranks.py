"""The ranks that reshard together: their calls, the connections that notice who dies, and what the next reshard need not find again."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, finalize

from ckpt.coordination.call import Call
from ckpt.coordination.group import Group
from ckpt.coordination.members import Members
from ckpt.transport.endpoints import listen
from ckpt.transport.tcp import close_when_forked

from .offering import ReshardCache


@dataclass(eq=False)
class ReshardRanks:
    """The ranks of one process group. Their calls are in a part of the job's store that saves and loads do not use: these make no
    connections, and would else see who departs after the last reshard."""

    group: Group
    cache: ReshardCache = field(default_factory=ReshardCache)
    _connected: bool = False
    _ports: list[socket.socket] = field(default_factory=list)

    def ports(self) -> list[socket.socket]:
        """Where this rank serves, for one reshard: the addresses are those of the reshard before, so the others know them."""
        if not self._ports:
            self._ports = listen(self.group.store.host if self.group.store is not None else None)
            for port in self._ports:
                finalize(self, port.close)
        ports = [port.dup() for port in self._ports]
        for port in ports:
            close_when_forked(port)
        return ports

    def connect(self, call: Call) -> None:
        """In their first call the ranks connect to each other: who dies in this one or a later one is named at once. The connections end
        with the process group, or with the process."""
        if self._connected:
            return
        self._connected = True  # on all ranks, however it ends: they must agree on who comes to this phase
        self.group.connect(call, lambda rank: None)
        if self.group.links is not None:
            finalize(self.group, self.group.links.close)


def reshard_ranks(base: Group) -> ReshardRanks:
    """Those of a group; made by its first reshard, on all ranks."""
    known = _known.get(base)
    if known is None:
        known = _known[base] = ReshardRanks(base.apart())
    return known


_known: WeakKeyDictionary[Members, ReshardRanks] = WeakKeyDictionary()
