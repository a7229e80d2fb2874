"""Values that are meant to differ between ranks, and objects that are made of several kinds of state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ShapeError
from ckpt.tree import Node

from .stateful import restore_in_place

Reshard = Callable[[Sequence[Any], int, int], Any]
"""``reshard(values, rank, world_size) -> value``: the value for a rank, made of the values that all ranks saved, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChoice:
    """What a rank takes of a value that was saved per rank: the values of ``ranks``, in this order, which are given to ``take``."""

    ranks: Sequence[int]
    take: Callable[[list[Any]], None]


class PerRank:
    """Wraps a value of which each rank has its own.

    ``value`` is anything that a state may hold without sharding: JSON values, tensors, nested containers, or objects with
    ``state_dict`` and ``load_state_dict``, but no modules and optimizers. Loading on as many ranks as saved gives each rank its own value
    back: objects take theirs, dicts and lists stay the same objects, tensors are new ones. Loading on another number of ranks calls
    ``reshard``, and is an error without it. :class:`ckpt.rng.Generators` and :class:`ckpt.data.LoaderState` know better what is to
    happen then for random number generators and data loaders.

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

    def saved(self, rank: int, ranks: Sequence[int]) -> Any:
        """What ``rank``, one of the job's ``ranks``, leaves in the checkpoint."""
        return self.value

    def choose(self, nodes: Mapping[int, Node], world_size: int, rank: int, ranks: Sequence[int]) -> RankChoice | None:
        """What ``rank``, one of the job's ``ranks``, takes of the ``nodes`` that were saved by ``world_size`` ranks, which count from 0;
        None if its own is missing.

        Raises:
            ShapeError: it cannot be said who takes what. Nothing was changed.
        """
        position, count = list(ranks).index(rank), len(ranks)
        if world_size == count:
            return RankChoice(ranks=[position], take=lambda values: self._put(values[0])) if position in nodes else None
        reshard = self.reshard
        if reshard is None:
            raise ShapeError(f"saved per rank by {world_size} ranks, loaded by {count}; give PerRank(value, reshard=...) to say how")
        return RankChoice(ranks=list(nodes), take=lambda values: self._put(reshard(values, position, count)))

    def _put(self, value: object) -> None:
        self.value = restore_in_place(self.value, value)


class Compound:
    """An object whose state is of several kinds, such as values of the job and values of each rank. For subclasses."""

    def parts(self) -> dict[str, Any]:
        """What is saved in its place."""
        raise NotImplementedError

    def slots(self) -> dict[str, Any]:
        """What a load fills: live objects under the names that ``parts`` gives. Asked for before it is known that the checkpoint fits."""
        raise NotImplementedError

    def loaded(self, slots: dict[str, Any]) -> None:
        """Take what the load has filled."""
        raise NotImplementedError
