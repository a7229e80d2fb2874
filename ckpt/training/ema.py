"""Exponential moving averages of a model's parameters, on the shards that each rank holds, as a part of the state.

Each rank averages its own memory, so an update needs no messages, and a sharded average has the bits of one in a single process. In a
checkpoint an average has global tensors as a model does: it loads into any layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckpt.engine.save.staging import fence
from ckpt.errors import StateError, UsageError
from ckpt.state.collect import Fenced
from ckpt.state.tensors import local_of
from ckpt.state.torch_objects import tensors_of
from ckpt.state.walk import Compound

__all__ = ["Average"]

Decay = float | Callable[[int], float]
"""The share of the average that an update keeps, or a function that gives it for the number of updates before this one."""


class Average(Compound, Fenced):
    """The exponential moving average of the trained parameters of ``model``, to be put into a state: ``{"ema": Average(model, 0.999), …}``.

    It begins as a copy of the parameters. Each :meth:`update` computes ``average = decay * average + (1 - decay) * parameter``, both
    products rounded. Parameters without ``requires_grad`` and buffers are not averaged: they stay those of the model. Parameters may be
    DTensors (FSDP2, tensor parallelism) or plain tensors. Under the key ``ema``, saves name the averages
    ``ema.weights.<name of the parameter>``.

    Args:
        decay: from 0 to 1; or a function of the number of updates so far, for a warm-up.
        dtype: of the average. By default that of the parameter, and float32 for parameters of 16 bits: there most updates would be lost in
            rounding.

    Raises:
        UsageError: ``model`` is not a module, ``decay`` is not from 0 to 1, nothing is trained, or FSDP version 1 keeps the parameters in
            flat ones.
    """

    def __init__(self, model: nn.Module, decay: Decay, *, dtype: torch.dtype | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Average takes a module, not {type(model).__name__}", hint="Average(model, 0.999)")
        if not callable(decay):
            _checked(decay)
        if tensors_of(model).flat:
            raise UsageError("an average of the flat parameters of FSDP version 1 has no names", hint="use fully_shard (FSDP2)")
        self.decay = decay
        self._parameters = {name: p for name, p in tensors_of(model).tensors.items() if isinstance(p, nn.Parameter) and p.requires_grad}
        if not self._parameters:
            raise UsageError("the model has no parameter with requires_grad, so nothing can be averaged")
        wide = {p.dtype: torch.float32 if p.dtype.itemsize < torch.float32.itemsize else p.dtype for p in self._parameters.values()}
        copies = {id(p): p.detach().to(dtype=dtype or wide[p.dtype], copy=True) for p in self._parameters.values()}
        self._weights = {name: copies[id(p)] for name, p in self._parameters.items()}
        self._updates = 0
        self._swapped = False

    @property
    def updates(self) -> int:
        """How many there were, also before a load."""
        return self._updates

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The averages by the names of the parameters, laid out like these. Tied parameters have one average."""
        return dict(self._weights)

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters of now into the average; after ``optimizer.step()``. It waits for the copy of a running background save.

        Raises:
            UsageError: the averages are in the model now, or the decay is not from 0 to 1.
        """
        if self._swapped:
            raise UsageError("the model has the averaged weights now, so there is nothing to average", hint="update after the swap() block")
        decay = _checked(self.decay(self._updates) if callable(self.decay) else self.decay)
        fence()
        for average, parameter in self._pairs():
            average.mul_(decay)
            average.add_(parameter.to(average.dtype) * (1.0 - decay))  # not lerp_: its last bits depend on where a shard ends
        self._updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """The model has the averaged weights in the block, cast to the parameters' dtypes, and has its own again after it.

        Memory: one more copy of this rank's trained parameters. Do not train in the block: changes are lost.
        """
        if self._swapped:
            raise UsageError("the model has the averaged weights already", hint="leave the first swap() block before the next one")
        fence()
        with torch.no_grad():
            own = [(parameter, parameter.clone()) for _, parameter in self._pairs()]
        self._swapped = True
        try:
            with torch.no_grad():
                for average, parameter in self._pairs():
                    parameter.copy_(average)
            yield
        finally:
            fence()  # the averaged weights alone may be saved in the block
            with torch.no_grad():
                for parameter, before in own:
                    parameter.copy_(before)
            self._swapped = False

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's memory of each average and its parameter."""
        seen: set[int] = set()
        for name, parameter in self._parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield local_of(self._weights[name]), local_of(parameter)

    # ---- in a checkpoint

    def parts(self) -> dict[str, Any]:
        if self._swapped:
            raise StateError("the model has the averaged weights now: a save would store them as its own", hint="save outside of swap()")
        return {"updates": self._updates, "weights": dict(self._weights)}

    def slots(self) -> dict[str, Any]:
        return self.parts()

    def loaded(self, slots: dict[str, Any]) -> None:
        """Take what the load has filled; the tensors are filled in place."""
        self._updates = slots["updates"]


def _checked(decay: float) -> float:
    if not (isinstance(decay, int | float) and math.isfinite(decay) and 0.0 <= decay <= 1.0):
        raise UsageError(f"a decay is from 0 to 1, not {decay!r}", hint="0.999, for example")
    return decay
