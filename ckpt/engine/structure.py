"""The structure of a checkpoint: index files, tiling, data files and their headers, references from the state. No torch, no chunk is read.

A problem never ends the check; every function here gives all that it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckpt import units
from ckpt.catalog import Catalog, DataFile
from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError, StorageError
from ckpt.formats.native.catalog import NativeCatalog, read_index_file
from ckpt.formats.native.codecs import CODECS
from ckpt.formats.native.commit import CODED, COMMIT_PATH, CommitRecord, read_record
from ckpt.formats.native.datafile import chunk_key, coded_key
from ckpt.formats.native.paths import is_reference
from ckpt.io_backends.protocol import Backend
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box, find_fault

FAILURES = (CorruptError, FormatError, NotFoundError, StorageError)
"""What a single file or chunk may give without ending the check."""

UNREAD = "unread"
"""The kind of a problem of a chunk whose bytes are stored in a way that is not known here: it was not checked."""
_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong. ``box`` is in elements of the global tensor; what is None does not apply."""

    kind: str
    """``index``, ``tiling``, ``state``, ``missing`` or ``size`` (of a file), ``header``, ``unknown-chunk``, ``read``,
    ``digest``, ``codec``, or ``unread``."""
    file: str | None = None
    tensor: str | None = None
    box: Box | None = None
    message: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "box": None if self.box is None else [self.box.offset, self.box.shape]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Problem:
        """What ``to_json`` gave."""
        box = None if fields["box"] is None else Box(tuple(fields["box"][0]), tuple(fields["box"][1]))
        return cls(**{**fields, "box": box})

    def __str__(self) -> str:
        what = (self.file, f"{self.tensor or ''}{self.box or ''}" or None)
        return f"{self.kind}: {self.message} ({', '.join(w for w in what if w)})" if any(what) else f"{self.kind}: {self.message}"


def file_of(err: CkptError, url: str) -> str | None:
    """The file that an error is about, relative to the checkpoint at ``url``."""
    return None if err.where is None else err.where.removeprefix(f"{url.rstrip('/')}/")


def check_index(backend: Backend, err: CorruptError) -> list[Problem]:
    """Every index file that is not as the commit record says; if none is, the error ``err`` that opening the index gave."""
    try:
        data = read_record(backend)
        if data is None:  # a checkpoint of another format
            return [Problem(kind="index", file=file_of(err, backend.url), message=err.message)]
        record = CommitRecord.from_bytes(data, backend.url)
    except CorruptError as damage:
        return [Problem(kind="index", file=COMMIT_PATH, message=damage.message)]
    problems = []
    for name, file in record.index.items():
        try:
            size = backend.size(file.path)
            if size != file.size:
                problems.append(Problem(kind="size", file=file.path, message=f"has {size} bytes, should have {file.size}"))
            else:
                read_index_file(backend, record, name)
        except NotFoundError:
            problems.append(Problem(kind="missing", file=file.path, message="a file of the index"))
        except StorageError as failure:
            problems.append(Problem(kind="read", file=file.path, message=failure.message))
        except CorruptError:
            problems.append(Problem(kind="index", file=file.path, message=f"the bytes changed after they were written: not {file.digest}"))
    return problems or [Problem(kind="index", file=file_of(err, backend.url), message=err.message)]


def check_tiling(catalog: Catalog) -> list[Problem]:
    """Tensors whose chunks leave a hole or overlap. Tensors that share a grid are checked once, and all are named."""
    problems, faults = [], dict[tuple[int, tuple[int, ...]], Problem | None]()
    for entry in catalog.tensors.values():
        if entry.alias is not None:
            continue
        # Tensors of equal layout share a grid object, so the check runs once per distinct grid: a dozen times instead
        # of once for each of 100,000 tensors.
        key = (id(entry.grid), entry.shape)
        if key not in faults:
            fault = find_fault(entry.shape, *entry.grid.all_boxes())
            text = "no chunk has this part" if fault and fault.times == 0 else f"{fault.times if fault else 0} chunks have this part"
            faults[key] = Problem(kind="tiling", box=fault.box, message=text) if fault else None
        problem = faults[key]
        if problem is not None:
            problems.append(Problem(kind="tiling", tensor=entry.name, box=problem.box, message=problem.message))
    return problems


