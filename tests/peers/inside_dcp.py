"""Loaded by each file of PyTorch's own checkpoint tests: they run on CPUs, and save and load through ckpt.

``PEERS_MODE``: ``storage`` puts our CkptWriter and CkptReader in the place of DCP's, ``native`` ckpt.save and ckpt.load in that of
dcp.save and dcp.load, ``reader`` reads with our CkptReader what DCP's own Writer wrote; ``off`` changes nothing, to see what fails
without us.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.testing._internal.common_distributed as common
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, state_dict_loader, state_dict_saver

import ckpt
from ckpt.integrations import dcp as ours

MODE = os.environ.get("PEERS_MODE", "off")


class PathWriter(ours.CkptWriter):
    """Its first argument is called as that of FileSystemWriter is."""

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **options)


class PathReader(ours.CkptReader):
    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(os.fspath(path), **options)


def on_cpu() -> None:
    """Tests that ask for GPUs run with gloo."""

    def as_is(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common, name, as_is)
    start = dist.init_process_group

    @functools.wraps(start)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(kwargs.get("backend", "")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return start(*(("gloo", *args[1:]) if args and "nccl" in str(args[0]) else args), **kwargs)

    dist.init_process_group = with_gloo
    torch.cuda.set_device = lambda device: None
    torch.accelerator.current_device_index = lambda: "cpu"  # where ShardedTensors are compared

    def forked(self: Any) -> None:  # a process that imports torch anew takes seconds
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common.MultiProcessTestCase._spawn_processes = forked
    import torch.testing._internal.distributed._shard.sharded_tensor as sharded
    import torch.testing._internal.distributed._tensor.common_dtensor as common_dtensor
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded.with_comms = functools.partial(sharded.with_comms, backend="gloo")
    sharded.TEST_GPU_NUM = 2
    wrap = FullyShardedDataParallel.__init__

    @functools.wraps(wrap)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs | {"device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = wrapped

    common_dtensor.skip_if_lt_x_gpu = as_is
    common_dtensor.DEVICE_TYPE = "cpu"
    common_dtensor.PG_BACKEND = "gloo"
    common_dtensor.DTensorTestBase.world_size = property(lambda self: 4)


def where(storage: Any, url: Any) -> str:
    if url is None:
        url = getattr(storage, "checkpoint_id", None) or storage.path
    return os.fspath(url)


def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, process_group: Any = None, **options: Any) -> Any:
    return ckpt.save(where(storage_writer, checkpoint_id), dict(state_dict))


def load(state_dict: Any, *, checkpoint_id: Any = None, storage_reader: Any = None, process_group: Any = None, **options: Any) -> Any:
    """``dcp.load`` takes a part of a checkpoint, and wants everything that the state names."""
    url = where(storage_reader, checkpoint_id)
    report = ckpt.load(url, state_dict, strict=False)
    if report.missing and not getattr(options.get("planner"), "allow_partial_load", False):
        raise ckpt.errors.NamesError(f"the checkpoint has no {', '.join(report.missing)}", where=url)
    return report


def old_save(state_dict: Any, storage_writer: Any, process_group: Any = None, *args: Any, **options: Any) -> Any:
    return save(state_dict, storage_writer=storage_writer)


def old_load(state_dict: Any, storage_reader: Any, process_group: Any = None, *args: Any, **options: Any) -> Any:
    return load(state_dict, storage_reader=storage_reader)


def replace() -> None:
    places = {dcp, filesystem, _fsspec_filesystem, _storage_utils}
    if MODE == "storage":
        for place in places:
            for name in ("FileSystemWriter", "FsspecWriter"):
                if hasattr(place, name):
                    setattr(place, name, PathWriter)
    if MODE != "off":  # native: what DCP reads besides, such as load_sharded_optimizer_state_dict
        for place in places:
            for name in ("FileSystemReader", "FsspecReader"):
                if hasattr(place, name):
                    setattr(place, name, PathReader)
    if MODE == "native":
        dcp.save, dcp.load = save, load
        dcp.save_state_dict, dcp.load_state_dict = old_save, old_load
        state_dict_saver.save, state_dict_loader.load = save, load
        state_dict_saver.save_state_dict, state_dict_loader.load_state_dict = old_save, old_load


if not getattr(dcp, "_peers", False):
    dcp._peers = True  # type: ignore[attr-defined]
    on_cpu()
    replace()
