"""Reading for libraries that want tensors of their own filled, or a whole checkpoint in host memory."""

from __future__ import annotations

from typing import Any

import torch

from ckpt import settings
from ckpt.adapters.tensors import LocalShard, LocalTensor, dtype_of
from ckpt.api import open as open_view
from ckpt.byte_source.storage import source_of
from ckpt.catalog import TensorEntry
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.layout.geometry import Box
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.view import StoredPerRank, StoredTensor

_HERE = TensorLayout.replicated((0,))


def job(entry: TensorEntry, box: Box, memory: torch.Tensor) -> TensorLoad:
    """Read ``box`` of a stored tensor into ``memory``, which has its shape."""
    info = TensorSpec(entry.name, dtype_of(memory, entry.name), entry.shape, _HERE, entry.logical)
    return TensorLoad(target=LocalTensor(info, [LocalShard(box, memory)] if box.numel else [], entry.name), entry=entry)


def read_state(url: str, *, threads: int | None = None) -> Any:
    """The state as it was saved: nested values with tensors in host memory. What each rank saved for itself is None.

    Raises:
        NotFoundError, NotCommittedError, FormatError: there is no checkpoint that can be read.
        CorruptError: bytes are damaged.
    """
    view = open_view(url)
    catalog, jobs = view._catalog, []

    def filled(value: Any) -> Any:
        if isinstance(value, StoredTensor):
            memory = torch.empty(value.shape, dtype=value.dtype)
            jobs.append(job(catalog.tensors[value.name], Box.whole(value.shape), memory))
            return memory
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(filled, value))
        return None if isinstance(value, StoredPerRank) else value

    state = filled(view.state())
    reader = Reader(catalog=catalog, source=source_of(catalog), verify="full", threads=settings.threads(threads), beat=lambda: None)
    reader.run(reader.plan(jobs))
    return state
