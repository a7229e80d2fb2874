"""Saves with spans of any shape, made by hand: rows as docs/format.md has them, without the code that records spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import Row
from tests.cli.checkpoints import sample, write_checkpoint

MIB = 1 << 20
EIGHT = ("collect", "plan", "agree", "capture", "hash", "write", "sync", "commit")

Piece = tuple[str, float, float, int]
"""Phase, start and end in seconds, bytes."""


def row(*pieces: Piece, began: float = 1.7e9, threads: tuple[str, ...] = ("MainThread",)) -> Row:
    phases = list(dict.fromkeys(phase for phase, *_ in pieces))
    columns = [
        [phases.index(phase) for phase, *_ in pieces],
        [i % len(threads) for i in range(len(pieces))],
        [round(start * 1e6) for _, start, _, _ in pieces],
        [round(end * 1e6) - round(start * 1e6) for _, start, end, _ in pieces],
        [nbytes for *_, nbytes in pieces],
    ]
    return {"began": began, "phases": phases, "threads": list(threads), "spans": columns, "folded": []}


def many(ranks: int, seed: int = 5) -> dict[int, Row]:
    """Eight phases on every rank, with machine 3 (of 8 ranks) and rank 700 slow, and every eighth rank a little."""
    random = np.random.default_rng(seed)
    return {rank: row(*_save_of(rank, random)) for rank in range(ranks)}


def _save_of(rank: int, random: np.random.Generator) -> Iterator[Piece]:
    at = 0.0
    slow = 2.4 if rank // 8 == 3 else 3.3 if rank == 700 else 1.4 if rank % 8 == 0 else 1.0
    for phase, seconds in zip(EIGHT, (0.2, 0.1, 0.5, 1.1, 2.0, 10.0, 3.0, 0.4), strict=True):
        factor = slow if phase in ("write", "sync") else 1.0
        took = seconds * factor * float(random.uniform(0.9, 1.1))
        yield phase, at, at + took, 256 * MIB if phase in ("capture", "write", "sync") else 0
        at += took


def save(url: Path, rows: Mapping[int, Row] | None, *, arrays: Mapping[str, Any] | None = None, ranks: int | None = None) -> Path:
    """A committed checkpoint with these spans."""
    count = ranks or max(max(rows or {0: None}) + 1, 2)
    write_checkpoint(str(url), arrays or sample(), ranks=2)
    if count != 2:
        _say_ranks(url, count)
    if rows:
        backend = open_backend(str(url))
        write_spans(backend, NativeCatalog(backend).record.id, rows)
    return url


def _say_ranks(url: Path, ranks: int) -> None:
    """The record says that so many ranks saved: spans of all of them can then be kept, without their data files."""
    from dataclasses import replace

    from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord

    path = url / COMMIT_PATH
    record = CommitRecord.from_bytes(path.read_bytes(), str(path))
    path.write_bytes(replace(record, world_size=ranks).to_bytes())


def layers(count: int = 12, width: int = 64) -> dict[str, Any]:
    """A small transformer with AdamW, a data loader and generators, by name."""
    weights: dict[str, Any] = {"model.embed.weight": np.zeros((256, width), np.float32), "model.norm.weight": np.zeros(width, np.float32)}
    for i in range(count):
        weights |= {f"model.layers.{i}.{name}.weight": np.zeros((width, width), np.float32) for name in ("wq", "wk", "wv", "wo")}
        weights |= {f"model.layers.{i}.mlp.{name}": np.zeros((width, 4 * width), np.float32) for name in ("up", "down")}
    states = {f"optimizer.state.{name}.{state}": array for name, array in weights.items() for state in ("exp_avg", "exp_avg_sq")}
    others = {"data.train.order": np.zeros(5000, np.int64), "rng.cuda": np.zeros(816, np.uint8), "extra.table": np.zeros(99, np.int32)}
    return {**weights, **states, **others}
