"""Loads into other layouts than the saved one: each stored byte is read once in the job, on one rank, and reaches all that want it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from tests.distributed.ranks import Ranks
from tests.distributed.test_exchange import apart, in_small_pieces

SHAPES = {"a": (37, 50), "b": (64, 3, 9), "c": (1100,), "d": (7, 5), "e": (400, 300), "f": (2, 2), "g": (), "h": (0, 4)}
DTYPES = {"a": torch.bfloat16, "c": torch.float64, "f": torch.uint8, "b": torch.complex64}


def array(name: str) -> np.ndarray:
    """Bytes of a tensor that follow from its name alone, in its shape and with an axis for the bytes of an element."""
    size = DTYPES.get(name, torch.float32).itemsize
    random = np.random.default_rng(ord(name))
    return random.integers(0, 60, (*SHAPES[name], size), dtype=np.uint8)


def tensor(name: str) -> torch.Tensor:
    return torch.from_numpy(array(name).reshape(-1)).view(DTYPES.get(name, torch.float32)).view(SHAPES[name])


def layouts(kind: str) -> tuple[Any, Any]:
    """A mesh of all ranks, and the placements of a tensor on it."""
    world = dist.get_world_size()
    if kind in ("rows", "columns", "whole"):
        mesh = init_device_mesh("cpu", (world,))
        return mesh, lambda t: [Replicate() if kind == "whole" or t.ndim == 0 else Shard(0 if kind == "rows" else t.ndim - 1)]
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    dp = {"fsdp-tp": lambda t: Shard(0), "hsdp": lambda t: Replicate()}[kind]
    return mesh, lambda t: [dp(t), Shard(t.ndim - 1)] if t.ndim else [Replicate(), Replicate()]


def state_in(kind: str, *, empty: bool) -> dict[str, Any]:
    mesh, placements = layouts(kind)
    state: dict[str, Any] = {}
    for name in SHAPES:
        full = tensor(name)
        state[name] = distribute_tensor(torch.zeros_like(full) if empty else full, mesh, placements(full))
    return state


def save_in(url: str, kind: str, codec: str | None) -> None:
    ckpt.save(url, state_in(kind, empty=False), codec=codec)


def load_each(url: str, kind: str, options: list[dict[str, Any]]) -> list[tuple[list[str], ckpt.LoadReport]]:
    return [load_in(url, kind, each) for each in options]


def load_in(url: str, kind: str, options: dict[str, Any]) -> tuple[list[str], ckpt.LoadReport]:
    """What is wrong after a load, compared by numpy with what was made."""
    options = dict(options)
    if options.pop("pieces", False):
        in_small_pieces()
    if options.pop("apart", False):
        apart()
    state = state_in(kind, empty=True)
    report = ckpt.load(url, state, **options)
    wrong = []
    for name, found in state.items():
        assert isinstance(found, DTensor)
        full = found.full_tensor()
        data = torch.view_as_real(full).numpy() if full.is_complex() else full.view(torch.uint8 if full.ndim else full.dtype).numpy()
        if data.tobytes() != array(name).tobytes():
            wrong.append(name)
    return wrong, report


ALL = {"read": ckpt.ReadOptions(exchange=True), "pieces": True}


EACH: list[dict[str, Any]] = [{}, ALL, ALL | {"apart": True}, ALL | {"job": ckpt.Job(threads=4), "apart": True}]
"""One after another in one process, in which small pieces and being apart stay."""


@pytest.mark.parametrize(
    ("source", "saved", "target", "loaded"),
    [
        ("rows", 2, "columns", 2),
        pytest.param("rows", 2, "rows", 3, marks=pytest.mark.slow),
        ("fsdp-tp", 4, "rows", 4),
        ("columns", 3, "fsdp-tp", 4),
        ("rows", 2, "hsdp", 4),
        pytest.param("rows", 4, "whole", 1, marks=pytest.mark.slow),
    ],
)
def test_each_byte_is_read_once(ranks: Ranks, tmp_path: Path, source: str, saved: int, target: str, loaded: int) -> None:
    url = str(tmp_path / "a")
    ranks.run(saved, save_in, url, source, None)
    by_rank = ranks.run(loaded, load_each, url, target, EACH)
    stored = sum(array(name).nbytes for name in SHAPES)
    for options, found in zip(EACH, zip(*by_rank, strict=True), strict=True):
        assert [wrong for wrong, _ in found] == [[]] * loaded, options
        reports = [report for _, report in found]
        if options:
            assert sum(r.bytes_read for r in reports) == stored, options
            assert loaded == 1 or sum(r.bytes_received for r in reports) > 0, options
        else:
            assert all(r.bytes_unverified == 0 and r.bytes_read + r.bytes_received >= r.bytes_needed for r in reports)


@pytest.mark.parametrize("codec", [pytest.param("zstd", marks=pytest.mark.slow), "planes-zstd"])
def test_coded_chunks_are_decoded_once(ranks: Ranks, tmp_path: Path, codec: str) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_in, url, "rows", codec)
    files = sum(p.stat().st_size for p in (tmp_path / "a" / "data").iterdir())
    for found in zip(*ranks.run(3, load_each, url, "columns", [ALL, ALL | {"apart": True}]), strict=True):
        assert [wrong for wrong, _ in found] == [[]] * 3
        assert sum(r.bytes_read for _, r in found) < files


# ------------------------------------------------------------------------------------------------------------- by default

MANY = (4096, 2048)


def save_large(url: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(MANY[0] * MANY[1], dtype=torch.float32).view(MANY)
    ckpt.save(url, {f"w{i}": distribute_tensor(full + i, mesh, [Shard(0)]) for i in range(3)})


def load_large(url: str, dim: int, verify: str, where: str) -> tuple[int, int, int, int]:
    """Bytes read, received and needed, and the most memory that the load took."""
    if where == "apart":
        apart()
    if where == "slow":
        from ckpt.engine.load.receiver import SharedReadReceiver

        slot = SharedReadReceiver.slot

        def slowly(self: SharedReadReceiver, *args: Any) -> bool:
            time.sleep(0.01)
            return slot(self, *args)

        SharedReadReceiver.slot = slowly  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"w{i}": distribute_tensor(torch.ones(MANY), mesh, [Shard(dim)]) for i in range(3)}
    ckpt.load(url, state, read=ckpt.ReadOptions(verify="off", exchange=False))  # imports
    for t in state.values():
        t.to_local().zero_()
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    exchange = True if where == "slow" else None
    report = ckpt.load(url, state, read=ckpt.ReadOptions(verify=verify, exchange=exchange))  # type: ignore[arg-type]
    took = _resident("VmHWM") - before
    full = torch.arange(MANY[0] * MANY[1], dtype=torch.float32).view(MANY)
    for i in range(3):
        assert torch.equal(state[f"w{i}"].to_local(), full.chunk(dist.get_world_size(), dim)[dist.get_rank()] + i)
    return report.bytes_read, report.bytes_received, report.bytes_needed, took


def _resident(which: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(which))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_columns_of_rows_on_a_file_system(ranks: Ranks, tmp_path: Path) -> None:
    """Read once on one machine; by each for itself where ranks are apart, or check nothing, or want the same."""
    url, total = str(tmp_path / "a"), 3 * 4 * MANY[0] * MANY[1]
    ranks.run(2, save_large, url)
    found = ranks.run(2, load_large, url, 1, "full", "together")
    assert sum(read for read, *_ in found) == sum(needed for _, _, needed, _ in found) == total
    assert max(read for read, *_ in found) < 0.7 * total
    assert max(took for *_, took in found) < 24 << 20
    for verify, where in (("full", "apart"), ("partial", "together")):
        assert all(received == 0 for _, received, _, _ in ranks.run(2, load_large, url, 1, verify, where))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_a_slow_rank_holds_up_the_others(ranks: Ranks, tmp_path: Path) -> None:
    """They wait for it, with no more memory than the slots."""
    url = str(tmp_path / "a")
    ranks.run(2, save_large, url)
    found = ranks.run(2, load_large, url, 1, "full", "slow")
    assert max(took for *_, took in found) < 24 << 20
    assert min(received for _, received, _, _ in found) > 0


def load_damaged(url: str) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        ckpt.load(url, {f"w{i}": distribute_tensor(torch.ones(MANY), mesh, [Shard(1)]) for i in range(3)}, job=ckpt.Job(timeout=20))
    except ckpt.errors.CkptError as err:
        return type(err).__name__, str(err)
    return "", ""


def test_damage_in_a_large_chunk_is_told_by_all_that_want_it(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(2, save_large, url)
    path = sorted((tmp_path / "a" / "data").iterdir())[0]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    for kind, text in ranks.run(2, load_damaged, url):
        assert kind == "CorruptError"
        assert "tensor w1" in text and path.name in text and "[0:2048,0:2048]" in text and "partly overwritten" in text


def load_without_collector(url: str, threads: int) -> list[str]:
    import gc

    state = state_in("columns", empty=True)
    in_small_pieces()
    gc.collect()
    gc.disable()
    ckpt.load(url, state, read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(threads=threads))
    return [name for o in gc.get_objects() if (name := type(o).__name__) in ("ReadExchange", "SlotPool", "SharedReads", "Exchange")]


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_nothing_is_left_for_the_collector(ranks: Ranks, tmp_path: Path, threads: int) -> None:
    """The slots are free when a load returns."""
    url = str(tmp_path / "a")
    ranks.run(2, save_in, url, "rows", None)
    assert ranks.run(2, load_without_collector, url, threads) == [[], []]
