"""The model's tensors: those in files of modules, layers and experts, frozen parameters of ZeRO-3, and further names of tied ones.

Trained parameters that no file has as weights, such as those of ZeRO-3, are their masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.errors import FormatError
from ckpt.formats.external.base import grid_of
from ckpt.formats.external.flat import flat_pieces
from ckpt.formats.pickles.nodes import NodeMaker
from ckpt.formats.pickles.stored import StoredView
from ckpt.formats.torchzip.table import StorageBlock, TensorTable
from ckpt.tree import Node

from .flat import split_each
from .pickled import PickledFile
from .states import MASTER

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
                raise FormatError(f"the entry {name!r} of a layer is no tensor", where=file.where, hint="such layers are not read")

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
