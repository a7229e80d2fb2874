"""Data loaders in a checkpoint: no sample is dropped and none is seen twice, also on another number of ranks (docs/random-and-data.md)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Sampler

from ckpt.errors import MismatchError, StateError, UsageError
from ckpt.plan.tree import Node
from ckpt.state.dtensor import MeshLike, StateSharding, holders
from ckpt.state.walk import Compound, PerRank, RankChoice, ReceivedState

# The global order of samples, cut into steps. A position in it means the same on any number of ranks. Pure.

Tail: TypeAlias = Literal["carry", "drop", "short"]
"""What becomes of the samples at the end of an epoch that do not fill a step: the step is filled up from the next epoch; they are left out;
or the step is smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """So many samples of this epoch have been taken, by all ranks together."""

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """``samples`` per epoch, taken ``size`` at a time by all ranks together."""

    samples: int
    size: int
    tail: Tail

    def __post_init__(self) -> None:
        if self.samples < 1 or self.size < 1:
            raise UsageError(f"batches of {self.size} out of {self.samples} samples", hint="both must be at least 1")
        if self.tail not in ("carry", "drop", "short"):
            raise UsageError(f"tail is 'carry', 'drop' or 'short', not {self.tail!r}")
        if self.tail == "drop" and self.size > self.samples:
            raise UsageError(f"an epoch has {self.samples} samples, so tail='drop' leaves out all: a batch has {self.size}")

    def settled(self, at: Position) -> Position:
        """Where the next step really begins: at the next epoch if this one has no step left."""
        left = self.samples - at.taken
        if left <= 0 or (self.tail == "drop" and left < self.size):
            return Position(epoch=at.epoch + 1)
        return at

    def step(self, at: Position) -> tuple[list[tuple[int, int, int]], Position]:
        """The step from a position, as ``(epoch, start, stop)`` ranges of the epochs' orders, and the position after it."""
        at = self.settled(at)
        ranges, missing = [], self.size
        while missing:
            stop = min(self.samples, at.taken + missing)
            ranges.append((at.epoch, at.taken, stop))
            missing -= stop - at.taken
            at = self.settled(Position(epoch=at.epoch, taken=stop))
            if self.tail != "carry":
                break
        return ranges, at

    def left(self, at: Position) -> int:
        """How many steps begin in the epoch of a position, from there on."""
        left = self.samples - self.settled(at).taken
        return left // self.size if self.tail == "drop" else -(-left // self.size)


