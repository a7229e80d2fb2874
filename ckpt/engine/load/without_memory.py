"""Tensors without memory in a dry run: planned as if they had some, and given none."""

from __future__ import annotations

import mmap

import torch

from ckpt.adapters.tensors import LocalShard, LocalTensor

from .whole_chunks import TensorLoad

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def as_if_created(job: TensorLoad, device: str | torch.device) -> TensorLoad:
    """The load of a tensor that has no memory yet, planned as if it had some on ``device``."""
    target = job.target
    if torch.device(device).type != "cpu":
        return job  # memory of the meta device is planned as that of any other device but the host
    parts = [LocalShard(part.box, address_space(part.memory)) for part in target.parts]
    return TensorLoad(LocalTensor(target.info, parts, target.state_name), job.entry)


def address_space(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor whose pages nobody touches: it takes addresses, and no memory."""
    pages = mmap.mmap(-1, max(like.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=like.nbytes).view(like.dtype).view(like.shape) if like.nbytes else like
