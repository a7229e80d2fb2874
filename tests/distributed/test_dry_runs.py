"""Dry runs of several ranks: each says what it would do, shared reads included, and then does just that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.dry_run_load import MeshRules, forecast_on_mesh
from ckpt.formats.registry import open_catalog
from tests.distributed.ranks import Ranks
from tests.distributed.test_exchange import apart, in_small_pieces
from tests.distributed.test_shared_reads import save_in, state_in

EACH: list[dict[str, Any]] = [
    {},
    {"read": ckpt.ReadOptions(exchange=True)},
    {"read": ckpt.ReadOptions(exchange=True, verify="partial")},
    {"read": ckpt.ReadOptions(exchange=False, verify="off")},
    {"read": ckpt.ReadOptions(exchange=True), "pieces": True},
    {"read": ckpt.ReadOptions(exchange=True), "job": ckpt.Job(threads=4), "apart": True},
]
"""One after another in one process, in which small pieces and being apart stay."""


def forecast_and_load(url: str, kind: str) -> list[tuple[ckpt.LoadReport, ckpt.LoadReport]]:
    reports = []
    for each in EACH:
        options = dict(each)
        if options.pop("pieces", False):
            in_small_pieces()
        if options.pop("apart", False):
            apart()
        state = state_in(kind, empty=True)
        dry = ckpt.load(url, state, dry_run=True, **options)
        assert not any(bool(t.to_local().ne(0).any()) for t in state.values())
        reports.append((dry, ckpt.load(url, state, **options)))
    return reports


@pytest.mark.parametrize(("kind", "size", "codec"), [("columns", 3, None), ("fsdp-tp", 4, "zstd"), ("whole", 2, None)])
def test_each_rank_reads_what_it_said(ranks: Ranks, tmp_path: Path, kind: str, size: int, codec: str | None) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_in, url, "rows", codec)
    unsure = {"seconds": 0.0, "memory": 0, "dry_run": False, "estimated_from": None}
    for options, reports in zip(EACH, zip(*ranks.run(size, forecast_and_load, url, kind), strict=True), strict=True):
        for dry, real in reports:
            assert replace(dry, **unsure) == replace(real, **unsure), options
            assert real.memory <= dry.memory, options
        assert len({dry.seconds for dry, _ in reports}) == 1, "the slowest rank's, on all ranks"
        if options.get("read", ckpt.ReadOptions()).exchange and kind != "whole":
            assert sum(dry.bytes_received for dry, _ in reports) > 0, options


def forecast_and_save(url: str) -> tuple[ckpt.SaveReport, ckpt.SaveReport]:
    """Flat shards that end in the middle of rows, replicas and values of single ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    length = 40 * 37 // size
    state = {
        "flat": torch.arange(rank * length, (rank + 1) * length, dtype=torch.float32),
        "same": torch.ones(100, 300),
        "own": ckpt.PerRank(rank),
    }
    layout = ckpt.Layout({"dp": size}, [("flat", ckpt.Flat("dp"), ckpt.GlobalShape((40, 37))), ("*", ckpt.Replicate())])
    dry = ckpt.save(url, state, layout=layout, dry_run=True)
    dist.barrier()
    assert not Path(url).exists()
    dist.barrier()
    return dry, ckpt.save(url, state, layout=layout)


def test_each_rank_writes_what_it_said(ranks: Ranks, tmp_path: Path) -> None:
    reports = ranks.run(4, forecast_and_save, str(tmp_path / "a"))
    for dry, real in reports:
        unsure = {"id": "", "seconds": 0.0, "memory": 0, "dry_run": False, "estimated_from": None}
        assert replace(dry, **unsure) == replace(real, **unsure)
    assert sum(dry.sent_bytes for dry, _ in reports) > 0


def load_rows(url: str) -> ckpt.LoadReport:
    return ckpt.load(url, state_in("rows", empty=True))


def test_a_plan_on_a_mesh_is_what_such_ranks_read(ranks: Ranks, tmp_path: Path) -> None:
    """What one process plans for ranks that do not exist is what they do when they do."""
    url = str(tmp_path / "a")
    ranks.run(2, save_in, url, "columns", None)
    planned = forecast_on_mesh(open_catalog(url), MeshRules.of({"fsdp": 3})).ranks
    fields = ("tensors", "bytes_needed", "bytes_read", "bytes_received", "requests", "files")
    for one, real in zip(planned, ranks.run(3, load_rows, url), strict=True):
        assert {f: getattr(one, f) for f in fields} == {f: getattr(real, f) for f in fields}
    assert sum(one.bytes_received for one in planned) > 0
