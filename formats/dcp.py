"""DCP checkpoints as catalogs. Opening reads the metadata and the values that are not tensors; items of tensors are looked into when their
bytes are asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.catalog import Extent, Format, TensorEntry
from ckpt.dtypes import DTYPES, dtype
from ckpt.errors import CorruptError, FormatError, NotCommittedError
from ckpt.plan import tree
from ckpt.units import plural

from .dcp_container import DATA_FILE, METADATA, DcpBox, DcpTensor, Metadata, Places, open_items, rank_of, read_metadata
from .external import ChunkRequests, ExternalCatalog, ExternalContents, ExternalFile, SingleFile, grid_of, one_chunk_grid, sizes_of
from .torchzip import TensorTable, node_maker

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

FORMAT_NAME = "torch.distributed.checkpoint"
_MODULE = b"torch.distributed.checkpoint"
_OWN = re.compile(r"__\d+\.metadata")


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether there is a ``.metadata`` that names the module, or one of each rank."""
    if METADATA in names:
        return _MODULE in backend.read(METADATA, 0, min(backend.size(METADATA), 512))
    return any(_OWN.fullmatch(name) for name in names)


def open_dcp(backend: Backend) -> ExternalCatalog:
    """Open what ``recognises`` found."""
    if METADATA not in backend.list_dir():
        hint = "save it with use_collectives=True"
        raise FormatError("every rank kept its own metadata, which do not make one checkpoint", where=backend.url, hint=hint)
    metadata = read_metadata(backend)
    items = [box.item for stored in metadata.tensors.values() for box in stored.boxes]
    paths = sorted({item.path for item in (*items, *metadata.values.values())})
    files = [ExternalFile(path, size, rank_of(path)) for path, size in zip(paths, sizes_of(backend, paths), strict=True)]
    rows = {file.path: row for row, file in enumerate(files)}
    tensors = _ItemTensors(backend, files, {name: _grid(name, stored, rows, backend.url) for name, stored in metadata.tensors.items()})
    archives = list(open_items(backend, list(metadata.values.values()), tensors.sizes))
    inner = TensorTable(archives, files, [rows[item.path] for item in metadata.values.values()])
    nodes: dict[str, Any] = {name: {"$tensor": name} for name in metadata.tensors}
    opaque: dict[str, str] = {}
    for number, name in enumerate(metadata.values):
        maker = node_maker(inner, number)
        nodes[name] = maker.root(archives[number].load(), name)
        opaque |= maker.opaque
    twice = sorted(inner.entries.keys() & tensors.entries.keys())
    if twice:
        raise CorruptError(f"two tensors have the name {twice[0]!r}", where=backend.url, hint="rename one of them when saving")

    def locate(wanted: ChunkRequests) -> list[Extent]:
        mine = [pair for pair in wanted if pair[0].name in inner.entries]
        if not mine:
            return tensors.locate(wanted)
        theirs = iter(tensors.locate([pair for pair in wanted if pair[0].name not in inner.entries]))
        extents = iter(inner.locate(mine))
        return [next(extents) if entry.name in inner.entries else next(theirs) for entry, _ in wanted]

    contents = ExternalContents(
        tensors=[*tensors.entries.values(), *inner.entries.values()],
        files=files,
        world_size=max((f.rank + 1 for f in files if f.rank is not None), default=1),
        state=nested(nodes, metadata.paths, backend.url),
        opaque=opaque,
        notes=_unread(metadata, tensors),
    )
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=locate)


def _unread(metadata: Metadata, tensors: _ItemTensors) -> list[str]:
    """That tensors have another form than their elements, as quantised ones of torchao have: dtype and shape are those that they show
    outside. Their items tell by their lengths."""
    sizes = {name: DTYPES[stored.dtype].itemsize for name, stored in metadata.tensors.items()}
    short = [n for n, t in metadata.tensors.items() if any(b.item.length < math.prod(b.shape) * sizes[n] for b in t.boxes)]
    if not short:
        return []
    try:
        tensors.locate([(tensors.entries[short[0]], 0)])
        what = "the items are too short for their elements"
    except (CorruptError, FormatError) as err:
        what = err.message
    return [f"{plural(len(short), 'tensor')} cannot be read, such as {short[0]}: {what}"]


