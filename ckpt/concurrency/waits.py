"""Whether a thread had to wait: the sign that storage is slow, and that more threads pay."""

from __future__ import annotations

import resource

COUNTS_WAITS = hasattr(resource, "RUSAGE_THREAD")
"""Whether the system counts them for each thread."""


def waits_so_far() -> int:
    """How often this thread has given up its core of its own accord; 0 where nobody counts."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if COUNTS_WAITS else 0
