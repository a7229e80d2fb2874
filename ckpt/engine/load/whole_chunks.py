"""Chunks that a target wants just as they are stored: no copy to plan. By far the most chunks of a load into the saved layout. And boxes
out of any chunk's bytes, into tensors.

Small ones are read many at a time and moved to their places from the cache; large ones are read in place.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.catalog import Catalog, Extent, Grid, TensorEntry
from ckpt.dtypes import DTYPES, DType
from ckpt.engine.digest_reader import ChunkName, DigestReader
from ckpt.plan.layout.geometry import Box, row_major_strides
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.reads import RangeGroup, common_box, group_ranges
from ckpt.state import lazy
from ckpt.state.tensors import LocalShard, LocalTensor, raw_view, reads_otherwise, torch_dtype

if TYPE_CHECKING:
    import torch

_HERE = TensorLayout.replicated((0,))
SLICE = 256
"""Chunks that are looked up between two signs of life."""


class TensorLoad(NamedTuple):
    """Load ``entry`` into ``target``."""

    target: LocalTensor
    entry: TensorEntry

    @classmethod
    def of_box(cls, entry: TensorEntry, box: Box, memory: torch.Tensor) -> TensorLoad:
        """Load ``box`` of ``entry`` into ``memory``, which has its shape."""
        info = TensorSpec(entry.name, DTYPES[str(memory.dtype).removeprefix("torch.")], entry.shape, _HERE, entry.logical)
        return cls(LocalTensor(info, [LocalShard(box, memory)] if box.numel else [], entry.name), entry)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeChunks:
    """Chunks that fill all of the only part of a job each, as columns: the jobs, where the chunks are stored, and where they go."""

    jobs: Sequence[TensorLoad]
    extents: Sequence[Extent]
    addresses: Sequence[int]

    def chunk(self, i: int) -> ChunkName:
        return ChunkName(self.jobs[i].entry.name, self.jobs[i].target.parts[0].box, self.extents[i])


def find_whole_chunks(jobs: Iterable[TensorLoad], catalog: Catalog, beat: Callable[[], None]) -> tuple[WholeChunks, list[TensorLoad]]:
    """Divide jobs into chunks that fill a target in host memory, and what needs more thought. ``beat`` is called now and then."""
    rest: list[TensorLoad] = []
    fitting: list[TensorLoad] = []
    addresses: list[int] = []
    sizes: list[int] = []
    chunks: list[tuple[TensorEntry, int]] = []
    for job in jobs:
        target, entry = job
        # The fast path is narrow on purpose: one part, same shape and dtype, plain contiguous host memory, and a box
        # that is exactly one chunk. Then a load of the chunk is one copy of its bytes to one address. Lazily negated
        # or conjugated tensors (``is_neg``, ``is_conj``) look contiguous but hold other values than they show.
        info, grid, parts = target.info, entry.grid, target.parts
        number, address = None, 0
        if len(parts) == 1 and info.shape == entry.shape and (entry.dtype is info.dtype or entry.dtype == info.dtype):
            memory = parts[0].memory
            if memory.is_cpu and memory.is_contiguous() and not memory.is_neg() and not memory.is_conj():
                box, address = parts[0].box, memory.data_ptr()
                number = _number(grid, box) if not grid.single else 0 if box.shape == entry.shape else None
        if number is None or not address:
            rest.append(job)
        else:
            fitting.append(job)
            addresses.append(address)
            sizes.append(memory.nbytes)
            chunks.append((entry, number))
    extents: list[Extent] = []
    for at in range(0, len(chunks), SLICE):  # each may have to read headers
        extents += catalog.extents_of(chunks[at : at + SLICE])
        beat()
    # What is coded, or has not as many bytes as its memory, is left out: nothing is ever written beyond that.
    fits = [e[2] == size and e[4] is None for e, size in zip(extents, sizes, strict=True)]
    if not all(fits):
        rest += [job for job, fit in zip(fitting, fits, strict=True) if not fit]
        fitting, extents, addresses = list(compress(fitting, fits)), list(compress(extents, fits)), list(compress(addresses, fits))
    return WholeChunks(jobs=fitting, extents=extents, addresses=addresses), rest


def wanted_boxes(target: LocalTensor, entry: TensorEntry, padding: list[torch.Tensor]) -> tuple[tuple[int, Box], ...]:
    """The box that each part of a target gets of a tensor, with the part's number; memory of parts that reach beyond the stored tensor is
    added to ``padding``."""
    stored = common_box(target.info, entry)
    boxes: list[tuple[int, Box]] = []
    for number, part in enumerate(target.parts):
        box: Box | None = part.box
        if not stored.contains(part.box):
            padding.append(part.memory)
            box = part.box.intersect(stored)
        if box is not None:
            boxes.append((number, box))
    return tuple(boxes)


def _number(grid: Grid, box: Box) -> int | None:
    """The chunk that is this box, or None."""
    if grid.cuts is None:
        return None
    number = 0
    for cuts, low, size in zip(grid.cuts, box.offset, box.shape, strict=True):
        i = bisect_left(cuts, low)
        if i + 1 >= len(cuts) or cuts[i] != low or cuts[i + 1] != low + size:
            return None
        number = number * (len(cuts) - 1) + i
    return number


def tasks_of(exact: WholeChunks, fetch: DigestReader) -> Iterator[Callable[[], None]]:
    """What to run, in any order and on any threads."""
    groups, large = small_and_large(exact, fetch)
    for group in groups:
        yield partial(_move, fetch, exact, group)
    for i in large:
        yield partial(_fill, fetch, exact, i)


def small_and_large(exact: WholeChunks, fetch: DigestReader) -> tuple[list[RangeGroup], Sequence[int]]:
    """Chunks that are read together, and those that are read in place."""
    hints = fetch.backend.io_hints
    # Small chunks are read together into a buffer that stays in the cache and copied from there: one system call for
    # hundreds of tensors. For chunks longer than that the extra copy costs more than the calls it saves.
    longest, most = max(settings.WORTH_A_CALL, hints.coalesce_gap), max(settings.CACHE_BLOCK, hints.read_size)
    small: list[int] = []
    large: list[int] = []
    for i, extent in enumerate(exact.extents):
        (small if extent[2] <= longest else large).append(i)
    groups = group_ranges([exact.extents[i] for i in small], max_bytes=most)
    return [group._replace(members=[small[i] for i in group.members]) for group in groups], large


def _move(fetch: DigestReader, exact: WholeChunks, group: RangeGroup) -> None:
    """Read all, check all, then put each in its place."""
    buffer = fetch.scratch(group.length)
    extents = [exact.extents[i] for i in group.members]
    together = Extent(group.path, group.offset, group.length, None)
    fetch.reread(together, partial(_read, fetch, exact, group, extents, buffer.data[: group.length]))
    with fetch.span("copy", group.length):
        at = buffer.ctypes.data - group.offset
        for i, extent in zip(group.members, extents, strict=True):
            _memmove(exact.addresses[i], at + extent[1], extent[2])


def _read(fetch: DigestReader, exact: WholeChunks, group: RangeGroup, extents: Sequence[Extent], data: memoryview) -> None:
    fetch.fill(group.path, group.offset, data)
    _, offsets, lengths, digests, *_ = zip(*extents, strict=True)
    fetch.compare_rows(data, group.offset, offsets, lengths, digests, lambda i: exact.chunk(group.members[i]))


def _fill(fetch: DigestReader, exact: WholeChunks, i: int) -> None:
    extent = exact.extents[i]
    memory = (ctypes.c_ubyte * extent.length).from_address(exact.addresses[i])
    fetch.reread(extent, partial(fetch.read_chunk, exact.chunk(i), memoryview(memory).cast("B")))


_memmove = ctypes.PyDLL(None).memmove  # keeps the interpreter lock: giving it up takes longer than the copy
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


# Boxes out of the bytes of chunks, into tensors of any strides, dtype and device.


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Bytes that begin ``start`` bytes into a chunk: the row-major ``box`` of elements of ``dtype``."""

    data: npt.NDArray[np.uint8]
    start: int
    box: Box
    dtype: DType


