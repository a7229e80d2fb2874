"""Checkpoints that torch's own tools write on several ranks, loaded on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
from ckpt.errors import FormatError
from tests.distributed.gathered import full_state, options, same
from tests.distributed.models import Trained, fsdp, mesh_of, trained, whole_model
from tests.distributed.ranks import Ranks

MOVED = {"optimizer.state.*": "optimizer.state.model.*"}
"""DCP names the parameters of an optimizer within the model, ckpt within the state."""


def job(seed: int) -> Trained:
    return trained(fsdp(whole_model(seed), mesh_of(dp=dist.get_world_size())))


def save_dcp(path: str) -> tuple[dict[str, torch.Tensor], object]:
    which = job(1).steps(2)
    model, optimizer = get_state_dict(which.model, which.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "step": 2}, checkpoint_id=path)
    return full_state(which), options(which)


def load_dcp(path: str) -> tuple[dict[str, torch.Tensor], object, int, dict[str, torch.Tensor]]:
    which = job(2)
    state = which.state() | {"step": 0}
    ckpt.load(path, state, rename=MOVED)
    found = full_state(which)
    return found, options(which), state["step"], full_state(which.steps(1))


def test_dcp_of_two_ranks_into_fsdp_on_others(ranks: Ranks, tmp_path: Path) -> None:
    """Model, optimizer, its options and a number, bit for bit; and the next step can be made."""
    saved, groups = ranks.run(2, save_dcp, str(tmp_path))[0]
    for found, others, step, _ in (*ranks.run(1, load_dcp, str(tmp_path)), *ranks.run(3, load_dcp, str(tmp_path))):
        assert found.keys() == saved.keys() and all(same(found[n], t) for n, t in saved.items())
        assert (others, step) == (groups, 2)


def save_hugging_face(path: str) -> dict[str, torch.Tensor]:
    which = job(1)
    model = {n: t for n, t in which.model.state_dict().items() if t.dtype == torch.float32}
    dcp.save(model, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    return {n.removeprefix("model."): t for n, t in full_state(which).items() if n.removeprefix("model.") in model}


def test_shards_of_dcps_hugging_face_writer(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save_hugging_face, str(tmp_path))[0]
    view = ckpt.open(str(next(p.parent for p in tmp_path.rglob("*.safetensors"))))
    assert set(view) == set(saved) and all(same(view[n].read(), t) for n, t in saved.items())


PLACED = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "both": (Shard(1), Shard(0)),
    "twice": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
}


def whole() -> torch.Tensor:
    return torch.arange(35, dtype=torch.float64).reshape(7, 5)


def save_dtensors(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state = {name: distribute_tensor(whole(), mesh, placements) for name, placements in PLACED.items()}
    few = {"few": distribute_tensor(torch.arange(3.0), mesh, (Shard(0), Shard(0)))}
    torch.save(state | few, f"{path}/model_world_size_4_rank_{dist.get_rank()}.pt")


def test_files_of_dtensors(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, save_dtensors, str(tmp_path))
    view = ckpt.open(str(tmp_path))
    assert set(view) == {*PLACED, "few"}
    assert all(same(view[name].read(), whole()) for name in PLACED)
    assert same(view["both"][2:5, 1:4], whole()[2:5, 1:4]) and same(view["few"].read(), torch.arange(3.0))


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 9), torch.nn.Linear(9, 3))


def with_moments(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights, and moments that tell each element apart: gradients are made of the weights, which stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()
    return model.state_dict() | {f"moments.{n}": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}


def save_two_dimensional(path: str) -> dict[str, torch.Tensor]:
    """FSDP over tensor parallelism, and replicas of that: rows and columns that no number of ranks divides."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "dp", "tp"))
    placements = set()
    for name, mesh, dp in (("two", two, two["dp"]), ("hybrid", hybrid, hybrid["replicas", "dp"])):
        model = small_model()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
        for layer in (*model, model):
            fully_shard(layer, mesh=dp)
        state = with_moments(model)
        placements |= {type(p).__name__ for t in state.values() for p in t.placements}
        torch.save(state, f"{path}/{name}_world_size_4_rank_{dist.get_rank()}.pt")
    assert placements == {"_StridedShard", "Shard", "Replicate"}
    return with_moments(small_model())


def test_files_of_fsdp_over_tensor_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(4, save_two_dimensional, str(tmp_path))[0]
    view = ckpt.open(str(tmp_path))
    assert set(view) == {f"{job}.{name}" for job in ("two", "hybrid") for name in saved}
    for name in view:
        assert same(view[name].read(), saved[name.partition(".")[2]]), name
    assert same(view["two.0.weight"][5:29, 2:6], saved["0.weight"][5:29, 2:6])


def even() -> torch.Tensor:
    return torch.arange(96.0).reshape(8, 12)


def save_strided(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    columns = distribute_tensor(even(), mesh, [_StridedShard(1, split_factor=3), _StridedShard(0, split_factor=2)])
    twice = distribute_tensor(even(), mesh, [_StridedShard(0, split_factor=4), Shard(0)])
    few = distribute_tensor(even()[:1], mesh, [Shard(0), Replicate()])
    torch.save({"columns": columns, "twice": twice, "few": few}, f"{path}/x_rank{dist.get_rank()}.pt")


def test_parts_of_groups(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that has a part of each group has several boxes."""
    ranks.run(4, save_strided, str(tmp_path))
    view = ckpt.open(str(tmp_path))
    assert same(view["columns"].read(), even()) and same(view["twice"].read(), even()) and same(view["few"].read(), even()[:1])


def save_unknown(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    partial = DTensor.from_local(torch.ones(2, 3), mesh["a"], [Partial()])
    turned = distribute_tensor(whole(), mesh, (Shard(0), Shard(0)))
    turned._spec.shard_order = (_dtensor_spec.ShardOrderEntry(0, (1, 0)),)
    for name, tensor in (("partial", partial), ("turned", turned)):
        torch.save({"w": tensor}, f"{path}/{name}/x_rank{dist.get_rank()}.pt")


@pytest.mark.skipif(not hasattr(_dtensor_spec, "ShardOrderEntry"), reason="this version of torch knows one order")
def test_placements_that_are_not_known_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("partial", "turned"):
        (tmp_path / name).mkdir()
    ranks.run(2, save_unknown, str(tmp_path))
    with pytest.raises(FormatError, match="the placement Partial"):
        ckpt.open(str(tmp_path / "partial"))
    with pytest.raises(FormatError, match=r"over the mesh dimensions \[1, 0\] in that order"):
        ckpt.open(str(tmp_path / "turned"))
