"""dlrover's flash checkpoint beside ours in ``benchmarks.memory_tier``, where it is installed (``pip install dlrover==0.6.1``).

Its trainer copies the state into one buffer of shared memory, which another process holds, and computes no digests; the next save writes
over it. What is measured is ``save_checkpoint(..., StorageType.MEMORY)``: the trainer is blocked until it returns.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def dlrover_save(stack: ExitStack) -> Callable[[int, dict[str, Any]], None] | None:
    """Saves a state as a step, until ``stack`` is closed; None if dlrover is not installed."""
    run = f"ckpt-benchmark-{os.getpid()}"
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID=run)
    try:
        flash: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
    except ImportError:
        return None
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("dlrover")]:
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    checkpointer = flash.DdpCheckpointer(folder)
    stack.callback(_forget, run)

    def save(step: int, state: dict[str, Any]) -> None:
        checkpointer.save_checkpoint(step, dict(state), f"{folder}/{step}.pt", storage_type=flash.StorageType.MEMORY)

    return save


def _forget(run: str) -> None:
    for path in Path("/dev/shm").glob(f"{run}*"):
        path.unlink(missing_ok=True)
