"""PyTorch Distributed Checkpoint with ckpt's format, engine and storage.

>>> dcp.save(state_dict, storage_writer=CkptWriter("runs/a/step-100"))  # doctest: +SKIP
>>> dcp.load(state_dict, storage_reader=CkptReader("runs/a/step-100"))  # doctest: +SKIP

DCP plans and moves its plans between ranks as ever; the bytes go through ckpt. What is written is a native checkpoint, committed in one
step, and has no pickle: values that are not tensors must be plain (docs/format.md §8). DCP raises what goes wrong as
``CheckpointException``, with our errors inside. The interfaces: ``torch.distributed.checkpoint.storage`` and ``planner``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt import settings
from ckpt.dtypes import dtype as dtype_named
from ckpt.engine.save.leader import Leader, Tables, Values
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.plan import WriteOptions, plan_assigned
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.engine.save.writer import EncodedWriter, RankWriter
from ckpt.errors import ConflictError, LayoutError, StateError, UsageError
from ckpt.formats.native.codecs import check_choice
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.registry import open_backend
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.plan import tree
from ckpt.plan.external_assignment import AssignedBox, ExternalAssignment, assign_boxes
from ckpt.plan.layout.geometry import Box
from ckpt.plan.tables import Joined
from ckpt.state.tensors import LocalShard, LocalTensor, dtype_of

from .dcp_reader import SERIALIZED, CkptReader

__all__ = ["CkptReader", "CkptWriter"]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What the coordinator tells a rank: the id of the save, and what the checkpoint knows the rank by."""

    id: str
    position: int


