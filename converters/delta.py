"""An export as a delta: the same windows of the same files as a full export, but what each rank would write is compared with what the
export before has there, and only what changed is kept. No torch.

Invariants: the files of the full export are laid out and never written. A rank reads of the export before what lies in its own windows,
and keeps no more of it than the windows that its threads compare; changes beyond ``SPILLED`` bytes wait in a temporary file.
"""

# window of a file that would be written     | header | a ........ | b .............. |     (put together as in any export)
# the same elements of the export before              | a ........ | b .............. |     (read: the anchor, with its deltas)
# sections                                            |  2 changed |    unchanged     |
#
# When all windows are compared, a rank knows how long its gaps and values are, lays out its file and writes it. The leader reads the
# tables of all files, checks that their sections tile the model, and publishes the manifest: the commit.

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ckpt.errors import MismatchError, StorageError, UsageError
from ckpt.formats.delta_changes import code_counts, encode_gaps, find_changes, gaps_of, mostly_changed
from ckpt.formats.delta_manifest import (
    COLUMNS,
    MANIFEST,
    DeltaFile,
    DeltaManifest,
    DeltaTensor,
    WrittenTensor,
    head_digest,
    lay_out,
    read_sections,
    signed,
)
from ckpt.formats.deltas import Base, section_digest
from ckpt.formats.native.writer import WriteJournal
from ckpt.io_backends.protocol import Writer
from ckpt.plan.layout.geometry import flat_to_boxes

from .selection import OutputTensor
from .target import OutputFile
from .transaction import Destination, ExportTransaction

SPILLED = 64 << 20
"""Bytes of changes that a rank keeps in memory before they go to a temporary file."""


class _Compared(NamedTuple):
    """A section that was compared. ``counts`` has the gap codes that it takes, by width; none if it is dense or unchanged. ``kept`` is the
    offset of its gaps (four bytes each) and values among the changes."""

    tensor: int
    start: int
    stop: int
    gaps: int
    values: int
    counts: Mapping[int, int]
    kept: int
    result: int


def delta_paths(ranks: int) -> tuple[str, ...]:
    """The files of a delta that so many ranks write."""
    return tuple(f"delta-{i + 1:05d}-of-{ranks:05d}.safetensors" for i in range(ranks))


def check_follows(base: Base, chosen: Mapping[str, OutputTensor], url: str) -> None:
    """Raise MismatchError unless the export before has the same tensors."""
    before = {t.name: t for t in base.tensors}
    tensors = {n: DeltaTensor(name=n, dtype=t.dtype, shape=t.shape) for n, t in chosen.items()}
    differing = sorted(n for n in before.keys() | tensors.keys() if before.get(n) != tensors.get(n))
    if differing:
        name = differing[0]
        was, now = (f"{t.dtype.name} {list(t.shape)}" if t is not None else "absent" for t in (before.get(name), tensors.get(name)))
        more = f", and {len(differing) - 1} more tensors differ" if len(differing) > 1 else ""
        message = f"{base.this.url} has other tensors, so no delta can follow it: {name} was {was}, is {now}{more}"
        raise MismatchError(message, where=url, hint="export without since=")


