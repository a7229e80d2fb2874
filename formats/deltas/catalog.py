"""Deltas as catalogs: an anchor, which is any safetensors checkpoint, and the deltas that follow it, opened as the newest model.

The chain is followed from the newest delta back to its anchor; every link says by ``id`` what it was made from. An anchor has no digests,
so its id is one of what its headers say and of a few samples of its bytes: other weights in the same place are noticed when the chain is
opened. All bytes are compared when they are read: each chunk of the newest version has a digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import xxhash

from ckpt import settings
from ckpt.catalog import Extent, TensorEntry
from ckpt.errors import AccessError, CkptError, CorruptError, FormatError, NotFoundError
from ckpt.formats.external.base import (
    ChunkRequests,
    ExternalCatalog,
    ExternalContents,
    ExternalFile,
    Range,
    grid_of,
    one_chunk_grid,
    open_single,
    read_ranges,
)
from ckpt.formats.protocol import Format
from ckpt.formats.safetensors import open_safetensors
from ckpt.formats.safetensors import recognises as is_safetensors
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.plan.layout.geometry import Box, flat_to_boxes

from .chain import AnchorPlace, ChainBackend, Link, result_of
from .manifest import MANIFEST, START, STOP, DeltaManifest, DeltaTensor, LinkedExport, TensorSections, read_sections

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

FORMAT_NAME = "ckpt-delta"
_SAMPLES, _SAMPLE = 32, 4096


class Base(NamedTuple):
    """An export that a delta can follow. ``number`` of deltas since the anchor; ``places`` in the order of ``tensors``, sorted by name;
    ``backend`` has the bytes of this version."""

    this: LinkedExport
    anchor: LinkedExport
    number: int
    tensors: tuple[DeltaTensor, ...]
    places: tuple[AnchorPlace, ...]
    backend: Backend


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether the manifest of a delta is there."""
    return MANIFEST in names


def open_delta(backend: Backend, allowed: Sequence[str] | None = None) -> ExternalCatalog:
    """Open what ``recognises`` found, and all that it follows. ``allowed``: roots below which that may lie; None: anywhere."""
    links = _links(backend, None if allowed is None else tuple(map(real_url, allowed)))
    newest = links[-1].manifest
    anchor, places, inner = _chain(links)
    files = [ExternalFile(f.path, f.size) for f in anchor.files]
    numbers = {file.path: n for n, file in enumerate(files)}
    entries: list[TensorEntry] = []
    extents: dict[str, list[Extent]] = {}
    for tensor, place, sections in zip(newest.tensors, places, links[-1].sections, strict=True):
        entry, of = _entry(tensor, place, sections, numbers.get(place.path, 0), links[-1].url)
        entries.append(entry)
        extents[tensor.name] = of
    share = newest.changed / max(1, sum(t.numel for t in newest.tensors))
    contents = ExternalContents(
        tensors=entries,
        files=[*files, ExternalFile(MANIFEST, backend.size(MANIFEST))],
        notes=[
            f"delta {newest.number} after the full export {newest.anchor.url}: "
            f"{newest.changed:,} elements ({share:.2%}) changed since {newest.base.url}"
        ],
    )

    def locate(wanted: ChunkRequests) -> list[Extent]:
        return [extents[entry.name][number] for entry, number in wanted]

    return ExternalCatalog(contents, backend=inner, format=FORMAT_NAME, locate=locate)


def open_base(url: str) -> Base:
    """The export at ``url`` as what a delta follows."""
    backend = open_backend(url)
    if MANIFEST not in backend.list_dir():
        anchor, id = _open_anchor(url)
        tensors = _tensors(anchor, url)
        places = tuple(_place(anchor, tensor, number) for number, tensor in enumerate(tensors))
        this = LinkedExport(url=url, id=id)
        return Base(this, this, 0, tensors, places, anchor.backend)
    links = _links(backend, None)
    newest = links[-1].manifest
    _, places, inner = _chain(links)
    return Base(LinkedExport(url=url, id=newest.id), newest.anchor, newest.number, newest.tensors, places, inner)


def _links(backend: Backend, allowed: Sequence[str] | None) -> list[Link]:
    """The deltas from the first after the anchor to the one at ``backend``."""
    links: list[Link] = []
    manifest = _read_manifest(backend)
    seen = {real_url(backend.url)}
    while True:
        sections, result = read_sections(backend, manifest.files, manifest.tensors)
        if result != manifest.result:
            _damaged(f"the sections of this delta make {result}, and its manifest says {manifest.result}", backend.url)
        links.append(Link(url=backend.url, backend=backend, manifest=manifest, sections=sections))
        base = manifest.base
        for export in (base, manifest.anchor):
            place = real_url(export.url)
            if allowed is not None and not any(place == root or place.startswith(f"{root.rstrip('/')}/") for root in allowed):
                message = f"this delta follows {export.url}, which is not among the sources that may be read"
                raise AccessError(message, where=backend.url, hint="if you trust it, name its root in sources= or CKPT_SOURCES")
        if real_url(base.url) in seen:
            _damaged(f"the chain closes on itself: {base.url} follows what follows it", backend.url)
        seen.add(real_url(base.url))
        if manifest.number == 1:
            if base != manifest.anchor:
                _damaged(f"the first delta follows {base.url}, which is not its anchor, {manifest.anchor.url}", backend.url)
            return links[::-1]
        after, above = manifest, backend.url
        backend = open_backend(base.url)
        try:
            manifest = _read_manifest(backend)
        except NotFoundError as err:
            _damaged(f"a link of the chain is missing: {base.url}, which this delta follows", above, err)
        if manifest.id != base.id:
            _damaged(f"this delta follows version {base.id} of {base.url}, but {manifest.id} is there", above)
        if (manifest.number, manifest.anchor.id, manifest.tensors) != (after.number - 1, after.anchor.id, after.tensors):
            _damaged(f"{base.url} is no delta of the same chain", above)


