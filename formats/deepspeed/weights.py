"""The model's tensors: those in files of modules, layers and experts, frozen parameters of ZeRO-3, further names of tied ones; flat
partitions and universal checkpoints.

Trained parameters that no file has as weights, such as those of ZeRO-3, are their masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external import grid_of
from ckpt.formats.external_elements import flat_pieces
from ckpt.formats.pickle_nodes import NodeMaker
from ckpt.formats.stand_ins import StoredView
from ckpt.formats.torchzip import StorageBlock, TensorTable
from ckpt.plan.layout.geometry import row_major_strides
from ckpt.plan.layout.placements import window_sizes
from ckpt.plan.tree import Node

from .files import MASTER, PickledFile

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# ZeRO's flat partitions: which elements of which parameter the flat tensors of each rank hold. Pure arithmetic.
#
# (Source of the layouts: ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``runtime/bf16_optimizer.py`` of DeepSpeed 0.19.)

#     ZeRO-1, 2    a group's parameters one after another, cut into equal partitions that do not respect them
#
#                  |------ a ------|-- b --|gap|---- c ----|pad|
#                  |.. rank 0 ..|.. rank 1 ..|.. rank 2 .....|
#
#     ZeRO-3       each parameter is cut into equal parts, the last one padded; a rank has its part of a, then of b, then of c
#
#                  rank 0   |a0|b0|c0|      rank 1   |a1|b1|c1|      rank 2   |a2|b2|c2|
#                  groups   '--0--'1-'      with several sub-groups a part may be cut where one of them ends
#
# Either way the result is for each parameter a list of runs: which rank, which flat tensor, from where, how many elements.


Numels = Mapping[str, int]
"""Elements of each parameter, in the order in which they were flattened."""


class FlatRun(NamedTuple):
    """Elements ``[start, start + length)`` of a parameter's row-major flattening: they lie at element ``at`` of flat tensor ``group`` of
    rank ``rank``."""

    rank: int
    group: int
    at: int
    start: int
    length: int


def split_evenly(numels: Numels, gaps: Sequence[int], group: int, partition: int, ranks: Sequence[int]) -> dict[str, list[FlatRun]]:
    """ZeRO-1 and 2: the parameters of a group one after another, ``gaps`` elements of padding after each, cut into partitions of equal
    length for ``ranks``."""
    # Walk the concatenation of the parameters once; a run ends where the parameter does or where the partition does.
    runs: dict[str, list[FlatRun]] = {}
    offset = 0
    for (name, numel), gap in zip(numels.items(), gaps, strict=True):
        runs[name] = []
        at = offset
        while at < offset + numel and partition and at // partition < len(ranks):
            owner = at // partition
            stop = min(offset + numel, (owner + 1) * partition)
            runs[name].append(FlatRun(ranks[owner], group, at - owner * partition, at - offset, stop - at))
            at = stop
        offset += numel + gap
    return runs


def split_each(numels: Numels, lengths: Sequence[int], ranks: int) -> dict[str, list[FlatRun]]:
    """ZeRO-3: every parameter is cut into ``ranks`` parts of ``ceil(numel / ranks)`` elements, the last ones padded; a rank has its parts
    of all parameters one after another, in flat tensors of ``lengths`` elements, whose bounds may lie inside of a part."""
    runs: dict[str, list[FlatRun]] = {name: [] for name in numels}
    begins = [0, *accumulate(lengths)]
    offset = first = 0  # of a rank's flat tensors, the same on every rank: where the part of this parameter begins, and in which of them
    for name, numel in numels.items():
        part = -(-numel // ranks)
        start = 0
        for rank, size in enumerate(window_sizes(part, 0, numel, ranks)):
            group, at, stop = first, offset, start + size
            while start < stop and group < len(lengths):  # cut where a flat tensor ends
                count = min(stop - start, begins[group + 1] - at)
                if count > 0:
                    runs[name].append(FlatRun(rank, group, at - begins[group], start, count))
                at, start, group = at + count, start + count, group + 1
            start = stop
        offset += part
        while first < len(lengths) and begins[first + 1] <= offset:
            first += 1
    return runs


def padded(numels: Numels, ranks: int) -> int:
    """Elements of a rank's parts in ZeRO-3, padding included."""
    return sum(-(-numel // ranks) for numel in numels.values())


MODEL = "model"
STATE = "optimizer.state.model"


class Weights:
    """Collects the tensors of the model. ``extras`` are entries of the module that are no tensors."""

    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self.extras: dict[str, Node] = {}
        self._tied: dict[str, str] = {}
        self._empty: list[tuple[PickledFile, str, str]] = []

    def module(self, file: PickledFile, place: Any, *, partitioned: bool) -> None:
        """The module of a file. ``place`` makes nodes of entries that are no tensors; ``partitioned``: its parameters are empty."""
        entries = file.optional(file.root.get("module"), "'module'")
        shared = {alias: of for alias, of in file.optional(file.root.get("shared_params"), "'shared_params'").items() if alias != of}
        buffer_names = file.sequence(file.root.get("buffer_names") or [], "'buffer_names'")
        buffers = frozenset(name for name in buffer_names if type(name) is str)
        self._tied |= shared
        for name, value in entries.items():
            tensor = file.meaning(value)
            if type(tensor) is not StoredView:
                if tensor is not None:
                    self.extras[name] = place(file, value, f"{MODEL}.{name}")
            elif partitioned and not math.prod(tensor.shape) and name not in buffers:
                self._empty.append((file, name, tensor.storage.key))
            elif name not in shared:
                self.table.add(f"{MODEL}.{name}", file.file, tensor)

    def layer(self, file: PickledFile, prefix: str) -> None:
        """A file that is the state of one layer, or of one expert."""
        for name, value in file.root.items():
            tensor = file.meaning(value)
            if type(tensor) is StoredView:
                self.table.add(f"{MODEL}.{prefix}{name}", file.file, tensor)
            elif tensor is not None:
                raise FormatError(f"the entry {name!r} of a layer is not a tensor", where=file.where, hint="such layers are not read")

    def frozen(self, files: Sequence[PickledFile]) -> None:
        """Parameters of ZeRO-3 that are not trained: every rank has a part of each."""
        first = files[0]
        value = first.root.get("frozen_param_shapes")
        if value is None:
            return
        shapes = first.shapes(value, "'frozen_param_shapes'")
        parts = [f.optional(f.root.get("frozen_param_fragments"), "'frozen_param_fragments'") for f in files]
        for name, shape in shapes.items():
            views = [f.flat(part.get(name), f"the part of {name}") for f, part in zip(files, parts, strict=True)]
            self._frozen(name, shape, files, views)

    def _frozen(self, name: str, shape: tuple[int, ...], files: Sequence[PickledFile], views: Sequence[StoredView]) -> None:
        numel, kinds = math.prod(shape), {v.dtype for v in views}
        part = -(-numel // len(files))
        if len(kinds) > 1 or any(v.shape[0] != part for v in views):
            files[0].damaged(f"the parts of {name} {list(shape)} have {', '.join(str(v.shape[0]) for v in views)} elements")
        boxes, blocks = [], []
        for fragment in split_each({name: numel}, [part], len(files))[name]:
            view, file = views[fragment.rank], files[fragment.rank].file
            for box, begins in flat_pieces(shape, fragment.start, fragment.start + fragment.length):
                at = (view.offset + fragment.at + begins) * view.itemsize
                boxes.append((box.offset, box.shape))
                blocks.append(StorageBlock(file, view.storage, at, box.numel * view.itemsize))
            files[fragment.rank].archive.check(view.storage)
        if not numel:
            self.table.add(
                f"{MODEL}.{name}",
                files[0].file,
                StoredView(storage=views[0].storage, dtype=views[0].dtype, offset=0, shape=shape, strides=(0,) * len(shape)),
            )
            return
        grid, order = grid_of(name, shape, boxes, [self.table.rows[b.file] for b in blocks], files[0].where)
        self.table.add_placed(f"{MODEL}.{name}", kinds.pop(), shape, grid, [blocks[i] for i in order])

    def place_master(self, name: str) -> tuple[str, str | None]:
        """How the master of a parameter is called, and a further name of it: it is the weight too, where no file has another."""
        label, master = f"{MODEL}.{name}", f"{STATE}.{name}.{MASTER}"
        return (master, None) if label in self.table.entries else (label, master)

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise FormatError if a trained parameter has no weight, or one that does not fit its master."""
        for name, shape in shapes.items():
            weight, full = self.table.entries.get(f"{MODEL}.{name}"), self.table.entries.get(f"{STATE}.{name}.{MASTER}")
            if weight is None and 0 not in shape:
                raise FormatError(f"no file has the elements of {name}", where=where, hint="copy the whole directory")
            if weight is not None and full is not None and weight.shape != full.shape:
                message = f"{name} is {list(weight.shape)} in the model and {list(full.shape)} in the optimizer"
                hint = "slices of tensor parallelism are read from universal checkpoints only: deepspeed.checkpoint.ds_to_universal"
                raise FormatError(message, where=where, hint=hint)

    def tied_layers(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Tied layers of a pipeline: the optimizer calls them ``tied_modules.<key>.<name>``, and the file of the first layer has them."""
        free = {name: entry for name, entry in self.table.entries.items() if name.removeprefix(f"{MODEL}.") not in shapes}
        for name in shapes:
            if name.startswith("tied_modules.") and f"{MODEL}.{name}" not in self.table.entries:
                inner = name.split(".", 2)[2]
                fits = [n for n, e in free.items() if e.shape == shapes[name] and n.split(".", 2)[2:] == [inner]]
                if len(fits) == 1:
                    self.table.add_alias(f"{MODEL}.{name}", fits[0])

    def tied(self) -> None:
        """Further names: those that a file lists, and in ZeRO-3 also entries that shared the memory of a parameter."""
        by_storage: dict[tuple[int, str], list[str]] = {}
        for file, name, key in self._empty:
            if f"{MODEL}.{name}" in self.table.entries:
                by_storage.setdefault((file.file, key), []).append(name)
        for alias, of in self._tied.items():
            if f"{MODEL}.{of}" in self.table.entries and f"{MODEL}.{alias}" not in self.table.entries:
                self.table.add_alias(f"{MODEL}.{alias}", f"{MODEL}.{of}")
        for file, name, key in self._empty:
            if f"{MODEL}.{name}" in self.table.entries:
                continue
            owners = by_storage.get((file.file, key), [])
            if len(owners) != 1:
                file.unknown(f"{name} is empty, and no file says where its elements are")
            self.table.add_alias(f"{MODEL}.{name}", f"{MODEL}.{owners[0]}")


def node_maker(table: TensorTable, file: PickledFile, suffix: str = "", rank: int | None = None) -> NodeMaker:
    """Makes nodes of what is neither weights nor optimizer; tensors in it go into the table, with ``suffix`` after their names."""

    def place(value: Any, path: str) -> Node:
        if type(value) is not StoredView:
            file.damaged(f"{path} is a part of a tensor")
        table.add(f"{path}{suffix}", file.file, value, rank)
        return {"$tensor": f"{path}{suffix}"}

    return NodeMaker(file.archive.values, place, pickle_bytes=file.archive.pickle_bytes)


# Universal checkpoints: ``zero/<parameter>/<state>.pt``, one file for each whole state of each parameter.
#
# A file holds a mapping with the tensor as ``param``, or, made of ZeRO-3, the flat tensor itself. (Source:
# ``deepspeed/checkpoint/ds_to_universal.py`` of DeepSpeed 0.19.)

FOLDER = "zero/"
OPTIMIZER = "zero/optimizer_state.pt"
_FULL = "fp32"


def parameter_files(backend: Backend) -> dict[str, dict[str, str]]:
    """Paths by parameter and state."""
    files: dict[str, dict[str, str]] = {}
    for entry in backend.list_prefix(FOLDER):
        name, _, file = entry.path.removeprefix(FOLDER).partition("/")
        if file.endswith(".pt") and "/" not in file:
            files.setdefault(name, {})[file.removesuffix(".pt")] = entry.path
    return {name: dict(sorted(files[name].items())) for name in sorted(files)}


class Universal:
    """Puts the files of parameters into a table. ``values`` are states that are no tensors, by parameter."""

    def __init__(self, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.table = weights.table
        self.weights = weights
        self.shapes = shapes
        self.values: dict[str, dict[str, Any]] = {}

    def add(self, name: str, states: Mapping[str, PickledFile]) -> None:
        """A parameter that is trained, or anything else that was put among them."""
        if name not in self.shapes:
            label = f"{MODEL}.{name}"
            if label not in self.table.entries and _FULL in states:
                self.table.add(label, states[_FULL].file, self._tensor(name, states[_FULL]))
            return
        for key, file in states.items():
            label, further = self.weights.place_master(name) if key == _FULL else (f"{STATE}.{name}.{key}", None)
            value = file.whole
            if type(value) is StoredView and (value.shape == () or key == "step"):
                self.table.add(label, file.file, value)
            elif key == "step":
                self.values.setdefault(name, {})[key] = (file, value)
            else:
                self.table.add(label, file.file, self._tensor(name, file))
                if further is not None:
                    self.table.add_alias(further, label)

    def _tensor(self, name: str, file: PickledFile) -> StoredView:
        value = file.whole
        if type(value) is not StoredView:
            value = file.meaning(file.mapping(value, "its contents").get("param"))
            if type(value) is not StoredView:
                file.damaged("there is no tensor 'param'")
            return value
        shape = self.shapes.get(name)
        flat = file.flat(value, "its contents")
        if shape is None or math.prod(shape) != flat.shape[0]:
            raise CorruptError(
                f"{flat.shape[0]:,} elements of {name}, whose shape is {list(shape) if shape is not None else 'not known'}",
                where=file.where,
                hint="files are of different saves, or were not copied",
            )
        return StoredView(storage=flat.storage, dtype=flat.dtype, offset=flat.offset, shape=shape, strides=row_major_strides(shape))
