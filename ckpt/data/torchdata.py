"""What can be said of the state of torchdata's StatefulDataLoader on another number of ranks (torchdata 0.8 to 0.11).

Its state says how far each worker's copy of the dataset is, and where its sampler is. That fits these ranks and workers alone. So the
loader begins a new iteration: with :class:`Batches` at the position that all ranks share, or with a dataset that takes up what all copies
had left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt.errors import StateError

from .batches import Batches


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
            raise StateError("the dataset has a state of its own, which cannot be split", hint="give the dataset a method reshard")
        if isinstance(loader.batch_sampler, Batches):
            positions = {loader.batch_sampler.position_of(_sampler(state)) for state in states}
            if len(positions) > 1:
                raise StateError(f"ranks had used different numbers of batches: {positions}", hint="save after the same step on all ranks")
            loader.batch_sampler.start = positions.pop()
        return {}

    return reshard


def _datasets(state: Mapping[str, Any]) -> list[Any]:
    """The states of the dataset, or of its iterator, in each worker; None where it has none."""
    workers = state["_snapshot"]["_worker_snapshots"] if "_snapshot" in state else {"worker_0": state}
    return [_dataset(workers[f"worker_{i}"]) for i in range(len(workers))]


def _dataset(worker: Mapping[str, Any]) -> Any:
    if worker["dataset_state"] is not None:
        return worker["dataset_state"]
    return (worker["fetcher_state"] or {}).get("dataset_iter_state")


def _sampler(state: Mapping[str, Any]) -> Any:
    return (state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state)["_sampler_iter_state"]
