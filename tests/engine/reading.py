"""Loads boxes of stored tensors into memory of every kind, for tests: what arrives is compared with the samples by numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch

from ckpt import settings as sizes
from ckpt.catalog import Catalog
from ckpt.engine.load import chunk_scan, reader, whole_chunks
from ckpt.engine.load.reader import Reader, TensorLoad, Verify
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.state.tensors import LocalShard, LocalTensor, torch_dtype
from tests.formats.native_sample import Sample

TINY = {"PIECE": 48, "GROUPED_READ": 96, "CHUNK": 192, "GAP": 8, "WORTH_A_CALL": 32, "CACHE_BLOCK": 64, "SCRATCH": 100}
TINY |= {"SLICE": 2, "AHEAD": 0, "MANY": 0}
SIZES: dict[str, dict[str, int]] = {"as they are": {}, "tiny": TINY}
"""Limits in bytes, so that small tensors take the ways of large ones."""


@contextmanager
def limits(kind: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, (name, value) in product((sizes, whole_chunks, chunk_scan, reader), SIZES[kind].items()):
            if hasattr(module, name):
                patch.setattr(module, name, value)
        yield


class Target:
    """Memory for boxes of a sample. Every element is ``spread`` elements after the one before; what lies between must stay as it is."""

    def __init__(self, sample: Sample, boxes: Sequence[Box], spread: int) -> None:
        self.sample, self.boxes, self.spread, size = sample, boxes, spread, sample.dtype.itemsize
        self.raw = [np.full((max(b.numel, 1) * spread, size), 0xA5, dtype=np.uint8) for b in boxes]
        info = TensorSpec(sample.name, sample.dtype, sample.shape, TensorLayout.replicated((0,)))
        held = []
        for box, raw in zip(boxes, self.raw, strict=True):
            flat = torch.from_numpy(raw.reshape(-1)).view(torch_dtype(sample.dtype))
            strides = [spread * math.prod(box.shape[i + 1 :]) for i in range(len(box.shape))]
            held.append(LocalShard(box, torch.as_strided(flat, box.shape, strides)))
        self.local = LocalTensor(info, [h for h in held if h.box.numel], sample.name)

    def check(self) -> None:
        for box, raw in zip(self.boxes, self.raw, strict=True):
            found = raw.reshape(-1, self.spread, raw.shape[1])
            if box.numel:
                assert found[:, 0].tobytes() == self.sample.data[box.slices].tobytes(), (self.sample.name, box)
            assert (found[:, 1:] == 0xA5).all()


def load(catalog: Catalog, targets: Sequence[Target], verify: Verify = "full", threads: int = 2) -> Reader:
    made = Reader(catalog=catalog, verify=verify, threads=threads)
    made.load([TensorLoad(target=t.local, entry=catalog.tensors[t.sample.name]) for t in targets])
    return made


def halves(shape: tuple[int, ...]) -> list[Box]:
    """Both halves of the last dimension: no chunk is one of them as it is, and their rows are not contiguous in it."""
    if not shape or 0 in shape:
        return [Box.whole(shape)]
    at = shape[-1] // 2
    parts = [(0, at), (at, shape[-1] - at)]
    return [Box((*(0,) * (len(shape) - 1), o), (*shape[:-1], n)) for o, n in parts if n]


def targets_of(stored: Sequence[Sample], way: str) -> list[Target]:
    if way == "whole":
        return [Target(s, [Box.whole(s.shape)], 1) for s in stored]
    if way == "chunks":
        return [Target(s, [box], 1) for s in stored for box in s.chunks()]
    if way == "spread":
        return [Target(s, [Box.whole(s.shape)], 2) for s in stored]
    return [Target(s, halves(s.shape), 1) for s in stored]


WAYS = ("whole", "chunks", "spread", "halves")