def _read_manifest(backend: Backend) -> DeltaManifest:
    def read() -> DeltaManifest:
        return DeltaManifest.from_bytes(backend.read_whole(MANIFEST, settings.FOREIGN_TABLE), backend.url)

    return read_checked(backend, MANIFEST, read)


def _chain(links: Sequence[Link]) -> tuple[ExternalCatalog, tuple[AnchorPlace, ...], ChainBackend]:
    """The anchor of a chain, where it has each tensor, and what has the newest bytes."""
    newest = links[-1].manifest
    url = newest.anchor.url
    try:
        anchor, id = _open_anchor(url)
    except NotFoundError as err:
        _damaged(f"the anchor of the chain is missing: {url}", url, err)
    if id != newest.anchor.id:
        _damaged(f"the anchor is not the one that the deltas follow: its id is {id}, should be {newest.anchor.id}", url)
    if _tensors(anchor, url) != newest.tensors:
        _damaged("the anchor has other tensors than the deltas", url)
    places = tuple(_place(anchor, tensor, number) for number, tensor in enumerate(newest.tensors))
    return anchor, places, ChainBackend(anchor.backend, dict(zip((t.name for t in newest.tensors), places, strict=True)), links)


def _open_anchor(url: str) -> tuple[ExternalCatalog, str]:
    """A safetensors checkpoint, and its id."""
    backend: Backend = open_backend(url)
    names = backend.list_dir()
    if MANIFEST in names:
        raise CorruptError("the anchor of the chain is a delta itself", where=url, hint="export a full anchor")
    if not names:
        single = open_single(url)
        if single is None:
            raise NotFoundError("there is no export", where=url, hint="check the URL")
        backend, names = single, [single.name]
    if not is_safetensors(backend, names):
        raise FormatError("this is no export that a delta can follow: no safetensors files", where=url, hint="export a full anchor")
    try:
        anchor = read_checked(backend, "", partial(open_safetensors, backend), faults=(CorruptError, FormatError))
    except CkptError as err:
        raise FormatError(f"this is no export that a delta can follow: {err.message}", where=url, hint="export a full anchor") from err
    return anchor, _fingerprint(anchor)


def _fingerprint(anchor: ExternalCatalog) -> str:
    """What tells an anchor from others of the same shapes: names, dtypes, shapes and places of all tensors, and samples of the bytes."""
    entries = [e for e in anchor.tensors.values() if e.nbytes]
    extents = anchor.extents_of([(e, n) for e in entries for n in range(len(e.grid))])
    digest = xxhash.xxh3_128(json.dumps([[e.name, e.dtype.name, list(e.shape)] for e in anchor.tensors.values()]).encode())
    digest.update(json.dumps([[e.path, e.offset, e.length] for e in extents]).encode())
    ends = np.cumsum([e.length for e in extents])
    for at in (np.arange(_SAMPLES) * (int(ends[-1]) // _SAMPLES)).tolist() if extents else ():
        i = int(np.searchsorted(ends, at, side="right"))
        within = at - int(ends[i]) + extents[i].length
        (data,) = read_ranges(
            anchor.backend, [Range(extents[i].path, extents[i].offset + within, min(_SAMPLE, extents[i].length - within))]
        )
        digest.update(data)
    return digest.hexdigest()


def _tensors(anchor: ExternalCatalog, url: str) -> tuple[DeltaTensor, ...]:
    """All tensors by name; each must lie in one piece."""
    parted = [e.name for e in anchor.tensors.values() if len(e.grid) != 1]
    if parted:
        raise FormatError(
            f"this is no export that a delta can follow: {parted[0]} lies in several files", where=url, hint="export a full anchor"
        )
    return tuple(DeltaTensor(name=e.name, dtype=e.dtype, shape=e.shape) for e in anchor.tensors.values())


def _place(anchor: ExternalCatalog, tensor: DeltaTensor, number: int) -> AnchorPlace:
    extent = anchor.extents(anchor.tensors[tensor.name], [0])[0]
    return AnchorPlace(extent.path, extent.offset, extent.length, tensor.dtype.itemsize, number)


def _entry(tensor: DeltaTensor, place: AnchorPlace, sections: TensorSections, file: int, url: str) -> tuple[TensorEntry, list[Extent]]:
    """A tensor of the newest version; its chunks are the sections of the newest delta."""
    if not tensor.numel:
        entry = TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, grid=one_chunk_grid(tensor.shape, file))
        return entry, [Extent(place.path, place.offset, 0, xxhash.xxh3_64_hexdigest(b""))]
    boxes: list[Box] = []
    for start, stop in sections.rows[:, [START, STOP]].tolist():
        of = flat_to_boxes(tensor.shape, start, stop)
        if len(of) != 1:
            _damaged(f"a section of tensor {tensor.name} is no box of it: elements [{start}:{stop}]", url)
        boxes += of
    grid, order = grid_of(tensor.name, tensor.shape, [(b.offset, b.shape) for b in boxes], [file] * len(boxes), url)
    size = tensor.dtype.itemsize
    extents = [
        Extent(place.path, place.offset + start * size, (stop - start) * size, result_of(sections, i))
        for i, (start, stop) in ((i, sections.rows[i, [START, STOP]].tolist()) for i in order)
    ]
    return TensorEntry(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, grid=grid), extents


def _damaged(what: str, where: str, cause: BaseException | None = None) -> NoReturn:
    raise CorruptError(what, where=where, hint="put it back, or use an export of another chain") from cause


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_delta, open_within=open_delta)
"""This format, for ckpt.formats.registry."""
