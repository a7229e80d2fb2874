"""What of a state changes only behind a fence (``engine/save/fence.py``), so that a save in the background may copy it later.

Torch calls a hook of ours before each optimizer's step, and the hook waits. Nothing else that changes tensors waits by itself. An optimizer
counts that is in the state, or that the hook has seen: who publishes weights seldom gives the optimizer, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from torch.optim import Optimizer

seen: WeakSet[Optimizer] = WeakSet()
"""Optimizers of this process that the hook has waited for."""


class Fenced:
    """An object that calls ``fence()`` before it changes its tensors; or leaves changing them, and parameters of the state's modules, to
    ``optimizers``."""

    optimizers: Sequence[Optimizer] = ()


def fencing(value: object) -> Sequence[Optimizer] | None:
    """The optimizers whose steps alone change the tensors of a value; None if something may change them that does not wait."""
    optimizers = [value] if isinstance(value, Optimizer) else value.optimizers if isinstance(value, Fenced) else None
    return optimizers if optimizers is not None and all(map(_waits, optimizers)) else None


def _waits(optimizer: Optimizer) -> bool:
    """Whether its step runs torch's hooks: not if its class has never called ``Optimizer.__init__``, or its step was replaced."""
    if getattr(optimizer.step, "hooked", False):
        return True
    inner = getattr(optimizer, "optimizer", None)  # accelerate's, for one, has the real one inside
    return isinstance(inner, Optimizer) and _waits(inner)
