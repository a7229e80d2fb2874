"""What must hold between the rows of an index, whoever wrote it. The same checks serve writers and readers.

That boxes of an irregular grid do not overlap is proven by whoever plans a save, with ``ckpt.layout.geometry.find_fault``; here their sizes
have to add up.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry

from .datafiles.datafile import CHUNK_DIGITS, HEADER_LIMIT, LENGTH_BYTES
from .datafiles.keys import name_problem
from .datafiles.references import is_reference, reference_problem
from .paths import is_digest, path_problem
from .tables import DIMENSIONS

_MAX_BYTES = (1 << 63) - 1


def find_problem(contents: Contents) -> str | None:
    """What is wrong with an index, naming the tensor or file; None if nothing is."""
    by_name = {t.name: t for t in contents.tensors}
    if len(by_name) != len(contents.tensors):
        return "a tensor name occurs twice"
    for problem in map(_file_problem, contents.files):
        if problem is not None:
            return problem
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


def _file_problem(f: DataFile) -> str | None:
    problem = reference_problem(f.path) if is_reference(f.path) else path_problem(f.path)
    if problem is not None:
        return problem
    if not 0 < f.header <= min(f.size, LENGTH_BYTES + HEADER_LIMIT) or f.rank < 0 or not is_digest(f.digest):
        return f"the row of data file {f.path} cannot be: size {f.size}, header {f.header}, digest {f.digest!r}, rank {f.rank}"
    return None


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
    return f"its grid names an anchor that is not in one of the {files} data files" if _out_of_range(grid.anchors, files) else None


def _out_of_range(anchors: npt.NDArray[np.int32], files: int) -> bool:
    return bool(anchors.min() < -1 or anchors.max() >= files)


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
