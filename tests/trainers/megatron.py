"""megatron-core on two ranks, then on one, three and four: its states through ckpt's DCP storage, by ckpt itself, and by ckpt as a backend
of its own saves. The model is a GPTModel with experts: on two ranks tensors are cut, on three data, on four tensors and stages."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.errors import CkptError
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.integrations.megatron import CkptLoad, CkptSave, plain

from .failing import failing
from .lives import SAVED, Job, digest, world

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
import megatron_memory as memory
import megatron_writer as writer

ROWS = 24
CUT = {1: [], 2: ["--tp", "2"], 3: [], 4: ["--tp", "2", "--pp", "2"]}
"""By the number of ranks."""


@functools.cache
def started() -> argparse.Namespace:
    """What the model of this process is made with."""
    options = writer.options().parse_args(["--out", "", "--plain", "bf16", "--experts", "4", *CUT[world()]])
    writer.started(options)
    return options


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


class Rows(Job):
    """Rows of one weight on each rank. A step knows which rows these are, so it computes the same on every number of ranks."""

    def __init__(self, seed: int) -> None:
        started()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rows = torch.arange(ROWS).chunk(self.size)[self.rank]
        self.weight = torch.full((len(self.rows), 4), float(seed))
        self.extra = {"tensor": torch.full((2,), seed)}

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self.weight.mul_(0.5).add_((self.rows + number)[:, None])

    def sharded(self) -> dict[str, Any]:
        weight = ShardedTensor.from_rank_offsets("w", self.weight, (0, self.rank, self.size))
        return {"w": weight, "extra": ShardedObject("extra", self.extra, (1,), (0,), replica_id=self.rank)}

    def digests(self) -> dict[str, str]:
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, self.weight)
        return {"w": digest(torch.cat(parts)), "extra": digest(self.extra["tensor"])}


class ByDcp(Rows):
    def save(self, url: str) -> None:
        made(url)
        try:
            dist_checkpointing.save(self.sharded(), url, sharded_strategy=CkptStrategy())
        except CheckpointException as err:  # of DCP, no Exception, around those of all ranks
            raise next(iter(err.failures.values()))[0] from err

    def load(self, url: str) -> None:
        own = mcore._get_filesystem_reader
        mcore._get_filesystem_reader = lambda path, cache_metadata=False: CkptReader(path)
        try:
            state = dist_checkpointing.load(self.sharded(), url)
        finally:
            mcore._get_filesystem_reader = own
        self.weight.copy_(state["w"])
        self.extra = state["extra"]


class ByCkpt(Rows):
    def save(self, url: str) -> None:
        ckpt.save(url, self.sharded())

    def load(self, url: str) -> None:
        with contextlib.suppress(CkptError):  # an error of one rank ends the call on all
            CkptLoad().load(self.sharded(), url if self.rank == 0 else f"{url}/nothing")
        ckpt.load(url, state := self.sharded())
        self.extra = plain(state)["extra"]


class Model(Job):
    """A GPTModel and Megatron's mixed-precision Adam, with generators that are of a tensor and pipeline rank."""

    sharding: str | None = None
    """How the states of a distributed optimizer are looked at."""

    def __init__(self, seed: int) -> None:
        self.wrapped, self.optimizer = made_model(started(), seed, distributed=self.sharding is not None)
        self.models = [each.module for each in self.wrapped]
        self.random = {"seed": torch.full((3,), seed), "state": (seed, [1.5])}

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            for name, p in (found for model in self.models for found in memory.placed(model)):
                p.main_grad.copy_(memory.gradient(name, p, step))
            self.optimizer.step()

    def sharded(self, *, loading: bool = False) -> dict[str, Any]:
        from megatron.core import parallel_state as ps

        metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True), "chained_optim_avoid_prefix": True}
        metadata |= {} if self.sharding is None else {"distrib_optim_sharding_type": self.sharding}
        state: dict[str, Any] = {"model": self.models[0].sharded_state_dict(metadata=metadata), "iteration": SAVED}
        state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
        if not loading or dist.get_world_size() == 2:  # as --no-load-rng on other numbers of ranks
            sizes = ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()
            place = ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()
            replica = ps.get_data_parallel_rank(with_context_parallel=True)
            state["rng_state"] = ShardedObject("rng_state", self.random, sizes, place, replica_id=replica)
        return state

    def save(self, url: str) -> None:
        ckpt.save_async(url, self.sharded(), capture="eager").result()

    def load(self, url: str) -> None:
        state = self.sharded(loading=True)
        report = ckpt.load(url, state, strict="rng_state" in state)
        assert not report.missing
        self.take(plain(state))

    def take(self, state: dict[str, Any]) -> None:
        assert state["iteration"] == SAVED
        self.models[0].load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random = state.get("rng_state", {"seed": torch.full((3,), 1), "state": (1, [1.5])})

    def digests(self) -> dict[str, str]:
        """Of every tensor of the model and the optimizer, put together from the boxes of all ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        mine: list[Any] = []
        state = self.sharded()
        dist_checkpointing.mapping.apply_factories(state)
        for each in dist_checkpointing.dict_utils.nested_values(state):
            if isinstance(each, ShardedTensor):
                box = (slice(o, o + n) for o, n in zip(each.global_offset, (*(1,) * each.prepend_axis_num, *each.local_shape), strict=True))
                mine.append((each.key, each.global_shape, tuple(box), each.data.detach()))
        dist.all_gather_object(every, mine)
        tensors: dict[str, torch.Tensor] = {}
        for key, shape, box, data in (part for rank in every for part in rank):
            whole = tensors.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
            whole[box] = data.view(whole[box].shape)
        steps = {g["step"].item() if "step" in g else 0 for s in self.optimizer.chained_optimizers for g in s.optimizer.state.values()}
        values = {"steps": repr(steps), "rng": repr(self.random)}
        return {key: digest(whole) for key, whole in sorted(tensors.items())} | values


class ModelByBackend(Model):
    """By Megatron's own functions, with ckpt as a backend, in the background."""

    def save(self, url: str) -> None:
        from megatron.core import parallel_state as ps

        made(url)
        strategy = FullyParallelSaveStrategyWrapper(CkptSave(), ps.get_data_parallel_group(with_context_parallel=True))
        dist_checkpointing.save(self.sharded(), url, strategy, async_sharded_save=True).execute_sync()

    def load(self, url: str) -> None:
        names = dist_checkpointing.serialization.load_sharded_metadata(url)
        assert "rng_state/shard_0.0_1." in " ".join(names)
        state, stored_alone, absent = dist_checkpointing.load(self.sharded(loading=True), url, strict="return_all")
        assert not absent
        assert not {name for name in stored_alone if not name.startswith("rng_state")}
        self.take(state)


