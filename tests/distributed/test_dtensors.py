"""DTensors on meshes of several dimensions: every placement into every other, cut here by hand with ``torch.chunk``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
from ckpt import live
from ckpt.errors import CkptError, CoverageError, LayoutError, ReplicaError
from tests.distributed.gathered import differences, full_state, same
from tests.distributed.models import fsdp, mesh_of, tensor_parallel, trained, whole_model
from tests.distributed.ranks import Ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

CASES: list[tuple[tuple[Placement, ...], list[tuple[int, int]]]] = [
    ((R, R, R), []),
    ((S0, R, R), [(0, 0)]),
    ((R, S1, R), [(1, 1)]),
    ((R, R, S2), [(2, 2)]),
    ((S0, S1, S2), [(0, 0), (1, 1), (2, 2)]),
    ((S2, S0, S1), [(0, 2), (1, 0), (2, 1)]),
    ((S0, S0, S0), [(0, 0), (1, 0), (2, 0)]),
    ((S1, R, S1), [(0, 1), (2, 1)]),
    ((S0, S1, S0), [(0, 0), (1, 1), (2, 0)]),
    ((_StridedShard(0, split_factor=2), S0, R), [(1, 0), (0, 0)]),
    ((R, _StridedShard(1, split_factor=2), S1), [(2, 1), (1, 1)]),
    ((_StridedShard(0, split_factor=2), S1, S0), [(2, 0), (0, 0), (1, 1)]),
    ((_StridedShard(0, split_factor=4), S0, S0), [(1, 0), (2, 0), (0, 0)]),
]
"""Placements on a mesh of three dimensions, and what they mean: (mesh dimension, tensor dimension) in the order in which they cut."""

SHAPES = [(7, 5, 3), (2, 9, 4), (1, 33, 2), (16, 1, 8)]


def whole(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 1000 * number).reshape(shape)


def part_of(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(parts, dim) if tensor.shape[dim] else ()
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def cut(tensor: torch.Tensor, mesh: DeviceMesh, order: Sequence[tuple[int, int]]) -> torch.Tensor:
    where = mesh.get_coordinate()
    assert where is not None
    for axis, dim in order:
        tensor = part_of(tensor, mesh.size(axis), where[axis], dim)
    return tensor.contiguous()


def placed(tensor: torch.Tensor, mesh: DeviceMesh, case: int) -> DTensor:
    placements, order = CASES[case]
    return DTensor.from_local(
        cut(tensor, mesh, order).clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def state_of(mesh: DeviceMesh, shift: int, fill: float | None = None) -> dict[str, DTensor]:
    """A tensor of each shape in each case; ``shift`` moves the cases along the tensors."""
    found = {}
    for i in range(len(CASES)):
        for j, shape in enumerate(SHAPES):
            tensor = whole(10 * i + j, shape)
            found[f"t{i}.{j}"] = placed(tensor if fill is None else torch.full_like(tensor, fill), mesh, (i + shift) % len(CASES))
    return found


def save_cases(url: str, sizes: dict[str, int]) -> list[str]:
    state = state_of(mesh_of(**sizes), 0)
    ckpt.save(url, state)
    # What the table above says must be what torch means by these placements.
    wanted = {f"t{i}.{j}": whole(10 * i + j, shape) for i in range(len(CASES)) for j, shape in enumerate(SHAPES)}
    return [n for n, t in state.items() if not torch.equal(t.full_tensor(), wanted[n])]


def load_cases(url: str, sizes: dict[str, int], shifts: Sequence[int]) -> list[str]:
    mesh = mesh_of(**sizes)
    problems = []
    for shift in shifts:
        state = state_of(mesh, shift, fill=-1.0)
        ckpt.load(url, state)
        wanted = state_of(mesh, shift)
        problems += [f"shift {shift}, {n}" for n in state if not same(state[n].to_local(), wanted[n].to_local())]
    return problems


@pytest.mark.parametrize("shifts", [(7,), pytest.param((1, 3, 9, 11, 12), marks=pytest.mark.slow)], ids=str)
def test_every_placement_on_three_dimensions(ranks: Ranks, tmp_path: Path, shifts: tuple[int, ...]) -> None:
    url = str(tmp_path / "a")
    assert ranks.run(8, save_cases, url, {"a": 2, "b": 2, "c": 2}) == [[]] * 8
    view = ckpt.open(url)
    for i in range(len(CASES)):
        for j, shape in enumerate(SHAPES):
            assert torch.equal(view[f"t{i}.{j}"].read(), whole(10 * i + j, shape))
    assert ranks.run(8, load_cases, url, {"a": 2, "b": 2, "c": 2}, shifts) == [[]] * 8
    # Other sizes of the mesh: the strided cases then mean something else, so only those without are comparable.
    assert ranks.run(1, load_cases, url, {"a": 1, "b": 1, "c": 1}, [0]) == [[]]


# ------------------------------------------------------------------------------------------------------- uneven columns


def columns(mesh: DeviceMesh, fill: float | None = None) -> dict[str, DTensor]:
    found = {}
    for number, shape in enumerate([(3, 7), (2, 3), (5, 1), (0, 6), (4, 0), (2, 33, 5)]):
        tensor = whole(number, shape) if fill is None else torch.full(shape, fill, dtype=torch.float64)
        local = part_of(tensor, mesh.size(), mesh.get_local_rank(), 1).contiguous().clone()
        found[f"c{number}"] = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=tensor.shape, stride=tensor.stride())
    return found


def save_columns(url: str) -> None:
    ckpt.save(url, columns(mesh_of(tp=dist.get_world_size())))


def load_columns(url: str) -> list[str]:
    mesh = mesh_of(tp=dist.get_world_size())
    state, wanted = columns(mesh, fill=-1.0), columns(mesh)
    ckpt.load(url, state)
    return [n for n in state if not same(state[n].to_local(), wanted[n].to_local())]


@pytest.mark.parametrize(("saved", "loaded"), [(4, 3), (3, 4), (2, 4), (4, 1)])
def test_uneven_columns_and_empty_shards(ranks: Ranks, tmp_path: Path, saved: int, loaded: int) -> None:
    ranks.run(saved, save_columns, str(tmp_path / "a"))
    assert ranks.run(loaded, load_columns, str(tmp_path / "a")) == [[]] * loaded


# ---------------------------------------------------------------------------------------------------------- sub-meshes


def rows_of(mesh: DeviceMesh, tensor: torch.Tensor, fill: float | None = None) -> tuple[DTensor, torch.Tensor]:
    """A DTensor of this rank's rows (overwritten with ``fill``), and the rows."""
    local = part_of(tensor, mesh.size(), mesh.get_local_rank(), 0).contiguous()
    memory = local.clone() if fill is None else torch.full_like(local, fill)
    return DTensor.from_local(memory, mesh, [S0], run_check=False, shape=tensor.shape, stride=tensor.stride()), local


