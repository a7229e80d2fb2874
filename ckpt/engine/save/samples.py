"""Samples of what is captured later: what it was at the call, to be compared with the bytes that were captured.

    tensor     ████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░   128 bytes of each 32 KiB: 4 KiB of each MiB
    copy       ████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░░░░░░░░░░░░░░░░░░░░░░████░░░░░░░   the same places, right after the copy

torch counts neither writes through ``tensor.data`` nor numpy's, and counts an operation only when it is over. A rewrite of a tensor changes
its samples, whoever writes. If it was going on during the copy, part of the copy is new: then samples there are, or those of the tensor
after the copy, for it goes on.

Two lines of a cache that are neighbours cost one access, hence 128 bytes. Their distance, 257 times that, is odd in lines, so samples of
rows whose length is a power of two are not all of the same columns. On a device all bytes are summed, too, which takes no host's time: that
shows a sparse write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt.adapters.memory import RAW, raw_view

from .plan import Batch
from .tensor_source import ChunkSource

WHOLE = 4096
"""A sample of fewer bytes is all of them."""
LINE = 128
STEP = 257 * LINE

_LINE = np.dtype(f"V{LINE}")
_MEMORY = ctypes.c_char * (1 << 62)  # one type for all lengths: making one takes longer than a sample


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Of one piece of memory, where it lies: bytes of ``lines`` of it, and on a device the ``sum`` of all."""

    lines: torch.Tensor
    sum: torch.Tensor | None

    def same(self, other: Sample) -> bool:
        """Whether both are of the same bytes; ``other`` may lie elsewhere."""
        both = self.sum is not None and other.sum is not None
        return torch.equal(self.lines.cpu(), other.lines.cpu()) and not (both and not torch.equal(self.sum, other.sum))  # type: ignore[arg-type]


class Samples:
    """Those of one save's chunks, and of tensors that it only hashes."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._chunks: dict[int, bytes | list[Sample]] = {}
        self._tensors: dict[str, list[Sample]] = {}

    def take(self, batch: Batch, room: torch.Tensor, names: Container[str]) -> None:
        """Sample those chunks of a batch whose tensors are not among ``names``."""
        chunks, at = self.source.plan.chunks, 0
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            if length and chunks[number].name not in names:
                address = self.source.address(number)
                pieces = () if address else self.source.pieces(number, room[at : at + length])
                self._chunks[number] = _lines_at(address, length) if address else [sample_of(memory) for memory, _ in pieces]
            at += length

    def take_tensors(self, names: Iterable[str]) -> None:
        """Sample these tensors, as far as this rank has them."""
        for name in names:
            self._tensors[name] = [sample_of(raw_view(part.memory)) for part in self.source.tensor(name).parts if part.memory.numel()]

    def changed(self, batch: Batch, room: torch.Tensor) -> list[str]:
        """Names of the tensors that have, or had when the batch was copied to ``room``, other bytes than at the call."""
        at, names = 0, []
        for number, length in zip(batch.numbers, batch.lengths, strict=True):
            taken = self._chunks.get(number)
            if isinstance(taken, bytes):
                address = self.source.address(number)
                same = taken == _lines_at(room.data_ptr() + at, length) and taken == _lines_at(address, length)
            else:
                pieces = self.source.pieces(number, room[at : at + length]) if taken else ()
                same = all(
                    before.same(sample_of(copy)) and before.same(sample_of(memory))
                    for before, (memory, copy) in zip(taken or (), pieces, strict=True)
                )
            if not same:
                names.append(self.source.plan.chunks[number].name)
            at += length
        return names

    def changed_tensors(self) -> list[str]:
        """The same for the tensors, as they are now."""
        before, self._tensors = self._tensors, {}
        now = Samples(self.source)
        now.take_tensors(before)
        return [name for name, each in before.items() if not all(a.same(b) for a, b in zip(each, now._tensors[name], strict=True))]


def _lines_at(address: int, nbytes: int) -> bytes:
    """The sample of contiguous memory of the host."""
    if nbytes <= WHOLE:
        return ctypes.string_at(address, nbytes)
    memory: Any = _MEMORY.from_address(address)
    lines: bytes = np.ndarray(((nbytes - LINE) // STEP + 1,), _LINE, memory, 0, (STEP,)).tobytes()
    return lines


def sample_of(raw: torch.Tensor) -> Sample:
    """The sample of memory of any strides, on any device, in the order of its elements."""
    size = raw.element_size()
    if raw.numel() * size <= WHOLE:
        lines = raw.clone(memory_format=torch.contiguous_format).view(-1)
    else:
        count, step, line = (raw.numel() * size - LINE) // STEP + 1, STEP // size, LINE // size
        if raw.is_contiguous():
            flat = raw.view(-1)
            lines = flat.as_strided((count, line), (step, 1), flat.storage_offset()).reshape(-1).clone()
        else:
            places = (torch.arange(count, device=raw.device)[:, None] * step + torch.arange(line, device=raw.device)).view(-1)
            lines = raw[torch.unravel_index(places, raw.shape)]
    return Sample(lines.view(torch.uint8), _sum(raw) if _summed(raw) else None)  # bytes, since no NaN equals itself


def _summed(raw: torch.Tensor) -> bool:
    return raw.device.type != "cpu"


def _sum(raw: torch.Tensor) -> torch.Tensor:
    """Of all elements as integers."""
    integers = torch.view_as_real(raw).view(RAW[8]) if raw.is_complex() else raw
    return integers.sum(dtype=torch.int64)
