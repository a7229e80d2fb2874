"""torchft heals a replica through ``ckpt.live``: every byte checked against its digest, nothing unpickled.

``Manager(checkpoint_transport=CkptTransport(timeout), ...)``. As torchft asks for it, each rank of a replica heals from the rank of the
same number in another one: both have the same layout. Replicas on several machines need the same ``CKPT_LIVE_SECRET``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

from ckpt.errors import ConflictError
from ckpt.live import Sink, Source
from ckpt.live.control import own_address
from ckpt.live.sink import take_step
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job, group_of_one
from ckpt.state.dtensor import is_dtensor
from ckpt.state.walk import ReceivedState

T = TypeVar("T")
warn_if_untried("torchft", "0.2")


class CkptTransport(CheckpointTransport[T], Generic[T]):
    """Serves this rank's state to ranks that are behind, and fetches it if this one is.

    A DTensor arrives as the plain tensor of this rank's part, which ``load_state_dict`` of a module with DTensors does not take:
    give ``Manager`` functions that use ``to_local()``. Values are plain ones or tensors; an object is a ``StateError`` that names it.

    Args:
        timeout: seconds without a sign of life after which the other side counts as dead.
        host: address by which other replicas reach this machine; by default that of the interface that others reach.
        secret: what all replicas know; by default ``CKPT_LIVE_SECRET``.
    """

    def __init__(self, timeout: timedelta, *, host: str | None = None, secret: str | bytes | None = None) -> None:
        self._secret = secret
        self._job = Job(process_group=group_of_one(), timeout=timeout.total_seconds())
        self._state: dict[str, Any] = {"state": {}}
        address = own_address("torchft") if host is None else f"tcp://{host}:0/torchft"
        self._source = Source(address, self._state, keep=1, secret=secret, job=self._job)

    def metadata(self) -> str:
        """The address that ``recv_checkpoint`` of other replicas is given."""
        return self._source.address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Serve a copy of the state; returns when it is copied."""
        self._state["state"] = tree_map(lambda value: value.to_local() if is_dtensor(value) else value, state_dict)
        try:
            # A step that was not committed is sent again.
            self._source.publish(step, capture="eager", again=True).result(timeout.total_seconds())
        finally:
            self._state["state"] = {}

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """The state of ``step``, in memory of its own.

        Raises:
            DeadlineError: the other rank does not serve that step in time.
            ConflictError: it serves a later one.
        """
        received = ReceivedState()
        with Sink(metadata, {"state": received}, secret=self._secret, job=self._job) as sink:
            taken = take_step(sink, step, timeout.total_seconds())
        if taken.step != step:
            raise ConflictError(f"step {step} was asked for, and the source serves step {taken.step}", where=metadata)
        value: T = received.value
        return value

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001  torchft's
        """Serve no more."""
        self._source.close()
