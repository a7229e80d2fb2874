"""Checkpoints of ckpt for ``torch.distributed.checkpoint.load``: the reading half of :mod:`ckpt.integrations.dcp`."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt import settings
from ckpt.catalog import Catalog, identity
from ckpt.engine.load.reader import Reader as Reading
from ckpt.engine.load.reader import TensorLoad
from ckpt.engine.view import StoredTensor, View, with_tensors
from ckpt.errors import ConsistencyError, NamesError, ShapeError, UsageError
from ckpt.formats.native.catalog import replacement_noticed
from ckpt.formats.registry import open_catalog
from ckpt.plan.layout.geometry import Box
from ckpt.state.tensors import dtype_of
from ckpt.text import url_text

Verify = Literal["full", "partial", "off"]
SERIALIZED = "serialized by the planner of torch.distributed.checkpoint"
"""First of a tuple: the second are bytes that a planner made of a value, and makes the value of again."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What a checkpoint has, under the names that DCP gives it: tensors by their stored names, and values, small tensors among them."""

    catalog: Catalog
    metadata: Metadata
    tensors: dict[str, str]
    values: dict[str, Any]


class CkptReader(StorageReader):
    """A ``StorageReader`` for every checkpoint that ckpt can open, whatever saved it. For ``dcp.load``.

    Only the bytes that a rank needs are read, and each chunk that is touched is checked against its digest. Values that a rank saved for
    itself alone (``ckpt.PerRank``) are not there: :func:`ckpt.open` has them.

    Args:
        url: path or URL of the checkpoint; by default the ``checkpoint_id`` that DCP is given.
        cast: whether tensors of another dtype are converted; an error if not.
        verify: as for :class:`ckpt.ReadOptions`.
        threads: threads that this rank reads with (``CKPT_THREADS``; its share of the cores, at most 4).
    """

    def __init__(
        self, url: str | os.PathLike[str] | None = None, *, cast: bool = False, verify: Verify = "full", threads: int | None = None
    ) -> None:
        self.checkpoint_id = None if url is None else url_text(url)
        self.cast = cast
        self.verify: Verify = verify
        self.threads = settings.threads(threads)
        self._known: _Known | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
        self._known = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def read_metadata(self) -> Metadata:
        """What is there. Each tensor is told as a single chunk, so that DCP's plan has the boxes that the rank needs; which stored chunks
        these touch is found when they are read."""
        return self.known().metadata

    def known(self) -> _Known:
        if self._known is None:
            if self.checkpoint_id is None:
                raise UsageError("no place to load from is given", hint="CkptReader(url), or checkpoint_id= for dcp.load")
            self._known = _know(open_catalog(self.checkpoint_id))
        return self._known

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  DCP's
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=identity(self.known().catalog))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise ConsistencyError("it was replaced while ranks opened it", where=str(self.checkpoint_id), hint="load it again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        known = self.known()
        catalog = known.catalog
        reading = Reading(catalog=catalog, verify=self.verify, threads=self.threads)
        stored = [item for item in plan.items if item.type is LoadItemType.TENSOR and item.storage_index.fqn in known.tensors]
        targets = [planner.resolve_tensor(item).detach() for item in stored]
        with replacement_noticed(catalog):
            reading.load([self._job(item, target, known) for item, target in zip(stored, targets, strict=True)])
        for item, target in zip(stored, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.storage_index.fqn not in known.tensors:
                self._set(item, planner, known)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _job(self, item: ReadItem, target: torch.Tensor, known: _Known) -> TensorLoad:
        name = item.storage_index.fqn
        entry = known.catalog.tensors[known.tensors[name]]
        kind = dtype_of(target, name)
        if kind != entry.dtype and not self.cast:
            raise ShapeError(
                f"the checkpoint has {entry.dtype.name}, the state {kind.name}",
                where=f"tensor {name}",
                hint="CkptReader(url, cast=True) converts",
            )
        return TensorLoad.of_box(entry, Box(tuple(item.storage_offsets), tuple(item.lengths)), target)

    def _set(self, item: ReadItem, planner: LoadPlanner, known: _Known) -> None:
        name = item.storage_index.fqn
        if name not in known.values:
            raise NamesError(f"the checkpoint has no {name!r}", where=self.checkpoint_id, hint="`ckpt inspect` lists the names")
        value = known.values[name]
        if item.type is LoadItemType.BYTE_IO:
            if type(value) is tuple and value[:1] == (SERIALIZED,):
                wrapped = value[1]
            else:
                wrapped = io.BytesIO()
                torch.save(value, wrapped)  # what planners take; it is read again at once
            wrapped.seek(0)
            planner.load_bytes(item, wrapped)
            return
        target = planner.resolve_tensor(item).detach()
        target.copy_(value[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices])
        planner.commit_tensor(item, target)


def _know(catalog: Catalog) -> _Known:
    view = View(catalog)
    names: dict[int, str] = {}

    def placeholder(stored: StoredTensor) -> torch.Tensor:
        """An empty tensor, whose stored name goes to ``names``."""
        made = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        names[id(made)] = stored.name
        return made

    flat, paths = flatten_state_dict(with_tensors(view.state(), placeholder) if catalog.state is not None else {})
    for name in catalog.tensors.keys() - set(names.values()):  # of a catalog without a state, or of one rank
        flat[name], paths[name] = placeholder(view[name]), (name,)
    tensors = {name: names[id(value)] for name, value in flat.items() if id(value) in names}
    values = {name: value for name, value in flat.items() if id(value) not in names}
    metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, value in flat.items():
        metadata[name] = BytesStorageMetadata()
        if isinstance(value, torch.Tensor):
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * value.ndim), sizes=value.size())
            metadata[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])
    return _Known(catalog=catalog, metadata=Metadata(metadata, planner_data=paths), tensors=tensors, values=values)
