"""A data loader whose position is one number of the whole job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from ckpt.errors import UsageError

from .batches import Batches
from .order import Position

T = TypeVar("T")


class ResumableLoader(Generic[T]):
    """A ``DataLoader`` that knows how many of its samples were used, and goes on from there on any number of ranks.

    Each ``for`` loop over it runs to the end of the epoch that it is in. A batch counts as used when the loop gets it, whatever workers
    have fetched ahead. Put it into the state as it is: its state is the same on all ranks, and a save checks that.

    Args:
        loader: a ``DataLoader`` with :class:`Batches` as its ``batch_sampler``, and any other options but ``in_order=False``.

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

    def __init__(self, loader: DataLoader[T]) -> None:
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, Batches):
            raise UsageError(
                "the DataLoader has no ckpt.data.Batches as its batch_sampler", hint="other loaders go into ckpt.data.LoaderState"
            )
        if not getattr(loader, "in_order", True):
            raise UsageError(
                "with in_order=False it cannot be known which samples were used", hint="make the DataLoader with in_order=True"
            )
        self.loader = loader
        self.batches = batches
        self._position: Position = self.batches.start
        self._loop: object = None

    @property
    def epoch(self) -> int:
        """The epoch that the next loop runs over, counted from 0."""
        return self.batches.steps.settled(self._position).epoch

    @property
    def taken(self) -> int:
        """Samples of this epoch that were used, by all ranks together."""
        return self.batches.steps.settled(self._position).taken

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return self.batches.steps.left(self._position)

    def __iter__(self) -> Iterator[T]:
        mine = self._loop = object()
        self.batches.start = self._position
        for batch in self.loader:
            if self._loop is not mine:
                raise UsageError("a load, or another loop over this loader, has ended this loop", hint="begin a new one")
            _, self._position = self.batches.steps.step(self._position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.batches.position_state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = self.batches.position_of(state)
        self._loop = None
