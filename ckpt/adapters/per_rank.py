"""Values that are meant to differ between ranks: one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Reshard = Callable[[Sequence[Any], int, int], Any]
"""``reshard(values, rank, world_size) -> value``: the value for a rank, made of the values that all ranks saved, in their order."""


class PerRank:
    """Wraps a value of which each rank has its own: a random-number state, a data loader's position.

    ``value`` is anything that a state may hold without sharding: JSON values, tensors, nested containers, or objects with
    ``state_dict`` and ``load_state_dict``, but no modules and optimizers. Loading on as many ranks as saved gives each rank its own value
    back: objects take theirs, dicts and lists stay the same objects, tensors are new ones. Loading on another number of ranks calls
    ``reshard``, and is an error without it.

    Example::

        state["rng"] = ckpt.PerRank(torch.get_rng_state(), reshard=lambda values, rank, world: values[rank % len(values)])
        ckpt.load(url, state)
        torch.set_rng_state(state["rng"].value)
    """

    def __init__(self, value: Any, *, reshard: Reshard | None = None) -> None:
        self.value = value
        self.reshard = reshard

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
