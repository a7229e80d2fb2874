"""What must hold between the rows of an index, whoever wrote it, and in the nodes of a state. The same checks serve writers and readers.

That boxes of an irregular grid do not overlap is proven by whoever plans a save, with ``geometry.find_fault``; here their sizes have to add
up.
"""

from __future__ import annotations

import binascii
import math
import operator
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.io_backends.checks import path_problem
from ckpt.plan.tree_decoding import REFERENCES, tag_of

from .datafile import CHUNK_DIGITS, HEADER_LIMIT, LENGTH_BYTES, name_problem
from .paths import is_digest, is_reference, reference_problem
from .tables import DIMENSIONS

_MAX_BYTES = (1 << 63) - 1


def find_problem(contents: Contents) -> str | None:
    """What is wrong with an index, naming the tensor or file; None if nothing is."""
    by_name = {t.name: t for t in contents.tensors}
    if len(by_name) != len(contents.tensors):
        return "a tensor name occurs twice"
    for f in contents.files:
        problem = reference_problem(f.path) if is_reference(f.path) else path_problem(f.path)
        if problem is not None:
            return problem
        if not 0 < f.header <= min(f.size, LENGTH_BYTES + HEADER_LIMIT) or f.rank < 0 or not is_digest(f.digest):
            return f"the row of data file {f.path} cannot be: size {f.size}, header {f.header}, digest {f.digest!r}, rank {f.rank}"
    if len({f.path for f in contents.files}) != len(contents.files):
        return "a data file occurs twice"
    if any(is_reference(a.path) and not is_reference(b.path) for a, b in pairwise(contents.files)):
        return "data files of other checkpoints come before its own"
    checked: dict[tuple[int, tuple[int, ...]], str | None] = {}
    for t in contents.tensors:
        problem = _tensor_problem(t, by_name)
        if problem is None and t.alias is None:
            key = (id(t.grid), t.shape)
            if key not in checked:
                checked[key] = grid_problem(t.grid, t.shape, len(contents.files) or len(contents.sources))
            problem = checked[key]
        if problem is not None:
            return f"tensor {t.name!r}: {problem}"
    return None


def find_excess(contents: Contents) -> str | None:
    """Whether there are more chunks than the headers, as the index itself describes them, can list: then nobody must try to.

    A grid of a few thousand cuts per dimension has more cells than memory can. Every chunk has a digest in a header; or a row of its own,
    in a virtual checkpoint.
    """
    if contents.sources:
        return None  # there is a row for every chunk, which was checked before
    grids = {id(t.grid): t.grid for t in contents.tensors}
    uses = Counter(id(t.grid) for t in contents.tensors if t.alias is None)
    chunks = sum(count * grids[grid].count for grid, count in uses.items())
    return _excess(chunks, contents.files)


def row_excess(tensors: Iterable[TensorEntry], files: Iterable[DataFile]) -> str | None:
    """The same of the tensors of one rank, whose chunks are all in ``files``."""
    return _excess(sum(t.grid.count for t in tensors if t.alias is None), files)


def _excess(chunks: int, files: Iterable[DataFile]) -> str | None:
    room = sum(f.header for f in files) // CHUNK_DIGITS
    return f"the tensors have {chunks} chunks, the headers of the data files have room for {room}" if chunks > room else None


def tensor_problem(t: TensorEntry, by_name: Mapping[str, TensorEntry], files: int) -> str | None:
    """What is wrong with one tensor of a checkpoint of ``files`` data files; None if nothing is."""
    problem = _tensor_problem(t, by_name)
    return problem if problem is not None or t.alias is not None else grid_problem(t.grid, t.shape, files)


