"""Ranks that should have the same bytes, and do not: neither a reshard nor a publication takes one of them for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt import live
from ckpt.errors import CkptError, ReplicaError, UsageError
from tests.distributed.ranks import Ranks


def trained(flipped: int | None) -> dict[str, Any]:
    """``norm`` on both ranks, ``up`` cut over them; one element of ``norm`` is another one on rank ``flipped``."""
    rank, mesh = dist.get_rank(), DeviceMesh("cpu", [0, 1])
    norm, up = torch.arange(9.0), torch.arange(16.0).view(4, 4).chunk(2)[rank].clone()
    if rank == flipped:
        norm[4] = -1
    return {
        "norm": DTensor.from_local(norm, mesh, [Replicate()], run_check=False),
        "up": DTensor.from_local(up, mesh, [Shard(0)], run_check=False),
    }


def blank() -> dict[str, Any]:
    return {"norm": torch.full((9,), -7.0), "up": torch.full((4, 4), -7.0)}


def differing() -> dict[str, Any]:
    rank, results = dist.get_rank(), {}
    new = blank()
    try:
        live.reshard(trained(1), new, job=ckpt.Job(timeout=20))
    except ReplicaError as err:
        results["reshard"] = err.message
    results["untouched"] = all(bool((t == -7).all()) for t in new.values())
    live.reshard(trained(1), new, job=ckpt.Job(timeout=20), check_replicas=False)
    results["unchecked"] = new["up"].tolist() == torch.arange(16.0).view(4, 4).tolist()
    live.reshard(trained(None), new, job=ckpt.Job(timeout=20))
    results["equal"] = new["norm"].tolist() == list(range(9))
    state = trained(1)
    with live.Source("tcp://127.0.0.1:0/s", state, job=ckpt.Job(timeout=20)) as source:
        try:
            source.publish(1, capture="eager").result(20)
        except ReplicaError as err:
            results["publish"] = err.message
        with torch.no_grad():
            state["norm"].to_local()[4] = 4
        results["step"] = source.publish(1, capture="eager").result(20).step  # the failed one does not count
        try:
            source.publish(1)
        except UsageError as err:
            results["twice"] = err.message
        results["again"] = source.publish(1, capture="eager", again=True).result(20).step
        results["next"] = source.publish(2, capture="eager").result(20).step
        results["stays in step"] = one_rank_alone(source, state["norm"])
    try:
        live.Source("tcp://127.0.0.1:0/s", state, job=ckpt.Job(timeout=20), check_replicas=bool(rank))
    except UsageError as err:
        results["options"] = err.message
    return results


def one_rank_alone(source: live.Source, norm: Any) -> list[str]:
    """What one rank alone hears of, or does wrong, leaves the ranks in step: each publication is that of one step on both."""
    rank, heard = dist.get_rank(), []
    with torch.no_grad():
        norm.to_local()[0] = rank
    publication = source.publish(3, capture="eager")
    if rank == 0:
        with pytest.raises(ReplicaError):
            publication.result(20)
    with torch.no_grad():
        norm.to_local()[0] = 0
    for step in (4, 5 if rank == 0 else -5, 6):
        try:
            heard.append(str(source.publish(step, capture="eager").result(20).step))
        except CkptError as err:
            heard.append(f"{type(err).__name__}: {err.message}")
    return heard


def test_replicas_that_differ_are_named(ranks: Ranks) -> None:
    for rank, results in enumerate(ranks.run(2, differing)):
        failed = "publish failed in phase 'seal': rank 1 raised UsageError: a step is a number from 0 on, not -5"
        alone = ["4", f"RankFailedError: {failed}"], ["ReplicaError: replicas differ", "UsageError: a step is a number from 0 on, not -5"]
        assert [text.partition(": tensor")[0].partition(" (tcp")[0] for text in results["stays in step"]] == [*alone[rank], "6"]
        assert "tensor norm: rank 0 ≠ rank 1" in results["reshard"] and "nothing in the new state was changed" in results["reshard"]
        assert results["untouched"] and results["unchecked"] and results["equal"]
        assert results["publish"].startswith("replicas differ: tensor norm: rank 0 ≠ rank 1")
        assert (results["step"], results["again"], results["next"]) == (1, 1, 2)
        assert results["twice"] == "step 1 is published already"
        assert results["options"] == "the ranks of the source were given different options"


def cut_and_differing() -> str:
    """Two ranks have the same half of a tensor each; one of them has another element in it."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "shard"))
    half = torch.arange(24.0).view(6, 4).chunk(2)[dist.get_rank() % 2].clone()
    if dist.get_rank() == 3:
        half[2, 1] = -1
    state = {"up": DTensor.from_local(half, mesh, [Replicate(), Shard(0)], run_check=False)}
    with live.Source("tcp://127.0.0.1:0/s", state, job=ckpt.Job(timeout=20)) as source, pytest.raises(ReplicaError) as caught:
        source.publish(1, capture="eager").result(20)
    return caught.value.message


def test_a_part_that_differs_is_named_with_its_box_and_its_ranks(ranks: Ranks) -> None:
    assert set(ranks.run(4, cut_and_differing)) == {"replicas differ: tensor up [3:6,0:4]: rank 1 ≠ rank 3"}
