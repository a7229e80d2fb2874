"""A rank by itself: its address, a group of one, and a state that takes whatever a source has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt.transport.endpoints import own_addresses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ReceivedState:
    """Takes whatever a source has, in memory of its own."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing: all that comes is new."""
        return {}

    def load_state_dict(self, value: Any) -> None:
        """Keep it."""
        self.value = value


def group_of_one() -> ProcessGroup | None:
    """A process group of this rank alone, which no other rank has to hear of; None where torch.distributed is not in use."""
    if not dist.is_initialized():
        return None
    group: ProcessGroup = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return group


def own_address(name: str) -> str:
    """Where a source of this machine may listen: any free port of the interface that others reach (``CKPT_SOCKET_IFNAME``)."""
    host = own_addresses(None)[0]
    return f"tcp://{f'[{host}]' if ':' in host else host}:0/{name}"
