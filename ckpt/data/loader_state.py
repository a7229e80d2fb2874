"""The state of a data loader of which each data-parallel rank has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ckpt.adapters.mesh_coordinate import MeshLike, StateSharding, holders
from ckpt.adapters.per_rank import Compound, PerRank, RankChoice
from ckpt.errors import ShapeError, UsageError
from ckpt.tree import Node

from .torchdata import resharded

Reshard: TypeAlias = Callable[[Sequence[Any], int, int], Any]
"""``reshard(states, index, count) -> state``: the state of data-parallel rank ``index`` of ``count``, made of those of all that saved."""


class Stateful(Protocol):
    """What a loader needs. If it also has a method ``reshard``, as ``Reshard`` says, it can be loaded on another number of data-parallel
    ranks."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class LoaderState(Compound):
    """Puts a data loader with a state of its own on each data-parallel rank into a state: ``{"loader": LoaderState(loader, …), …}``.

    Loaded on as many data-parallel ranks, each takes the state of its number, exactly; ranks of one number (a tensor-parallel group) take
    the same, however many there are of them. On another number of data-parallel ranks, states are split or merged by ``reshard``; without
    it that is an error, and nothing is changed.

    torchdata's ``StatefulDataLoader`` can do that by itself with :class:`Batches` as its ``batch_sampler``, or with a dataset that has
    ``reshard`` (docs/random-and-data.md).

    Args:
        loader: anything with ``state_dict`` and ``load_state_dict``.
        mesh: the parallel dimensions of all ranks of the job: a ``DeviceMesh``, a :class:`ckpt.Layout`, a :class:`ckpt.Mesh`, or names and
            sizes.
        over: the data-parallel dimensions. Without ``mesh`` and ``over`` every rank is one of its own.
        shared: keys of the loader's state that are equal on all ranks (sources, configuration, epoch). They are stored once, and compared.
        reshard: ``reshard(states, index, count)`` gives the state of data-parallel rank ``index`` of ``count``, from those of all that
            saved, in their order. By default the loader's method of this name, if it has one.
        stores: whether this rank stores the state. With large states, one rank of each number is enough: ``stores=tp_rank == 0``.

    Raises:
        UsageError, LayoutError: the mesh has no such dimension.
    """

    def __init__(
        self,
        loader: Stateful,
        *,
        mesh: MeshLike | None = None,
        over: str | Sequence[str] | None = None,
        shared: Sequence[str] = (),
        reshard: Reshard | None = None,
        stores: bool = True,
    ) -> None:
        self.loader = loader
        self.shared = (shared,) if isinstance(shared, str) else tuple(shared)
        self.reshard: Reshard | None = reshard or getattr(loader, "reshard", None) or resharded(loader)
        self.stores = stores
        self._seating = StateSharding(mesh, over, "over")

    def __repr__(self) -> str:
        return f"LoaderState({type(self.loader).__name__})"

    def parts(self) -> dict[str, Any]:
        state = self.loader.state_dict()
        if not self.shared:
            return {"own": _Own(self, state)}
        lacking = [key for key in self.shared if key not in state]
        if lacking:
            raise UsageError(f"the loader's state has no {lacking[0]!r}, which is said to be shared", hint=f"its keys are {list(state)}")
        own = {key: value for key, value in state.items() if key not in self.shared}
        return {"shared": {key: state[key] for key in self.shared}, "own": _Own(self, own)}

    def slots(self) -> dict[str, Any]:
        return {"own": _Own(self), **({"shared": _Shared()} if self.shared else {})}

    def loaded(self, slots: dict[str, Any]) -> None:
        shared = slots["shared"].state if self.shared else {}
        own: _Own = slots["own"]
        states = [{**shared, **state} if self.shared else state for state in own.states]
        if own.place is None:
            self.loader.load_state_dict(states[0])
        else:
            assert self.reshard is not None
            self.loader.load_state_dict(self.reshard(states, *own.place))


class _Shared:
    """Takes the values that all ranks share."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class _Own(PerRank):
    """The state of one data-parallel rank; what a load chose is in ``states``."""

    def __init__(self, of: LoaderState, state: Any = None) -> None:
        super().__init__(state)
        self.of = of
        self.states: list[Any] = []
        self.place: tuple[int, int] | None = None
        """Index and count of this data-parallel rank, if they were not those of a state that was saved."""

    def saved(self, rank: int, ranks: Sequence[int]) -> Any:
        seat = {"seat": self.of._seating.seat(rank, ranks).node()}
        return {**seat, "state": self.value} if self.of.stores else seat

    def choose(self, nodes: Mapping[int, Node], world_size: int, rank: int, ranks: Sequence[int]) -> RankChoice | None:
        seat = self.of._seating.seat(rank, ranks)
        count, holding = holders(nodes, "state")
        wanted = [seat.number] if count == seat.count else list(range(count))
        lacking = [n for n in wanted if n not in holding]
        if lacking:
            raise ShapeError(f"of {count} data-parallel ranks, none of number {lacking[0]} saved the loader's state: stores=False")
        if count != seat.count and self.of.reshard is None:
            raise ShapeError(
                f"saved by {count} data-parallel ranks, loaded by {seat.count}, and only the loader knows what its state means: load on "
                f"{count}, give LoaderState(reshard=...), or use ckpt.data.Batches (docs/random-and-data.md)"
            )
        self.place = None if count == seat.count else (seat.number, seat.count)
        return RankChoice(ranks=[holding[n] for n in wanted], take=self._take)

    def _take(self, values: list[Any]) -> None:
        self.states = [value["state"] for value in values]