def copy_box(stored: Stored, box: Box, target: LocalTensor) -> None:
    """Copy ``box``, all of whose bytes are there, to where ``target`` has it, converting the dtype if it differs."""
    size = stored.dtype.itemsize
    strides = row_major_strides(stored.box.shape)
    element = sum((o - b) * s for o, b, s in zip(box.offset, stored.box.offset, strides, strict=True)) - stored.start // size
    if stored.dtype == target.info.dtype and (rows := _rows(box, target)) is not None:
        raw = rows.dtype
        np.copyto(rows, np.ndarray(box.shape, raw, stored.data, element * size, tuple(s * size for s in strides)))
        return
    memory = target.view(box)
    same = stored.dtype == target.info.dtype and not reads_otherwise(memory)
    data = stored.data[: len(stored.data) // size * size]
    if data.ctypes.data % size:
        data = data.copy()  # a file need not align its chunks
    typed = lazy.torch.from_numpy(data).view(lazy.RAW[size] if same else torch_dtype(stored.dtype))
    source = lazy.torch.as_strided(typed, box.shape, strides, element)
    (raw_view(memory) if same else memory).copy_(source)


def _rows(box: Box, target: LocalTensor) -> npt.NDArray[np.generic] | None:
    """The memory of ``box`` where numpy is to fill it: on the host, and in rows."""
    # It takes a fifth of the time that torch takes to see what is to do, of which there is much where others read in
    # small pieces; torch is faster where neighbours do not lie together.
    for part in target.parts:
        if part.box.contains(box):
            memory = part.memory
            if not memory.is_cpu or not memory.dim() or memory.stride(-1) != 1 or reads_otherwise(memory):
                return None
            array: npt.NDArray[np.generic] = raw_view(memory.detach()).numpy()
            return array if part.box.shape == box.shape else array[box.relative_to(part.box.offset).slices]
    return None


# Tensors without memory in a dry run: planned as if they had some, and given none.

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def as_if_created(job: TensorLoad, device: str | torch.device) -> TensorLoad:
    """The load of a tensor that has no memory yet, planned as if it had some on ``device``."""
    target = job.target
    if lazy.torch.device(device).type != "cpu":
        return job  # memory of the meta device is planned as that of any other device but the host
    parts = [LocalShard(part.box, address_space(part.memory)) for part in target.parts]
    return TensorLoad(LocalTensor(target.info, parts, target.state_name), job.entry)


def address_space(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor whose pages nobody touches: it takes addresses, and no memory."""
    pages = mmap.mmap(-1, max(like.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return (
        lazy.torch.frombuffer(pages, dtype=lazy.torch.uint8, count=like.nbytes).view(like.dtype).view(like.shape) if like.nbytes else like
    )


def note_writes(targets: Iterable[LocalTensor]) -> None:
    """Autograd did not see the bytes change."""
    lazy.torch.autograd.graph.increment_version([p.memory for local in targets for p in local.parts if not p.memory.is_inference()])