class DeltaRecorder:
    """One rank's side of a delta, in the place of ``RankFiles``: compares what the rank would write, and writes what changed."""

    def __init__(self, destination: Destination, base: Base, files: Sequence[OutputFile], path: str) -> None:
        self.base = base
        self.files = files
        self.path = path
        self.destination = destination
        self._numbers = {t.name: number for number, t in enumerate(base.tensors)}
        self._items = [[i for i, item in enumerate(file.items) if item.length] for file in files]
        self._starts = [[file.items[i].offset for i in of] for file, of in zip(files, self._items, strict=True)]
        self._changes = tempfile.SpooledTemporaryFile(max_size=SPILLED)  # noqa: SIM115  closed in ``close``
        self._end = 0
        self._compared: list[_Compared] = []
        self._lock = threading.Lock()
        self._journal = WriteJournal(destination.backend)

    def open(self, number: int) -> None:
        """Nothing: the files of the full export are not written."""

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Compare bytes of a file with those of the export before. What is no tensor's is passed over."""
        file, stop = self.files[number], offset + len(data)
        first = max(0, bisect_right(self._starts[number], offset) - 1)
        for i in self._items[number][first:]:
            item = file.items[i]
            low, high = max(offset, item.offset), min(stop, item.offset + item.length)
            if item.offset >= stop:
                break
            if low < high:
                self._compare(item.name, low - item.offset, data[low - offset : high - offset])

    def _compare(self, name: str, at: int, data: memoryview) -> None:
        """Compare bytes of a tensor from its byte ``at`` on, in sections that are boxes of it."""
        tensor, place = self.base.tensors[self._numbers[name]], self.base.places[self._numbers[name]]
        size = tensor.dtype.itemsize
        if at % size or len(data) % size:
            raise StorageError(
                f"tensor {name} would be written in parts of elements", where=self.destination.url, hint="please report this"
            )
        before = memoryview(bytearray(len(data)))
        self.base.backend.read_into(place.path, place.offset + at, before)
        start = at // size
        for box in flat_to_boxes(tensor.shape, start, start + len(data) // size):
            of = slice((start * size) - at, (start + box.numel) * size - at)
            self._add(place.number, start, start + box.numel, before[of], data[of], size)
            start += box.numel

    def _add(self, tensor: int, start: int, stop: int, before: memoryview, data: memoryview, size: int) -> None:
        counts: Mapping[int, int] = {}
        parts = [b"", bytes(data)]
        if not mostly_changed(before, data, size):
            indices, values = find_changes(before, data, size)
            gaps = gaps_of(indices)
            sparse = code_counts(gaps) if len(gaps) else {}
            if min((width * n for width, n in sparse.items()), default=0) + values.nbytes < len(data):
                counts, parts = sparse, [gaps.astype("<u4").tobytes(), values.tobytes()]
        result = xxhash.xxh3_64_intdigest(data)
        with self._lock:
            self._changes.seek(self._end)
            for part in parts:
                self._changes.write(part)
            self._compared.append(_Compared(tensor, start, stop, len(parts[0]) // 4, len(parts[1]) // size, counts, self._end, result))
            self._end += sum(map(len, parts))

    def flush(self) -> dict[int, Any]:
        """Write this rank's file; what the leader needs to publish it."""
        sections = sorted(self._compared, key=lambda c: c[:2])
        stored = _stored(sections)
        layout = lay_out(self.base.tensors, list(stored.values()), len(sections))
        backend = self.destination.backend
        rows = np.zeros((len(sections), COLUMNS), dtype="<i8")
        with self._journal.making(self.path), backend.create(self.path, layout.size) as writer:
            at = {number: list(starts) for number, starts in layout.starts.items()}
            for n, section in enumerate(sections):
                width = stored[section.tensor].width if section.tensor in stored else 0
                rows[n] = self._store(writer, section, width, at.get(section.tensor, [0, 0]))
            head = layout.header + rows.tobytes()
            writer.write(0, [head])
            writer.commit()
        changed = sum(c.values for c in sections)
        return {0: {"path": self.path, "size": layout.size, "head": len(head), "digest": head_digest(head), "changed": changed}}

    def _store(self, writer: Writer, section: _Compared, width: int, at: list[int]) -> list[int]:
        """Write the gaps and values of a section at their places, which go on; its row of the table."""
        size = self.base.tensors[section.tensor].dtype.itemsize
        self._changes.seek(section.kept)
        gaps = np.frombuffer(self._changes.read(4 * section.gaps), "<u4").astype(np.int64)
        codes = encode_gaps(gaps, width).tobytes() if section.gaps else b""
        values = self._changes.read(section.values * size)
        for which, data in enumerate((codes, values)):
            if data:
                writer.write(at[which], [data])
                at[which] += len(data)
        count = len(codes) // width if codes else 0
        stored = signed(section_digest(codes, values)) if values else 0
        return [section.tensor, section.start, section.stop, count, section.values, stored, signed(section.result)]

    def discard(self) -> None:
        """Remove what this process has written."""
        self._journal.discard()

    def close(self) -> None:
        """Forget the changes."""
        self._changes.close()


def _stored(sections: Sequence[_Compared]) -> dict[int, WrittenTensor]:
    """What the file has of each tensor with changes: gaps of the width that is the shortest for all of its sections."""
    counts: dict[int, dict[int, int]] = {}
    values: dict[int, int] = {}
    for section in sections:
        if section.values:
            values[section.tensor] = values.get(section.tensor, 0) + section.values
            of = counts.setdefault(section.tensor, {})
            for width, n in section.counts.items():
                of[width] = of.get(width, 0) + n
    stored = {}
    for tensor, of in counts.items():
        width, codes = min(of.items(), key=lambda pair: pair[0] * pair[1], default=(0, 0))
        stored[tensor] = WrittenTensor(tensor, width, codes, values[tensor])
    return stored


def begin_delta(destination: Destination, ranks: int) -> ExportTransaction:
    """The files of a delta that so many ranks write, begun: they exist together, from the manifest on, or not at all."""
    if destination.name is not None:
        raise UsageError("a delta is a directory", where=destination.url, hint="a URL that does not end in .safetensors")
    if destination.replace:
        raise UsageError("a delta replaces nothing: others may follow what is there", where=destination.url, hint="export to a new URL")
    transaction = ExportTransaction(destination, dict.fromkeys(delta_paths(ranks)), (MANIFEST,), last=MANIFEST)
    transaction.show()
    return transaction


def manifest_of(destination: Destination, base: Base, receipts: Sequence[Any]) -> bytes:
    """The manifest of a delta whose files are there: what ``DeltaRecorder.flush`` gave for each says what they have."""
    files = sorted((DeltaFile(path=r["path"], size=r["size"], head=r["head"], digest=r["digest"]) for r in receipts), key=lambda f: f.path)
    _, result = read_sections(destination.backend, files, base.tensors)
    manifest = DeltaManifest(
        number=base.number + 1,
        base=base.this,
        anchor=base.anchor,
        tensors=base.tensors,
        files=tuple(files),
        result=result,
        changed=sum(r["changed"] for r in receipts),
        dense_bytes=sum(place.length for place in base.places),
    )
    return manifest.to_bytes(destination.url)
