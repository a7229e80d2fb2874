"""Checkpoints that change under the eyes of others: ranks that open different ones, steps that go while somebody restores or removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.load import load as loading
from ckpt.errors import ConsistencyError
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends.registry import open_backend
from ckpt.runs import tier_chain
from ckpt.runs.removal import remove_checkpoint, remove_steps
from ckpt.runs.step_listing import list_steps
from tests.distributed.ranks import Ranks


def _replaced_between(root: str, times: int) -> Any:
    """Rank 1 opens the checkpoint only after it was replaced, the first so many times."""
    opened, open_catalog = [0], loading.open_catalog

    def late(url: str) -> Any:
        opened[0] += 1
        if dist.get_rank() == 1 and opened[0] <= times:
            from ckpt.net.group import Group

            whole = ckpt.api.group_of
            ckpt.api.group_of = lambda *a: Group(0, (0,))  # a job of its own
            try:
                ckpt.save(root, {"w": torch.full((64,), float(opened[0])), "n": opened[0]})
            finally:
                ckpt.api.group_of = whole
        dist.barrier()
        return open_catalog(url)

    try:

        def hooked(url: str, **options: Any) -> Any:
            if dist.get_rank() == 0:
                found = open_catalog(url, **options)
                dist.barrier()
                return found
            return late(url)

        loading.open_catalog = hooked  # type: ignore[assignment]
        state = {"w": torch.zeros(64), "n": -1}
        try:
            ckpt.load(root, state, job=ckpt.Job(timeout=20))
        except ConsistencyError as err:
            return str(err)
        return state["n"], state["w"].tolist()
    finally:
        loading.open_catalog = open_catalog


def test_all_ranks_load_the_same_save(ranks: Ranks, tmp_path: Path) -> None:
    root = str(tmp_path / "c")
    ckpt.save(root, {"w": torch.zeros(64), "n": 0})
    first, second = ranks.run(2, _replaced_between, root, 2)
    assert first == second == (2, [2.0] * 64)
    told = ranks.run(2, _replaced_between, root, 99)
    assert all("again and again" in text for text in told)


def test_what_was_replaced_or_tagged_since_it_was_listed_stays(tmp_path: Path) -> None:
    root = str(tmp_path)
    for n in (1, 2, 3):
        ckpt.save(f"{root}/step-{n}", {"w": torch.full((8,), float(n))})
    one, two, three = list_steps(root)
    ckpt.save(one.url, {"w": torch.full((8,), 9.0)})
    set_tags(open_backend(two.url), ["keep"])
    for step in (one, two, three):
        remove_steps(root, [step], {})
    assert [s.number for s in list_steps(root)] == [1, 2]
    assert ckpt.open(one.url)["w"][0] == 9.0


def test_a_save_that_begins_while_a_checkpoint_is_removed_keeps_its_files(tmp_path: Path) -> None:
    url = str(tmp_path / "step-1")
    ckpt.save(url, {"w": torch.zeros(8)})
    backend = open_backend(url)
    listing = type(backend).list_prefix

    def save_first(self: Any, prefix: str = "") -> Any:
        type(backend).list_prefix = listing  # type: ignore[method-assign]
        ckpt.save(url, {"w": torch.ones(8)})
        return listing(self, prefix)

    type(backend).list_prefix = save_first  # type: ignore[method-assign]
    try:
        remove_checkpoint(backend)
    finally:
        type(backend).list_prefix = listing  # type: ignore[method-assign]
    assert ckpt.open(url)["w"][0] == 1.0


def test_a_step_that_goes_while_it_is_restored_leads_to_the_one_that_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path)
    for n in (1, 50):
        ckpt.save(f"{root}/step-{n:08d}", {"n": n})
    load_nearest = tier_chain.TierChain.load_nearest

    def meanwhile(tiers: Any, load: Any, step: Any, id: Any = None) -> Any:
        def hooked(url: str) -> Any:
            if url.endswith("50"):
                ckpt.save(f"{root}/step-{51:08d}", {"n": 51})
                remove_checkpoint(open_backend(url))
            return load(url)

        return load_nearest(tiers, hooked, step, id)

    monkeypatch.setattr(tier_chain.TierChain, "load_nearest", meanwhile)
    state = {"n": 0}
    with ckpt.Checkpointer(root) as c:
        assert c.restore(state) == 51
    assert state == {"n": 51}
