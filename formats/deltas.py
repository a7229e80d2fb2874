"""Deltas as catalogs: an anchor, which is any safetensors checkpoint, and the deltas that follow it, opened as the newest model.

The chain is followed from the newest delta back to its anchor; every link says by ``id`` what it was made from. An anchor has no digests,
so its id is one of what its headers say and of a few samples of its bytes: other weights in the same place are noticed when the chain is
opened. All bytes are compared when they are read: each chunk of the newest version has a digest.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import xxhash

from ckpt import settings
from ckpt.catalog import Extent, Format, TensorEntry
from ckpt.errors import AccessError, CkptError, CorruptError, FormatError, NotFoundError
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.protocol import IOHints
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.plan.layout.geometry import Box, flat_to_boxes

from .delta_changes import Section, decode_section, unit
from .delta_manifest import (
    CODES,
    COUNT,
    MANIFEST,
    RESULT,
    START,
    STOP,
    STORED,
    DeltaManifest,
    DeltaTensor,
    LinkedExport,
    TensorSections,
    read_sections,
)
from .external import (
    ChunkRequests,
    ExternalCatalog,
    ExternalContents,
    ExternalFile,
    Range,
    ReadOnly,
    grid_of,
    one_chunk_grid,
    open_single,
    read_ranges,
)
from .safetensors import open_safetensors
from .safetensors import recognises as is_safetensors

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# A chain of exports as one storage: the files of the anchor, with the changes of every delta put over the bytes as they are read.
#
# Invariants: what is read of a tensor is the newest version's, whatever range is asked for. Nothing is kept of what was read; a section is
# checked against its digest before any of it is used.

# A read of bytes of a file of the anchor, where two deltas follow it
#
#     file of the anchor    | header |------- a -------|----------- b -----------|
#     asked for                              [===============]
#     sections, delta 1              |--------|--------|-----|-----|------|------|
#     sections, delta 2              |-----------------|------------|------------|
#
# Of each delta, oldest first, the sections that overlap are read (near ones in one request), decoded and put in place. The result is what
# the newest version has; the catalog gives its digests, and whoever reads compares them as those of any chunk.


READ = 8 << 20
"""Bytes that one read should ask for: about a section, of which each read decodes all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """One delta of a chain, opened."""

    url: str
    backend: Backend
    manifest: DeltaManifest
    sections: Sequence[TensorSections]


class AnchorPlace(NamedTuple):
    """Where the anchor has a tensor: bytes from ``offset`` on of the file ``path``; ``number`` counts the tensors of the chain."""

    path: str
    offset: int
    length: int
    itemsize: int
    number: int


class _StoredChanges(NamedTuple):
    """A section of a delta that is read, and its places: the start of its run in elements, and its length in bytes."""

    name: str
    row: Sequence[int]
    width: int
    codes: Range
    values: Range
    itemsize: int


