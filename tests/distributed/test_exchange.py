"""Loads in which ranks that hold the same tensors read each of them once: every byte right, and read by one rank alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt import settings
from tests.distributed.ranks import Lost, Ranks

SHAPES = {"a": (300, 7), "b": (64,), "c": (), "d": (5, 0), "e": (1000, 100), "f": (3, 3, 3)}


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_whole(url: str) -> None:
    ckpt.save(url, whole())


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, float("nan")) for name, t in tensors.items()}


def apart() -> None:
    """From now on no two ranks are on one machine."""
    from ckpt.engine.load import shared_reads

    shared_reads.machine = lambda: f"{os.getpid()}"


def in_small_pieces() -> None:

    settings.PIECE = 1 << 10
    settings.SMALL_SHARED_READ = 100


def load_replicated(url: str, kind: str, where: str) -> tuple[int, int, int]:
    """Bytes read, received and needed."""
    if where == "apart":
        apart()
    want = whole()
    state: dict[str, Any] = blank(want)
    if kind == "strided":
        state["e"] = torch.full((100, 1000), float("nan")).t()
        state["a"] = torch.full((300, 14), float("nan"))[:, ::2]
    if kind == "other dtype":
        state = {name: t.to(torch.float64) for name, t in state.items()}
    if kind == "pieces":
        in_small_pieces()
    versions = {name: t._version for name, t in state.items()}
    report = ckpt.load(
        url, state, cast=kind == "other dtype", read=ckpt.ReadOptions(verify="off" if kind == "unverified" else "full", exchange=True)
    )
    for name, t in want.items():
        assert torch.equal(state[name], t.to(state[name].dtype)), name
        assert state[name]._version > versions[name] or not t.numel()
    return report.bytes_read, report.bytes_received, report.bytes_needed


@pytest.mark.parametrize("where", ["together", "apart"])
@pytest.mark.parametrize("kind", ["plain", "strided", "other dtype", "unverified", "pieces"])
def test_replicas_are_read_once(ranks: Ranks, tmp_path: Path, kind: str, where: str) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(3, load_replicated, url, kind, where)
    stored = sum(t.numel() * 4 for t in whole().values())
    assert sum(read for read, _, _ in found) == stored
    assert all(read + received == needed == stored for read, received, needed in found)
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


def load_mixed(url: str, where: str) -> tuple[int, int]:
    """Two rows of two: rows replicated over one dimension of the mesh, a tensor that nobody shares, and one that all do."""
    in_small_pieces()
    if where == "apart":
        apart()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = {"a": [Replicate(), Shard(0)], "e": [Shard(0), Shard(1)], "b": [Replicate(), Replicate()], "f": [Shard(0), Replicate()]}
    want = whole()
    state: dict[str, Any] = {n: distribute_tensor(torch.zeros(SHAPES[n]), mesh, p) for n, p in placements.items()}
    state |= {"c": torch.zeros(()), "d": torch.zeros(5, 0)}
    state["own"] = ckpt.PerRank(0, reshard=lambda values, rank, world: rank)
    report = ckpt.load(url, state, read=ckpt.ReadOptions(exchange=True), strict=False)
    for name, t in state.items():
        if isinstance(t, DTensor):
            assert torch.equal(t.full_tensor(), want[name]), name
    assert torch.equal(state["c"], want["c"])
    return report.bytes_read, report.bytes_received


@pytest.mark.parametrize("where", ["together", "apart"])
def test_some_share_and_some_do_not(ranks: Ranks, tmp_path: Path, where: str) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(4, load_mixed, url, where)
    assert all(received > 0 for _, received in found)


def load_different(url: str) -> int:
    rank = dist.get_rank()
    state = blank(whole())
    report = ckpt.load(url, state, read=ckpt.ReadOptions(exchange=True), only=["a", "b"] if rank else ["a"], strict=False)
    assert torch.equal(state["a"], whole()["a"]) and torch.equal(state["b"], whole()["b"]) == (rank > 0)
    return report.bytes_received


def test_ranks_that_want_different_things_do_not_share(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    assert ranks.run(2, load_different, url) == [0, 0]


def load_damaged(url: str) -> tuple[str, str]:
    try:
        ckpt.load(url, blank(whole()), read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(timeout=20))
    except ckpt.errors.CkptError as err:
        return type(err).__name__, str(err)
    return "", ""


def test_damage_that_one_rank_reads_fails_all(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    (path,) = (tmp_path / "a" / "data").iterdir()
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    for kind, text in ranks.run(3, load_damaged, url):
        assert kind == "CorruptError"
        assert "is damaged: its XXH3-64 digest is" in text and "tensor f" in text and path.name in text and "partly overwritten" in text


def load_and_end(url: str, how: str, timeout: float) -> tuple[str, float]:
    from ckpt.engine.load.read_exchange import ReadExchange
    from ckpt.engine.load.receiver import SharedReadReceiver

    in_small_pieces()
    count = [0]

    def counted(work: Any) -> Any:
        def counting(*args: Any) -> Any:
            count[0] += 1
            if count[0] == 20:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            return work(*args)

        return counting

    if dist.get_rank() == 1:
        ReadExchange._send, SharedReadReceiver.slot = counted(ReadExchange._send), counted(SharedReadReceiver.slot)  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        ckpt.load(url, blank(whole()), read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(timeout=timeout))
    except ckpt.errors.CkptError as err:
        return str(err), time.monotonic() - began
    return "", 0.0


@pytest.mark.alone
@pytest.mark.parametrize(("how", "timeout", "within"), [("killed", 60.0, 30.0), ("stopped", 3.0, 20.0)])
def test_a_rank_that_ends_in_the_middle(ranks: Ranks, tmp_path: Path, how: str, timeout: float, within: float) -> None:
    """One that dies is noticed long before the deadline, one that hangs at the deadline."""
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    found = ranks.run(3, load_and_end, url, how, timeout, allow_death=True, await_stopped=False)
    assert isinstance(found[1], Lost)
    for text, seconds in (found[0], found[2]):
        assert "rank 1" in text and "partly overwritten" in text
        assert seconds < within


def load_and_fail(url: str) -> tuple[str, str, float]:
    """Rank 2 fails before it has opened a connection; the others wait for it."""
    from ckpt.engine.load.read_exchange import ReadExchange

    def fail(*args: Any) -> Any:
        raise ckpt.errors.StorageError("the disk is on fire")

    if dist.get_rank() == 2:
        ReadExchange.tasks = fail  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        ckpt.load(url, blank(whole()), read=ckpt.ReadOptions(exchange=True), job=ckpt.Job(timeout=50))
    except ckpt.errors.CkptError as err:
        return type(err).__name__, str(err), time.monotonic() - began
    return "", "", 0.0


def test_a_rank_that_fails_before_it_is_reached(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    ranks.run(1, save_whole, url)
    *others, own = ranks.run(3, load_and_fail, url)
    assert own[0] == "StorageError"
    for kind, text, seconds in others:
        assert kind == "RankFailedError" and "rank 2" in text and "the disk is on fire" in text
        assert seconds < 30
