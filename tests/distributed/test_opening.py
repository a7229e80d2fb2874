"""The index of a checkpoint on storage that is no file system: one rank reads it, and it is right whatever happens on the way."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.load.load import Opening
from tests.distributed.ranks import Lost, Ranks


def save(url: str) -> None:
    ckpt.save(url, {"w": torch.arange(40.0), "step": 7})


def count_reads(*, fan: int) -> Counter[str]:
    """From now on this process takes paths for object storage, and counts what it asks for by kind of file."""
    from ckpt.engine.load import load as opening
    from ckpt.io_backends.posix_backend import PosixBackend
    from ckpt.net import broadcast_tree

    opening.is_file_system = lambda url: False
    broadcast_tree.FAN = fan
    asked: Counter[str] = Counter()

    def counted(method: Any) -> Any:
        def counting(self: Any, path: str = "", *args: Any, **options: Any) -> Any:
            asked["data" if path.startswith("data/") else "index"] += 1
            return method(self, path, *args, **options)

        return counting

    for name in ("read", "read_whole", "size", "list_prefix", "list_dir", "read_into"):
        setattr(PosixBackend, name, counted(getattr(PosixBackend, name)))
    return asked


def load(url: str, case: str) -> tuple[int, list[float]]:
    """How often a rank asked for anything but data, and what it loaded."""
    asked, rank = count_reads(fan=2), dist.get_rank()
    from ckpt.engine.load import load as opening

    if case == "damaged by the leader" and rank == 0:
        pack = opening.pack
        opening.pack = lambda *args: pack(*args)[:-3] + b"xyz"
    if case == "not handed on" and rank > 0:
        opening.Call.broadcast = lambda self, name, load: load()  # type: ignore[method-assign]
    state: dict[str, Any] = {"w": torch.zeros(40), "step": 0}
    ckpt.load(url, state, read=ckpt.ReadOptions(exchange=False))
    assert state["step"] == 7
    return asked["index"], state["w"].tolist()


@pytest.mark.parametrize("count", [2, 5])
def test_requests_do_not_grow_with_ranks(ranks: Ranks, tmp_path: Path, count: int) -> None:
    ranks.run(1, save, f"{tmp_path}/c")
    found = ranks.run(count, load, f"{tmp_path}/c", "")
    assert [asked for asked, _ in found] == [found[0][0]] + [0] * (count - 1)
    assert 0 < found[0][0] <= 15
    assert all(loaded == list(range(40)) for _, loaded in found)


def save_apart(url: str) -> None:
    """As a job of many ranks does: what each rank has of its own lies in rows of ranks."""
    from ckpt.engine.save import save as engine

    engine.APART = 0
    rank = dist.get_rank()
    ckpt.save(url, {"w": torch.arange(40.0), "own": ckpt.PerRank({"rank": rank, "t": torch.full((3,), float(rank))})})


def load_apart(url: str) -> tuple[int, list[float], int, list[float]]:
    asked, rank = count_reads(fan=2), dist.get_rank()
    state: dict[str, Any] = {"w": torch.zeros(40), "own": ckpt.PerRank({"rank": -1, "t": torch.zeros(3)})}
    ckpt.load(url, state, read=ckpt.ReadOptions(exchange=False))
    own = state["own"].value
    assert own["rank"] == rank
    return asked["index"], state["w"].tolist(), own["rank"], own["t"].tolist()


def test_rows_of_ranks_are_not_handed_on(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank reads its own row, and nothing else of the index."""
    ranks.run(3, save_apart, f"{tmp_path}/c")
    for rank, (asked, w, own, t) in enumerate(ranks.run(3, load_apart, f"{tmp_path}/c")):
        assert (w, own, t) == (list(range(40)), rank, [float(rank)] * 3)
        assert asked <= 2 or rank == 0


@pytest.mark.parametrize("case", ["damaged by the leader", "not handed on"])
def test_what_is_not_handed_on_right_is_read(ranks: Ranks, tmp_path: Path, case: str) -> None:
    ranks.run(1, save, f"{tmp_path}/c")
    found = ranks.run(3, load, f"{tmp_path}/c", case)
    assert all(asked and loaded == list(range(40)) for asked, loaded in found)


def test_whatever_bit_of_it_is_flipped_or_missing(tmp_path: Path) -> None:
    """Also in what says where the files are in it."""
    url = f"{tmp_path}/c"
    save(url)
    bundle = Opening(url, None).read()
    head = 8 + int.from_bytes(bundle[:8], "little")
    for at in [*range(head + 8), len(bundle) - 1]:
        for wrong in (bundle[:at] + bytes([bundle[at] ^ 4]) + bundle[at + 1 :], bundle[:at] + bytes(len(bundle) - at), bundle[:at]):
            assert Opening(url, None).of(wrong).tensors.keys() == {"w"}


def load_what_cannot_be(url: str) -> str:
    count_reads(fan=2)
    try:
        ckpt.load(url, {"w": torch.zeros(40), "step": 0})
    except ckpt.CkptError as err:
        return f"{type(err).__name__}: {err}"
    return ""


@pytest.mark.parametrize("damage", ["missing", "no record", "index"])
def test_errors_are_those_of_each_rank(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    url = f"{tmp_path}/c"
    if damage != "missing":
        ranks.run(1, save, url)
        index = next(tmp_path.rglob("*tensors.arrow")) if damage == "index" else tmp_path / "c" / "checkpoint.json"
        if damage == "index":
            data = bytearray(index.read_bytes())
            data[len(data) // 2] ^= 1
            index.write_bytes(data)
        else:
            index.unlink()
    found = ranks.run(4, load_what_cannot_be, url)
    alone = ranks.run(1, load_what_cannot_be, url)
    assert found == alone * 4


def load_without(url: str) -> None:
    count_reads(fan=2)
    if dist.get_rank() == 1:
        os._exit(1)
    ckpt.load(url, {"w": torch.zeros(40), "step": 0}, job=ckpt.Job(timeout=4))


@pytest.mark.alone
def test_a_rank_that_dies_ends_the_load(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, save, f"{tmp_path}/c")
    found = ranks.run(4, load_without, f"{tmp_path}/c", allow_death=True)
    errors = [type(lost.error).__name__ for lost in found if isinstance(lost, Lost) and lost.error is not None]
    assert len(errors) == 3
    assert set(errors) <= {"DeadlineError", "RankFailedError"}
