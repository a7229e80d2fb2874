"""Groups of domains by layouts: which losses are survived, counted one by one over the files that planning gives."""

from __future__ import annotations

import time
from itertools import combinations
from math import comb

import pytest

from ckpt.dtypes import DTYPES
from ckpt.engine.save.plan import plan_mirrored
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Shard
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec, assign
from ckpt.plan.redundancy.copies import missing_copies
from ckpt.plan.redundancy.domains import backups_in
from ckpt.plan.redundancy.kinship import RankKinship, groups_by_kinship, kinship_of
from ckpt.plan.redundancy.mirrors import MirrorPlacement

FLOAT = DTYPES["float32"]
MACHINES = 16


def tensor(name: str, mesh: Mesh, *splits: str, at: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> TensorSpec:
    return TensorSpec(name, FLOAT, (4096, 32), TensorLayout(mesh, tuple(Shard(0, over) for over in splits), at))


def pipeline(mesh: Mesh, *splits: str) -> list[TensorSpec]:
    """Stages that know nothing of each other."""
    return [tensor(f"stage{stage}", mesh, *splits, at=(("pp", (stage,)),)) for stage in range(mesh.size("pp"))]


DP, HSDP = Mesh.of({"dp": 16}), Mesh.of({"replicate": 2, "shard": 16})
WIDE, TALL = Mesh.of({"dp": 8, "tp": 4}), Mesh.of({"pp": 4, "dp": 2, "tp": 4})
JOBS = {
    "data parallel": ([tensor("w", DP)], 1),
    "HSDP over eight machines": ([tensor("w", HSDP, "shard"), tensor("norm", HSDP)], 2),
    "HSDP with moments over all": ([tensor("w", HSDP, "shard"), tensor("m", HSDP, "replicate", "shard")], 2),
    "FSDP": ([tensor("w", Mesh.of({"shard": 32}), "shard"), tensor("norm", Mesh.of({"shard": 32}))], 2),
    "tensor parallel over two machines": ([tensor("w", WIDE, "tp"), tensor("norm", WIDE)], 2),
    "pipeline": (pipeline(TALL, "tp"), 2),
    "pipeline without replicas": (pipeline(Mesh.of({"pp": 4, "tp": 8}), "tp"), 2),
}


def arranged(tensors: list[TensorSpec], per_host: int, copies: int = 1) -> tuple[MirrorPlacement, list[tuple[str, ...]]]:
    ranks = sorted({rank for t in tensors for rank in t.layout.mesh.ranks})
    domains = {rank: f"host{rank // per_host:02}" for rank in ranks}
    groups = groups_by_kinship(domains, {rank: kinship_of(of(tensors, rank), rank) for rank in ranks}, copies)
    return MirrorPlacement(domains=domains, copies=copies, backups=backups_in(groups, copies)), groups


def of(tensors: list[TensorSpec], rank: int) -> list[TensorSpec]:
    return [t for t in tensors if (t.layout.tiling(t.shape).holders == rank).any()]


def holders(tensors: list[TensorSpec], mirrors: MirrorPlacement) -> tuple[dict[str, set[str]], int, int]:
    """The domains that have each file in the end; files that are copied, and all."""
    files: dict[str, set[int]] = {}
    for rank, name in mirrors.domains.items():
        mine = of(tensors, rank)
        for f in plan_mirrored(mine, assign(mine), mirrors, rank=rank).files:
            files.setdefault(f.path, set()).add(mirrors.names.index(name))
    copied = missing_copies(files, mirrors.names, mirrors.copies, mirrors.backups)
    for path, _, target in copied:
        files[path].add(target)
    return {path: {mirrors.names[n] for n in nodes} for path, nodes in files.items()}, len(copied), len(files)


@pytest.mark.parametrize("job", JOBS)
def test_losses_of_two_and_three_of_sixteen_machines(job: str) -> None:
    tensors, per_host = JOBS[job]
    mirrors, groups = arranged(tensors, per_host)
    there, copied, count = holders(tensors, mirrors)
    assert len(mirrors.names) == MACHINES and all(len(group) == 2 for group in groups)
    assert sorted(name for group in groups for name in group) == mirrors.names
    assert all(len(domains) == 2 for domains in there.values())
    for losses, mark in ((2, 0.933), (3, 0.8)):
        fatal = {lost for lost in combinations(mirrors.names, losses) if any(domains <= {*lost} for domains in there.values())}
        assert round(1 - len(fatal) / comb(MACHINES, losses), 3) >= mark
    if job in ("data parallel", "HSDP over eight machines", "pipeline", "tensor parallel over two machines"):
        assert copied == 0
    assert copied < count or job == "pipeline without replicas"


def test_no_pair_shares_a_tensor_parallel_group() -> None:
    """Where there are replicas; and where there are none, but stages that are no kin."""
    for tensors, per_host in (JOBS["tensor parallel over two machines"], JOBS["pipeline"], JOBS["pipeline without replicas"]):
        mirrors, groups = arranged(tensors, per_host)
        kin = {rank: {*kinship_of(of(tensors, rank), rank).kin} for rank in mirrors.domains}
        for group in groups:
            members = [rank for rank, name in mirrors.domains.items() if name in group]
            assert not [(a, b) for a in members for b in kin[a] if b in members and mirrors.domains[a] != mirrors.domains[b]]


def test_machines_that_are_like_no_other_join_a_group() -> None:
    """An odd number, one that has more ranks, one alone, and fewer than copies."""
    tensors = JOBS["HSDP over eight machines"][0]
    domains = {rank: "big" if rank in (0, 1, 16, 17) else f"host{rank // 2:02}" for rank in range(32)}
    kinship = {rank: kinship_of(tensors, rank) for rank in domains}
    groups = groups_by_kinship(domains, kinship, 1)
    assert sorted(name for group in groups for name in group) == sorted({*domains.values()})
    assert all(len(group) >= 2 for group in groups) and ("host01", "host09") in groups
    alone = {0: RankKinship((), ()), 1: RankKinship((), ())}
    assert groups_by_kinship({0: "a", 1: "a"}, alone, 1) == [("a",)]
    assert groups_by_kinship({0: "a", 1: "b"}, alone, 3) == [("a", "b")]


def test_kin_in_other_groups_do_not_count_as_all() -> None:
    """Machines x and y are replicas, and kin of a and b, which have no replicas and more kin than there are others to be grouped with."""
    ranks = dict(enumerate(("a", "b", "c", "d", "x", "y")))
    of = {0: RankKinship((), (0, 1, 4, 5)), 1: RankKinship((), (0, 1, 4, 5)), 2: RankKinship((), (2, 3)), 3: RankKinship((), (2, 3))}
    of |= dict.fromkeys((4, 5), RankKinship((4, 5), (0, 1, 4, 5)))
    assert groups_by_kinship(ranks, of, 1) == [("x", "y"), ("a", "c"), ("b", "d")]


def test_groups_of_ten_thousand_machines_take_no_time() -> None:
    """Pairs among them survive the loss of two with the odds of the formula."""
    domains = {rank: f"host{rank:05}" for rank in range(10_000)}
    everyone = tuple(domains)
    for kinship in (
        dict.fromkeys(domains, RankKinship(everyone, everyone)),  # data parallel
        {rank: RankKinship((), everyone) for rank in domains},  # FSDP
        {rank: RankKinship((), tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))) for rank in domains},  # stages of eight
    ):
        began = time.process_time()
        groups = groups_by_kinship(domains, kinship, 1)
        assert {len(group) for group in groups} == {2} and len(groups) == 5_000
        assert time.process_time() - began < 3
        survived = 1 - len(groups) / comb(len(domains), 2)
        assert survived == pytest.approx(comb(5_000, 2) * 4 / comb(10_000, 2)) and survived > 0.9998
