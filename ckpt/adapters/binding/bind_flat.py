"""State that an optimizer keeps for a flat parameter of FSDP version 1: one tensor for all of its parameters, which are stored apart."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.adapters.fsdp1 import FlatPart
from ckpt.adapters.sharded import Sharded
from ckpt.adapters.tensors import torch_dtype
from ckpt.catalog import TensorEntry
from ckpt.errors import ShapeError


@dataclass(eq=False, kw_only=True)
class FlatState:
    """One key of the state of one flat parameter, while a load binds its parameters: ``now`` is what the optimizer has, if anything.

    ``filled`` is the tensor that is filled part by part; ``numbers`` are single numbers, one for each parameter, which must come out equal,
    as the optimizer has one for all.
    """

    states: MutableMapping[Any, Any]
    owner: torch.Tensor
    key: str
    now: torch.Tensor | None
    filled: torch.Tensor | None = None
    numbers: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def target(self, state_name: str, part: FlatPart, entry: TensorEntry | None, *, host: bool) -> Sharded:
        """Where the state of one of the parameters goes."""
        if self.now is not None and tuple(self.now.shape) != part.alike:
            number = self.now.detach().clone()
        elif self.now is None and entry is not None and entry.shape != part.shape and entry.numel == 1:
            number = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu" if host else self.owner.device)
        else:
            return part.elements(self._flat_tensor(part, entry))
        self.numbers.append((state_name, number))
        return part.number(number)

    def _flat_tensor(self, part: FlatPart, entry: TensorEntry | None) -> torch.Tensor:
        if self.filled is None:
            dtype = None if entry is None else torch_dtype(entry.dtype)
            self.filled = torch.zeros(part.alike, dtype=dtype, device=self.owner.device) if self.now is None else self.now
        return self.filled

    def apply(self) -> None:
        """Give the optimizer what was filled."""
        if self.numbers:
            (first, number), *others = self.numbers
            other = next((name for name, value in others if not torch.equal(value, number)), None)
            if other is not None:
                raise ShapeError(
                    f"it is {number.item()} and {other} is {dict(others)[other].item()}, but FSDP's flat parameter has one for both",
                    where=f"tensor {first}",
                    hint="build FSDP with use_orig_params=True",
                )
            self.filled = number if self.now is None else self.now.copy_(number)
        if self.now is None and self.filled is not None:
            self.states[self.owner][self.key] = self.filled
