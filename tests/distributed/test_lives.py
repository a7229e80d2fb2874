"""Jobs whose process group ends and begins again, ranks whose arguments are wrong, and slow but living ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import NamesError, RankFailedError, UsageError
from ckpt.io_backends.posix_writer import PosixWriter
from ckpt.net import group
from ckpt.net.channel import ControlChannel
from tests.distributed.ranks import Ranks, at_once


def _two_lives(root: str) -> list[str]:
    """What the second of two process groups of one name finds in a store that outlives the first."""
    found = []
    for life in (1, 2):
        state: dict[str, Any] = {"x": torch.zeros(4)} if life == 1 else {"y": torch.zeros(4)}
        try:
            ckpt.load(root, state, job=ckpt.Job(timeout=20))
            found.append(f"loaded {state}")
        except NamesError:
            found.append("names")
        dist.barrier()
        group._groups.clear()
    return found


def test_a_new_process_group_reads_nothing_of_the_last(ranks: Ranks, tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "c"), {"x": torch.ones(4)})
    first, second = ranks.run(2, _two_lives, str(tmp_path / "c"))
    assert first == second
    assert first[0].startswith("loaded") and first[1] == "names"


def _wrong_argument(root: str) -> list[str]:
    said = []
    for turn in range(2):
        try:
            wrong = turn == 0 and dist.get_rank() == 1
            ckpt.save(root, {"n": turn}, job=ckpt.Job(timeout=20, threads=-1 if wrong else 1))
            said.append("saved")
        except (UsageError, RankFailedError) as err:
            said.append(type(err).__name__)
    return said


def test_a_wrong_argument_on_one_rank_ends_the_call_and_no_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _wrong_argument, str(tmp_path)) == [["RankFailedError", "saved"], ["UsageError", "saved"]]


def _slow_decision(root: str) -> str:
    from ckpt.engine.save import leader as saving

    if dist.get_rank() == 0:
        write = saving.write_index
        saving.write_index = lambda *a, **k: (time.sleep(5), write(*a, **k))[1]  # type: ignore[assignment]
    ckpt.save(root, {"w": torch.ones(3)}, job=ckpt.Job(timeout=4))
    return "saved"


def _slow_flush(root: str) -> str:
    from ckpt.engine.save import writer as writing

    if dist.get_rank() == 1:
        commit = PosixWriter.commit
        PosixWriter.commit = lambda self: (time.sleep(5), commit(self))[1]  # type: ignore[method-assign]
    writing.SLOWEST = 1e4
    ckpt.save(root, {"w": torch.full((60_000,), 1.0), "own": ckpt.PerRank(torch.zeros(20_000))}, job=ckpt.Job(timeout=4))
    return "saved"


def test_neither_a_leader_that_decides_slowly_nor_a_slow_flush_of_many_bytes_is_a_death(ranks: Ranks, tmp_path: Path) -> None:
    def check(name: str, save: Callable[[str], str]) -> None:
        assert ranks.run(2, save, str(tmp_path / name)) == ["saved", "saved"], name

    at_once(check, [("decision", _slow_decision), ("flush", _slow_flush)])


def _leader_ends_at_once(root: str, kind: str) -> str:
    """Rank 0 serves the store, and its process is gone the moment its call returns; rank 1 is slow to ask what was decided."""
    if dist.get_rank() == 1:
        ask = ControlChannel.word
        ControlChannel.word = lambda self: (time.sleep(0.3), ask(self))[1]  # type: ignore[method-assign]
    state = {"w": torch.ones(3)}
    if kind == "save":
        ckpt.save(root, state, job=ckpt.Job(timeout=20))
    elif kind == "async":
        ckpt.save_async(root, state, job=ckpt.Job(timeout=20)).result()
    elif kind == "load":
        ckpt.load(root, state, job=ckpt.Job(timeout=20))
    else:
        with pytest.raises(NamesError, match="other"):
            ckpt.load(root, {"other": torch.ones(3)}, job=ckpt.Job(timeout=20))
    if dist.get_rank() == 0:
        os._exit(0)
    return "heard"


@pytest.mark.parametrize("kind", ["save", "async", "load", "fails"])
def test_the_process_that_serves_the_store_ends_only_when_all_have_heard(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    if kind in ("load", "fails"):
        ckpt.save(str(tmp_path / "c"), {"w": torch.zeros(3)})
    found = ranks.run(2, _leader_ends_at_once, str(tmp_path / "c"), kind, allow_death=True, store_on_rank0=True)
    assert found[1] == "heard"


def _on_one_rank_only(root: str) -> Any:
    state = {"own": ckpt.PerRank(7)} if dist.get_rank() == 0 else {}
    ckpt.save(root, {"n": 1, **state})
    fresh: dict[str, Any] = {"n": 0, **({"own": ckpt.PerRank(0)} if dist.get_rank() == 0 else {})}
    ckpt.load(root, fresh)
    return fresh["own"].value if "own" in fresh else None


def test_a_value_of_one_rank_alone_comes_back_to_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _on_one_rank_only, str(tmp_path)) == [7, None]


class _Picky:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")


def _touched(root: str) -> str:
    ckpt.save(root, {"o": _Picky(), "w": torch.ones(2)})
    try:
        ckpt.load(root, {"o": _Picky(), "w": torch.zeros(2)}, job=ckpt.Job(timeout=20))
    except ckpt.CkptError as err:
        return str(err)
    return "loaded"


def test_every_rank_says_that_its_state_was_touched(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, _touched, str(tmp_path)):
        assert "boom" in text and "partly overwritten" in text
