"""Two checkpoints compared, of whatever formats: names, shapes, dtypes, elements and values. No torch; bounded memory, in parallel."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import islice, zip_longest
from typing import Any, TypeVar

import numpy as np

from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.concurrency import imap_unordered
from ckpt.dtypes import DType, dtype
from ckpt.errors import NamesError
from ckpt.formats.registry import open_catalog
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.match import several
from ckpt.plan.reads import pieces
from ckpt.plan.views import LogicalTensor, part, whole
from ckpt.telemetry.progress import ProgressCallback
from ckpt.text import url_text

from .element_differences import ElementDifferences, Elements, Raw, differing, have_same_bits, raw_dtype, slices_of
from .element_differences import Tolerance as Tolerance
from .selection import Views

# One of two checkpoints that are compared: tensors and values by the names that they have in the comparison. No torch.

_T = TypeVar("_T")
_GROUPS = "param_groups"


class Renaming:
    """Other beginnings of names."""

    def __init__(self, beginnings: Mapping[str, str], where: str) -> None:
        self.beginnings = sorted(beginnings.items(), key=lambda pair: -len(pair[0]))
        self.where = where

    def of(self, by_name: Mapping[str, _T]) -> dict[str, _T]:
        """The same under other names."""
        now = {name: self.name(name) for name in by_name}
        if len(set(now.values())) < len(now):
            twice = next(name for name, count in Counter(now.values()).items() if count > 1)
            raise NamesError(f"two names become {twice!r}", where=self.where, hint="--rename with longer beginnings")
        return {now[name]: value for name, value in by_name.items()}

    def check(self, names: Iterable[str]) -> None:
        """Raise NamesError if none of these names has one of the beginnings."""
        names = list(names)
        idle = [old for old, _ in self.beginnings if not any(name.startswith(old) for name in names)]
        if idle:
            raise NamesError(f"no name begins with {', '.join(map(repr, idle))}", where=self.where, hint="`ckpt inspect` lists the names")

    def name(self, name: str) -> str:
        """What one name becomes."""
        return next((new + name.removeprefix(old) for old, new in self.beginnings if name.startswith(old)), name)


class Side:
    """One checkpoint: its tensors as views, without padding."""

    def __init__(
        self, catalog: Catalog, views: Views | None, renaming: Renaming, root: str | None = None, about_storage: Collection[str] = ()
    ) -> None:
        """``about_storage``: paths of values that are not compared."""
        self.catalog = catalog
        self._about_storage = about_storage
        self.elements = Elements(catalog)
        self._renaming = renaming
        made = self._views(views)
        if root is not None:
            made = {name[len(root) + 1 :]: view for name, view in made.items() if name.startswith(f"{root}.")}
            if not made:
                raise NamesError(f"no tensor lies below {root!r}", where=catalog.url, hint="`ckpt inspect` lists the names")
        if renaming.beginnings:
            renaming.check([*made, *(path for path, _ in self._values())])
        self.views = renaming.of(made)

    def _views(self, views: Views | None) -> dict[str, LogicalTensor]:
        entries = self.catalog.tensors
        if views is not None:
            made = views({name: entry.shape for name, entry in entries.items()})
            return {name: part(view, Box.whole(view.unpadded or view.shape)) for name, view in made.items()}
        by_name = {name: whole(name, entry.shape) for name, entry in entries.items()}
        for name, entry in entries.items():
            if entry.logical is not None:
                by_name[name] = part(by_name[name], Box.whole(entry.logical))
        return by_name

    def kind(self, name: str) -> DType:
        """dtype of a logical tensor."""
        return self.catalog.tensors[self.views[name].pieces[0].source].dtype

    def values(self) -> Iterator[tuple[str, tree.Node]]:
        """Path and node of each value; those of one rank begin with ``rank <r>:``."""
        return iter(self._renaming.of(dict(self._values())).items()) if self._renaming.beginnings else self._values()

    def inlined(self, name: str) -> tuple[DType, Raw] | None:
        """dtype and elements of the tensor that the state itself has under this name, as it may have an optimizer's step; None if it has
        none."""
        node = self._inlined.get(name)
        if node is None:
            return None
        kind, shape, data = node["$inline"]
        kind_of = dtype(kind)
        return kind_of, np.frombuffer(base64.b64decode(data), raw_dtype(kind_of)).reshape(shape)

    @cached_property
    def _inlined(self) -> dict[str, Any]:
        leaves = tree.leaves(self.catalog.state) if self.catalog.state is not None else ()
        tagged = ((path, node) for path, node in leaves if type(node) is dict and tree.tag_of(node) == "$inline")
        return self._renaming.of({path: node for path, node in tagged if not self._of_storage(path)})

    def _values(self) -> Iterator[tuple[str, tree.Node]]:
        for path, node in tree.leaves(self.catalog.state) if self.catalog.state is not None else ():
            if self._about_storage and self._of_storage(path):
                continue
            if type(node) in tree.SCALARS:  # of which there may be millions
                yield path, node
            elif _is_value(node):
                yield path, self._listed(path, node)
        for rank, by_path in self.catalog.ranks.items():
            for path, node in by_path.items():
                for below, leaf in tree.leaves(node):
                    if _is_value(leaf):
                        at = f"rank {rank}: {path}{'.' if below else ''}{below}"
                        yield at, self._listed(at, leaf)

    def _listed(self, path: str, node: tree.Node) -> tree.Node:
        """Parameter groups that name their parameters as torch has them: options and names in one mapping, and names as the states have
        them."""
        groups = _groups(node) if path.endswith(_GROUPS) else None
        if groups is None:
            return node
        head = f"{path.removesuffix(_GROUPS)}state."
        called = self._renaming.name(path).removesuffix(_GROUPS) + "state."

        def name(of: str) -> str:
            return self._renaming.name(f"{head}{of}.").removeprefix(called).removesuffix(".")

        return [{**options, "params": [name(n) for n in names]} for options, names in groups]

    def _of_storage(self, path: str) -> bool:
        return any(path == about or path.startswith(f"{about}.") for about in self._about_storage)


def _is_value(node: tree.Node) -> bool:
    return type(node) in tree.SCALARS or tree.tag_of(node) not in ("$tensor", "$tensors", "$per_rank")


def _groups(node: tree.Node) -> list[tuple[dict[str, Any], list[str]]] | None:
    """Options and names of each group, in either form; None if it is another node, or names no parameters."""
    if isinstance(node, dict) and "$param_groups" in node:
        groups = [(g["options"], g["params"]) for g in node["$param_groups"]]
    elif isinstance(node, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in node):
        groups = [({k: v for k, v in g.items() if k != "params"}, g["params"]) for g in node if isinstance(g, dict)]
    else:
        return None
    plain = all(isinstance(o, dict) and tree.tag_of(o) is None and all(isinstance(n, str) for n in names) for o, names in groups)
    return groups if plain else None


# 1. Names: those of one side alone are differences. A tensor of one side may be a value inside the other's state (an optimizer's step):
#    such pairs are compared on their own (``mixed``).
# 2. Shapes and dtypes of common names. Another shape ends the comparison of that tensor, another dtype does not.
# 3. Elements, in windows of 4 MiB of both sides, several threads at a time. Equal bits need no arithmetic; other windows are compared as
#    numbers, in blocks that fit a cache (``elements.ElementDifferences``).
# 4. Values of the state, as text of their nodes, by path.
#
# Memory does not grow with the checkpoints: each thread has a window of each side, and a tensor's differences are joined as they come.


_BLOCK = 1 << 18
"""Elements that are compared at once, as numbers of 64 bits."""
_AT_ONCE = 16
"""Windows that one thread takes in turn, so that a coded chunk is decoded once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """How one tensor differs. ``kind``: ``only-left``, ``only-right``, ``shape``, ``dtype`` or ``values``; dtypes that differ are one
    difference, and elements are compared all the same."""

    name: str
    kind: str
    left: str | None = None
    right: str | None = None
    """Shape or dtype on each side."""
    elements: int = 0
    """How many differ by more than the tolerance."""
    max_abs: float = 0.0
    """The largest difference of two numbers; of one that is NaN or infinite and another, infinite."""
    max_rel: float = 0.0
    """The largest difference as a part of the larger of both."""
    first: tuple[int, ...] | None = None
    """Index of the first element that differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """A value that is no tensor: its path, and its node on each side as text, or None."""

    path: str
    left: str | None
    right: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffReport:
    """What ``compare`` found. ``tensors`` and ``bytes`` count what was compared, those of the left side; ``seconds`` is wall time."""

    left: str
    right: str
    tensors: int
    values: int
    bytes: int
    seconds: float
    differences: tuple[TensorDifference, ...]
    value_differences: tuple[ValueDifference, ...]

    @property
    def same(self) -> bool:
        return not self.differences and not self.value_differences


def compare(
    left: str | os.PathLike[str],
    right: str | os.PathLike[str],
    *,
    views: Views | None = None,
    rename: Mapping[str, str] | None = None,
    root: str | None = None,
    only: Sequence[str] = (),
    tolerances: Sequence[Tolerance] = (),
    values: bool = True,
    dtypes: bool = True,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare two checkpoints.

    Two NaNs are equal, and so are both zeros. Padding does not count. A tensor that one state has in itself, such as an optimizer's step,
    is compared with the tensor of the other. Values about how a checkpoint is stored (``about_storage`` of a catalog) are not compared.

    Args:
        views: from the shapes of the left side's tensors to what they are on the right side, for another naming convention.
        rename: from what names and paths of the left side begin with to what they begin with on the right side. The longest one counts.
        root: key of the left side's state that has the model: only what lies below it is compared, by its names there, and no values.
        only: globs of names and paths; others are left out.
        tolerances: the first whose glob fits a tensor's name counts; without one elements must be equal.
        values: whether what is no tensor is compared too.
        dtypes: whether tensors of two dtypes differ. Elements are compared as numbers either way.
        progress: called with the bytes of the left side that were compared, and all of them.
    """
    left, right = url_text(left), url_text(right)
    began = time.monotonic()
    catalogs = open_catalog(left), open_catalog(right)
    about = {path for catalog in catalogs for path in catalog.about_storage}
    sides = (
        Side(catalogs[0], views, Renaming(rename or {}, left), root, about),
        Side(catalogs[1], None, Renaming({}, right), about_storage=about),
    )
    chosen = _NameFilter(several(only))
    names = [{n for n in side.views if chosen.takes(n)} for side in sides]
    compared = values and root is None
    mixed = {n for n in names[0] ^ names[1] if sides[n in names[0]].inlined(n) is not None} if compared else set[str]()
    count, differ = _values(sides, chosen, mixed) if compared else (0, [])
    chosen.check(left)
    differences = [
        TensorDifference(name=n, kind="only-left" if n in names[0] else "only-right") for n in sorted((names[0] ^ names[1]) - mixed)
    ]
    shared = sorted(names[0] & names[1])
    comparing = _Comparing(sides, tolerances, threads or min(16, max(2, os.cpu_count() or 2)))
    differences += comparing.run(shared, progress)
    differences += [difference for n in sorted(mixed) for difference in comparing.mixed(n)]
    return DiffReport(
        left=sides[0].catalog.url,
        right=sides[1].catalog.url,
        tensors=len(shared) + len(mixed),
        values=count,
        bytes=comparing.done,
        seconds=time.monotonic() - began,
        differences=tuple(sorted((d for d in differences if dtypes or d.kind != "dtype"), key=lambda d: d.name)),
        value_differences=tuple(differ),
    )


