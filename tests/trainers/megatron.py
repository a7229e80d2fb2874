"""megatron-core on two ranks, then on one and three: its states through ckpt's DCP storage, and by ckpt itself. Its own saves need CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.integrations.dcp import CkptReader, CkptWriter

from .lives import Job, digest

ROWS = 24


class CkptStrategy(SaveShardedStrategy):
    """Megatron's states go to DCP as its own strategy gives them, and DCP stores with ckpt."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, *_ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = mcore.mcore_to_pyt_state_dict(state, False)
        dcp.save(state, storage_writer=CkptWriter(checkpoint_dir), planner=mcore.MCoreSavePlanner(flatten_state_dict=False))


class Sharded(Job):
    """Rows of one weight on each rank. A step knows which rows these are, so it computes the same on every number of ranks."""

    def __init__(self, seed: int, *, with_object: bool = False) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rows = torch.arange(ROWS).chunk(self.size)[self.rank]
        self.weight = torch.full((len(self.rows), 4), float(seed))
        self.with_object = with_object

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self.weight.mul_(0.5).add_((self.rows + number)[:, None])

    def sharded(self) -> dict[str, Any]:
        state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", self.weight, (0, self.rank, self.size))}
        if self.with_object:
            state["extra"] = ShardedObject("extra", {"tensor": torch.ones(2)}, (1,), (0,), replica_id=self.rank)
        return state

    def digests(self) -> dict[str, str]:
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, self.weight)
        return {"w": digest(torch.cat(parts))}


class ByStrategy(Sharded):
    def save(self, url: str) -> None:
        if self.rank == 0:
            os.makedirs(url)
        dist.barrier()
        try:
            dist_checkpointing.save(self.sharded(), url, sharded_strategy=CkptStrategy())
        except CheckpointException as err:  # of DCP, no Exception, around those of all ranks
            raise next(iter(err.failures.values()))[0] from err

    def load(self, url: str) -> None:
        own = mcore._get_filesystem_reader
        mcore._get_filesystem_reader = lambda path, cache_metadata=False: CkptReader(path)
        try:
            self.weight.copy_(dist_checkpointing.load(self.sharded(), url)["w"])
        finally:
            mcore._get_filesystem_reader = own


class ByCkpt(Sharded):
    def save(self, url: str) -> None:
        ckpt.save(url, self.sharded())

    def load(self, url: str) -> None:
        ckpt.load(url, self.sharded())


def objects(kind: type[Sharded]) -> Callable[[int], Job]:
    return lambda seed: kind(seed, with_object=True)


CASES = {
    "strategy-tensors": ByStrategy,
    "strategy-objects": objects(ByStrategy),
    "sharded-tensors": ByCkpt,
    "sharded-objects": objects(ByCkpt),
}