class ModelByQueue(ModelByBackend):
    """As Megatron-LM and Bridge save in the background: the strategy of their ``checkpointing_context``, and Megatron's queue."""

    def save(self, url: str) -> None:
        made(url)
        queue, context = AsyncCallsQueue(), {"save_strategy": CkptSave()}
        here = mock.patch.multiple(torch.cuda, synchronize=lambda: None, current_device=lambda: "cpu")  # which it asks for a GPU
        with here, contextlib.closing(queue):
            queue.schedule_async_request(dist_checkpointing.save(self.sharded(), url, context["save_strategy"], async_sharded_save=True))
            queue.maybe_finalize_async_calls(blocking=True)


def unfit(job: Any) -> Any:
    """Have an object of the state be nothing that a checkpoint holds."""
    return mock.patch.dict(job.random, {"state": object()})


def made(folder: str) -> None:
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()


def made_model(a: argparse.Namespace, seed: int, *, distributed: bool = False) -> tuple[list[Any], Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = writer.config_of(a)
    models = writer.models_of(a, config)
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter.mul_(seed)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = [DistributedDataParallel(config, ddp, model) for model in models]
    options = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, bf16=True, clip_grad=0.0, use_distributed_optimizer=distributed)
    return wrapped, get_megatron_optimizer(options, wrapped)


CASES = {
    "dcp": ByDcp,
    "sharded": ByCkpt,
    "model": Model,
    "model-by-backend": ModelByBackend,
    "model-by-queue": ModelByQueue,
    "model-one-rank-fails": failing(Model, unfit, late=True),
    "model-by-backend-one-rank-fails": failing(ModelByBackend, unfit),
    "model-by-queue-one-rank-fails": failing(ModelByQueue, unfit),
}