class _NameFilter:
    """Globs, and which of them fitted anything."""

    def __init__(self, globs: Sequence[str]) -> None:
        self.globs = globs
        self._idle = set(globs)

    def takes(self, name: str) -> bool:
        if not self.globs:
            return True
        fitting = {glob for glob in self.globs if fnmatchcase(name, glob)}
        self._idle -= fitting
        return bool(fitting)

    def check(self, where: str) -> None:
        if self._idle:
            raise NamesError(f"nothing fits {', '.join(map(repr, sorted(self._idle)))}", where=where, hint="`ckpt inspect` lists the names")


def _values(sides: tuple[Side, Side], chosen: _NameFilter, mixed: Set[str]) -> tuple[int, list[ValueDifference]]:
    """How many values there are on either side, but those of the names ``mixed``, and those that differ."""
    # Two states of one program have the same paths in the same order, as far as they go: there a path need not be kept.
    left, right = (
        ((p, n) for p, n in side.values() if chosen.takes(p) and p not in mixed) if chosen.globs or mixed else side.values()
        for side in sides
    )
    count, differ = 0, list[ValueDifference]()
    rest: list[dict[str, tree.Node]] = [{}, {}]
    for one, other in zip_longest(left, right):
        if one is None or other is None or one[0] != other[0]:
            rest = [dict([] if first is None else [first]) | dict(more) for first, more in ((one, left), (other, right))]
            break
        count += 1
        if not _same(one[1], other[1]):
            differ.append(ValueDifference(path=one[0], left=tree.text(one[1]), right=tree.text(other[1])))
    for path in rest[0].keys() | rest[1].keys():
        count += 1
        texts = [tree.text(nodes[path]) if path in nodes else None for nodes in rest]
        if texts[0] != texts[1]:
            differ.append(ValueDifference(path=path, left=texts[0], right=texts[1]))
    return count, sorted(differ, key=lambda d: d.path)