class CkptWriter(StorageWriter):
    """A ``StorageWriter`` that writes a ckpt checkpoint. For ``dcp.save`` and ``dcp.async_save``, one save at a time.

    Args:
        url: path or URL of the checkpoint; by default the ``checkpoint_id`` that DCP is given.
        codec: as for :func:`ckpt.save`.
        threads: threads that this rank writes with (``CKPT_THREADS``; its share of the cores, at most 4).
        overwrite: whether a checkpoint that is there is replaced; ``ConflictError`` on all ranks, before anything is written, if not.
        others: further arguments of ``FileSystemWriter``. ``thread_count`` is ``threads``; the rest may only have the values that say what
            this does anyway.

    Raises:
        UsageError: an argument of ``FileSystemWriter`` asks for what this does not do, or there is no such argument.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        codec: str | None = None,
        threads: int | None = None,
        overwrite: bool = True,
        **others: Any,
    ) -> None:
        check_choice(codec)
        self.checkpoint_id = None if url is None else os.fspath(url)
        self.codec = codec
        count = others.pop("thread_count", None)
        if threads is not None and count is not None:
            raise UsageError("threads and thread_count are the same: give one of them")
        self.threads = settings.threads(count if threads is None else threads)
        self.overwrite = overwrite
        for name, value in others.items():
            if name not in _ONLY:
                raise UsageError(
                    f"CkptWriter has no argument {name!r}", hint=f"those of FileSystemWriter that it takes: {', '.join(_ONLY)}"
                )
            only, why = _ONLY[name]
            if getattr(value, "value", value) != only:
                raise UsageError(f"{name}={value!r} is not possible: {why}", hint=f"leave {name} out")
        self._leader: Leader | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)

    @property
    def url(self) -> str:
        if self.checkpoint_id is None:
            raise UsageError("no place to save to is given", hint="CkptWriter(url), or checkpoint_id= for dcp.save")
        return self.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    # ---- planning

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001  DCP's
        if kwargs.get("use_collectives") is False:
            raise UsageError("use_collectives=False makes a checkpoint of each rank", hint="leave it out")
        self._leader = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: everything will be there, once; nothing is written if not."""
        if not self.overwrite and committed_id(open_backend(self.url)) is not None:
            raise ConflictError("Checkpoint already exists and overwrite=False", where=self.url, hint="save to another URL")
        plans = _whole(plans)
        assignment = assign_boxes(g for position, plan in enumerate(plans) for g in _assigned_boxes(plan.items, position))
        assignment.check()
        group = Group(0, tuple(range(len(plans))))
        call = group.call("save", self.url, settings.timeout(None))
        leader = self._leader = Leader(
            call=call, backend=open_backend(self.url), options=SaveOptions.of({"merge_flat_shards": False}), known=[]
        )
        joined = Joined(tensors=dict(assignment.tensors), assignments=dict(assignment.assignments), aliases={})
        leader.open_tables(Tables((), joined, {}), {})
        return [replace(plan, storage_data=_Place(id=leader.id, position=i)) for i, plan in enumerate(plans)]

    # ---- writing

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place: _Place = plan.storage_data
        values = {item.index.fqn: _node(item, planner) for item in plan.items if item.type is WriteItemType.BYTE_IO}
        mine = assign_boxes(_assigned_boxes(plan.items, place.position))
        tensors = _memory(mine, plan.items, planner)
        how = WriteOptions(rank=place.position, position=place.position, codec=self.codec)
        ranked = plan_assigned(list(mine.tensors.values()), mine.assignments, how)
        kind = RankWriter if self.codec is None else partial(EncodedWriter, codec=self.codec)
        source, backend = ChunkSource(ranked, tensors), open_backend(self.url)
        writer = kind(backend=backend, plan=ranked, source=source, id=place.id, position=place.position, threads=self.threads)
        writer.run()
        done: Future[list[WriteResult]] = Future()
        nbytes = sum(file.size for file in writer.files)
        done.set_result([WriteResult(MetadataIndex(""), nbytes, storage_data=(place.position, writer.row(), values))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: index and commit."""
        if self._leader is None:
            raise UsageError("nothing was planned here", hint="DCP calls prepare_global_plan on the rank that it calls finish on")
        rows: dict[int, Row] = {}
        values: dict[str, tree.Node] = {}
        for position, row, nodes in (result.storage_data for of_rank in results for result in of_rank):
            rows[position] = row
            values |= nodes
        self._leader.commit(rows, Values(_state(metadata, values), {}))
        self._leader.remove_older()


_ONLY: dict[str, tuple[Any, str]] = {
    "single_file_per_rank": (True, "each rank writes as few files as it can"),
    "sync_files": (True, "a checkpoint is committed when every byte is durable"),
    "per_thread_copy_ahead": (10_000_000, "memory is copied in batches of its own"),
    "cache_staged_state_dict": (False, "dcp.async_save stages; ckpt.save_async keeps its staging memory between saves"),
    "serialization_format": ("torch_save", "data files are safetensors files"),
    "_extensions": (None, "codec= compresses"),
}
"""Arguments of ``FileSystemWriter``: the value that is no different from leaving it out, and what this does."""


def _whole(plans: list[SavePlan]) -> list[SavePlan]:
    """All plans, also those that a planner which caches them did not give again, since they are as in its last save."""
    # DCP would let ranks use the plans they have, which name the files of the last save; so they are all given out
    # again. The planner has them. DCP hands it to the writer only when plans are made: until then it is a local of the caller.
    if all(getattr(plan, "usable", True) for plan in plans):  # torch 2.6 has no such plans
        return plans
    planners: Iterator[Any] = (frame.f_locals.get("planner") for frame, _ in walk_stack(None))
    combined: list[SavePlan] | None = next((planner.global_plan for planner in planners if hasattr(planner, "global_plan")), None)
    if combined is None or len(combined) != len(plans) or not all(p is q or not p.usable for p, q in zip(plans, combined, strict=True)):
        raise UsageError("the planner gives parts of its plan and keeps the rest", hint="enable_plan_caching=False")
    return combined


def _assigned_boxes(items: Sequence[WriteItem], position: int) -> Iterable[AssignedBox]:
    for item in items:
        data = item.tensor_data
        if data is not None:
            kind = dtype_named(str(data.properties.dtype).removeprefix("torch."))
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            yield AssignedBox(name=item.index.fqn, dtype=kind, shape=tuple(data.size), box=box, owner=position)


def _memory(mine: ExternalAssignment, items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, LocalTensor]:
    """This rank's tensors, with the memory of its boxes."""
    tensors = {name: LocalTensor(info, [], name) for name, info in mine.tensors.items()}
    for item in items:
        if item.tensor_data is None:
            continue
        name, chunk = item.index.fqn, item.tensor_data.chunk
        memory = planner.resolve_data(item)
        if not isinstance(memory, torch.Tensor) or memory.shape != chunk.sizes or dtype_of(memory, name) != mine.tensors[name].dtype:
            raise LayoutError("the planner gives other data than it has planned", where=f"tensor {name}")
        tensors[name].parts.append(LocalShard(Box(tuple(chunk.offsets), tuple(chunk.sizes)), memory.detach()))
    return tensors


def _node(item: WriteItem, planner: SavePlanner) -> tree.Node:
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise UsageError(f"{type(planner).__name__} has no lookup_object", hint="derive the planner from DefaultSavePlanner")
    value = look_up(item.index)
    if type(value) is io.BytesIO and planner.resolve_data(item) is value:
        value = (SERIALIZED, value)  # the planner, such as Megatron's, has made it of the value and will read it itself

    def refuse_tensor(value: object, path: str) -> tree.Node:
        if isinstance(value, torch.Tensor):
            raise StateError("DCP does not find the tensors in a tuple", where=path, hint="use a list or a dict")
        return None

    return tree.encode(value, item.index.fqn, refuse_tensor)


@dataclass(frozen=True, slots=True)
class _Leaf:
    node: tree.Node


def _state(metadata: Metadata, values: Mapping[str, tree.Node]) -> tree.Node:
    """The node of the whole state: nested as it was before the planner flattened it."""
    flat: dict[str, Any] = {name: _Leaf({"$tensor": name}) for name in metadata.state_dict_metadata if name not in values}
    flat |= {name: None if node is None else _Leaf(node) for name, node in values.items()}
    nested = unflatten_state_dict(flat, metadata.planner_data) if metadata.planner_data else flat
    return tree.encode(nested, "", lambda value, path: value.node if isinstance(value, _Leaf) else None)