def _grid(name: str, stored: DcpTensor, rows: Mapping[str, int], where: str) -> tuple[TensorEntry, list[DcpBox]]:
    boxes = stored.boxes
    if not boxes and 0 in stored.shape:
        return TensorEntry(name=name, dtype=dtype(stored.dtype), shape=stored.shape, grid=one_chunk_grid(stored.shape, 0)), []
    grid, order = grid_of(name, stored.shape, [b[:2] for b in boxes], [rows[b.item.path] for b in boxes], where)
    return TensorEntry(name=name, dtype=dtype(stored.dtype), shape=stored.shape, grid=grid), [boxes[i] for i in order]


class _ItemTensors:
    """Tensors whose boxes are items of their own."""

    def __init__(self, backend: Backend, files: Sequence[ExternalFile], described: Mapping[str, tuple[TensorEntry, list[DcpBox]]]) -> None:
        self.entries = {name: entry for name, (entry, _) in described.items()}
        self.sizes = {f.path: f.size for f in files}
        self._first = files[0].path if files else ""
        self._boxes = {name: boxes for name, (_, boxes) in described.items()}
        self._places = Places(backend, self.sizes)

    def locate(self, wanted: ChunkRequests) -> list[Extent]:
        """The extents of chunks; looks into items that were not looked into before."""
        boxes = [self._boxes[entry.name][number] if self._boxes[entry.name] else None for entry, number in wanted]
        self._places.look((e.name, e.dtype.name, box) for (e, _), box in zip(wanted, boxes, strict=True) if box is not None)
        return [
            Extent(self._first, 0, 0, None) if box is None else self._extent(entry, box)
            for (entry, _), box in zip(wanted, boxes, strict=True)
        ]

    def _extent(self, entry: TensorEntry, box: DcpBox) -> Extent:
        start, crc = self._places.of(box.item)
        return Extent(box.item.path, start, math.prod(box.shape) * entry.dtype.itemsize, None, crc32=crc)


# ------------------------------------------------------------------------------------------------------------- state


def nested(nodes: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], where: str) -> tree.Node:
    """The node of the state that was saved: names whose keys are known are put where they were, all others stand at the top."""
    root: dict[str | int, Any] = {}
    for name, node in nodes.items():
        *above, last = paths.get(name, (name,))
        if len(above) > tree.MAX_DEPTH:
            message = f"{name!r} lies {len(above)} containers deep, of {tree.MAX_DEPTH} that are read"
            raise CorruptError(message, where=where, hint="the metadata are damaged: copy them again")
        at = root
        for key in above:
            below = at.setdefault(key, _Branch())
            if not isinstance(below, _Branch):
                _contradiction(name, where)
            at = below
        if last in at:
            _contradiction(name, where)
        at[last] = node
    return _closed(root)


class _Branch(dict[str | int, Any]):
    """A container of the state that is being put together."""


def _contradiction(name: str, where: str) -> None:
    raise CorruptError(f"the keys of {name!r} lead through another value", where=where, hint="the metadata are damaged: copy them again")


def _closed(branch: dict[str | int, Any]) -> tree.Node:
    """The node of a container: numbers as keys are places in a list."""
    closed = {k: _closed(v) if isinstance(v, _Branch) else v for k, v in branch.items()}
    if closed and all(type(k) is int for k in closed) and set(closed) == set(range(len(closed))):
        return [closed[i] for i in range(len(closed))]
    return tree.mapping_node(list(closed.items()))


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_dcp)
"""This format, for ckpt.formats.registry."""


def _is_unfinished(backend: Backend, names: Sequence[str]) -> bool:
    """``.metadata`` is written last."""
    return METADATA not in names and any(DATA_FILE.fullmatch(name) for name in names)


def _open_unfinished(backend: Backend) -> NoReturn:
    if isinstance(backend, SingleFile):
        message = f"this is a data file of {FORMAT_NAME}, which says nothing without {METADATA} beside it"
        raise FormatError(message, where=backend.url, hint="name the directory that has both")
    raise NotCommittedError(
        f"this is a save of {FORMAT_NAME} that was not finished: there are data files, and no {METADATA}",
        where=backend.url,
        hint="open another one; or, if a copy left out hidden files, copy it again",
    )


UNFINISHED = Format(name=f"unfinished save of {FORMAT_NAME}", recognises=_is_unfinished, open=_open_unfinished)
"""Recognised so that a listing shows it, and no other format takes what is there for a checkpoint."""
