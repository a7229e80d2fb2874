"""Random number generators and data loaders that are saved by some ranks and loaded by others."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import ckpt
from ckpt.training import Batches, Generators, LoaderState, ResumableLoader
from tests.data.datasets import Buffered, Counting, Elastic, Numbers, Queue, Splitting
from tests.distributed.ranks import Ranks, RanksFailedError

# ------------------------------------------------------------------------------------------------------------------ rng


def with_workers() -> None:
    """Ranks of the tests are daemonic, and so may not have loaders with workers; these end with their loader. They are forked, as in
    a job: by the server that ranks come from, each would import torch anew."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


class Dice:
    """The global generators, the same along all dimensions but ``dp``, and one that every rank has of its own."""

    def __init__(self, mesh: dict[str, int]) -> None:
        names, rank = list(mesh), dist.get_rank()
        at = dict(zip(names, np.unravel_index(rank, tuple(mesh.values())), strict=True))
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + int(at.get("dp", 0)))
        self.tp = np.random.default_rng(rank)
        distinct = tuple(name for name in names if name in ("dp", "tp"))
        self.state = {
            "rng": Generators(mesh=mesh, distinct=("dp",) if "dp" in mesh else ()),
            "tp_rng": Generators({"tp": self.tp}, mesh=mesh, distinct=distinct),
        }

    def shared(self) -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.normal(), tuple(torch.randn(3).tolist())

    def draw(self) -> tuple[Any, Any]:
        return tuple(self.shared() for _ in range(3)), tuple(self.tp.random(3).tolist())


def save_dice(url: str, mesh: dict[str, int]) -> Any:
    dice = Dice(mesh)
    dice.draw()
    ckpt.save(url, dice.state)
    return dice.draw()


def load_dice(url: str, mesh: dict[str, int]) -> Any:
    dice = Dice(mesh)
    random.seed(dist.get_rank())
    ckpt.load(url, dice.state)
    return dice.state["rng"].origin, dice.state["tp_rng"].origin, *dice.draw()


SAVED = {"dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def dice(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Where two data-parallel groups of two were saved, and what each rank drew next."""
    url = str(tmp_path_factory.mktemp("dice") / "c")
    return url, ranks.run(4, save_dice, url, SAVED)


def test_the_same_layout_goes_on_exactly(ranks: Ranks, dice: tuple[str, Any]) -> None:
    url, drawn = dice
    assert ranks.run(4, load_dice, url, SAVED) == [("own", "own", *d) for d in drawn]
    assert [drawn[0][0], drawn[2][0]] == [drawn[1][0], drawn[3][0]] and drawn[0][0] != drawn[2][0]


@pytest.mark.parametrize(
    "mesh",
    [{"dp": 4}, {"tp": 4}, {"dp": 2}, {"dp": 3}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"dp": 1, "tp": 2}],
    ids=str,
)
def test_another_layout_goes_on_by_the_rule(ranks: Ranks, dice: tuple[str, Any], mesh: dict[str, int]) -> None:
    url, drawn = dice
    shape = tuple(mesh.values())
    loaded = ranks.run(int(np.prod(shape)), load_dice, url, mesh)
    at = [dict(zip(mesh, np.unravel_index(rank, shape), strict=True)) for rank in range(len(loaded))]
    shared = {0: drawn[0][0], 1: drawn[2][0]}  # of the saved data-parallel ranks
    for place, (origin, _, mine, _) in zip(at, loaded, strict=True):
        data = int(place.get("dp", 0))
        assert origin == ("stream" if data < 2 else "derived")
        assert mine == shared.setdefault(data, mine)  # tensor-parallel ranks agree
    assert len(set(shared.values())) == len(shared)  # data-parallel ranks do not
    own: dict[Any, Any] = {}
    for place, (_, _, _, mine) in zip(at, loaded, strict=True):
        assert own.setdefault((place.get("dp"), place.get("tp")), mine) == mine
    assert len(set(own.values())) == len(own)
    assert set(list(own.values())[:2]) <= {d[1] for d in drawn}


def test_derived_streams_are_the_same_each_time(ranks: Ranks, dice: tuple[str, Any]) -> None:
    assert ranks.run(3, load_dice, dice[0], {"dp": 3}) == ranks.run(3, load_dice, dice[0], {"dp": 3})


