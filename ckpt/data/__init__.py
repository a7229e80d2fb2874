"""Data loaders in a checkpoint: no sample is dropped and none is seen twice, also on another number of ranks (docs/random-and-data.md)."""

from __future__ import annotations

from .batches import Batches
from .loader_state import LoaderState
from .resumable import ResumableLoader

__all__ = ["Batches", "LoaderState", "ResumableLoader"]
