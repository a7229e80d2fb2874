"""Plain tensors with a Layout on real ranks: fused, padded, flat, stacked and tied parts, cut here by hand, moved to other numbers of
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import Flat, GlobalShape, Interleaved, Layout, Padded, Replicate, Shard, Stage, experts, pipeline
from tests.distributed.gathered import same
from tests.distributed.ranks import Ranks
from tests.distributed.test_dtensors import part_of

Parts = dict[str, torch.Tensor]
Case = Callable[[], tuple[Parts, Layout]]
"""In a rank: the tensors that it has, cut from the whole ones, and the layout that says so."""


def whole(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# ------------------------------------------------------------------------------------------------------------ the cases


def fused() -> tuple[Parts, Layout]:
    """Query, key and value of 12, 4 and 4 rows below each other, each cut over the ranks; gate and up the same, with columns."""
    rank, world = rank_and_world()
    qkv, gate_up = whole("qkv", 20, 3), whole("gate_up", 5, 14)
    return {
        "qkv": torch.cat([group.chunk(world)[rank] for group in qkv.split([12, 4, 4])]),
        "gate_up": torch.cat([part_of(group, world, rank, 1) for group in gate_up.chunk(2, 1)], 1),
    }, Layout({"tp": world}, [("qkv", Interleaved(0, "tp", (12, 4, 4))), ("gate_up", Interleaved(1, "tp", (7, 7)))])


def padded() -> tuple[Parts, Layout]:
    """A vocabulary of 13, padded to a multiple of twice the number of ranks; the padding is 5."""
    rank, world = rank_and_world()
    size = -(-13 // (2 * world)) * 2 * world
    table = torch.cat([whole("table", 13, 3), torch.full((size - 13, 3), 5.0)])
    return {"table": table.chunk(world)[rank].clone()}, Layout({"tp": world}, [("table", Shard(0, "tp"), Padded(0, 13))])


def flat() -> tuple[Parts, Layout]:
    """ZeRO: tensors flattened and cut into equal ranges, in the middle of rows; one has fewer elements than there are ranks."""
    rank, world = rank_and_world()
    rules, parts = [], {}
    for name, shape in (("a", (5, 3, 2)), ("b", (3,)), ("c", (1, 17))):
        length = -(-torch.Size(shape).numel() // world)
        parts[name] = whole(name, *shape).flatten()[rank * length : (rank + 1) * length].clone()
        rules.append((name, Flat("dp"), GlobalShape(shape)))
    return parts, Layout({"dp": world}, rules)


def flat_over_rows() -> tuple[Parts, Layout]:
    """The distributed optimizer over tensor parallelism: rows over two, what they leave flat over the others."""
    rank, world = rank_and_world()
    dp = world // 2
    part = whole("a", 7, 5).chunk(2)[rank % 2].flatten()
    length = -(-len(part) // dp)
    return {"a": part[rank // 2 * length : (rank // 2 + 1) * length].clone()}, Layout(
        {"dp": dp, "tp": 2}, [("a", Shard(0, "tp"), Flat("dp"), GlobalShape((7, 5)))]
    )


def uneven_sizes() -> tuple[Parts, Layout]:
    """Parts of sizes that no formula gives; the last rank has none."""
    rank, world = rank_and_world()
    sizes = {4: (1, 5, 3, 0), 3: (2, 7, 0), 2: (9, 0), 1: (9,)}[world]
    return {"a": whole("a", 9, 2).split(sizes)[rank].clone()}, Layout({"x": world}, [("a", Shard(0, "x", sizes))])


def stacked() -> tuple[Parts, Layout]:
    """Four experts, numbered from 0 on each rank, stored as one tensor; columns cut over what is left of the ranks."""
    rank, world = rank_and_world()
    ep = min(world, 2)
    tp = world // ep
    stack = whole("experts", 4, 6, 5)
    first = rank // tp * (4 // ep)
    parts = {f"mlp.experts.{i}.w": stack[first + i].chunk(tp, 0)[rank % tp].clone() for i in range(4 // ep)}
    return parts, Layout(
        {"ep": ep, "tp": tp}, [("*.w", Shard(0, "tp"))], numbered=[experts("experts.{n}", count=4, ranks=ep, to="experts.{n}", stack=0)]
    )


def tied_stages() -> tuple[Parts, Layout]:
    """Megatron: the head of the last stage is the embedding of the first; interleaved layers, two chunks a stage."""
    rank, world = rank_and_world()
    parts = {}
    for chunk in range(2):
        for local in range(8 // (2 * world)):
            layer = chunk * 4 + rank * (8 // (2 * world)) + local
            parts[f"{chunk}.layers.{local}.w"] = whole(f"layer{layer}", 3, 2)
    if rank in (0, world - 1):
        parts["embed"] = whole("embed", 9, 4)
    layout = Layout(
        {"pp": world},
        [("embed", Stage("pp", (0, -1) if world > 1 else 0)), ("*", Replicate())],
        numbered=[pipeline("{chunk}.layers.{n}", layers=8, stages=world, virtual=2)],
    )
    return parts, layout


WANTED: dict[Case, Callable[[], Parts]] = {
    fused: lambda: {"qkv": whole("qkv", 20, 3), "gate_up": whole("gate_up", 5, 14)},
    padded: lambda: {"table": whole("table", 13, 3)},
    flat: lambda: {"a": whole("a", 5, 3, 2), "b": whole("b", 3), "c": whole("c", 1, 17)},
    flat_over_rows: lambda: {"a": whole("a", 7, 5)},
    uneven_sizes: lambda: {"a": whole("a", 9, 2)},
    stacked: lambda: {"mlp.experts.w": whole("experts", 4, 6, 5)},
    tied_stages: lambda: {f"layers.{i}.w": whole(f"layer{i}", 3, 2) for i in range(8)} | {"embed": whole("embed", 9, 4)},
}


def cases_on(world: int) -> list[Case]:
    """Those that move between numbers of ranks; one cuts over tensor parallelism first and needs two."""
    return [case for case in WANTED if case is not padded and (case is not flat_over_rows or world > 1)]


# ------------------------------------------------------------------------------------------------------------ in a rank


def save(case: Case, url: str) -> None:
    parts, layout = case()
    ckpt.save(url, dict(parts), layout=layout)


def load(case: Case, url: str) -> list[str]:
    parts, layout = case()
    state = {name: torch.full_like(t, float("nan")) for name, t in parts.items()}
    ckpt.load(url, dict(state), layout=layout)
    return [f"{name}: {state[name]} is not {t}" for name, t in parts.items() if not same(state[name], t)]


def save_all(cases: list[Case], folder: str) -> None:
    for case in cases:
        save(case, f"{folder}/{case.__name__}")


def load_all(cases: list[Case], folder: str) -> dict[str, list[str]]:
    return {case.__name__: load(case, f"{folder}/{case.__name__}") for case in cases}


def load_table(url: str) -> torch.Tensor:
    parts, layout = padded()
    state = {"table": torch.full_like(parts["table"], -1.0)}
    ckpt.load(url, dict(state), layout=layout)
    return state["table"]


# ------------------------------------------------------------------------------------------------------------ the tests


@dataclass(eq=False)
class Moves:
    """Saves all cases, and loads them, once for each number of ranks, when the first test asks."""

    ranks: Ranks
    folder: Path
    saves: set[int] = field(default_factory=set)
    loads: dict[tuple[int, int], list[dict[str, list[str]]]] = field(default_factory=dict)

    def saved(self, world: int) -> str:
        """The folder with a checkpoint of each case."""
        folder = str(self.folder / f"{world}")
        if world not in self.saves:
            self.ranks.run(world, save_all, cases_on(world), folder)
            self.saves.add(world)
        return folder

    def loaded(self, saved: int, world: int) -> list[dict[str, list[str]]]:
        """What is wrong after a load, by rank and case."""
        if (saved, world) not in self.loads:
            cases = [case for case in cases_on(saved) if case in cases_on(world)]
            self.loads[saved, world] = self.ranks.run(world, load_all, cases, self.saved(saved))
        return self.loads[saved, world]


@pytest.fixture(scope="module")
def moves(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Moves:
    return Moves(ranks, tmp_path_factory.mktemp("moves"))


@pytest.mark.parametrize(
    ("case", "saved", "loaded"),
    [
        *((case, *worlds) for case in cases_on(1) for worlds in ((2, 1), (4, 2), (2, 4), (1, 4))),
        *((flat_over_rows, *worlds) for worlds in ((2, 2), (4, 2), (2, 4))),
    ],
)
def test_parts_move_to_other_numbers_of_ranks(moves: Moves, case: Case, saved: int, loaded: int) -> None:
    view = ckpt.open(f"{moves.saved(saved)}/{case.__name__}")
    found = {n: view[n].read() for n in view}
    wanted = WANTED[case]()
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not same(found[n], wanted[n])] == []
    assert [by_case[case.__name__] for by_case in moves.loaded(saved, loaded)] == [[]] * loaded


def test_padding(ranks: Ranks, tmp_path: Path) -> None:
    """The same padding resumes exactly; another one is filled with zeros; a reader does not see it."""
    ranks.run(4, save, padded, str(tmp_path / "a"))
    assert same(ckpt.open(str(tmp_path / "a"))["table"].read(), whole("table", 13, 3))
    assert ranks.run(4, load, padded, str(tmp_path / "a")) == [[]] * 4
    (found,) = ranks.run(1, load_table, str(tmp_path / "a"))
    assert same(found, torch.cat([whole("table", 13, 3), torch.zeros(1, 3)]))
    ranks.run(1, save, padded, str(tmp_path / "b"))
    found = torch.cat(ranks.run(4, load_table, str(tmp_path / "b")))
    assert same(found, torch.cat([whole("table", 13, 3), torch.zeros(3, 3)]))


# --------------------------------------------------------------------------------------------------- nested and renumbered


def nested(fill: float | None = None) -> tuple[dict[str, Any], Layout]:
    """Two layers a stage, counted from 0, in nested mappings beside values that all ranks have."""
    stage = dist.get_rank()
    tensors = [whole(f"layer{2 * stage + i}", 3, 2) for i in range(2)]
    if fill is not None:
        tensors = [torch.full_like(t, fill) for t in tensors]
    layers = {"0": {"w": tensors[0], "kind": "dense"}, "1": {"w": tensors[1]}}
    numbered = [pipeline("model.layers.{n}", layers=4, stages=2), pipeline("flat.layers.{n}", layers=2, stages=2)]
    state = {"model": {"version": 7, "layers": layers, "flat": {"layers.0.v": tensors[0] + 1}}}
    return state, Layout({"pp": 2}, [("*", Replicate())], numbered=numbered)


def save_nested(url: str) -> None:
    state, layout = nested()
    ckpt.save(url, state, layout=layout)


def load_nested(url: str) -> bool:
    (state, layout), (wanted, _) = nested(fill=-1.0), nested()
    state["model"]["version"] = state["model"]["layers"]["0"]["kind"] = None
    ckpt.load(url, state, layout=layout)
    mine, right = state["model"], wanted["model"]
    plain = (mine["version"], mine["layers"]["0"]["kind"]) == (7, "dense")
    layers = [same(mine["layers"][i]["w"], right["layers"][i]["w"]) for i in "01"]
    return plain and all(layers) and same(mine["flat"]["layers.0.v"], right["flat"]["layers.0.v"])


def test_numbers_of_a_stage_in_nested_mappings(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_nested, str(tmp_path / "a"))
    view = ckpt.open(str(tmp_path / "a"))
    assert sorted(view) == ["model.flat.layers.0.v", "model.flat.layers.1.v", *(f"model.layers.{i}.w" for i in range(4))]
    state = view.state()["model"]
    assert (state["version"], state["layers"]["0"]["kind"]) == (7, "dense")
    assert {n: t.name for n, t in state["flat"].items()} == {f"layers.{i}.v": f"model.flat.layers.{i}.v" for i in range(2)}
    layers = state["layers"]
    found = [layers["0"]["w"], layers["1"]["w"], layers["2.w"], layers["3.w"]]
    assert [t.name for t in found] == [f"model.layers.{i}.w" for i in range(4)]
    assert ranks.run(2, load_nested, str(tmp_path / "a")) == [True, True]