def stages(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """A pipeline stage's own tensors."""
    stage = mesh.get_local_rank("pp")
    return {f"layers.{stage}.w": whole(stage, (5, 3)), f"layers.{stage}.b": whole(2 + stage, (1,))}


def save_stages(url: str, shared: bool) -> CkptError | None:
    mesh = mesh_of(pp=2, dp=2)
    tensors = stages(mesh) | ({"norm": whole(9, (3,))} if shared else {})
    try:
        ckpt.save(url, {name: rows_of(mesh["dp"], tensor)[0] for name, tensor in tensors.items()})
    except CkptError as err:
        return err
    return None


def load_stages(url: str) -> list[str]:
    mesh = mesh_of(pp=2, dp=2)
    made = {name: rows_of(mesh["dp"], tensor, fill=-1.0) for name, tensor in stages(mesh).items()}
    ckpt.load(url, {name: tensor for name, (tensor, _) in made.items()})
    return [name for name, (tensor, wanted) in made.items() if not same(tensor.to_local(), wanted)]


def test_a_mesh_for_each_pipeline_stage(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    assert ranks.run(4, save_stages, url, False) == [None] * 4
    view = ckpt.open(url)
    wanted = {f"layers.{i}.w": whole(i, (5, 3)) for i in (0, 1)} | {f"layers.{i}.b": whole(2 + i, (1,)) for i in (0, 1)}
    assert differences({n: view[n].read() for n in view}, wanted) == []
    assert ranks.run(4, load_stages, url) == [[]] * 4


def save_as_told(url: str, err: CkptError) -> list[str]:
    """Save with the layout that an error's hint names. Tensors that come back wrong."""
    rule = re.search(r"give layout=(.*), or add", err.hint or "")
    mesh, layout = mesh_of(pp=2, dp=2), eval(rule[1] if rule else "None", {"ckpt": ckpt})
    tensors = stages(mesh) | {"norm": whole(9, (3,))}
    ckpt.save(url, {name: rows_of(mesh["dp"], tensor)[0] for name, tensor in tensors.items()}, layout=layout)
    made = {name: rows_of(mesh["dp"], tensor, fill=-1.0) for name, tensor in tensors.items()}
    ckpt.load(url, {name: tensor for name, (tensor, _) in made.items()})
    return [name for name, (tensor, wanted) in made.items() if not same(tensor.to_local(), wanted)]


def test_two_stages_that_claim_one_name_are_told_the_rule_that_helps(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.run(4, save_stages, str(tmp_path / "a"), True)
    assert [type(e) for e in errors] == [CoverageError] * 4
    assert "ranks 0-1 and ranks 2-3 both claim tensor norm" in str(errors[3])
    assert ranks.run(4, save_as_told, str(tmp_path / "a"), errors[3]) == [[]] * 4
    view = ckpt.open(str(tmp_path / "a"))
    assert differences({"norm": view["norm"].read()}, {"norm": whole(9, (3,))}) == []


def tied_stages(fill: float | None, differ: bool = False) -> dict[str, Any]:
    """An embedding that the first and the last stage have, each on a mesh of its own, and its optimizer; and what one stage has."""
    mesh, model = mesh_of(pp=2, dp=2), torch.nn.Module()
    table = whole(9, (5, 2)) + (mesh.get_local_rank("pp") if differ else 0)
    model.emb = torch.nn.Parameter(rows_of(mesh["dp"], table, fill)[0])
    optimizer = torch.optim.AdamW(model.parameters())
    model.emb.grad = rows_of(mesh["dp"], whole(3, (5, 2)) + (fill or 0))[0]
    optimizer.step()
    own = {name: rows_of(mesh["dp"], tensor, fill)[0] for name, tensor in stages(mesh).items()}
    return {"model": model, "optimizer": optimizer, "own": own}


def save_tied(url: str) -> tuple[list[str], str]:
    layout = ckpt.Layout({"pp": 2, "dp": 2}, [("model.emb", ckpt.Stage("pp", (0, -1))), ("*", ckpt.Replicate())])
    state = tied_stages(None)
    ckpt.save(f"{url}/sync", state, layout=layout)
    ckpt.save_async(f"{url}/async", state, layout=layout).result()
    problems = []
    for name, given in (("sync", None), ("async", layout)):
        again = tied_stages(-1.0)
        ckpt.load(f"{url}/{name}", again, layout=given)
        values = [
            [t.full_tensor() if isinstance(t, DTensor) else t for t in s["optimizer"].state[s["model"].emb].values()]
            for s in (state, again)
        ]
        if not same(again["model"].emb.to_local(), state["model"].emb.to_local()) or not all(map(torch.equal, *values)):
            problems.append(name)
    moved = {"model.emb": torch.zeros(5, 2, dtype=torch.float64)}
    live.reshard({"model.emb": state["model"].emb}, moved, layout=layout)
    problems += [] if torch.equal(moved["model.emb"], state["model"].emb.full_tensor()) else ["moved"]
    try:
        ckpt.save(f"{url}/differ", tied_stages(None, differ=True), layout=layout)
    except ReplicaError as err:
        return problems, str(err)
    return problems, "saved"


def test_a_dtensor_on_several_stages_is_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    for problems, text in ranks.run(4, save_tied, str(tmp_path)):
        assert problems == []
        assert "model.emb" in text and "rank 0 ≠ rank 2" in text
    for name in ("sync", "async"):
        view = ckpt.open(str(tmp_path / name))
        assert {n: tuple(view[n].shape) for n in view if "emb" in n} == {
            "model.emb": (5, 2),
            "optimizer.state.model.emb.exp_avg": (5, 2),
            "optimizer.state.model.emb.exp_avg_sq": (5, 2),
            "optimizer.state.model.emb.step": (),
        }


def two_meshes(fill: float | None = None) -> dict[str, tuple[DTensor, torch.Tensor]]:
    """FSDP over tensor parallelism: ``w`` is on both dimensions, ``norm``, which TP leaves alone, on the FSDP dimension's mesh alone."""
    mesh = mesh_of(dp=2, tp=2)
    tensor = whole(0, (7, 6))
    local = part_of(part_of(tensor, 2, mesh.get_local_rank("dp"), 0), 2, mesh.get_local_rank("tp"), 1).contiguous()
    memory = local.clone() if fill is None else torch.full_like(local, fill)
    wide = DTensor.from_local(memory, mesh, [S0, S1], run_check=False, shape=tensor.shape, stride=tensor.stride())
    return {"norm": rows_of(mesh["dp"], whole(9, (3,)), fill), "w": (wide, local)}


def save_two_meshes(url: str, drift: bool) -> CkptError | None:
    state = {name: tensor for name, (tensor, _) in two_meshes().items()}
    if drift and dist.get_rank() == 3:
        state["norm"].to_local().add_(1)
    try:
        ckpt.save(url, state)
    except CkptError as err:
        return err
    return None


def load_two_meshes(url: str) -> list[str]:
    made = two_meshes(fill=-1.0)
    ckpt.load(url, {name: tensor for name, (tensor, _) in made.items()})
    return [name for name, (tensor, wanted) in made.items() if not same(tensor.to_local(), wanted)]


def test_a_parameter_on_a_slice_of_the_mesh_is_replicated_over_the_rest(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    assert ranks.run(4, save_two_meshes, url, False) == [None] * 4
    view = ckpt.open(url)
    assert differences({n: view[n].read() for n in view}, {"norm": whole(9, (3,)), "w": whole(0, (7, 6))}) == []
    assert ranks.run(4, load_two_meshes, url) == [[]] * 4
    errors = ranks.run(4, save_two_meshes, url, True)
    assert [type(e) for e in errors] == [ReplicaError] * 4
    assert "tensor norm [2:3]: rank 2 ≠ rank 3" in str(errors[0])


# --------------------------------------------------------------------------------------------------- FSDP over TP, uneven


def save_fsdp_tp(url: str, dp: int) -> dict[str, torch.Tensor]:
    mesh = mesh_of(dp=dp, tp=2)
    which = trained(fsdp(tensor_parallel(whole_model(5), mesh["tp"]), mesh["dp"])).steps(1)
    ckpt.save(url, which.state())
    return full_state(which)


def load_fsdp_tp(url: str, dp: int, wanted: dict[str, torch.Tensor]) -> list[str]:
    mesh = mesh_of(dp=dp, tp=2)
    which = trained(fsdp(tensor_parallel(whole_model(6), mesh["tp"]), mesh["dp"]))
    ckpt.load(url, which.state())
    return differences(full_state(which), wanted)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 3), (3, 4)))])
