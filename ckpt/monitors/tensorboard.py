"""Events as scalars of TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpt.errors import UsageError
from ckpt.events.event import Event
from ckpt.needs import needed

from .numbers import numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """``ckpt/save_seconds``, ``ckpt/save_blocked_seconds``, ``ckpt/save_bytes``, ``ckpt/save_stragglers``, ``ckpt/restore_seconds`` and
    so on, by training step; failures and alerts as text.

    Args:
        writer: the job's SummaryWriter, or a directory for one of its own.

    Raises:
        ImportError: tensorboard is not installed.
        UsageError: ``writer`` is neither.
    """

    def __init__(self, writer: SummaryWriter | str | os.PathLike[str]) -> None:
        with needed("tensorboard", "tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter
        if not isinstance(writer, SummaryWriter | str | os.PathLike):
            raise UsageError(f"TensorBoard takes a SummaryWriter or a directory, not {writer!r}")
        self._writer: Any = writer if isinstance(writer, SummaryWriter) else SummaryWriter(os.fspath(writer))

    def __call__(self, event: Event) -> None:
        for name, value in numbers(event).items():
            self._writer.add_scalar(f"ckpt/{name}", value, event.step, walltime=event.at)
        if event.kind == "alert" or event.error is not None:
            text = f"{event.topic or event.kind}: {event.reason}"
            self._writer.add_text("ckpt/alerts", text, event.step, walltime=event.at)
        self._writer.flush()