def share(count: int, part: int, parts: int) -> slice:
    """The samples of a step that are for one of ``parts``: contiguous, and as many as the others have, or one more or less."""
    return slice(part * count // parts, (part + 1) * count // parts)


def shuffled(samples: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of an epoch. NumPy promises that a ``RandomState`` never changes what it gives, so a job may be resumed with another
    version."""
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    order: Sequence[int] = np.random.RandomState(bits).permutation(samples)  # type: ignore[assignment]
    return order


# A batch sampler whose position does not depend on the number of ranks.

Order = Callable[[int], Sequence[int]]
"""``order(epoch)``: the samples in the order of this epoch; the same on all ranks, and whenever it is asked."""


class Batches(Sampler[list[int]]):
    """Batches of a map-style dataset, for ``DataLoader(dataset, batch_sampler=…)``: at each step all data-parallel ranks together take the
    next ``size`` samples of one order, each its part of them.

    It counts what is asked for, and workers ask ahead of time; so put it into a :class:`ResumableLoader`, which counts what is used, or
    into torchdata's ``StatefulDataLoader``.

    Args:
        samples: how many the dataset has.
        size: samples per step of all parts together. It may change when a job is resumed, and so may ``parts`` and ``tail``.
        part, parts: the number of this data-parallel rank and how many there are. Ranks that are to see the same samples (those of one
            tensor-parallel group) give the same number. Parts differ by one sample if ``size`` does not divide.
        order: ``"shuffled"``, anew in each epoch; ``"as-is"``; or a function from an epoch to the sequence of its samples.
        seed: of the shuffling.
        tail: what becomes of the samples at the end of an epoch that do not fill a step. ``"carry"``: the step is filled up with the next
            epoch's first; all steps are of one size. ``"drop"``: they are left out. ``"short"``: the last step is smaller; a part of it may
            be an empty list, if fewer samples than parts are left, and torch's default ``collate_fn`` cannot take that: give your own.

    Raises:
        UsageError: the numbers do not fit together.
    """

    def __init__(
        self,
        samples: int,
        *,
        size: int,
        part: int = 0,
        parts: int = 1,
        order: str | Order = "shuffled",
        seed: int = 0,
        tail: Tail = "carry",
    ) -> None:
        self.steps: Steps = Steps(samples=samples, size=size, tail=tail)
        if not 0 <= part < parts <= size:
            raise UsageError(
                f"part {part} of {parts} in batches of {size}", hint="size counts the samples of all data-parallel ranks together"
            )
        if seed < 0 or not (callable(order) or order in ("shuffled", "as-is")):
            raise UsageError(f"order is 'shuffled', 'as-is' or a function, seed not negative: {order!r}, {seed}")
        self.part: int = part
        self.parts: int = parts
        self.start: Position = Position()
        """Where the next iteration begins."""
        self._named = "function" if callable(order) else f"shuffled {seed}" if order == "shuffled" else "as-is"
        own = order if callable(order) else (lambda epoch: range(samples)) if order == "as-is" else partial(shuffled, samples, seed)
        self._order = lru_cache(maxsize=2)(own)

    def __iter__(self) -> Iterator[list[int]]:
        return _Iteration(self)

    def __len__(self) -> int:
        """Steps that are left of the epoch."""
        return self.steps.left(self.start)

    def at(self, position: Position) -> list[int]:
        """This part of the step that begins at a position."""
        ranges, _ = self.steps.step(position)
        mine = share(sum(stop - start for _, start, stop in ranges), self.part, self.parts)
        samples: list[int] = []
        before = 0
        for epoch, start, stop in ranges:
            low, high = max(mine.start - before, 0), min(mine.stop - before, stop - start)
            if low < high:
                samples += map(int, self._samples(epoch)[start + low : start + high])
            before += stop - start
        return samples

    def _samples(self, epoch: int) -> Sequence[int]:
        order = self._order(epoch)
        if len(order) != self.steps.samples:
            raise UsageError(f"order({epoch}) gives {len(order)} samples, not {self.steps.samples}")
        return order

    def position_state(self, position: Position) -> dict[str, Any]:
        """A position as plain values, with what it is a position in."""
        return {"epoch": position.epoch, "taken": position.taken, "samples": self.steps.samples, "order": self._named}

    def position_of(self, state: Any) -> Position:
        """The position that ``position_state`` gave."""
        now = self.position_state(Position())
        for key in ("samples", "order"):
            if state[key] != now[key]:
                raise StateError(
                    f"the data loader was saved at a position among other samples: {key} {state[key]}, now {now[key]}",
                    hint="resume with the same dataset, order and seed, or leave the loader out of the load: only=[...]",
                )
        return Position(epoch=state["epoch"], taken=state["taken"])


class _Iteration(Iterator[list[int]]):
    """What is left of one epoch. torchdata keeps its state, as of the batch that was used last."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.position = batches.steps.settled(batches.start)
        self.epoch = self.position.epoch

    def __next__(self) -> list[int]:
        if self.position.epoch != self.epoch:
            self.batches.start = self.position
            raise StopIteration
        samples = self.batches.at(self.position)
        _, self.position = self.batches.steps.step(self.position)
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {**self.batches.position_state(self.position), "iterates": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = self.batches.start = self.batches.position_of(state)
        self.epoch = state["iterates"]


T = TypeVar("T")


class ResumableLoader(Generic[T]):
    """A ``DataLoader`` that knows how many of its samples were used, and continues there on any number of ranks.

    Each ``for`` loop over it runs to the end of the epoch that it is in. A batch counts as used when the loop gets it, whatever workers
    have fetched ahead. Put it into the state as it is: its state is the same on all ranks, and a save checks that.

    Args:
        loader: a ``DataLoader`` with :class:`Batches` as its ``batch_sampler``, and any other options but ``in_order=False``.
        counts: ``"used"``: a batch counts when :meth:`used` is called, in the order of the loop. For a loop that fetches ahead of training,
            such as one that copies the next batch to the device.

    Raises:
        UsageError: it is another one.

    Example::

        batches = Batches(len(dataset), size=64, part=mesh.get_local_rank("dp"), parts=mesh["dp"].size())
        loader = ResumableLoader(DataLoader(dataset, batch_sampler=batches, num_workers=4))
        state = {"model": model, "loader": loader}
        while loader.epoch < 3:
            for batch in loader:
                ...  # a save here knows that this batch was used
    """

    def __init__(self, loader: DataLoader[T], *, counts: Literal["received", "used"] = "received") -> None:
        if counts not in ("received", "used"):
            raise UsageError(f"counts is 'received' or 'used', not {counts!r}")
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, Batches):
            raise UsageError(
                "the DataLoader has no ckpt.training.Batches as its batch_sampler", hint="other loaders go into ckpt.training.LoaderState"
            )
        if not getattr(loader, "in_order", True):
            raise UsageError(
                "with in_order=False it cannot be known which samples were used", hint="make the DataLoader with in_order=True"
            )
        self.loader = loader
        self.batches = batches
        self._counts = counts
        self._position: Position = self.batches.start
        """After the last batch that counts."""
        self._received = self._position
        self._unused: deque[Position] = deque()
        """Of batches that a loop has got and that do not count yet: the position after each."""
        self._loop: object = None

    @property
    def epoch(self) -> int:
        """The epoch that the next loop runs over, counted from 0."""
        return self.batches.steps.settled(self._received).epoch

    @property
    def taken(self) -> int:
        """Samples of this epoch that were used, by all ranks together."""
        return self.batches.steps.settled(self._position).taken

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return self.batches.steps.left(self._received)

    def __iter__(self) -> Iterator[T]:
        mine = self._loop = object()
        self.batches.start = self._received
        for batch in self.loader:
            if self._loop is not mine:
                raise UsageError("a load, or another loop over this loader, has ended this loop", hint="begin a new one")
            _, self._received = self.batches.steps.step(self._received)
            self._unused.append(self._received)
            if self._counts == "received":
                self.used()
            yield batch

    def used(self) -> None:
        """The oldest batch that does not count yet was used: after the training step, with ``counts="used"``."""
        if not self._unused:
            raise UsageError("every batch that the loop has got counts already", hint='call used() once per batch, with counts="used"')
        self._position = self._unused.popleft()

    def state_dict(self) -> dict[str, Any]:
        return self.batches.position_state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = self._received = self.batches.position_of(state)
        self._unused.clear()
        self._loop = None


# What can be said of the state of torchdata's StatefulDataLoader on another number of ranks (torchdata 0.8 to 0.11).
#
# Its state says how far each worker's copy of the dataset is, and where its sampler is. That fits these ranks and workers alone. So the
# loader begins a new iteration: with :class:`Batches` at the position that all ranks share, or with a dataset that takes up what all copies
# had left.


def resharded(loader: Any) -> Callable[[Sequence[Any], int, int], Any] | None:
    """How to load a ``StatefulDataLoader`` on another number of data-parallel ranks; None if that cannot be, or it is no such loader."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is None or not isinstance(loader, torchdata.StatefulDataLoader):
        return None
    takes_up = callable(getattr(loader.dataset, "reshard", None))
    if not takes_up and not isinstance(loader.batch_sampler, Batches):
        return None

    def reshard(states: Sequence[Any], index: int, count: int) -> Any:
        """Set the position of the sampler and the state of the dataset; the loader's own state is that of a fresh one."""
        if any(state.get("_steps_since_snapshot", 0) for state in states):
            raise StateError("the loader's state lies behind what was used", hint="make it with snapshot_every_n_steps=1")
        copies = [copy for state in states for copy in _datasets(state)]
        known = [copy for copy in copies if copy is not None]
        if takes_up:
            loader.dataset.load_state_dict(loader.dataset.reshard(known, index, count))
        elif known:
            raise StateError("the dataset has its own state, which cannot be split", hint="give the dataset a method reshard")
        if isinstance(loader.batch_sampler, Batches):
            mains = [state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state for state in states]
            positions = {loader.batch_sampler.position_of(main["_sampler_iter_state"]) for main in mains}
            if len(positions) > 1:
                raise StateError(f"ranks had used different numbers of batches: {positions}", hint="save after the same step on all ranks")
            loader.batch_sampler.start = positions.pop()
        return {}

    return reshard


def _datasets(state: Mapping[str, Any]) -> list[Any]:
    """The states of the dataset, or of its iterator, in each worker; None where it has none."""
    by_name = state["_snapshot"]["_worker_snapshots"] if "_snapshot" in state else {"worker_0": state}
    workers = [by_name[f"worker_{i}"] for i in range(len(by_name))]
    iterators = [(worker["fetcher_state"] or {}).get("dataset_iter_state") for worker in workers]
    return [w["dataset_state"] if w["dataset_state"] is not None else it for w, it in zip(workers, iterators, strict=True)]


# The state of a data loader of which each data-parallel rank has its own.

Reshard: TypeAlias = Callable[[Sequence[Any], int, int], Any]
"""``reshard(states, index, count) -> state``: the state of data-parallel rank ``index`` of ``count``, made of those of all that saved."""


class Stateful(Protocol):
    """What a loader needs. If it also has a method ``reshard``, as ``Reshard`` says, it can be loaded on another number of data-parallel
    ranks."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class LoaderState(Compound):
    """Puts a data loader with a separate state on each data-parallel rank into a state: ``{"loader": LoaderState(loader, …), …}``.

    Loaded on as many data-parallel ranks, each takes the state of its number, exactly; ranks of one number (a tensor-parallel group) take
    the same, however many there are of them. On another number of data-parallel ranks, states are split or merged by ``reshard``; without
    it that is an error, and nothing is changed.

    torchdata's ``StatefulDataLoader`` can do that by itself with :class:`Batches` as its ``batch_sampler``, or with a dataset that has
    ``reshard`` (docs/random-and-data.md).

    Args:
        loader: anything with ``state_dict`` and ``load_state_dict``.
        mesh: the parallel dimensions of all ranks of the job: a ``DeviceMesh``, a :class:`ckpt.Layout`, a :class:`ckpt.Mesh`, or names and
            sizes.
        over: the data-parallel dimensions. Without ``mesh`` and ``over`` every rank is a separate one.
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
        self.shared: tuple[str, ...] = (shared,) if isinstance(shared, str) else tuple(shared)
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
            raise UsageError(f"the loader's state has no {lacking[0]!r}, which is listed as shared", hint=f"its keys are {list(state)}")
        own = {key: value for key, value in state.items() if key not in self.shared}
        return {"shared": {key: state[key] for key in self.shared}, "own": _Own(self, own)}

    def slots(self) -> dict[str, Any]:
        return {"own": _Own(self), **({"shared": ReceivedState()} if self.shared else {})}

    def loaded(self, slots: dict[str, Any]) -> None:
        shared = slots["shared"].value or {} if self.shared else {}  # None: the load left it out
        own: _Own = slots["own"]
        states = [{**shared, **state} if self.shared else state for state in own.states]
        if own.place is None:
            self.loader.load_state_dict(states[0])
        else:
            assert self.reshard is not None
            self.loader.load_state_dict(self.reshard(states, *own.place))


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
            raise MismatchError(f"of {count} data-parallel ranks, none of number {lacking[0]} saved the loader's state: stores=False")
        if count != seat.count and self.of.reshard is None:
            raise MismatchError(
                f"saved by {count} data-parallel ranks, loaded by {seat.count}, and only the loader knows what its state means: load on "
                f"{count}, give LoaderState(reshard=...), or use ckpt.training.Batches (docs/random-and-data.md)"
            )
        self.place = None if count == seat.count else (seat.number, seat.count)

        def take(values: list[Any]) -> None:
            self.states = [value["state"] for value in values]

        return RankChoice(ranks=[holding[n] for n in wanted], take=take)


__all__ = ["Batches", "LoaderState", "ResumableLoader"]
