"""Items that were handed out and are not finished: prompts of rollouts, or batches that a trainer prefetches. No torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckpt.errors import StateError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ticket(Generic[T]):
    """An item that was handed out. Its number stays the same when it is handed out again."""

    number: int
    item: T


class Inflight(Generic[T]):
    """Hands out items, and knows which are not finished: these are in its state, and are handed out again after a restore. So each is
    finished exactly once in the result, however often the job is killed.

    Put it into the state of the one process that hands items out. Methods may be called from several threads.

    Args:
        source: a sequence; or an iterable with ``state_dict`` and ``load_state_dict``. Items are values that a checkpoint can have.

    Example::

        work = Inflight(prompts)
        state = {"work": work, "buffer": buffer}
        c.restore(state)
        work.keep(rollout.number for rollout in buffer)  # they are in the buffer: not to be handed out again
        ticket = work.take()
        ...  # a rollout, which ends when it likes
        work.finish([ticket.number])  # after the optimizer step that used it
    """

    def __init__(self, source: Sequence[T] | Iterable[T]) -> None:
        self._source = source
        self._stateful = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        if not self._stateful and not isinstance(source, Sequence):
            raise UsageError(
                f"Inflight takes a sequence, or an iterable with state_dict and load_state_dict, not {type(source).__name__}",
                hint="Inflight(list(prompts))",
            )
        self._lock = threading.Lock()
        self._start({}, 0)

    def _start(self, unfinished: Mapping[int, T], count: int) -> None:
        self._unfinished = dict(unfinished)
        self._waiting = deque(self._unfinished)
        """Numbers of unfinished items that are to be handed out again."""
        self._finished: dict[int, tuple[int, T]] = {}
        """Number → the step that an item was finished in, and the item, until a state of that step or a later one was asked for."""
        self._count = count
        self._items: Iterator[T] | None = None

    def __len__(self) -> int:
        """How many items are not finished."""
        return len(self._unfinished)

    def take(self) -> Ticket[T] | None:
        """The next item: one that was handed out before and given back, or a new one. None if there is none."""
        with self._lock:
            while self._waiting:
                number = self._waiting.popleft()
                if number in self._unfinished:  # else it was finished all the same
                    return Ticket(number=number, item=self._unfinished[number])
            if self._items is None:
                source = self._source
                self._items = iter(source[i] for i in range(self._count, len(source))) if isinstance(source, Sequence) else iter(source)
            for item in self._items:
                number, self._count = self._count, self._count + 1
                self._unfinished[number] = item
                return Ticket(number=number, item=item)
            self._items = None  # a source of epochs begins the next one
            return None

    def finish(self, numbers: Iterable[int], *, step: int | None = None) -> None:
        """These were used, in training step ``step``. With ``step``, :meth:`as_of` gives the state as of any step that was not saved yet,
        also if this process has heard of later ones."""
        numbers = list(numbers)  # outside of the lock, as it may take items
        with self._lock:
            for number in self._known(numbers):
                item = self._unfinished.pop(number)
                if step is not None:
                    self._finished[number] = (step, item)

    def give_back(self, numbers: Iterable[int]) -> None:
        """These failed, such as a rollout whose engine died: they are handed out again, before new ones."""
        numbers = list(numbers)
        with self._lock:
            waiting = set(self._waiting)
            self._waiting.extendleft(reversed([n for n in self._known(numbers) if n not in waiting]))

    def keep(self, numbers: Iterable[int]) -> None:
        """After a restore: these are in a buffer that was restored, too, and are not handed out again. They are finished as others."""
        numbers = list(numbers)
        with self._lock:
            kept = set(self._known(numbers))
            self._waiting = deque(n for n in self._waiting if n not in kept)

    def _known(self, numbers: list[int]) -> list[int]:
        unknown = [n for n in numbers if n not in self._unfinished]
        if unknown or len(set(numbers)) < len(numbers):
            raise UsageError(
                f"item {unknown[0]} is not in flight" if unknown else f"an item is there twice in {numbers}",
                hint="it was finished before, or handed out before a restore: drop what was in flight then",
            )
        return numbers

    def as_of(self, step: int) -> StateOfStep:
        """The state as of a training step, for a checkpoint of that step: what was finished in later ones is still in flight there."""
        with self._lock:
            later = {number: item for number, (n, item) in self._finished.items() if n > step}
            self._finished = {number: (n, item) for number, (n, item) in self._finished.items() if n > step}
            return StateOfStep(self._state({**self._unfinished, **later}), self)

    def _state(self, unfinished: Mapping[int, T]) -> dict[str, Any]:
        state: dict[str, Any] = {"count": self._count, "numbers": sorted(unfinished), "items": [unfinished[n] for n in sorted(unfinished)]}
        if self._stateful:
            state["source"] = self._source.state_dict()  # type: ignore[union-attr]
        else:
            state["size"] = len(self._source)  # type: ignore[arg-type]
        return state

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return self._state(self._unfinished)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if ("source" in state) != self._stateful or (not self._stateful and state["size"] != len(self._source)):  # type: ignore[arg-type]
            raise StateError(
                "the items in flight were saved with another source",
                hint="resume with the same items, or leave them out of the load: only=[...]",
            )
        with self._lock:
            if self._stateful:
                self._source.load_state_dict(state["source"])  # type: ignore[union-attr]
            self._start(dict(zip(state["numbers"], state["items"], strict=True)), state["count"])


class StateOfStep:
    """The state of an :class:`Inflight` as of one training step, in a state in its place; a load goes to the Inflight itself."""

    def __init__(self, state: dict[str, Any], of: Inflight[Any]) -> None:
        self._state, self._of = state, of

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of.load_state_dict(state)


__all__ = ["Inflight", "Ticket"]
