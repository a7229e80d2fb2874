"""Several ranks save into one machine's memory, and others load it in another layout, when all who wrote it are gone."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.engine.save.job import save_cache
from ckpt.net.group import current_group
from ckpt.nodes.memory_client import MemoryClient
from tests.distributed.ranks import Ranks
from tests.memory.daemons import daemon_in

URL = "memory://run/step-00000001"


def state(placement: Placement, factor: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    full = torch.arange(60_000.0).reshape(600, 100) * factor
    return {
        "w": distribute_tensor(full, mesh, [placement]),
        "b": distribute_tensor(torch.arange(7.0) * factor, mesh, [Replicate()]),
        "step": factor,
    }


def save(folder: str) -> int:
    """Bytes of the stage that this rank has of its own."""
    os.environ["CKPT_MEMORY_DIR"] = folder
    ckpt.save_async(URL, state(Shard(0), 3)).result()
    return save_cache(current_group(None)).arena.nbytes


def load(folder: str) -> bool:
    os.environ["CKPT_MEMORY_DIR"] = folder
    mine, expected = state(Shard(1), 0), state(Shard(1), 3)
    ckpt.load(URL, mine)
    return mine["step"] == 3 and all(torch.equal(mine[n].to_local(), expected[n].to_local()) for n in ("w", "b"))  # type: ignore[attr-defined]


def written_by(daemon: MemoryClient) -> int:
    return sum("/data/" in known.path for known in daemon.list())


def test_ranks_save_into_memory_and_others_load(ranks: Ranks, tmp_path: Path) -> None:
    with daemon_in(tmp_path / "memory") as daemon:
        assert ranks.run(4, save, str(daemon.folder)) == [0] * 4  # each captured straight into the daemon's memory
        assert written_by(daemon) == 4
        assert ranks.run(3, load, str(daemon.folder)) == [True] * 3
        assert daemon.status()["lent"] == 0
