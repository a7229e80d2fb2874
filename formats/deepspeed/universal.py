"""Universal checkpoints: ``zero/<parameter>/<state>.pt``, one file for each whole state of each parameter.

A file holds a mapping with the tensor as ``param``, or, made of ZeRO-3, the flat tensor itself. (Source:
``deepspeed/checkpoint/ds_to_universal.py`` of DeepSpeed 0.19.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.errors import CorruptError
from ckpt.formats.pickles.stored import StoredView
from ckpt.layout.geometry import row_major_strides

from .pickled import PickledFile
from .weights import MODEL, STATE, Weights

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

FOLDER = "zero/"
OPTIMIZER = "zero/optimizer_state.pt"
_FULL = "fp32"


def parameter_files(backend: Backend) -> dict[tuple[str, str], str]:
    """Paths by parameter and state."""
    files = {}
    for entry in backend.list_prefix(FOLDER):
        parts = entry.path.removeprefix(FOLDER).split("/")
        if len(parts) == 2 and parts[1].endswith(".pt"):
            files[parts[0], parts[1].removesuffix(".pt")] = entry.path
    return dict(sorted(files.items()))


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


def by_parameter(files: Mapping[tuple[str, str], PickledFile]) -> dict[str, dict[str, PickledFile]]:
    """Files of states, by parameter."""
    by_name: dict[str, dict[str, PickledFile]] = {}
    for (name, key), file in files.items():
        by_name.setdefault(name, {})[key] = file
    return by_name
