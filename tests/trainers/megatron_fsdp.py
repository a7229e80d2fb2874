"""Megatron-FSDP of megatron-core on two ranks, then on one and three: its DTensors, which lie otherwise than their placements say, saved by
ckpt, by DCP through ckpt, and by DCP alone. Its steps need CUDA: here they are arithmetic on what each rank has."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckpt.integrations.dcp import CkptWriter

from .lives import Job, digest

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
import megatron_writer as writer


class Stream(contextlib.nullcontext[None]):
    """For a CUDA stream: everything is done when it is asked for."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = synchronize = nothing

    def record_event(self, *_: Any) -> Stream:
        return self


@functools.cache
def mesh() -> DeviceMesh:
    writer.without_gpus()
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = torch.cuda.stream = Stream
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


class Sharded(Job):
    def __init__(self, seed: int) -> None:
        where = mesh()
        from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard_model

        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        cpu, units = torch.device("cpu"), [nn.Linear]
        self.model = fully_shard_model(model, device_mesh=where, dp_shard_dim="dp", fsdp_unit_modules=units, device=cpu)
        super().__init__({"model": self.model.state_dict()}, self.calculate)

    def calculate(self, number: int) -> None:
        for tensor in self.state["model"].values():
            tensor._local_tensor.mul_(0.5).add_(number)

    def digests(self) -> dict[str, str]:
        every: list[Any] = [None] * dist.get_world_size()
        mine: dict[str, list[Any]] = {}
        for name, tensor in self.state["model"].items():
            local = tensor._local_tensor
            mine[name] = [(*chunk.offsets, *chunk.sizes, local.tolist()) for chunk in local.__create_chunk_list__()]
        dist.all_gather_object(every, mine)
        found = {}
        for name, tensor in self.state["model"].items():
            whole = torch.full(tensor.shape, float("nan"))
            for *numbers, values in (part for parts in every for part in parts[name]):
                offsets, sizes = numbers[: whole.ndim], numbers[whole.ndim :]
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = torch.tensor(values).view(sizes)
            found[name] = digest(whole)
        return found


class ThroughDcp(Sharded):
    def save(self, url: str) -> None:
        dcp.save(self.state, storage_writer=CkptWriter(url))


class ByDcp(Sharded):
    def save(self, url: str) -> None:
        dcp.save(self.state, checkpoint_id=url)


CASES = {"native": Sharded, "dcp-writer": ThroughDcp, "dcp-files": ByDcp}