class ChainBackend(ReadOnly):
    """See above. ``inner`` has the anchor; the newest manifest can be read beside its files."""

    why = "a chain of deltas is only read"

    def __init__(self, inner: Backend, places: Mapping[str, AnchorPlace], links: Sequence[Link]) -> None:
        self.inner = inner
        self.links = links
        self._names = list(places)
        self._by_path: dict[str, list[AnchorPlace]] = {}
        for place in sorted(places.values()):
            if place.length:
                self._by_path.setdefault(place.path, []).append(place)
        self._starts = {path: [place.offset for place in of] for path, of in self._by_path.items()}

    @property
    def url(self) -> str:
        """The newest delta's."""
        return self.links[-1].url

    @property
    def io_hints(self) -> IOHints:
        hints = self.inner.io_hints
        return IOHints(
            read_size=max(READ, hints.read_size),
            split_read_size=max(READ, hints.split_read_size),
            coalesce_gap=hints.coalesce_gap,
            concurrency=hints.concurrency,
            single_put_size=hints.single_put_size,
        )

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path == MANIFEST:
            return self.links[-1].backend.read(path, offset, length)
        data = bytearray(self.inner.read(path, offset, length))
        self._apply(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path == MANIFEST:
            self.links[-1].backend.read_into(path, offset, buffer)
            return
        self.inner.read_into(path, offset, buffer)
        self._apply(path, offset, buffer.cast("B"))

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """Of the deltas too, whichever of their bytes are in this range."""
        if path == MANIFEST:
            self.links[-1].backend.evict(path, offset, length)
            return
        self.inner.evict(path, offset, length)
        stop = offset + (1 << 62 if length is None else length)
        for place in self._overlapping(path, offset, stop):
            for link in self.links:
                for part in self._parts(link, place, max(0, offset - place.offset), min(place.length, stop - place.offset)):
                    for span in (part.codes, part.values):
                        link.backend.evict(span.path, span.offset, span.length)

    def size(self, path: str) -> int:
        return self.links[-1].backend.size(path) if path == MANIFEST else self.inner.size(path)

    def version_token(self, path: str) -> str | None:
        """What tells versions of a file apart: see ``Backend.version_token``."""
        return self.links[-1].backend.version_token(path) if path == MANIFEST else self.inner.version_token(path)

    # ---- changes

    def _apply(self, path: str, offset: int, buffer: memoryview) -> None:
        """Put the changes of all deltas over bytes of the anchor."""
        overlapping = list(self._overlapping(path, offset, offset + len(buffer)))
        for link in self.links if overlapping else ():
            parts = [
                (place, part)
                for place in overlapping
                for part in self._parts(link, place, max(0, offset - place.offset), min(place.length, offset + len(buffer) - place.offset))
            ]
            data = read_ranges(link.backend, [span for _, part in parts for span in (part.codes, part.values)])
            for number, (place, part) in enumerate(parts):
                section = _checked(link, part, *data[2 * number : 2 * number + 2])
                _put(buffer, offset, place, part, section, f"{link.url.rstrip('/')}/{part.values.path}")

    def _overlapping(self, path: str, start: int, stop: int) -> Iterator[AnchorPlace]:
        """Tensors that have bytes of ``[start, stop)``."""
        places = self._by_path.get(path, [])
        for place in places[max(0, bisect_right(self._starts.get(path, []), start) - 1) :]:
            if place.offset >= stop:
                return
            if place.offset + place.length > start:
                yield place

    def _parts(self, link: Link, place: AnchorPlace, start: int, stop: int) -> Iterator[_StoredChanges]:
        """The sections with changes of the bytes ``[start, stop)`` of a tensor."""
        sections = link.sections[place.number]
        for i in sections.overlapping(start // place.itemsize, -(-stop // place.itemsize)):
            row = sections.rows[i].tolist()
            if not row[COUNT]:
                continue
            path, width = link.manifest.files[int(sections.files[i])].path, int(sections.widths[i]) if row[CODES] else 0
            codes = Range(path, int(sections.codes_at[i]), row[CODES] * width)
            values = Range(path, int(sections.values_at[i]), row[COUNT] * place.itemsize)
            yield _StoredChanges(self._names[place.number], row, width, codes, values, place.itemsize)


def _checked(link: Link, part: _StoredChanges, codes: bytes, values: bytes) -> Section:
    """A section whose bytes were read; read again if they do not fit their digest."""
    given = [(codes, values)]

    def read() -> Section:
        codes, values = given.pop() if given else tuple(read_ranges(link.backend, [part.codes, part.values]))
        if (computed := section_digest(codes, values)) != part.row[STORED] % (1 << 64):
            where = f"{link.url.rstrip('/')}/{part.values.path}"
            run = f"[{part.row[START]}:{part.row[STOP]}]"
            message = f"the changes of elements {run} of tensor {part.name} are damaged: their digest is {computed:016x}"
            raise CorruptError(message, where=where, hint="copy the file again, or export a full anchor")
        return Section(part.width, np.frombuffer(codes, np.uint8), np.frombuffer(values, np.uint8))

    return read_checked(link.backend, part.values.path, read, offset=part.values.offset, length=part.values.length)


def section_digest(codes: bytes | memoryview, values: bytes | memoryview) -> int:
    """XXH3-64 of the bytes of a section: gap codes, then values."""
    digest = xxhash.xxh3_64(codes)
    digest.update(values)
    return digest.intdigest()


def _put(buffer: memoryview, offset: int, place: AnchorPlace, part: _StoredChanges, section: Section, where: str) -> None:
    """Put a section of a tensor into ``buffer``, which has the bytes of its file from ``offset`` on."""
    start, length = part.row[START], part.row[STOP] - part.row[START]
    changes = decode_section(section, length * part.itemsize, part.itemsize, where)
    origin = offset - place.offset  # in bytes of the tensor
    first, last = max(start, -(-origin // part.itemsize)), min(start + length, (origin + len(buffer)) // part.itemsize)
    if first < last:
        low, high = np.searchsorted(changes.indices, (first - start, last - start)).tolist()
        whole = np.frombuffer(buffer[first * part.itemsize - origin : last * part.itemsize - origin], unit(part.itemsize))
        if section.width == 0:
            whole[:] = changes.values[low:high]
        else:
            whole[changes.indices[low:high] - (first - start)] = changes.values[low:high]
    for cut in {origin // part.itemsize, (origin + len(buffer)) // part.itemsize}:
        at = int(np.searchsorted(changes.indices, cut - start))
        if first <= cut < last or at == len(changes.indices) or int(changes.indices[at]) != cut - start:
            continue
        element = changes.values[at : at + 1].tobytes()
        for n in range(max(0, origin - cut * part.itemsize), min(part.itemsize, origin + len(buffer) - cut * part.itemsize)):
            buffer[cut * part.itemsize + n - origin] = element[n]


def result_of(sections: TensorSections, number: int) -> str:
    """The digest of the elements that section ``number`` of a tensor makes, as extents have it."""
    return f"{int(sections.rows[number, RESULT]) % (1 << 64):016x}"


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
            _damaged(f"the sections of this delta make {result}, in its manifest {manifest.result}", backend.url)
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
            _damaged(f"{base.url} is not a delta of the same chain", above)


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
        raise FormatError("a delta cannot follow this export: no safetensors files", where=url, hint="export a full anchor")
    try:
        anchor = read_checked(backend, "", partial(open_safetensors, backend), faults=(CorruptError, FormatError))
    except CkptError as err:
        raise FormatError(f"a delta cannot follow this export: {err.message}", where=url, hint="export a full anchor") from err
    # What tells an anchor from others of the same shapes: names, dtypes, shapes and places of all tensors, and samples of the bytes
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
    return anchor, digest.hexdigest()


def _tensors(anchor: ExternalCatalog, url: str) -> tuple[DeltaTensor, ...]:
    """All tensors by name; each must lie in one piece."""
    parted = [e.name for e in anchor.tensors.values() if len(e.grid) != 1]
    if parted:
        raise FormatError(f"a delta cannot follow this export: {parted[0]} lies in several files", where=url, hint="export a full anchor")
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
            _damaged(f"a section of tensor {tensor.name} is not a box of it: elements [{start}:{stop}]", url)
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
