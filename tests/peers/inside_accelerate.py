"""Loaded by accelerate's own checkpoint tests: every accelerator is given to ``ckpt.integrations.accelerate.use``.

The tests look at the directory as soon as ``save_state`` returns, so the save is waited for, and remove it as soon as they have loaded, so
the suite sets ``CKPT_RUN_LOG=off``: the log beside it is written later. ``PEERS_MODE=off`` changes nothing.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from accelerate import Accelerator

from ckpt.integrations.accelerate import use


def replace() -> None:
    made = Accelerator.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        use(self, background=False)

    init.by_ckpt = True  # type: ignore[attr-defined]
    Accelerator.__init__ = init  # type: ignore[method-assign]


if os.environ.get("PEERS_MODE") != "off" and not getattr(Accelerator.__init__, "by_ckpt", False):
    replace()
