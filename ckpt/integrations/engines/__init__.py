"""Weights for generation engines: where the tensors of a checkpoint go in an engine's memory, recorded from its own ``load_weights``."""

from .loading import EngineCheckpoint
from .recorded import EngineSink, Recorded, record

__all__ = ["EngineCheckpoint", "EngineSink", "Recorded", "record"]