def device_mesh(url: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dice = Dice({"dp": 2, "tp": 2})
    dice.state["rng"] = Generators(mesh=mesh, distinct="dp")
    dice.draw()
    ckpt.save(url, {"rng": dice.state["rng"]})
    expected = dice.shared()
    ckpt.load(url, {"rng": dice.state["rng"]})
    assert dice.shared() == expected and dice.state["rng"].origin == "own"
    with pytest.raises(ckpt.errors.LayoutError, match="the whole mesh"):
        ckpt.save(url, {"rng": Generators(mesh=mesh["tp"], distinct="tp")})
    return ckpt.open(url).per_rank("rng", dist.get_rank())["seat"]["at"]


def test_a_device_mesh(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, device_mesh, str(tmp_path / "c")) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def without_mesh(url: str, save: bool) -> Any:
    state = {"rng": Generators()}
    torch.manual_seed(dist.get_rank() if save else 99)
    if save:
        torch.rand(7)
        ckpt.save(url, state)
    else:
        ckpt.load(url, state)
    return torch.rand(4).tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_a_mesh_all_ranks_differ(ranks: Ranks, tmp_path: Path, count: int) -> None:
    url = str(tmp_path / "c")
    drawn = ranks.run(2, without_mesh, url, True)
    loaded = ranks.run(count, without_mesh, url, False)
    assert loaded[:2] == drawn[:count] and len(set(map(tuple, loaded))) == count


# ----------------------------------------------------------------------------------------------------- ResumableLoader

SAMPLES = 61


def life(run: str, lives: Sequence[int], size: int, tail: str, workers: int, tp: int) -> list[list[int]]:
    """Goes on from the newest checkpoint, trains ``lives[0]`` steps, saves in between, and is gone without a word."""
    with_workers()
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = Batches(SAMPLES, size=size, part=rank // tp, parts=world // tp, tail=tail, seed=4)  # type: ignore[arg-type]
    loader = ResumableLoader(DataLoader(Numbers(SAMPLES), batch_sampler=batches, num_workers=workers, collate_fn=torch.tensor))
    state: dict[str, Any] = {"loader": loader, "w": torch.ones(300_000), "seen": ckpt.PerRank(None, reshard=lambda v, r, w: None)}
    used: list[list[int]] = []
    with ckpt.Checkpointer(run) as c:
        step = c.restore(state) or 0
        saved = step + lives[0]
        while True:
            for batch in loader:
                step += 1
                if step <= saved:
                    used.append(batch.tolist())
                if step == saved:
                    c.save(step, state)
                if step == saved + 3:  # these are lost
                    return used


LIVES = {
    "carry": [(2, 7, 8), (3, 9, 9), (1, 5, 4), (4, 11, 8)],
    "carry, workers": [(2, 9, 8), (1, 8, 9)],
    "short": [(2, 3, 8), (4, 14, 7), (3, 9, 6)],
    "drop": [(3, 5, 9), (2, 16, 8)],
}


@pytest.mark.parametrize(("tail", "workers"), [("carry", 0), ("carry, workers", 2), ("short", 0), ("drop", 0)])
def test_every_sample_once_over_the_lives_of_a_job(ranks: Ranks, tmp_path: Path, tail: str, workers: int) -> None:
    """Each life: ranks, steps to its save, samples per step of all ranks. After the save more steps are done, and lost."""
    order: list[int] = []
    for count, steps, size in LIVES[tail]:
        used = ranks.run(count, life, str(tmp_path), [steps], size, tail.partition(",")[0], workers, 1)
        order += [n for step in zip(*used, strict=True) for part in step for n in part]
    epochs: list[list[int]] = [[]]
    for n in order:
        if n in epochs[-1]:
            epochs.append([])
        epochs[-1].append(n)
    assert len(epochs) >= 2
    for epoch in epochs[:-1]:
        assert len(epoch) == SAMPLES if tail != "drop" else SAMPLES - len(epoch) < 9


def test_tensor_parallel_ranks_see_the_same(ranks: Ranks, tmp_path: Path) -> None:
    a = ranks.run(2, life, str(tmp_path), [5], 6, "carry", 0, 1)
    b = ranks.run(4, life, str(tmp_path), [5], 6, "carry", 0, 2)
    assert b[0] == b[1] and b[2] == b[3]
    flat = [n for used in (a, b[::2]) for step in zip(*used, strict=True) for part in step for n in part]
    assert len(set(flat)) == len(flat) == 60


def out_of_step(url: str) -> None:
    batches = Batches(SAMPLES, size=4, part=dist.get_rank(), parts=2)
    loader = ResumableLoader(DataLoader(Numbers(SAMPLES), batch_sampler=batches))
    for n, _ in enumerate(loader):
        if n == dist.get_rank():
            break
    ckpt.save(url, {"loader": loader})


def test_ranks_that_used_different_numbers_of_batches(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"loader\.taken"):
        ranks.run(2, out_of_step, str(tmp_path / "c"))


# --------------------------------------------------------------------------------------------------------- LoaderState

COUNT = 48


def own_of(kind: str, part: int, parts: int) -> Any:
    """The loader of a data-parallel rank, as a job makes it before it loads anything."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    with_workers()
    mine, workers = range(part, COUNT, parts), 2 if kind.endswith("2") else 0
    if kind.startswith("buffered"):
        return (Splitting if kind == "buffered, splitting" else Buffered)(mine)
    if kind.startswith("queue"):
        return StatefulDataLoader(Queue(mine), batch_size=2, num_workers=workers)
    if kind.startswith("elastic"):
        return StatefulDataLoader(Elastic(mine), batch_size=2, num_workers=workers)
    dataset = Counting(COUNT) if kind.startswith("counting") else Numbers(COUNT)
    return StatefulDataLoader(dataset, batch_sampler=Batches(COUNT, size=2 * parts, part=part, parts=parts), num_workers=workers)


def taking(loader: Any) -> Callable[[int | None], list[int]]:
    """A function that takes the samples of the next steps of one loop; all that are left with None."""
    if isinstance(loader, Buffered):
        return lambda steps: loader.next(COUNT if steps is None else 2 * steps)
    loop = iter(loader)
    return lambda steps: [n for batch in itertools.islice(loop, steps) for n in batch.tolist()]


def session(kind: str, url: str, mesh: dict[str, int], steps: int | None, save: bool) -> tuple[list[int], Any]:
    """Loads if there is something, takes some samples, and saves if asked."""
    names = list(mesh)
    part = int(np.unravel_index(dist.get_rank(), tuple(mesh.values()))[names.index("dp")])
    loader = own_of(kind, part, mesh["dp"])
    stores = "tp" not in mesh or dist.get_rank() % mesh["tp"] == 0
    state = {"loader": LoaderState(loader, mesh=mesh, over="dp", stores=stores, shared=["config"] if kind.startswith("buffered") else ())}
    if Path(url).exists():
        ckpt.load(url, state)
    dist.barrier()  # before a rank that goes first makes the checkpoint exist
    take = taking(loader)
    found = take(steps)
    if save:
        ckpt.save(url, state)
    return found, take(None)


@pytest.mark.parametrize("kind", ["buffered", "queue", "queue 2", "numbers", "counting"])
def test_the_same_number_of_data_parallel_ranks_goes_on_exactly(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Also where tensor parallelism comes or goes."""
    url = str(tmp_path / "c")
    saved = ranks.run(4, session, kind, url, {"dp": 2, "tp": 2}, 4, True)
    assert saved[0] == saved[1] != saved[2] == saved[3]
    loaded = ranks.run(2, session, kind, url, {"dp": 2}, None, False)
    expected = [saved[0][1], saved[2][1]]
    assert [found for found, _ in loaded] == expected
    if kind == "buffered":
        swapped = ranks.run(4, session, kind, url, {"tp": 2, "dp": 2}, None, False)
        assert [found for found, _ in swapped] == expected * 2


@pytest.mark.parametrize(
    ("kind", "count"),
    [(kind, count) for kind in ("buffered, splitting", "elastic", "numbers") for count in (1, 3)] + [("elastic 2", 1), ("numbers 2", 1)],
)
def test_another_number_drops_nothing_and_repeats_nothing(ranks: Ranks, tmp_path: Path, kind: str, count: int) -> None:
    url = str(tmp_path / "c")
    saved = ranks.run(2, session, kind, url, {"dp": 2}, 3, True)
    loaded = ranks.run(count, session, kind, url, {"dp": count}, None, False)
    used = [n for found, _ in saved for n in found]
    rest = sorted(n for found, _ in loaded for n in found)
    assert len(used) == 12 and sorted(used + rest) == list(range(COUNT))


@pytest.mark.parametrize("kind", ["buffered", "queue", "counting"])
def test_a_state_that_cannot_be_split_is_refused(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "c")
    ranks.run(2, session, kind, url, {"dp": 2}, 3, True)
    text = "a method reshard" if kind == "counting" else r"saved by 2 data-parallel ranks, loaded by 3(.|\n)*ckpt\.training\.Batches"
    with pytest.raises(RanksFailedError, match=text):
        ranks.run(3, session, kind, url, {"dp": 3}, None, False)


def nobody_stores(url: str) -> None:
    state = {"loader": LoaderState(Buffered([1]), stores=dist.get_rank() == 0)}
    ckpt.save(url, state)
    ckpt.load(url, state)


def test_a_state_that_nobody_stored(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="of 2 data-parallel ranks, none of number 1 saved"):
        ranks.run(2, nobody_stores, str(tmp_path / "c"))


def different_sources(url: str) -> None:
    ckpt.save(url, {"loader": LoaderState(Buffered([1], source=f"web{dist.get_rank()}"), shared=["config"])})


def test_shared_values_are_compared(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"loader\.shared\.config\.source"):
        ranks.run(2, different_sources, str(tmp_path / "c"))


def both(url: str) -> Any:
    """Random numbers and a loader are those of the call, however long the save takes."""
    batches = Batches(SAMPLES, size=4, part=dist.get_rank(), parts=2)
    loader = ResumableLoader(DataLoader(Numbers(SAMPLES), batch_sampler=batches, generator=torch.Generator()))
    torch.manual_seed(dist.get_rank())
    state = {"rng": Generators(), "loader": loader, "w": torch.ones(2_000_000)}
    loop = iter(loader)
    next(loop)
    handle = ckpt.save_async(url, state)
    expected = [(next(loop).tolist(), torch.rand(2).tolist()) for _ in range(3)]
    time.sleep(0.05)
    handle.result()
    ckpt.load(url, state)
    again = iter(loader)
    return expected, [(next(again).tolist(), torch.rand(2).tolist()) for _ in range(3)]


def test_a_background_save_has_both_as_of_the_call(ranks: Ranks, tmp_path: Path) -> None:
    for expected, found in ranks.run(2, both, str(tmp_path / "c")):
        assert found == expected
