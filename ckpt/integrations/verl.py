"""verl's rollouts take weights from a ``ckpt.live.Source`` on the trainer: every byte checked, and nobody waits for a rollout that died.

Set ``checkpoint_engine.backend: ckpt`` and ``checkpoint_engine.custom_backend_module: ckpt.integrations.verl``. verl hands whole tensors
over: the trainer's first rank has all of them in host memory. To send to each rank only what it keeps, use ``EngineSink`` in the rollout
instead. Machines other than the trainer's first need the same ``CKPT_LIVE_SECRET``. For verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ckpt.errors import UsageError
from ckpt.live import Sink, Source, Version
from ckpt.live.control import own_address
from ckpt.live.sink import take_step
from ckpt.needs import warn_if_untried
from ckpt.net.group import Job, group_of_one
from ckpt.state.walk import ReceivedState

warn_if_untried("verl", "0.9.1")


@CheckpointEngineRegistry.register("ckpt")
class CkptCheckpointEngine(CheckpointEngine):
    """Whole tensors, from the trainer's first rank to every rollout worker.

    Args:
        bucket_size: verl gives it; tensors are not put into buckets here.
        is_master: whether this is the trainer's first rank.
        timeout: seconds without a sign of life after which the other side counts as dead.
        progress: show how far a rollout is in taking a version.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,  # noqa: FBT001  verl's
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> None:
        self._master, self._progress = is_master, progress
        self._job = Job(process_group=group_of_one(), timeout=timeout)
        self._weights: dict[str, torch.Tensor] = {}
        self._source: Source | None = None
        self._sink: Sink | None = None
        self._received = ReceivedState()
        self._version: Version | None = None
        self._count = 0

    def prepare(self) -> dict[str, Any]:
        """The address of the source, on the trainer's first rank."""
        if not self._master:
            return {}
        if self._source is None:
            self._source = Source(own_address("verl"), {"weights": self._weights}, keep=1, job=self._job)
        return {"address": self._source.address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every worker gets the address."""
        address = metadata[0]["address"]
        return {"address": [address] * actor_wg_world_size}, {
            "address": [address] * rollout_world_size,
            "takes": [True] * rollout_world_size,
        }

    def init_process_group(self, address: str, takes: bool = False) -> None:  # noqa: FBT001  verl's
        """Connect, on a rollout worker."""
        if not takes or (self._sink is not None and self._sink.address == address):
            return
        if self._sink is not None:
            self._sink.close()
        self._version = None
        self._sink = Sink(address, {"weights": self._received}, job=self._job)

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None) -> None:
        """Publish them. All ranks of the trainer iterate, as the tensors are gathered meanwhile; the first one keeps them."""
        for name, tensor in weights:
            if self._master:
                self._weights[name] = tensor.detach().to("cpu", copy=True)
        if self._source is not None:
            self._count = self._count + 1 if global_steps is None else global_steps
            self._source.publish(self._count, capture="eager").result()
            self._weights.clear()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """The tensors of the next version, or of step ``global_steps``."""
        if self._sink is None:
            raise UsageError("receive_weights before init_process_group", hint="verl calls it on rollout workers")
        self._version = take_step(self._sink, global_steps, newer_than=self._version, progress=self._progress)
        for name, tensor in self._received.value.items():
            yield name, tensor

    def finalize(self) -> None:
        """Let go of the tensors; the connection stays for the next step."""
        self._received.value = None

    def close(self) -> None:
        """End the connection, or serve no more."""
        for end in (self._source, self._sink):
            if end is not None:
                end.close()