def test_strided_shards_that_do_not_divide(ranks: Ranks, tmp_path: Path, saved: int, loaded: int) -> None:
    """33, 7 and 5 rows over 2 tensor-parallel ranks and then over 2, 4 or 3 of FSDP: pieces of 9, 5, 4, 1 or no rows."""
    full = ranks.run(2 * saved, save_fsdp_tp, str(tmp_path / "a"), saved)[0]
    view = ckpt.open(str(tmp_path / "a"))
    assert differences({n: view[n].read() for n in view}, full) == []
    assert ranks.run(2 * loaded, load_fsdp_tp, str(tmp_path / "a"), loaded, full) == [[]] * 2 * loaded


# ---------------------------------------------------------------------------------------------------------- refused


class Reversed(Shard):
    """Of another library: means something else by the fields of torch's."""


def save_placement(url: str, placement: Placement) -> CkptError | None:
    state = {"w": DTensor.from_local(torch.ones(2), mesh_of(dp=2), [placement], run_check=False)}
    try:
        ckpt.save(url, state)
    except CkptError as err:
        return err
    return None


@pytest.mark.parametrize(("placement", "hint"), [(Partial(), "redistribute it"), (Reversed(0), "plug-in")])
def test_a_placement_that_nothing_knows_is_refused(ranks: Ranks, tmp_path: Path, placement: Placement, hint: str) -> None:
    errors = ranks.run(2, save_placement, str(tmp_path / "a"), placement)
    assert [type(e) for e in errors] == [LayoutError, LayoutError]
    assert "cannot be stored (tensor w)" in str(errors[0]) and hint in str(errors[0])
    assert not (tmp_path / "a" / "checkpoint.json").exists()