def _tensor_problem(t: TensorEntry, by_name: Mapping[str, TensorEntry]) -> str | None:
    problem = name_problem(t.name)
    if problem is not None:
        return problem
    if len(t.shape) > DIMENSIONS:
        return f"it has {len(t.shape)} dimensions; at most {DIMENSIONS} can be stored"
    if min(t.shape, default=0) < 0:
        return f"its shape {t.shape} has a negative size"
    if math.prod(max(n, 1) for n in t.shape) * t.dtype.itemsize > _MAX_BYTES:
        return f"its shape {t.shape} cannot be addressed"
    logical = t.logical
    if logical is not None and (len(logical) != len(t.shape) or not all(0 <= a <= b for a, b in zip(logical, t.shape, strict=True))):
        return f"its logical shape {logical} is not a leading part of {t.shape}"
    if t.rank is not None and t.rank < 0:
        return f"its rank is {t.rank}"
    return None if t.alias is None else _alias_problem(t, by_name.get(t.alias))


def _alias_problem(t: TensorEntry, target: TensorEntry | None) -> str | None:
    if target is None or target.alias is not None:
        return f"it is an alias of {t.alias!r}, which is not a stored tensor"
    if (t.dtype, t.shape) != (target.dtype, target.shape):
        return f"it is {t.dtype.name} {t.shape}, but the tensor {t.alias!r} that it is an alias of is {target.dtype.name} {target.shape}"
    return None


def grid_problem(grid: Grid, shape: tuple[int, ...], files: int) -> str | None:
    """Why ``grid`` is not one of a tensor of ``shape`` in a checkpoint of ``files`` data files; None if it is."""
    if (grid.cuts is None) == (grid.boxes is None):
        return "its grid has both or neither of cuts and boxes"
    problem = _cuts_problem(grid.cuts, shape) if grid.cuts is not None else _boxes_problem(grid, shape)
    if problem is not None:
        return problem
    if len(grid.files) not in (1, grid.count):
        return f"its grid has {grid.count} chunks, but names a file for {len(grid.files)}"
    if grid.files.min() < 0 or grid.files.max() >= files:
        return f"its grid names a data file that is not one of the {files}"
    if grid.anchors is None:
        return None
    if len(grid.anchors) != grid.count:
        return f"its grid has {grid.count} chunks, but names an anchor, or none, for {len(grid.anchors)}"
    return (
        f"its grid names an anchor that is not in one of the {files} data files"
        if (bool(grid.anchors.min() < -1 or grid.anchors.max() >= files))
        else None
    )


def _cuts_problem(cuts: Sequence[Sequence[int]], shape: tuple[int, ...]) -> str | None:
    if len(cuts) != len(shape):
        return f"its grid cuts {len(cuts)} dimensions, its shape is {shape}"
    for i, (c, size) in enumerate(zip(cuts, shape, strict=True)):
        if size == 0 and tuple(c) == (0, 0):
            continue
        if len(c) < 2 or c[0] != 0 or c[-1] != size or not all(map(operator.lt, c, c[1:])):
            return f"its cuts of dimension {i} do not increase from 0 to {size}"
    return None


def _boxes_problem(grid: Grid, shape: tuple[int, ...]) -> str | None:
    offsets, shapes = grid.all_boxes()
    if not shape or offsets.shape != shapes.shape or offsets.ndim != 2 or offsets.shape[1] != len(shape) or len(offsets) == 0:
        return f"the boxes of its grid are not boxes of a tensor of shape {shape}"
    size = np.array(shape, dtype=np.int64)
    outside = (offsets < 0) | (shapes < 0) | (shapes > size) | (offsets > size - shapes) | ((shapes == 0) & (size > 0))
    if outside.any():
        at = int(np.argwhere(outside)[0, 0])
        return f"box {at} of its grid, at {offsets[at].tolist()} of shape {shapes[at].tolist()}, is empty or leaves the shape {shape}"
    covered, wanted = sum(shapes.prod(axis=1).tolist()), math.prod(shape)
    return f"the boxes of its grid have {covered} elements, it has {wanted}" if covered != wanted else None


