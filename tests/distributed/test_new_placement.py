"""A placement from outside the package, on real ranks: saved, loaded, resharded into others, alone and below a Shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh

import ckpt
from ckpt import Layout, Replicate, Shard, Uneven
from ckpt.errors import LayoutError
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.tensor_layout import TensorLayout
from tests.distributed.ranks import Ranks
from tests.plan.block_cyclic import BlockCyclic, DealtOut, dealt
from tests.plan.layout_strategies import numbered, through_pieces
from tests.toy_plugins import installed


def whole(name: str, rows: int) -> torch.Tensor:
    return torch.randn((rows, 5), generator=torch.Generator().manual_seed(sum(map(ord, name))))


def state_of_rank(fill: float | None = None) -> tuple[dict[str, torch.Tensor], Layout]:
    """Blocks of 3 rows: of 17, so that the parts differ, and of the rows that a Shard leaves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = {"a": dealt(whole("a", 17), 3, world, rank), "b": dealt(whole("b", 26).chunk(2)[0], 3, world, rank)}
    parts["c"] = whole("c", 4)
    rules = [
        ("a", BlockCyclic(0, "x", 3), Uneven(0, 17)),
        ("b", Shard(0, "one", (13,)), BlockCyclic(0, "x", 3), Uneven(0, 13)),
        ("*", Replicate()),
    ]
    if fill is not None:
        parts = {name: torch.full_like(part, fill) for name, part in parts.items()}
    return parts, Layout({"one": 1, "x": world}, rules)


def save(url: str) -> None:
    with installed():
        parts, layout = state_of_rank()
        ckpt.save(url, dict(parts), layout=layout)


def load(url: str) -> bool:
    with installed():
        (state, layout), (wanted, _) = state_of_rank(float("nan")), state_of_rank()
        ckpt.load(url, dict(state), layout=layout)
    return all(torch.equal(state[name], wanted[name]) for name in wanted)


def load_rows(url: str) -> bool:
    """Into consecutive rows: a placement of the package."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = {"a": torch.zeros_like(whole("a", 17).chunk(world)[rank])}
    ckpt.load(url, dict(state), layout=Layout({"x": world}, [("*", Shard(0, "x"), Uneven(0, 17))]), only=["a"])
    return torch.equal(state["a"], whole("a", 17).chunk(world)[rank])


def save_and_load_dtensor(url: str) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    full = whole("d", 18)
    placed = [DealtOut(0, 3)]

    def tensor(local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, mesh, placed, run_check=False, shape=full.shape, stride=full.stride())

    with installed():
        ckpt.save(url, {"d": tensor(dealt(full, 3, world, rank))})
        target = torch.zeros_like(dealt(full, 3, world, rank))
        ckpt.load(url, {"d": tensor(target)})
    return torch.equal(target, dealt(full, 3, world, rank))


def test_it_is_saved_and_loaded_by_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save, url)
    view = ckpt.open(url)
    assert torch.equal(view["a"].read(), whole("a", 17))
    assert torch.equal(view["b"].read(), whole("b", 26).chunk(2)[0])
    for world in (1, 2, 3):
        assert ranks.run(world, load, url) == [True] * world
    assert ranks.run(2, load_rows, url) == [True, True]


def test_a_dtensor_is_read_by_its_own_placement(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_dtensor, str(tmp_path / "a")) == [True, True]
    assert torch.equal(ckpt.open(str(tmp_path / "a"))["d"].read(), whole("d", 18))


@pytest.mark.parametrize("size", [1, 2, 7, 12, 29])
def test_pieces_and_tiling_agree_with_the_dealt_rows(size: int) -> None:
    """With a Shard before and after it, whose parts are of different sizes and so have different numbers of blocks."""
    mesh = Mesh(("dp", "x", "tp"), (2, 3, 2))
    layout = TensorLayout(mesh, (Shard(0, "dp"), BlockCyclic(0, "x", 2), Shard(0, "tp")))
    array = numbered((size,))
    owners: list[set[int]] = [set() for _ in range(size)]
    for rank in range(12):
        dp, x, tp = (int(i) for i in np.unravel_index(rank, (2, 3, 2)))
        half = torch.from_numpy(array)[: -(-size // 2)] if dp == 0 else torch.from_numpy(array)[-(-size // 2) :]
        cards = dealt(half, 2, 3, x)
        step = -(-len(cards) // 2)
        mine = cards[:step] if tp == 0 else cards[step:]
        assert through_pieces(layout, array, rank).tolist() == mine.tolist()
        for element in mine.tolist():
            owners[element].add(rank)
    tiling = layout.tiling((size,))
    assert tiling.cuts is not None
    (cuts,) = tiling.cuts
    found = [
        set(ranks.tolist()) for ranks, start, stop in zip(tiling.holders, cuts[:-1], cuts[1:], strict=True) for _ in range(start, stop)
    ]
    assert found == owners


def test_a_split_that_a_process_does_not_know_is_named() -> None:
    layout = TensorLayout(Mesh.of({"x": 2}), (BlockCyclic(0, "x", 3),))
    with pytest.raises(LayoutError, match="'BlockCyclic', which this process does not know"):
        TensorLayout.from_json(layout.to_json())
    with installed():
        assert TensorLayout.from_json(layout.to_json()) == layout
