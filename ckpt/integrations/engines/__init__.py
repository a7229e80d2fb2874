"""Weights for generation engines: where the tensors of a checkpoint go in an engine's memory, recorded from its own ``load_weights``."""

from .engine_sink import EngineSink
from .loading import EngineCheckpoint
from .recorded import Recorded, record

__all__ = ["EngineCheckpoint", "EngineSink", "Recorded", "record"]
