"""The scenario ``codecs``: size and speed of the codecs on weights, one thread, in chunks as ``ckpt`` stores them.

ZipNN is measured where it can be imported; it overwrites what it is given, so it gets a copy each time, which is not timed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import zstandard

from ckpt.formats.native.coding import frames, planes
from ckpt.formats.native.coding.codecs import decode, encode

from .findings import Finding, at_most, medians
from .places import Place
from .pool import Pool, Rank
from .report import Check
from .scenarios import Settings, Tell

CHUNK = 64 << 20
SIGMA = 0.02
RATIO = 0.70
"""Most that is left of normally distributed bfloat16 weights with byte planes."""

Coded = Any
ZSTD, PLANES = frames.ZSTD.name, planes.PLANES.name
Coder = tuple[Callable[[memoryview], Any], Callable[[memoryview], Coded], Callable[[Coded, memoryview], Any]]
"""Makes the input from a chunk (not timed), codes it, and decodes it."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """The codecs in turns; ``place`` is not used. Half of ``settings.size`` bytes, at most 3 repetitions."""
    del place
    repeat = min(settings.repeat, 3)
    found: dict[str, list[dict[str, float]]] = pool.run(measure, on=1, size=settings.size // 2, repeat=repeat)[0]
    mine = {name: medians(s) for name, s in found.items()}
    tell(f"codecs: {', '.join(mine)}")
    rows = [(n, f"{m['ratio']:.1%}", f"{m['encode'] / 1e9:.2f}", f"{m['decode'] / 1e9:.2f}") for n, m in mine.items()]
    absent = () if "ZipNN" in mine else ("ZipNN is not installed: left out",)
    faster = mine[PLANES]["encode"] / mine["zstandard, level 1"]["encode"]
    checks = [
        at_most(f"size of {PLANES} of bfloat16 weights", mine[PLANES]["ratio"], RATIO),
        Check(name=f"{PLANES} codes faster than zstandard level 1", ok=faster > 1, detail=f"{faster:.2f} times as fast"),
    ]
    return [
        Finding(
            scenario="codecs",
            title=f"bfloat16 weights, normally distributed, {settings.size / 2e6:,.0f} MB, one thread",
            columns=("", "size", "encode GB/s", "decode GB/s"),
            rows=rows,
            figures={"medians": mine, "samples": found},
            checks=checks,
            notes=absent,
        )
    ]


def measure(rank: Rank, *, size: int, repeat: int) -> dict[str, list[dict[str, float]]]:
    """For each codec and repetition: coded over plain bytes, and bytes a second of plain bytes."""
    torch.manual_seed(0)
    weights = (torch.randn(max(1, size // 2)) * SIGMA).to(torch.bfloat16)
    data = memoryview(weights.view(torch.uint8).numpy())
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    out = memoryview(bytearray(CHUNK))
    coders = _coders()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in coders}
    for repetition in range(repeat + 1):
        for name, coder in coders.items():
            found = _measure(coder, chunks, out)
            if repetition > 0:
                samples[name].append(found)
    return samples


def _measure(coder: Coder, chunks: list[memoryview], out: memoryview) -> dict[str, float]:
    make, code, uncode = coder
    total = coded = 0
    encoding = decoding = 0.0
    for chunk in chunks:
        given, room = make(chunk), out[: len(chunk)]
        began = time.perf_counter()
        blob = code(given)
        encoded = time.perf_counter()
        got = uncode(blob, room)
        decoding += time.perf_counter() - encoded
        encoding += encoded - began
        if (room if got is None else got) != chunk:
            raise ValueError("a codec did not give back what it got")
        total += len(chunk)
        coded += len(blob)
    return {"ratio": coded / total, "encode": total / encoding, "decode": total / decoding}


def _coders() -> dict[str, Coder]:
    level1, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    coders: dict[str, Coder] = {name: _own(name) for name in (PLANES, ZSTD)}
    coders["zstandard, level 1"] = (lambda c: c, level1.compress, lambda blob, out: decompressor.decompress(blob))
    zipnn = _zipnn()
    return coders if zipnn is None else coders | {"ZipNN": zipnn}


def _own(name: str) -> Coder:
    def code(chunk: memoryview) -> memoryview:
        blob = encode(name, chunk, 2)
        return chunk if blob is None else blob

    def uncode(blob: memoryview, out: memoryview) -> None:
        if len(blob) == len(out):
            out[:] = blob  # not worth coding: stored as it is
        else:
            decode(name, blob, out, 2)

    return lambda chunk: chunk, code, uncode


def _zipnn() -> Coder | None:
    try:
        module = importlib.import_module("zipnn")
    except ImportError:
        return None
    codec = module.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    return bytearray, codec.compress, lambda blob, out: codec.decompress(blob)
