"""Loads in which ranks that hold the same tensors read each of them once: every byte right, and read by one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from tests.distributed.ranks import Lost, Ranks, RanksFailedError

SHAPES = {"a": (300, 7), "b": (64,), "c": (), "d": (5, 0), "e": (1000, 100), "f": (3, 3, 3)}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_whole(url: str) -> None:
    ckpt.save(url, whole())


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, float("nan")) for name, t in tensors.items()}


def load_replicated(url: str, kind: str) -> tuple[int, int, int]:
    """Bytes read, received and held."""
    want = whole()
    state: dict[str, Any] = blank(want)
    if kind == "strided":
        state["e"] = torch.full((100, 1000), float("nan")).t()
        state["a"] = torch.full((300, 14), float("nan"))[:, ::2]
    if kind == "other dtype":
        state = {name: t.to(torch.float64) for name, t in state.items()}
    report = ckpt.load(url, state, exchange=True, cast=kind == "other dtype", verify="off" if kind == "unverified" else "full")
    for name, t in want.items():
        assert torch.equal(state[name], t.to(state[name].dtype)), name
    return report.bytes_read, report.bytes_received, sum(t.numel() * t.element_size() for t in state.values())


@pytest.mark.parametrize("kind", ["plain", "strided", "other dtype", "unverified"])
def test_replicas_are_read_once(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(3, load_replicated, url, kind)
    stored = sum(t.numel() * 4 for t in whole().values())
    assert sum(read for read, _, _ in found) == stored
    factor = 2 if kind == "other dtype" else 1
    assert all(read * factor + received == held == stored * factor for read, received, held in found)
    assert max(received for _, received, _ in found) > 0


def load_without(url: str) -> int:
    state = blank(whole())
    report = ckpt.load(url, state)
    assert torch.equal(state["e"], whole()["e"]) and report.bytes_received == 0
    return report.bytes_read


def test_a_file_system_is_read_by_all(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    assert ranks.run(2, load_without, url) == [sum(t.numel() * 4 for t in whole().values())] * 2


def load_mixed(url: str, rounds: bool) -> tuple[int, int]:
    """Two rows of two: rows replicated over one dimension of the mesh, a tensor that nobody shares, and one that all do."""
    from ckpt.engine import sharing

    if rounds:
        sharing.ROUND = 1000
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {"a": [Replicate(), Shard(0)], "e": [Shard(0), Shard(1)], "b": [Replicate(), Replicate()], "f": [Shard(0), Replicate()]}
    want = whole()
    state: dict[str, Any] = {n: distribute_tensor(torch.zeros(SHAPES[n]), mesh, p) for n, p in placements.items()}
    state |= {"c": torch.zeros(()), "d": torch.zeros(5, 0)}
    state["own"] = ckpt.PerRank(0, reshard=lambda values, rank, world: rank)
    report = ckpt.load(url, state, exchange=True, strict=False)
    for name, t in state.items():
        if isinstance(t, DTensor):
            assert torch.equal(t.full_tensor(), want[name]), name
    assert torch.equal(state["c"], want["c"])
    return report.bytes_read, report.bytes_received


@pytest.mark.parametrize("rounds", [False, True])
def test_some_share_and_some_do_not(ranks: Ranks, tmp_path: Path, rounds: bool) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(4, load_mixed, url, rounds)
    assert all(received > 0 for _, received in found)


def load_different(url: str) -> int:
    rank = dist.get_rank()
    state = blank(whole())
    report = ckpt.load(url, state, exchange=True, only=["a", "b"] if rank else ["a"], strict=False)
    assert torch.equal(state["a"], whole()["a"]) and torch.equal(state["b"], whole()["b"]) == (rank > 0)
    return report.bytes_received


def test_ranks_that_want_different_things_do_not_share(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    assert ranks.run(2, load_different, url) == [0, 0]


def load_damaged(url: str) -> None:
    ckpt.load(url, blank(whole()), exchange=True, timeout=20)


def test_damage_that_one_rank_reads_fails_all(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    (path,) = (tmp_path / "a" / "data").iterdir()
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(3, load_damaged, url)
    text = str(caught.value)
    assert text.count("CorruptError") >= 1 and "RankFailedError" in text


def load_and_die(url: str) -> None:
    from ckpt.engine.sharing import Sharing

    if dist.get_rank() == 1:
        import os

        Sharing.exchange = lambda *a, **k: os._exit(9)  # type: ignore[method-assign,assignment]
    ckpt.load(url, blank(whole()), exchange=True, timeout=4)


def test_a_rank_that_dies_in_the_exchange(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(3, load_and_die, url, allow_death=True)
    assert isinstance(found[1], Lost) and found[1].exitcode == 9
    for lost in (found[0], found[2]):
        assert isinstance(lost, Lost) and lost.error is not None and "partly overwritten" in str(lost.error)
