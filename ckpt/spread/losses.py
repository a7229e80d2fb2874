"""What of a checkpoint is lost: files that no node has that answers, that parity cannot give, and that are not at the root; by tensor, box
and who had them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

import numpy as np

from ckpt.catalog import DataFile
from ckpt.errors import CkptError, NotFoundError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.datafiles.keys import box_text
from ckpt.formats.native.paths import data_prefix
from ckpt.formats.native.spans import read_spans
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend

from .backend import SpreadBackend

NAMED = 4
"""Chunks that a message names."""


def lost_files(backend: SpreadBackend, catalog: NativeCatalog) -> list[int]:
    """Rows of the catalog's files that nobody has whole, and that cannot be computed."""
    prefix = data_prefix(catalog.record.id)
    sizes = backend.holders(prefix)
    lost = [n for n, f in enumerate(catalog.files) if f.size not in sizes.get(f.path, {}).values()]
    lost = [n for n in lost if not _is_computable(backend, catalog.files[n])]
    if not lost or (root := backend.root()) is None:
        return lost
    there = {entry.path: entry.size for entry in root.list_prefix(prefix)}
    return [n for n in lost if there.get(catalog.files[n].path) != catalog.files[n].size]


def loss(url: str) -> str | None:
    """Why the checkpoint cannot be loaded from the nodes that answer; None if it can, as far as listings say."""
    backend = open_backend(url)
    try:
        catalog = open_catalog(url)
    except CkptError as err:
        return f"its index cannot be read: {err.message}"
    if not isinstance(catalog, NativeCatalog) or not isinstance(backend, SpreadBackend):
        return None
    lost = lost_files(backend, catalog)
    if not lost:
        return None
    hosts: dict[int, str | None] = {}
    with suppress(CkptError):
        hosts = {rank: table.host for rank, table in read_spans(backend, catalog.record).items()}
    chunks = list(_chunks(catalog, lost))
    ranks = sorted({catalog.files[n].rank for n in lost})
    who = ", ".join(f"rank {rank}{f' on {host}' if (host := hosts.get(rank)) else ''}" for rank in ranks[:NAMED])
    names = ", ".join(chunks[:NAMED]) + (f" and {len(chunks) - NAMED} more" if len(chunks) > NAMED else "")
    parity = next((missing for n in lost if (missing := backend.reader.parity.missing(catalog.files[n].path)) is not None), None)
    places = "on no node that answers and not at the root"
    places += "" if parity is None else f", and parity gives the first of them only with {parity}"
    count = f"{len(lost)} of {len(catalog.files)} files are {places}"
    return f"{count}; {who}{' and others' if len(ranks) > NAMED else ''} wrote them: {names}"


def _is_computable(backend: SpreadBackend, file: DataFile) -> bool:
    try:
        return backend.reader.parity.size(file.path) == file.size
    except NotFoundError:
        return False


def _chunks(catalog: NativeCatalog, files: Collection[int]) -> Iterator[str]:
    """Tensor and box of each chunk that is in one of these files."""
    for name, entry in catalog.tensors.items():
        if entry.alias is None:
            of_chunk = np.broadcast_to(entry.grid.files, (len(entry.grid.all_boxes()[0]),))
            for chunk in np.flatnonzero(np.isin(of_chunk, list(files))).tolist():
                yield name + box_text(entry.grid.box(chunk), entry.shape)
