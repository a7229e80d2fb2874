"""A local tier that is spread over nodes: what survives when nodes are gone, into any layout, and from where it comes."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import CorruptError, StorageError, UsageError
from ckpt.io_backends.registry import wrap_backends
from ckpt.nodes import rendezvous
from ckpt.policies import EverySteps, Latest
from tests.distributed.ranks import Ranks


def whole_of(n: int) -> torch.Tensor:
    return torch.randn(64, 50, generator=torch.Generator().manual_seed(n))


def state_of(n: int, dim: int) -> dict[str, Any]:
    """A tensor that is cut over the ranks, one that all have, a number, and the state of a generator."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(whole_of(n), mesh, [Shard(dim)]),
        "b": torch.full((9,), float(n)),
        "n": n,
        "rng": torch.Generator().manual_seed(n).get_state(),
    }


class NoData:
    """A root of which no data file is read."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)

        def call(path: str, *args: Any, **options: Any) -> Any:
            if "data/" in path:
                raise StorageError("the root must not be read")
            return value(path, *args, **options)

        return call if name.startswith("read") else value


def train(
    folder: str,
    nodes: Sequence[int],
    steps: range,
    dim: int = 0,
    root: str = "root",
    copies: int = 1,
    no_root: bool = False,
    parity: int | None = None,
) -> dict[str, Any]:
    """Go on, and save every step; what this rank saw. Rank r runs on ``nodes[r]``, whose disk is a folder of its own."""
    node = nodes[dist.get_rank()]
    socket.gethostname = lambda: f"node{node}"
    local = ckpt.NodeLocal(f"{folder}/node{node}", copies=None if parity else copies, parity=parity, keep=Latest(2))
    at_root = f"{folder}/{root}"
    policies: Any = {"save": EverySteps(1), "keep": Latest(3)}
    with (
        wrap_backends(lambda b: NoData(b) if no_root and b.url.startswith(at_root) else b),
        ckpt.Checkpointer(at_root, local=local, job=ckpt.Job(timeout=20), **policies) as c,
    ):
        state = state_of(-1, dim)
        start = c.restore(state)
        if start is not None:
            wanted = state_of(start, dim)
            assert state["n"] == start and torch.equal(state["w"].full_tensor(), whole_of(start))
            assert torch.equal(state["b"], wanted["b"])
            assert torch.equal(state["rng"], wanted["rng"])
        for n in steps:
            c.step(n, state_of(n, dim))
            c.wait()
        return {"start": start, "from": c.restored_from, "bytes": by_host(c.restored_from, node), "left": (c.unpublished, c.uncopied)}


def data(path: Path) -> set[str]:
    return {p.name for p in path.glob("step-00000002/data/*")}


def by_host(restored: ckpt.RestoredFrom | None, node: int) -> dict[str, int]:
    """Bytes by node, or ``root``."""
    sources = restored.sources if restored is not None else {}
    return {name.replace("this host", f"host node{node}").rpartition(" ")[2]: nbytes for name, nbytes in sources.items() if nbytes}


def names(result: dict[str, Any]) -> set[str]:
    return {*result["bytes"]}


@pytest.fixture(scope="module")
def first_job(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    assert [r["left"] for r in ranks.run(4, train, str(folder), [0, 1, 2, 3], range(1, 3))] == [((), ())] * 4
    return folder


@pytest.fixture
def saved(first_job: Path, tmp_path: Path) -> Path:
    """Steps 1 and 2 of four ranks on four nodes, each with the files of two, and published."""
    shutil.copytree(first_job, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_each_node_has_its_files_and_those_of_its_partner(saved: Path) -> None:
    on = [data(saved / f"node{n}") for n in range(4)]
    assert on[0] == on[1] and on[2] == on[3] and not on[0] & on[2]
    # What all ranks have is in a file of its own, which the owner and its partner both wrote: the least loaded ranks, 0 and 1.
    assert [len(names) for names in on] == [4, 4, 2, 2]
    assert data(saved / "root") == on[0] | on[2]
    for n in range(4):
        step = saved / f"node{n}" / "step-00000002"
        assert (step / "checkpoint.json").read_bytes() == (saved / "root" / "step-00000002" / "checkpoint.json").read_bytes()
        assert not [p for p in (saved / f"node{n}").rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize(("left", "dim"), [pytest.param([1, 2], 0, marks=pytest.mark.slow), ([0, 3, 3], 1)])
def test_two_nodes_are_gone_and_nothing_comes_from_the_root(ranks: Ranks, saved: Path, left: list[int], dim: int) -> None:
    """Other numbers of ranks, another layout, and ranks that share a node."""
    for n in {*range(4)} - {*left}:
        shutil.rmtree(saved / f"node{n}")
    results = ranks.run(len(left), train, str(saved), left, range(3, 4), dim, "root", 1, True)
    assert {r["start"] for r in results} == {2} and all("root" not in names(r) for r in results)
    assert {name for r in results for name in names(r)} == {f"node{n}" for n in left}
    again = ranks.run(1, train, str(saved), left[:1], range(0), dim)  # of what they saved together, one node has all
    assert again[0]["start"] == 3


def test_both_holders_are_gone_and_only_their_files_come_from_the_root(ranks: Ranks, saved: Path) -> None:
    lost = sum(p.stat().st_size for p in (saved / "node0").glob("step-00000002/data/*"))
    shutil.rmtree(saved / "node0")
    shutil.rmtree(saved / "node1")
    results = ranks.run(2, train, str(saved), [2, 3], range(0))
    assert [r["start"] for r in results] == [2, 2]
    assert str(results[0]["from"]).startswith(f"{saved / 'root' / 'step-00000002'}: disk of this host ")
    assert 0 < sum(r["bytes"].get("root", 0) for r in results) <= 2 * lost  # headers are read by each rank
    assert sum(sum(r["bytes"].values()) for r in results) > sum(r["bytes"].get("root", 0) for r in results)


def test_what_is_lost_everywhere_is_named_and_the_step_before_is_taken(ranks: Ranks, saved: Path) -> None:
    for n in (0, 1):
        shutil.rmtree(saved / f"node{n}" / "step-00000002")
    both = ranks.run(4, train, str(saved), [0, 1, 2, 3], range(0), 0, "other")
    assert [r["start"] for r in both] == [1] * 4
    for n in (0, 1):
        shutil.rmtree(saved / f"node{n}" / "step-00000001")
    texts = ranks.run(2, refused, str(saved), [2, 3])
    first, second = (text.replace(f"{saved}/node{n}", "disk") for n, text in zip((2, 3), texts, strict=True))  # each names its own
    assert first == second and "4 of 6 files are on no node that answers and not at the root; rank 0 on" in texts[0]
    assert "w[0:16,:], w[16:32,:]" in texts[0]


def refused(folder: str, nodes: Sequence[int]) -> str:
    with pytest.raises(CorruptError) as error:
        train(folder, nodes, range(0), 0, "third")
    return str(error.value)


def test_damage_on_one_node_is_found_and_the_other_copy_taken(ranks: Ranks, saved: Path) -> None:
    """A flipped byte of a chunk, one of a header, and a file that is cut off, each on one node."""
    first, second, *_ = sorted((saved / "node0").glob("step-00000002/data/*"))
    flip(first, -1)
    flip(second, 40)
    cut = min((saved / "node2").glob("step-00000002/data/*"))
    cut.write_bytes(cut.read_bytes()[:-8])
    results = ranks.run(4, train, str(saved), [0, 1, 2, 3], range(0), 1, "root", 1, True)
    assert [r["start"] for r in results] == [2] * 4


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def badly_set_up(folder: str, how: str) -> str:
    """Machines with one disk, or with one name; or processes of one machine that say different things of it."""
    rank = dist.get_rank()
    socket.gethostname = lambda: f"machine{rank}" if how == "shared" else "machine"
    os.environ["CKPT_DOMAIN"] = f"rack{rank}" if how == "domains" else "rack"
    local = ckpt.NodeLocal(f"{folder}/local{rank if how == 'names' else ''}")
    if how == "names":
        rendezvous.real_url = lambda url: f"{folder}/local"  # on each machine its own
    with pytest.raises(UsageError) as error, ckpt.Checkpointer(f"{folder}/root", local=local, job=ckpt.Job(timeout=10)) as c:
        c.restore({})
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shared", "several nodes share the directory"),
        ("domains", "name different domains"),
        ("names", "rank 1 and rank 0 have the same host name, 'machine', and do not see each other's files"),
    ],
)
def test_nodes_that_are_set_up_badly(ranks: Ranks, tmp_path: Path, how: str, text: str) -> None:
    assert [text in message for message in ranks.run(2, badly_set_up, str(tmp_path), how)] == [True, True]
    assert not list(tmp_path.rglob("*.tmp"))
