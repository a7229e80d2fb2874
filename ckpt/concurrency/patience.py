"""How long the call that goes on lets others be silent: who asks something within it waits no longer for the answer."""

from __future__ import annotations

import math
from contextvars import ContextVar

patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds. Threads of ``run_tasks``, ``imap_unordered`` and ``Pending`` have that of whoever began them."""
