"""The contestants: each saves and loads one state. All make what they wrote durable before they say so.

None gets an advantage that a user would not have: each is called as its documentation says, with its defaults.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckpt
from ckpt.state.tensors import as_bytes

from .states import State

Views = list[memoryview]
IOV_MAX = 1024
"""Buffers per system call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A state, and the ranks that hold it: ``rank`` of ``ranks``."""

    state: State
    group: dist.ProcessGroup | None
    rank: int
    ranks: int


class Contestant(Protocol):
    """Saves to and loads from a directory; collective over the job's group. What they return is noted with the measurement."""

    def save(self, job: Job, directory: str) -> dict[str, Any]: ...
    def load(self, job: Job, directory: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Ours:
    """``ckpt.save`` and ``ckpt.load``."""

    verify: Literal["full", "partial"] = "full"
    exchange: bool | None = None

    def save(self, job: Job, directory: str) -> dict[str, Any]:
        report = ckpt.save(directory, job.state.tree, job=ckpt.Job(process_group=job.group))
        return {"rank_bytes": report.rank_bytes}

    def load(self, job: Job, directory: str) -> dict[str, Any]:
        report = ckpt.load(
            directory,
            job.state.tree,
            job=ckpt.Job(process_group=job.group),
            read=ckpt.ReadOptions(verify=self.verify, exchange=self.exchange),
        )
        return {"needed": report.bytes_needed, "read": report.bytes_read, "unverified": report.bytes_unverified}


@dataclass(frozen=True)
class Dcp:
    """``torch.distributed.checkpoint``; it syncs its files by default."""

    def save(self, job: Job, directory: str) -> dict[str, Any]:
        dcp_save(job.state.tree, checkpoint_id=directory, process_group=job.group)
        return {}

    def load(self, job: Job, directory: str) -> dict[str, Any]:
        dcp_load(job.state.tree, checkpoint_id=directory, process_group=job.group)
        return {}


@dataclass(frozen=True)
class TorchSave:
    """``torch.save``: a file per rank, or rank 0's alone for a replicated state; loads copy into the state's tensors."""

    def save(self, job: Job, directory: str) -> dict[str, Any]:
        if job.state.replicated and job.rank > 0:
            return {}
        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/{job.rank}.pt", "wb") as file:
            torch.save(job.state.local, file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        return {}

    def load(self, job: Job, directory: str) -> dict[str, Any]:
        found = torch.load(f"{directory}/{0 if job.state.replicated else job.rank}.pt", weights_only=True)
        for name, tensor in job.state.local.items():
            tensor.copy_(found[name])
        return {}


@dataclass(frozen=True)
class TorchCheckpointing:
    """``torch_checkpointing`` 0.1.1, saved in the foreground without ``O_DIRECT``, which its own writer cannot use on every file system.

    Each rank has its own tensors as an item: the metadata of DTensors need CUDA. It syncs nothing, so here that is done after it."""

    def save(self, job: Job, directory: str) -> dict[str, Any]:
        manager = self._manager()
        manager.save(directory, {"state": job.state.local})  # without a future where it saves in the foreground
        manager.close()
        if job.group is not None:
            dist.barrier(job.group)  # rank 0 renames the directory when the others may have returned
        path = f"{directory}/state_{job.rank}.pt"
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sync_directory(directory)
        return {}

    def load(self, job: Job, directory: str) -> dict[str, Any]:
        manager = self._manager()
        manager.load(directory, into={"state": job.state.local}, strict=True)
        manager.close()
        return {}

    @staticmethod
    def _manager() -> Any:
        tc = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = tc.CheckpointManager.Config.with_sync_save()
        config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        return config.build()


@dataclass(frozen=True)
class Raw:
    """Plain writes and reads of the same bytes by the same processes: what the storage can do.

    A file per rank; a replicated state's bytes are divided evenly. A load reads this rank's share of all bytes, one after
    another, straight into the tensors: in another layout than the saved one these are as many bytes, but not those that belong there.
    In a bucket, boto3's transfer manager moves an object per rank.
    """

    def save(self, job: Job, directory: str) -> dict[str, Any]:
        if "://" in directory:
            return _move_object("upload_fileobj", job, directory)
        os.makedirs(directory, exist_ok=True)
        views = [as_bytes(t) for t in job.state.local.values()]
        if job.state.replicated:
            views = cut(views, *share(job.state.total, job.rank, job.ranks))
        fd = os.open(f"{directory}/{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            at = 0
            for group in batches(views):
                at = _transfer(os.pwritev, fd, group, at)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(directory)
        return {}

    def load(self, job: Job, directory: str) -> dict[str, Any]:
        if "://" in directory:
            return _move_object("download_fileobj", job, directory)
        views = [as_bytes(t) for t in job.state.local.values()]
        begin = 0
        for path in sorted((f"{directory}/{name}" for name in os.listdir(directory)), key=lambda p: int(os.path.basename(p))):
            end = begin + os.path.getsize(path)
            low, high = max(begin, job.state.start), min(end, job.state.start + job.state.nbytes)
            if high > low:
                _read(path, low - begin, cut(views, low - job.state.start, high - job.state.start))
            begin = end
        return {}


@dataclass(eq=False)
class Stream:
    """The bytes of a rank's tensors, one after another, as boto3 reads and writes a file."""

    views: Views

    def take(self, count: int) -> Views:
        taken, self.views = cut(self.views, 0, count), cut(self.views, count, sum(map(len, self.views)))
        return taken

    def read(self, count: int = 1 << 62) -> bytes:
        return b"".join(self.take(count))

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        for view in self.take(len(data)):
            view[:], rest = rest[: len(view)], rest[len(view) :]


def _move_object(method: str, job: Job, directory: str) -> dict[str, Any]:
    bucket, _, prefix = directory.removeprefix("s3://").partition("/")
    stream = Stream([as_bytes(t) for t in job.state.local.values()])
    getattr(importlib.import_module("boto3").client("s3"), method)(Fileobj=stream, Bucket=bucket, Key=f"{prefix}/{job.rank}")
    return {}


CONTESTANTS: dict[str, Contestant] = {
    "ckpt": Ours(),
    "ckpt partial": Ours(verify="partial"),
    "ckpt alone": Ours(exchange=False),
    "dcp": Dcp(),
    "torch.save": TorchSave(),
    "raw": Raw(),
}
if find_spec("torch_checkpointing") is not None:
    CONTESTANTS["torch_checkpointing"] = TorchCheckpointing()


def _read(path: str, offset: int, views: Views) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        for group in batches(views):
            offset = _transfer(os.preadv, fd, group, offset)
    finally:
        os.close(fd)


def _transfer(call: Any, fd: int, views: Views, offset: int) -> int:
    """Repeat ``pwritev`` or ``preadv`` until all is done; the offset after it."""
    while views:
        done = call(fd, views, offset)
        if done == 0:
            raise OSError("the file ends too early")
        offset += done
        views = cut(views, done, sum(map(len, views)))
    return offset


def batches(views: Views) -> Iterator[Views]:
    """As many buffers as one system call takes, again and again."""
    it = iter(views)
    while group := list(itertools.islice(it, IOV_MAX)):
        yield group


def cut(views: Sequence[memoryview], start: int, stop: int) -> Views:
    """Bytes ``[start, stop)`` of the concatenation of views."""
    found, at = [], 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, len(view))
        if high > low:
            found.append(view[low:high])
        at += len(view)
    return found


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rank's even share of ``total`` bytes: begin and end."""
    return total * rank // ranks, total * (rank + 1) // ranks


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
