"""A batch sampler whose position does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from torch.utils.data import Sampler

from ckpt.errors import StateError, UsageError

from .order import Position, Steps, Tail, share, shuffled

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
        self.steps = Steps(samples=samples, size=size, tail=tail)
        if not 0 <= part < parts <= size:
            raise UsageError(
                f"part {part} of {parts} in batches of {size}", hint="size counts the samples of all data-parallel ranks together"
            )
        if seed < 0 or not (callable(order) or order in ("shuffled", "as-is")):
            raise UsageError(f"order is 'shuffled', 'as-is' or a function, seed not negative: {order!r}, {seed}")
        self.part, self.parts = part, parts
        self.start = Position()
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
        """The position that ``position_state`` gave.

        Raises:
            StateError: it is a position in another order.
        """
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
