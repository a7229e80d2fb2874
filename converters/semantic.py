"""Whether the tensors of a training checkpoint agree with each other: what digests cannot tell, since a wrong state has a digest too.

Four things are looked at, as far as the checkpoint has them: the parameters in full precision (``master``) rounded are the weights; boxes
that are stored several times are equal; all parameters of an optimizer are at one step; second moments are not all zero after steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt import tree
from ckpt.catalog import Catalog, TensorEntry
from ckpt.formats.elements import cast_bits, read_box, read_extent
from ckpt.geometry import Box, flat_to_boxes

from .roles import MODEL, STATE, role_of

PIECE = 16 << 20
"""Bytes of one tensor that are in memory at a time, unless a chunk is larger and has to be read whole."""
_MASTERS = (".master", ".fp32")
_SECOND = ".exp_avg_sq"


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """Something that cannot be right: ``what`` of tensor ``name``, in ``wrong`` of ``elements`` elements that were looked at."""

    name: str
    what: str
    wrong: int
    elements: int

    def __str__(self) -> str:
        return f"{self.name}: {self.what} ({self.wrong:,} of {self.elements:,} elements)"


@dataclass(kw_only=True)
class SemanticReport:
    """What was found. ``checked`` counts what each check looked at; ``skipped`` names the tensors that a limit left out."""

    url: str
    problems: list[Disagreement] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    bytes: int = 0
    """That were read."""

    @property
    def ok(self) -> bool:
        return not self.problems


def semantic_problems(catalog: Catalog, *, max_bytes: int | None = None) -> SemanticReport:
    """Look for disagreements.

    Args:
        max_bytes: read no more than about this; what is left out is said.

    Raises:
        CorruptError, NotFoundError: files are damaged or missing.
    """
    return _Check(catalog, max_bytes).run()


class _Check:
    def __init__(self, catalog: Catalog, limit: int | None) -> None:
        self.catalog = catalog
        self.limit = limit
        self.report = SemanticReport(url=catalog.url)

    def run(self) -> SemanticReport:
        for name, entry in sorted(self.catalog.tensors.items()):
            role = role_of(name)
            if role is None or not name.startswith(STATE) or entry.rank is not None:
                continue
            weight = self.catalog.tensors.get(f"{MODEL}{role[1]}")
            if role[0].tail in _MASTERS and weight is not None and entry.dtype.name == "float32":
                self._master(entry, weight)
            elif role[0].tail == _SECOND:
                self._moment(entry)
        self._replicas()
        self._steps()
        return self.report

    # ---- the four checks

    def _master(self, master: TensorEntry, weight: TensorEntry) -> None:
        if cast_bits(np.zeros(0, np.float32), weight.dtype.name) is None or not self._has_room(master, weight):
            return
        self._count("masters")
        if master.shape != weight.shape:
            self._disagree(
                master.name, f"has the shape {list(master.shape)}, and the weight {list(weight.shape)}", master.numel, master.numel
            )
            return
        wrong = sum(self._differing(master, weight, box) for box in _pieces(_logical(master), master.dtype.itemsize))
        if wrong:
            self._disagree(master.name, f"rounded to {weight.dtype.name} is not the weight", wrong, _logical_numel(master))

    def _differing(self, master: TensorEntry, weight: TensorEntry, box: Box) -> int:
        rounded = cast_bits(self._read(master, box).view(np.float32), weight.dtype.name)
        assert rounded is not None
        return int(np.count_nonzero(rounded != self._read(weight, box)))

    def _moment(self, entry: TensorEntry) -> None:
        """Reading ends at the first number that is not zero."""
        if not entry.numel or not self._steps_of(entry.name) or not self._has_room(entry):
            return
        self._count("moments")
        if not any(self._read(entry, box).any() for box in _pieces(entry.shape, entry.dtype.itemsize)):
            self._disagree(entry.name, "all zero after training steps", entry.numel, entry.numel)

    def _replicas(self) -> None:
        replicas = getattr(self.catalog, "replicas", None)
        for replica in () if replicas is None else replicas():
            entry: TensorEntry = self.catalog.tensors[replica.name]
            if not self._has_room(entry):
                continue
            self._count("replicas")
            own = self._read(entry, replica.box)
            other = read_extent(self.catalog.backend, entry.dtype.name, replica.extent, replica.box.shape)
            self.report.bytes += replica.extent.length
            wrong = int(np.count_nonzero(own != other))
            if wrong:
                self._disagree(entry.name, f"{replica.box} differs from the copy in {replica.extent.path}", wrong, replica.box.numel)

    def _steps(self) -> None:
        by_step: dict[float, list[str]] = {}
        for name, step in self._known_steps.items():
            by_step.setdefault(step, []).append(name)
        if by_step:
            self._count("steps", sum(map(len, by_step.values())))
        usual = max(by_step, key=lambda s: len(by_step[s]), default=0.0)
        for step, names in sorted(by_step.items()):
            if step != usual:
                for name in names:
                    self._disagree(name, f"is at step {step:g}, and most others at {usual:g}", 1, 1)

    # ---- steps of parameters

    def _steps_of(self, name: str) -> float:
        role = role_of(name)
        return 0.0 if role is None else self._known_steps.get(f"{MODEL}{role[1]}", 0.0)

    @cached_property
    def _known_steps(self) -> Mapping[str, float]:
        return {**_said_steps(self.catalog.state), **dict(self._stored_steps())}

    def _stored_steps(self) -> Iterator[tuple[str, float]]:
        for name, entry in self.catalog.tensors.items():
            role = role_of(name)
            if role is not None and role[0].tail == ".step" and entry.numel == 1 and entry.dtype.numpy is not None:
                value = self._read(entry, Box.whole(entry.shape)).view(entry.dtype.numpy).reshape(-1)
                yield f"{MODEL}{role[1]}", float(value[0])

    # ---- reading

    def _read(self, entry: TensorEntry, box: Box) -> npt.NDArray[Any]:
        self.report.bytes += box.numel * entry.dtype.itemsize
        return read_box(self.catalog, entry, box)

    def _has_room(self, *entries: TensorEntry) -> bool:
        if self.limit is None or self.report.bytes + sum(e.nbytes for e in entries) <= self.limit:
            return True
        self.report.skipped.append(entries[0].name)
        return False

    def _count(self, check: str, times: int = 1) -> None:
        self.report.checked[check] = self.report.checked.get(check, 0) + times

    def _disagree(self, name: str, what: str, wrong: int, elements: int) -> None:
        self.report.problems.append(Disagreement(name=name, what=what, wrong=wrong, elements=elements))


def _pieces(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes that make up a tensor, of few bytes each, in order."""
    total, step = int(np.prod(shape, dtype=np.int64)), max(1, PIECE // itemsize)
    for start in range(0, total, step):
        yield from flat_to_boxes(shape, start, min(start + step, total))


def _logical(entry: TensorEntry) -> tuple[int, ...]:
    """What is not padding: the padding of master and weight may differ."""
    return entry.logical or entry.shape


def _logical_numel(entry: TensorEntry) -> int:
    return int(np.prod(_logical(entry), dtype=np.int64))


def _said_steps(state: Any) -> dict[str, float]:
    """Steps that are values of the state: those of parameters, by name."""
    found = {}
    node = tree.find(state, ("optimizer", "state"))
    for name, values in () if node is tree.MISSING else tree.pairs_of(node) or ():
        step = next((v for k, v in tree.pairs_of(values) or () if k == "step"), None)
        number = _number(step)
        if isinstance(name, str) and number is not None:
            found[name] = number
    return found


def _number(node: Any) -> float | None:
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    if tree.tag_of(node) == "$inline":
        kind, shape, data = node["$inline"]
        value = tree.decode({"$array": [kind, shape, data]}, lambda *_: None)
        return float(np.asarray(value).reshape(-1)[0])
    return None
