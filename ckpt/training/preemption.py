"""Notices that the job will be stopped: signals set a flag, and the handlers that were there before still run.

    SIGTERM on any rank ──► flag ──► that rank's next step() passes it to the leader ──► OnPreemption is due
    all ranks agree on a step that none has passed ──► save ──► committed ──► Checkpointer.preempted is True on every rank

The handler itself only sets the flag: it may run between any two bytecodes, also while the job's store or a lock is in use.
Handlers can be set in the main thread only; elsewhere nothing is watched, and ``watch`` says so.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

log = logging.getLogger("ckpt")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What Slurm (``--signal``), Kubernetes and torchrun send before they stop a job."""


class Preemption:
    """``noticed`` is set once one of the signals has come."""

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self.signals = tuple(signals)
        self.noticed = threading.Event()
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals are not watched: the Checkpointer was not made in the main thread")
            return
        for number in self.signals:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing but a flag: a lock taken here could be held by the very code that the signal interrupted.
        self.noticed.set()
        before: Callable[[int, FrameType | None], Any] | int | None = self._before.get(number)
        if callable(before):  # not the default action, which would end the process before it has saved
            before(number, frame)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