# Whether the nodes of state.json are what docs/format.md §8 says, so that nobody who walks or decodes them has to ask again.
# A node of an unknown kind passes: whoever needs its value refuses it.

MAX_DEPTH = 150
"""Nodes may be nested this deep: Python code that walks them recursively must not overflow its stack."""

_Below = tuple[list[Any], list[Any]]
"""The nodes below a node: those that may refer to something as it may itself, and those that must be plain."""

_SIMPLE = frozenset((int, bool, type(None), str))


def node_problem(root: Any, references: Set[str] = REFERENCES) -> str | None:
    """What is wrong with a node or anything below it; None if nothing is. Of the kinds in ``REFERENCES`` these are allowed."""
    waiting: list[tuple[Any, Set[str], int]] = [(root, references, 0)]
    while waiting:
        node, allowed, depth = waiting.pop()
        if isinstance(node, (list, dict)):
            if depth > MAX_DEPTH:
                return f"nodes are nested more than {MAX_DEPTH} deep"
            below = _below(node)
            if below is None or tag_of(node) in REFERENCES - allowed:
                return f"a node with the keys {list(node)[:3]} is malformed, or not allowed where it is"
            tensors = "$tensor" in allowed and depth < MAX_DEPTH
            inside = [n for n in below[0] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n))]
            if tensors:  # by far the most common nodes, as they have to be
                inside = [n for n in inside if not (type(n) is dict and len(n) == 1 and type(n.get("$tensor")) is str)]
            waiting += [(n, allowed, depth + 1) for n in inside]
            keys = (n for n in below[1] if type(n) not in _SIMPLE and not (type(n) is float and isfinite(n)))
            waiting += [(n, frozenset(), depth + 1) for n in keys]
        elif type(node) not in _SIMPLE and not (isinstance(node, float) and isfinite(node)):
            return f"{node!r} is not a JSON value"
    return None


def _below(node: list[Any] | dict[Any, Any]) -> _Below | None:
    """The nodes below; None if this one is malformed. ``ckpt.plan.tree_decoding.decode`` checks the rest by itself."""
    if isinstance(node, list):
        return node, []
    if not all(issubclass(kind, str) for kind in {*map(type, node)}):
        return None
    tag = tag_of(node)
    if tag is None:
        return list(node.values()), []
    if len(node) != 1:
        return None
    payload = node[tag]
    nodes: _Below | None = [payload], []
    if tag in ("$tensor", "$tensors"):
        nodes = ([], []) if isinstance(payload, str) else None
    elif tag == "$per_rank":
        nodes = ([], []) if payload is True else None
    elif tag == "$inline":
        nodes = ([], []) if _is_inline(payload) else None
    elif tag in ("$map", "$tuple", "$set", "$frozenset", "$complex", "$param_groups") and not isinstance(payload, list):
        nodes = None
    elif tag == "$tuple":
        nodes = payload, []
    elif tag in ("$set", "$frozenset", "$complex"):
        nodes = [], payload
    elif tag == "$map":
        pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in payload)
        nodes = ([value for _, value in payload], [key for key, _ in payload]) if pairs else None
    elif tag == "$param_groups":
        groups = all(
            isinstance(g, dict)
            and g.keys() == {"params", "options"}
            and isinstance(g["params"], list)
            and all(isinstance(name, str) for name in g["params"])
            and isinstance(g["options"], dict)
            and tag_of(g["options"]) in (None, "$map")
            for g in payload
        )
        nodes = ([group["options"] for group in payload], []) if groups else None
    return nodes


def _is_inline(payload: Any) -> bool:
    if not isinstance(payload, list) or len(payload) != 3:
        return False
    dtype, shape, data = payload
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or not isinstance(data, str):
        return False
    if not all(type(n) is int and 0 <= n <= 64 for n in shape):
        return False
    try:
        size = len(b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        return False
    return size == math.prod(shape) * DTYPES[dtype].itemsize
