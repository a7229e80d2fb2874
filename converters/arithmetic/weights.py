"""The weights of an average: given ones, equal ones, or those of a schedule. Pure."""

# A schedule gives checkpoints, oldest first, the weights that make their average the model that a decay of the learning rate would have
# made (Tian et al., "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging for LLM Pre-training", arXiv 2507.17634). The updates
# between n checkpoints are g_1 … g_{n-1}, so theta_j = theta_0 + g_1 + … + g_j, and
#
#     sum of c_j * theta_j  =  theta_0 + sum of w_i * g_i        with w_i = c_i + … + c_{n-1}
#
# An update keeps the share w_i of its length, as under a decayed learning rate. With the decay d, from d(0) = 1 down to d(1) = 0, that is
# w_i = d(i / n), and so
#
#     c_j = d(j / n) - d((j + 1) / n)         j = 0 (oldest) … n - 1 (newest)

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ckpt.errors import UsageError
from ckpt.text import units

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: (1.0 + math.cos(math.pi * t)) / 2.0,
    "sqrt": lambda t: 1.0 - math.sqrt(t),
}
"""Name of a schedule → the decay d(t) that its weights stand for. ``linear`` gives equal weights."""

TOLERANCE = 1e-6
"""How far from 1 the sum of weights may be: what is left of decimal fractions of seven digits."""


def schedule_weights(schedule: str, count: int) -> tuple[float, ...]:
    """The weights of ``count`` checkpoints, oldest first. They are positive, and their sum is 1."""
    decay = SCHEDULES.get(schedule)
    if decay is None:
        raise UsageError(f"no schedule {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}")
    if schedule == "linear":  # its differences are equal, but for rounding
        return (1.0 / count,) * count
    return tuple(decay(j / count) - decay((j + 1) / count) for j in range(count))


def checked_weights(weights: Sequence[float] | None, schedule: str | None, count: int, *, any_sum: bool) -> tuple[float, ...]:
    """The weights of ``count`` checkpoints: the given ones, those of a schedule, or equal ones."""
    if weights is None:
        return schedule_weights("linear" if schedule is None else schedule, count)
    if schedule is not None:
        raise UsageError("a schedule gives the weights itself", hint="give either weights or a schedule")
    given: object = weights
    if isinstance(given, str):
        raise UsageError(f"weights= are numbers, not {weights!r}", hint="weights=[0.25, 0.75]")
    if len(weights) != count:
        what = f"{units.plural(len(weights), 'weight')} for {units.plural(count, 'checkpoint')}"
        raise UsageError(what, hint="one weight for each, in the same order")
    if not all(map(math.isfinite, weights)):
        raise UsageError(f"weights are finite numbers, not {', '.join(map(str, weights))}")
    total = math.fsum(weights)
    if abs(total - 1.0) > TOLERANCE and not any_sum:
        hint = "fractions such as 1/3,1/3,1/3 are exact; --any-sum (any_sum=True) takes the weights as they are"
        raise UsageError(f"the weights sum to {total:g}, not to 1", hint=hint)
    return tuple(map(float, weights))
