"""What a training loop puts into its state beside the model: data loaders, random number generators, averages of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

if TYPE_CHECKING:
    from .data import Batches as Batches
    from .data import LoaderState as LoaderState
    from .data import ResumableLoader as ResumableLoader
    from .ema import Average as Average
    from .inflight import Inflight as Inflight
    from .inflight import Ticket as Ticket
    from .rng import Generators as Generators

_WHERE = {
    "Batches": ".data",
    "LoaderState": ".data",
    "ResumableLoader": ".data",
    "Average": ".ema",
    "Generators": ".rng",
    "Inflight": ".inflight",
    "Ticket": ".inflight",
}
"""Public name → the module that has it."""

__all__ = list(_WHERE)

if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, _WHERE)
