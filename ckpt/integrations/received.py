"""What adapters of live states share: a rank by itself, a state that takes whatever a source has, and waiting for a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from ckpt.transport.endpoints import own_addresses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckpt.live import Version
    from ckpt.tracing.progress_callback import ProgressCallback


class Taker(Protocol):
    """A ``ckpt.live.Sink`` or an ``EngineSink``."""

    def take(
        self, newer_than: Version | None = None, timeout: float | None = None, *, progress: bool | ProgressCallback | None = None
    ) -> Version: ...


def take_step(
    sink: Taker,
    step: int | None,
    timeout: float | None = None,
    *,
    newer_than: Version | None = None,
    progress: bool | ProgressCallback | None = None,
) -> Version:
    """Take versions newer than ``newer_than`` until one is of ``step`` or a later one: engines' requests name steps. None: the next one.

    ``timeout``: seconds for all of it; None: for each version what the sink waits by default. Raises as ``take``.
    """
    end = None if timeout is None else time.monotonic() + timeout
    version = sink.take(newer_than, timeout, progress=progress)
    while step is not None and version.step < step:
        version = sink.take(version, None if end is None else max(0.0, end - time.monotonic()), progress=progress)
    return version


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
