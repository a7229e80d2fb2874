"""What a load takes and tells beside the bytes: scratch memory, garbage, and records of its phases."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch

import ckpt
from ckpt.concurrency import gc_paused
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import Spans
from tests.api.checked import empty_directory
from tests.engine.reading import load, targets_of
from tests.formats.native_sample import coded_samples, sample, save


@pytest.fixture
def place() -> Iterator[str]:
    with empty_directory() as path:
        yield path


def test_scratch_memory_does_not_grow_with_chunks(place: str) -> None:
    stored = [sample("w", "float32", (2048, 2048))]
    save(open_backend(place), stored)
    targets = targets_of(stored, "halves")
    tracemalloc.start()
    try:
        load(open_catalog(place), targets, threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for target in targets:
        target.check()
    assert peak < 4 << 20  # of a chunk of 16 MiB


def test_spans(place: str) -> None:
    stored = coded_samples()
    save(open_backend(place), stored, codec="zstd")
    catalog, spans = open_catalog(place), Spans()
    made = Reader(catalog=catalog, verify="full", threads=1, spans=spans)
    targets = targets_of(stored, "halves")
    made.load([TensorLoad(target=t.local, entry=catalog.tensors[t.sample.name]) for t in targets])
    coded = [
        entry.grid.box(i).numel * entry.dtype.itemsize
        for entry in catalog.tensors.values()
        for i, extent in enumerate(catalog.extents(entry, range(len(entry.grid))))
        if extent.codec is not None
    ]
    sums = spans.table().sums
    assert sums["read"].nbytes == sums["verify"].nbytes == made.fetch.read
    assert sums["decode"].nbytes == sum(coded) > 0
    assert sums["copy"].nbytes > 0


def test_spans_of_bytes_that_are_hashed_while_they_are_read(place: str) -> None:
    """Reading and hashing take turns of microseconds; in the spans they follow one another and nothing counts twice."""
    stored = [sample("w", "float32", (2048, 2048))]
    save(open_backend(place), stored)
    catalog, spans = open_catalog(place), Spans()
    made = Reader(catalog=catalog, verify="full", threads=1, spans=spans)
    targets = targets_of(stored, "whole")
    began = time.perf_counter()
    made.load([TensorLoad(target=t.local, entry=catalog.tensors[t.sample.name]) for t in targets])
    seconds = time.perf_counter() - began
    table = spans.table()
    assert table.sums["read"].nbytes == table.sums["verify"].nbytes == made.fetch.read == 16 << 20
    assert table.sums["verify"].seconds > 0 and table.seconds <= seconds
    rows = sorted((span.start, span.start + span.duration) for span in table.spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(rows))


def test_the_collector_goes_on_after_the_last_pause() -> None:
    assert gc.isenabled()
    with gc_paused():
        with gc_paused(), suppress(KeyError):
            assert not gc.isenabled()
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_left_for_the_collector() -> None:
    """A load leaves no circles: what it knew of very many tensors is gone when it returns."""
    with empty_directory() as root:
        state = {"m": {f"t{i}": torch.zeros(3) for i in range(50)}, "n": np.int64(3), "list": [1, {"x": torch.ones(2)}]}
        ckpt.save(f"{root}/c", state)
        ckpt.load(f"{root}/c", state)
        gc.collect()
        gc.disable()
        try:
            left = []
            for _ in range(3):  # threads of tests before this one may end meanwhile, and leave something once
                ckpt.load(f"{root}/c", state)
                left.append(gc.collect())
            assert min(left) < 50
        finally:
            gc.enable()
