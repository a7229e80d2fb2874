"""Loaders of one process: what they give after a load is what the loop had not got before the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.errors import ConsistencyError, MismatchError, StateError, UsageError
from ckpt.training import Batches, LoaderState, ResumableLoader
from tests.data.datasets import Buffered, Counting, Numbers, Queue

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13

WORKERS = [0, 2]
LOADERS = [DataLoader, StatefulDataLoader]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "c")


def resumable(make: Any, workers: int, count: int = 23, **batches: Any) -> ResumableLoader[torch.Tensor]:
    options: dict[str, Any] = {"prefetch_factor": 3} if workers else {}
    sampler = Batches(count, **{"size": 4, "seed": 1, **batches})
    return ResumableLoader(make(Numbers(count), batch_sampler=sampler, num_workers=workers, **options))


def epoch_of(loader: ResumableLoader[torch.Tensor], most: int = 1000) -> list[list[int]]:
    """Up to ``most`` batches of one loop."""
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_going_on_in_the_middle(url: str, make: Any, workers: int, tail: str) -> None:
    """Workers have fetched more than the loop got; only what it got counts."""
    straight = resumable(make, 0, tail=tail)
    expected = [epoch_of(straight) for _ in range(3)]
    first = resumable(make, workers, tail=tail)
    assert epoch_of(first) == expected[0] and first.epoch == 1
    begun = epoch_of(first, 2)
    ckpt.save(url, {"loader": first})
    again = resumable(make, workers, tail=tail)
    ckpt.load(url, {"loader": again})
    assert (again.epoch, len(again)) == (1, len(expected[1]) - 2)
    assert [begun + epoch_of(again), epoch_of(again)] == expected[1:]


def test_a_save_after_the_last_batch_of_an_epoch(url: str) -> None:
    loader = resumable(DataLoader, 0, count=8)
    for n, _ in enumerate(loader):
        if n == 1:
            ckpt.save(url, {"loader": loader})
    again = resumable(DataLoader, 0, count=8)
    ckpt.load(url, {"loader": again})
    assert (again.epoch, again.taken) == (1, 0)
    assert epoch_of(again) == epoch_of(loader)


def test_a_loop_that_was_left_is_gone_on_with() -> None:
    loader, straight = (resumable(DataLoader, 0) for _ in range(2))
    assert epoch_of(loader, 2) + epoch_of(loader) == epoch_of(straight)


def test_a_background_save_keeps_the_position_of_the_call(url: str) -> None:
    loader = resumable(DataLoader, 2)
    begun = epoch_of(loader, 2)
    handle = ckpt.save_async(url, {"loader": loader, "w": torch.ones(300_000)})
    rest = epoch_of(loader)
    handle.result()
    again = resumable(DataLoader, 0)
    ckpt.load(url, {"loader": again, "w": torch.zeros(300_000)})
    assert epoch_of(again) == rest and len(begun) == 2


def test_a_loop_does_not_survive_a_load(url: str) -> None:
    loader = resumable(DataLoader, 0)
    ckpt.save(url, {"loader": loader})
    loop = iter(loader)
    next(loop)
    ckpt.load(url, {"loader": loader})
    with pytest.raises(UsageError, match="has ended this loop"):
        next(loop)
    assert loader.taken == 0


def test_loaders_whose_position_cannot_be_known() -> None:
    with pytest.raises(UsageError, match=r"LoaderState"):
        ResumableLoader(DataLoader(Numbers(4), batch_size=2))
    with pytest.raises(UsageError, match="in_order"):
        ResumableLoader(DataLoader(Numbers(4), batch_sampler=Batches(4, size=2), num_workers=2, in_order=False))


def test_another_dataset_is_refused(url: str) -> None:
    ckpt.save(url, {"loader": resumable(DataLoader, 0)})
    with pytest.raises(StateError, match="samples 23, now 24"):
        ckpt.load(url, {"loader": resumable(DataLoader, 0, count=24)})


# -------------------------------------------------------------------------------------------------------- LoaderState


def stateful(workers: int, dataset: Any, **options: Any) -> Any:
    return StatefulDataLoader(dataset, num_workers=workers, generator=torch.Generator().manual_seed(0), **options)


def rest(loader: Any) -> list[int]:
    return [n for batch in loader for n in batch.tolist()]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", ["shuffled", "iterable", "batches"])
def test_torchdata_goes_on(url: str, workers: int, kind: str) -> None:
    def make() -> Any:
        if kind == "iterable":
            return stateful(workers, Queue(range(21)), batch_size=2)
        if kind == "batches":
            return stateful(workers, Counting(21), batch_sampler=Batches(21, size=2, seed=3))
        return stateful(workers, Counting(21), batch_size=2, shuffle=True)

    loader = make()
    loop = iter(loader)
    for _ in range(5):
        next(loop)
    handle = ckpt.save_async(url, {"loader": LoaderState(loader)})
    expected = rest(loop)
    handle.result()
    again = make()
    ckpt.load(url, {"loader": LoaderState(again)})
    assert rest(again) == expected
    if kind == "batches":
        assert rest(again) == rest(loader)  # the next epoch


def test_shared_keys_are_stored_once(url: str) -> None:
    loader = Buffered(range(7))
    loader.next(2)
    ckpt.save(url, {"loader": LoaderState(loader, shared=["config"])})
    view = ckpt.open(url)
    assert set(view) == {"loader.shared.config.weights", "loader.own.state.tokens@rank0"}
    assert view.state()["loader"]["shared"]["config"]["source"] == "web"
    assert view.per_rank("loader.own", 0)["state"]["read"] == 2
    again = Buffered([], source="books")
    ckpt.load(url, {"loader": LoaderState(again, shared=["config"])})
    assert (again.source, again.read, again.next(9)) == ("web", 2, [2, 3, 4, 5, 6])
    with pytest.raises(UsageError, match="no 'epoch'"):
        ckpt.save(url, {"loader": LoaderState(loader, shared="epoch")})
    with pytest.raises(MismatchError, match=r"loader\.shared"):
        ckpt.load(url, {"loader": LoaderState(again)})


def test_shared_keys_that_were_not_saved_apart(url: str) -> None:
    """What each rank has of its own is loaded all the same."""
    loader = Buffered(range(7))
    loader.next(2)
    ckpt.save(url, {"loader": LoaderState(loader)})
    again = Buffered([], source="books")
    report = ckpt.load(url, {"loader": LoaderState(again, shared=["config"])}, strict=False)
    assert report.missing == ("loader.shared",)
    assert (again.source, again.read, again.next(9)) == ("web", 2, [2, 3, 4, 5, 6])


def test_a_position_taken_from_something_else(url: str) -> None:
    ckpt.save(url, {"loader": {"own": ckpt.PerRank({"state": 1})}})
    with pytest.raises(MismatchError, match="something else"):
        ckpt.load(url, {"loader": LoaderState(Buffered([]))})


def test_a_token_buffer_that_changes_under_a_save(url: str) -> None:
    """As any other large tensor: what is changed in place before it was copied fails the save."""
    loader = Buffered(range(400_000))
    handle = ckpt.save_async(url, {"loader": LoaderState(loader), "w": torch.ones(4_000_000)})
    loader.tokens[:0].add_(1)  # counted at once; a long operation is counted when it ends, which may be after the copy was compared
    loader.tokens.add_(1)
    handle.wait()
    if handle.durable.exception() is not None:
        with pytest.raises(ConsistencyError, match=r"loader\.own"):
            handle.result()
    else:
        assert ckpt.open(url).per_rank("loader.own", 0)["state"]["tokens"][0] == 0