def _same(left: tree.Node, right: tree.Node) -> bool:
    """Whether the texts of two nodes are the same: 1, 1.0 and true are not, nor are the two zeros."""
    if type(left) is type(right) and type(left) in tree.SCALARS:
        return bool(left == right) and (type(left) is not float or left != 0 or str(left) == str(right))
    return tree.text(left) == tree.text(right)


def _of_values(name: str, r: ElementDifferences) -> TensorDifference:
    return TensorDifference(name=name, kind="values", elements=r.elements, max_abs=r.max_abs, max_rel=r.max_rel, first=r.first)


class _Comparing:
    """Compares tensors that are on both sides, some windows at a time."""

    def __init__(self, sides: tuple[Side, Side], tolerances: Sequence[Tolerance], threads: int) -> None:
        self.sides = sides
        self.tolerances = tolerances
        self.threads = threads
        self.done = 0
        self._lock = threading.Lock()

    def run(self, names: Sequence[str], progress: ProgressCallback | None) -> list[TensorDifference]:
        left, right = self.sides
        differences: list[TensorDifference] = []
        alike = []
        for name in names:
            shapes = [side.views[name].shape for side in self.sides]
            if shapes[0] != shapes[1]:
                differences.append(TensorDifference(name=name, kind="shape", left=str(list(shapes[0])), right=str(list(shapes[1]))))
                continue
            if left.views[name].pieces and right.views[name].pieces:
                kinds = left.kind(name).name, right.kind(name).name
                if kinds[0] != kinds[1]:
                    differences.append(TensorDifference(name=name, kind="dtype", left=kinds[0], right=kinds[1]))
                alike.append(name)
        return differences + self._values(alike, progress)

    def mixed(self, name: str) -> Iterator[TensorDifference]:
        """Compare a tensor of one side with the same that the state of the other side has in itself."""
        kinds, elements = [], []
        for side in self.sides:
            if name not in side.views and (inline := side.inlined(name)) is not None:
                kind, own = inline
            else:
                view = side.views[name]
                kind, own = side.kind(name), side.elements.of_view(view, Box.whole(view.shape))
            kinds.append(kind)
            elements.append(own)
        left, right = elements
        if left.shape != right.shape:
            yield TensorDifference(name=name, kind="shape", left=str(list(left.shape)), right=str(list(right.shape)))
            return
        if kinds[0] != kinds[1]:
            yield TensorDifference(name=name, kind="dtype", left=kinds[0].name, right=kinds[1].name)
        counted = differing(left, right, (kinds[0], kinds[1]), self._tolerance(name), Box.whole(left.shape))
        if counted.elements:
            yield _of_values(name, counted)

    def _tolerance(self, name: str) -> Tolerance:
        return next((t for t in self.tolerances if fnmatchcase(name, t.glob)), Tolerance(glob=name))

    def _values(self, names: Sequence[str], progress: ProgressCallback | None) -> list[TensorDifference]:
        left = self.sides[0]
        total = sum(Box.whole(left.views[n].shape).numel * left.kind(n).itemsize for n in names)
        results: dict[str, ElementDifferences] = {}
        for name, result in imap_unordered((partial(self._job, *job) for job in self._jobs(names)), self.threads, "ckpt-diff"):
            results[name] = results.get(name, ElementDifferences()).joined(result)
            if progress is not None:
                progress(self.done, total)
        return [_of_values(n, r) for n, r in results.items() if r.elements]

    def _jobs(self, names: Sequence[str]) -> Iterator[tuple[str, list[Box]]]:
        for name in names:
            box = Box.whole(self.sides[0].views[name].shape)
            size = max(side.kind(name).itemsize for side in self.sides)
            windows = (p.box for p in pieces(box, box, settings.VALUE_BLOCK // size))
            while boxes := list(islice(windows, _AT_ONCE)):
                yield name, boxes

    def _job(self, name: str, boxes: Sequence[Box]) -> tuple[str, ElementDifferences]:
        differences = ElementDifferences()
        tolerance = self._tolerance(name)
        kinds = self.sides[0].kind(name), self.sides[1].kind(name)
        for box in boxes:
            left, right = (side.elements.of_view(side.views[name], box) for side in self.sides)
            if kinds[0] != kinds[1] or not have_same_bits(left, right):
                for block in pieces(box, box, _BLOCK):
                    at = slices_of(block.box, box)
                    differences = differences.joined(differing(left[at], right[at], kinds, tolerance, block.box))
            with self._lock:
                self.done += left.nbytes
        return name, differences
