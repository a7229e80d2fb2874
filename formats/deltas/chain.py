"""A chain of exports as one storage: the files of the anchor, with the changes of every delta put over the bytes as they are read.

Invariants: what is read of a tensor is the newest version's, whatever range is asked for. Nothing is kept of what was read; a section is
checked against its digest before any of it is used.
"""

# A read of bytes of a file of the anchor, where two deltas follow it
#
#     file of the anchor    | header |------- a -------|----------- b -----------|
#     asked for                              [===============]
#     sections, delta 1              |--------|--------|-----|-----|------|------|
#     sections, delta 2              |-----------------|------------|------------|
#
# Of each delta, oldest first, the sections that overlap are read (near ones in one request), decoded and put in place. The result is what
# the newest version has; the catalog gives its digests, and whoever reads compares them as those of any chunk.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from ckpt.errors import CorruptError
from ckpt.formats.external.base import Range, ReadOnly, read_ranges
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.protocol import IOHints, ObjectMeta

from .changes import Section, decode_section, unit
from .manifest import CODES, COUNT, MANIFEST, RESULT, START, STOP, STORED, DeltaManifest, TensorSections

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

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

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return self.inner.list_prefix(prefix)

    def list_dir(self, prefix: str = "") -> list[str]:
        return self.inner.list_dir(prefix)

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