def check_state(catalog: Catalog) -> list[Problem]:
    """Values that cannot be read, and tensors that the state names and the index does not have."""
    nodes = [catalog.state, *(node for values in catalog.ranks.values() for node in values.values())]
    malformed = []
    for node in nodes:
        try:
            tree.check(node)
        except FormatError as err:
            malformed.append(Problem(kind="state", message=err.message))
    missing = {name for node in nodes for name in _named_tensors(node) if name not in catalog.tensors}
    return malformed + [
        Problem(kind="state", tensor=name, message="the state names this tensor, the index has none") for name in sorted(missing)
    ]


def _named_tensors(node: Any) -> Iterator[str]:
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if isinstance(at, list):
            waiting += at
        elif isinstance(at, dict):
            if isinstance(at.get("$tensor"), str):
                yield at["$tensor"]
            waiting += at.values()


# ------------------------------------------------------------------------------------------------------------- data files


def check_native_files(catalog: NativeCatalog, problems: list[Problem]) -> frozenset[int]:
    """Every data file: there, of the right size, and its header fits the index. Adds to ``problems``.

    Returns:
        The rows of the files whose chunks cannot be found, because the file or its header is damaged.
    """
    expected = _chunks_per_file(catalog)

    def check(row: int) -> tuple[Problem | None, bool]:
        """The problem, if any, and whether the header has another number of chunks than the index."""
        file = catalog.files[row]
        problem = _check_size(catalog.backend, file)
        if problem is not None:
            return problem, False
        try:
            header = catalog.header(row)
        except FAILURES as err:
            return Problem(kind="header", file=file.path, message=err.message), False
        return None, len(header.chunks) != expected[row] and not is_reference(file.path)  # others may need the rest of a file of theirs

    results = map_tasks(check, range(len(catalog.files)), _THREADS, "ckpt-headers")
    broken = frozenset(row for row, (problem, _) in enumerate(results) if problem is not None)
    for row, (problem, _) in enumerate(results):
        if problem is not None:
            lost = units.plural(expected[row], "chunk")
            problems.append(replace(problem, message=f"{problem.message}; not checked: {lost} in it"))
    uneven = {row for row, (_, differs) in enumerate(results) if differs}
    if uneven:
        problems += _unknown_chunks(catalog, uneven)
    return broken


def _check_size(backend: Backend, file: DataFile) -> Problem | None:
    try:
        size = backend.size(file.path)
    except NotFoundError:
        return Problem(kind="missing", file=file.path, message="a data file")
    except StorageError as err:
        return Problem(kind="read", file=file.path, message=err.message)
    if size != file.size:
        return Problem(kind="size", file=file.path, message=f"has {size} bytes, should have {file.size}")
    return None


def _chunks_per_file(catalog: NativeCatalog) -> Counter[int]:
    counts = Counter[int]()
    for entry in catalog.tensors.values():
        if entry.alias is not None:
            continue
        if entry.grid.anchors is not None:
            rows, times = np.unique(entry.grid.anchors[entry.grid.anchors >= 0], return_counts=True)
            counts.update(dict(zip(rows.tolist(), times.tolist(), strict=True)))
        if len(entry.grid.files) == 1:
            counts[int(entry.grid.files[0])] += len(entry.grid)
        else:
            rows, times = np.unique(entry.grid.files, return_counts=True)
            counts.update(dict(zip(rows.tolist(), times.tolist(), strict=True)))
    return counts


def _unknown_chunks(catalog: NativeCatalog, rows: set[int]) -> list[Problem]:
    """Chunks in the headers of these files that the index does not place there. (The reverse is found when chunks are looked up.)"""
    known: dict[int, set[str]] = {row: set() for row in rows}
    coded = CODED in catalog.record.features
    for entry in catalog.tensors.values():
        if entry.alias is not None:
            continue
        for n in range(len(entry.grid)):
            anchor = -1 if entry.grid.anchors is None else int(entry.grid.anchors[n])
            for row in {entry.grid.file(n), anchor} & known.keys():
                box, chunks = entry.grid.box(n), catalog.header(row).chunks
                keys = [chunk_key(entry.name, box, entry.shape, entry.dtype)]
                if coded and keys[0] not in chunks:
                    keys += [coded_key(entry.name, box, entry.shape, codec) for codec in CODECS]
                known[row].add(next((key for key in keys if key in chunks), keys[0]))
    return [
        Problem(kind="unknown-chunk", file=catalog.files[row].path, message=f"the header has {key!r}, which the index does not have")
        for row in sorted(rows)
        for key in sorted(catalog.header(row).chunks.keys() - known[row])
    ]
