"""The tensors of a state as holdings: views of their memory where that is on the host, copies of single boxes where it is not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ckpt.adapters.memory import raw_view, reads_otherwise
from ckpt.adapters.tensors import LocalTensor
from ckpt.live.holdings import BoxMemory, Check, Holdings, TensorParts


def holdings_of(tensors: Mapping[int, LocalTensor], check: Check | None = None) -> Holdings:
    """What this rank has, by number of the tensor. The memory stays the state's own: it must not change while it is served."""
    parts = {
        number: TensorParts(len(local.info.shape), local.info.dtype.itemsize, [BoxMemory(part.box, part.memory) for part in local.parts])
        for number, local in tensors.items()
    }
    return Holdings(tensors=parts, rows=tensor_rows, check=check)


def tensor_rows(memory: torch.Tensor, slices: tuple[slice, ...]) -> npt.NDArray[np.generic]:
    """The ``Rows`` of tensors, wherever they are."""
    memory = memory.detach()
    if memory.is_cpu and not reads_otherwise(memory):
        rows: npt.NDArray[np.generic] = raw_view(memory).numpy()
        return rows[slices]
    part = memory[slices]
    if reads_otherwise(part):
        part = part.resolve_conj().resolve_neg()
    copied: npt.NDArray[np.generic] = raw_view(part).contiguous().cpu().numpy()
    return copied
