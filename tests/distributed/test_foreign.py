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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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


def save_strided(path: str) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    torch.save({"w": tensor}, f"{path}/x_rank{dist.get_rank()}.pt")


def test_placements_that_are_not_known_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_strided, str(tmp_path))
    with pytest.raises(FormatError, match="_StridedShard"):
        ckpt.open(str(tmp_path))
