"""Replicas on other machines make second copies by themselves: nothing crosses the network, and each machine may be lost in turn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import ReplicaError
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps, Latest
from tests.distributed.ranks import Ranks
from tests.distributed.test_spread import NoData

State = dict[str, Any]


def whole_of(n: int, rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 300, generator=torch.Generator().manual_seed(n))


def replicated(n: int) -> State:
    """Pure data parallelism: a matrix that ranks divide for writing, a vector that goes whole to one of them, and a value."""
    return {"w": whole_of(n), "b": torch.full((9,), float(n)), "n": n}


def hybrid(n: int) -> State:
    """Sharded within a machine, replicated over machines; and one tensor that each rank has a part of for itself."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(whole_of(n), mesh, [Replicate(), Shard(0)]),
        "norm": distribute_tensor(whole_of(n)[0].clone(), mesh, [Replicate(), Replicate()]),
        "moments": distribute_tensor(whole_of(n + 100, 64), flat, [Shard(0)]),
        "n": n,
    }


def in_one_piece(n: int) -> dict[str, torch.Tensor]:
    w = whole_of(n)
    return {"w": w, "b": torch.full((9,), float(n)), "norm": w[0], "moments": whole_of(n + 100, 64)}


STATES: dict[str, Callable[[int], State]] = {"replicated": replicated, "hybrid": hybrid}


def checkpointer(folder: str, host: int, **options: Any) -> ckpt.Checkpointer:
    os.environ["CKPT_DOMAIN"] = f"host{host}"
    policies: Any = {"save": EverySteps(1), "keep": Latest(3)}
    return ckpt.Checkpointer(
        f"{folder}/root", local=ckpt.NodeLocal(f"{folder}/host{host}", keep=Latest(2)), job=ckpt.Job(timeout=20), **policies, **options
    )


def save(folder: str, kind: str, per_host: int) -> dict[str, int]:
    """Bytes that this rank wrote for others, in the background, and gave to other machines over the network. The leader is told of each
    step that has all of its copies."""
    events: list[ckpt.monitors.Event] = []
    with checkpointer(folder, dist.get_rank() // per_host, on_event=events.append) as c:
        for n in (1, 2):
            c.step(n, STATES[kind](n))
            assert c.handle is not None
            report = c.handle.result()
            c.wait()
        assert c.uncopied == () and c._tiers.spread is not None
        copier = c._tiers.spread._copier
    copied = [e for e in events if e.kind == "save.copied"]
    assert [(e.step, e.id) for e in copied] == ([(s.number, s.id) for s in ckpt.list_steps(c.root)] if dist.get_rank() == 0 else [])
    assert all(e.seconds is not None and e.seconds >= 0 for e in copied)
    return {"mirrored": report.mirrored_bytes, "copied": copier.copied if copier is not None else 0, "written": report.rank_bytes}


def restore_without_each(folder: str, kind: str, hosts: int) -> list[int | None]:
    """Every machine is lost in turn; what the others have is restored, in a layout that cuts columns and other ranks than wrote it."""
    starts = []
    for lost in range(hosts):
        there = [host for host in range(hosts) if host != lost]
        without = f"{folder}/without{lost}"
        with (
            wrap_backends(lambda b, at=f"{without}/root": NoData(b) if b.url.startswith(at) else b),  # type: ignore[misc]
            checkpointer(without, there[dist.get_rank() % len(there)]) as c,
        ):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            names = STATES[kind](0).keys() - {"n"} if kind == "replicated" else {"w", "norm", "moments"}
            state: State = {name: torch.full_like(t, -1) for name, t in in_one_piece(0).items() if name in names}
            state["w"] = distribute_tensor(state["w"], mesh, [Shard(1)])
            starts.append(c.restore({**state, "n": -1}))
            for name, t in state.items():
                got = t.full_tensor() if isinstance(t, DTensor) else t
                assert torch.equal(got, in_one_piece(2)[name]), name
    return starts


@pytest.mark.parametrize(("kind", "per_host"), [("replicated", 1), ("hybrid", 2), ("hybrid", 1)])
def test_replicas_are_not_copied_and_any_machine_may_be_lost(ranks: Ranks, tmp_path: Path, kind: str, per_host: int) -> None:
    results = ranks.run(4, save, str(tmp_path), kind, per_host)
    hosts = 4 // per_host
    # Copies are on the next machine. Where shards lie on two machines and their replicas on two others, mirrors are there.
    pairs = [{0, 1}, {2, 3}][: hosts // 2] + ([{0, 2}, {1, 3}] if (kind, per_host) == ("hybrid", 1) else [])
    data = {host: {p.name: p for p in (tmp_path / f"host{host}").glob("step-*/data/*")} for host in range(hosts)}
    for files in data.values():  # who has a file has the same bytes as all others
        for name, path in files.items():
            there = [host for host, other in data.items() if name in other]
            assert {*there} in pairs and len({data[host][name].read_bytes() for host in there} | {path.read_bytes()}) == 1
    assert all(r["mirrored"] > 0 for r in results)
    copied = sum(r["copied"] for r in results)
    if kind == "replicated":
        assert copied == 0
    else:  # the moments alone, of two steps; each rank's file has a header of a block
        payload = 2 * 64 * 300 * 4
        assert payload <= copied <= 1.02 * payload + 2 * 4 * 4096
    for lost in range(hosts):
        shutil.copytree(tmp_path, tmp_path / f"without{lost}", ignore=shutil.ignore_patterns("without*", f"host{lost}"))
    assert ranks.run(3, restore_without_each, str(tmp_path), kind, hosts) == [[2] * hosts] * 3


def save_once(folder: str, state: State) -> None:
    with checkpointer(folder, dist.get_rank()) as c:
        c.save(1, state)


def differing(folder: str) -> tuple[str, bool]:
    """A bit of one replica has flipped."""
    state = replicated(1)
    if dist.get_rank() == 1:
        state["b"].view(torch.uint8)[3] ^= 1
    with pytest.raises(ReplicaError) as error:
        save_once(folder, state)
    return str(error.value), bool(list(Path(folder).rglob("checkpoint.json")))


def unchecked(folder: str) -> int:
    """Replicas that are allowed to differ: no rank writes what another one owns, and all copies cross the network."""
    with checkpointer(folder, dist.get_rank(), check_replicas=False) as c:
        report = c.save(1, replicated(1)).result()
    assert c._tiers.spread is not None and c._tiers.spread._copier is not None
    return -report.mirrored_bytes or c._tiers.spread._copier.copied


def test_replicas_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    for text, committed in ranks.run(2, differing, str(tmp_path / "checked")):
        assert "replicas differ: tensor b: rank 0 ≠ rank 1" in text and not committed
    assert min(ranks.run(2, unchecked, str(tmp_path / "unchecked"))) > 0
