"""torchtitan with ckpt's checkpoints: its trainer makes the manager from the configuration.

>>> config.checkpoint = CheckpointManager.Config(enable=True, folder="checkpoint", interval=500)  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckpt.needs import needed

from . import titan

with needed("torchtitan", "torchtitan"):
    from torchtitan.components.checkpointer.base import BaseCheckpointManager


class CheckpointManager(BaseCheckpointManager):
    """torchtitan's interface (0.3 and later) to :class:`ckpt.integrations.titan.CheckpointManager`, where the arguments are described."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's fields, and those of ``titan.Config`` that it lacks."""

        async_mode: Literal["disabled", "async"] = "async"
        codec: str | None = None

    def __init__(self, config: Config, **parts: Any) -> None:
        self.enable = config.enable
        self.save_future: Any = None
        if self.enable:
            self.manager = titan.CheckpointManager(config, **parts)

    def _load(self, step: int = -1) -> bool:
        return self.manager.load(step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001  torchtitan's
        saved = self.manager.save(curr_step, last_step)
        handle = self.manager.checkpointer.handle
        self.save_future = handle.durable if handle is not None else None
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self.manager.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self.manager.maybe_wait_for_saving()
        self.save_future = None

    def _close(self) -> None:
        self.manager.close()
