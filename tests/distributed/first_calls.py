"""What torch does once in a process and no more, done in the server that ranks are forked from, which imports this module last.

The first shard, the first step of an optimizer and the first operators on DTensors wrap functions and fill tables for half a second of
CPU; each rank of each run would pay for it. Here a group that moves nothing stands in for other ranks. What torch remembers of a mesh
serves no rank: ``NAMES`` are names that no test gives to the dimensions of its meshes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.gathered import full_state
from tests.distributed.models import fsdp, mesh_of, tensor_parallel, trained, whole_model

NAMES = ("first calls, rows", "first calls, columns")


@contextmanager
def _alone_of(size: int) -> Iterator[None]:
    """A default process group in which this process is one of ``size``, and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_first_calls() -> None:
    """Train small models in the layouts that tests use, and gather them."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(), _alone_of(4):
        mesh = mesh_of(**dict.fromkeys(NAMES, 2))
        rows, columns = (mesh[name] for name in NAMES)
        sharded = fsdp(tensor_parallel(whole_model(0), columns), rows)
        DistributedDataParallel(whole_model(0))
        for model in (whole_model(0, moe=True), sharded):
            full_state(trained(model).steps(2))


# Later ones and builds for CUDA refuse autograd in a process that is forked from one that has used it; earlier ones, shards of these sizes.
if torch.version.cuda is None and "2.9" <= torch.__version__ < "2.14":
    make_first_calls()
gc.collect()
gc.freeze()  # a collection in a rank goes over what the rank has made, and copies no page of the server
