"""Limits so small that small tensors show what large ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckpt import settings
from ckpt.plan import ownership


@contextmanager
def small_chunks(chunk: int, undivided: int | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Chunks have at most ``chunk`` bytes, and cells of ``undivided`` are divided, or blocks of as many not gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "CHUNK", chunk)
        if undivided is not None:
            patch.setattr(settings, "UNDIVIDED", undivided)
        ownership._assignment.cache_clear()
        yield patch
    ownership._assignment.cache_clear()
