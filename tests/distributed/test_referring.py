"""Saves of several ranks that refer to an earlier checkpoint: what changed on one rank alone, other layouts, a loop with retention."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.engine.load import load
from ckpt.engine.save import reuse
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.engine.verify import verify
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.faulty import FaultyBackend
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import Anchor, EverySteps, Latest, TrustFrozen
from tests.distributed.gathered import Full, differences, full_state
from tests.distributed.models import Trained, fsdp, mesh_of, tensor_parallel, trained, whole_model
from tests.distributed.ranks import Ranks
from tests.formats import oracle

CHANGED = "blocks.0.mlp.up.weight"


def frozen_blocks(seed: int, layout: str) -> Trained:
    """Blocks without gradients between a trained embedding and head, on all ranks."""
    model, mesh = whole_model(seed), mesh_of(all=dist.get_world_size())
    model.blocks.requires_grad_(False)
    return trained(fsdp(model, mesh) if layout == "fsdp" else tensor_parallel(model, mesh))


def frozen_bytes(which: Trained) -> dict[str, int]:
    """Of this rank's shards."""
    frozen = {n: p for n, p in which.model.named_parameters() if not p.requires_grad}
    return {n: p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for n, p in frozen.items()}


def save_three(root: str) -> tuple[list[Full], list[int], dict[str, int]]:
    """A whole save, one after a write on rank 1 that torch does not count, and a background save that training goes on beside."""
    which = frozen_blocks(5, "fsdp").steps(1)
    wanted, reused = [full_state(which)], [ckpt.save(f"{root}/step-1", which.state(), reuse=True).reused_bytes]
    which.train()
    if dist.get_rank() == 1:
        parameter = dict(which.model.named_parameters())[CHANGED]
        assert isinstance(parameter, DTensor)
        parameter.to_local().detach().numpy()[0] += 1
    reused.append(ckpt.save(f"{root}/step-2", which.state(), reuse=f"{root}/step-1").reused_bytes)
    wanted.append(full_state(which))
    which.train()
    wanted.append(full_state(which))
    handle = ckpt.save_async(f"{root}/step-3", which.state(), reuse=f"{root}/step-2")
    which.train()
    reused.append(handle.result().reused_bytes)
    return wanted, reused, frozen_bytes(which)


class Warnings(logging.Handler):
    """What the log was told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_and_save_two(root: str, wanted: list[Full]) -> tuple[list[list[str]], list[int], int, list[list[str]]]:
    """Load all three in another layout, go on from the last, and refer to it from there."""
    which = frozen_blocks(6, "tp")
    problems = []
    for number, state in enumerate(wanted, 1):
        ckpt.load(f"{root}/step-{number}", which.state())
        problems.append(differences(full_state(which), state))
    reused, warnings = [], []
    for n in (4, 5):
        logging.getLogger("ckpt").addHandler(handler := Warnings())
        reused.append(ckpt.save(f"{root}/step-{n}", which.state(), reuse=f"{root}/step-{n - 1}").reused_bytes)
        logging.getLogger("ckpt").removeHandler(handler)
        warnings.append(handler.texts)
    frozen = sum(p.numel() * p.element_size() for p in which.model.parameters() if not p.requires_grad)
    return problems, reused, frozen, warnings


def holds(url: Path, wanted: Full) -> None:
    """By a reader that was written from the specification alone, and by ours."""
    stored = oracle.read(url)
    assert {name: data for name, (_, _, data) in stored.items()} == {
        name: t.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for name, t in wanted.items()
    }
    assert not verify(str(url)).problems


def owners(url: Path) -> set[str]:
    return {file.path.split("/")[1] for file in open_catalog(str(url)).files if file.path.startswith("../")}


def test_each_rank_writes_what_changed_there_and_any_layout_loads_it(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(3, save_three, str(tmp_path))
    wanted = results[0][0]
    for rank, (_, reused, frozen) in enumerate(results):
        everything = sum(frozen.values())
        assert everything > 0
        assert reused == [0, everything - (frozen[CHANGED] if rank == 1 else 0), everything], rank
    for number, state in enumerate(wanted, 1):
        holds(tmp_path / f"step-{number}", state)
    assert (owners(tmp_path / "step-2"), owners(tmp_path / "step-3")) == ({"step-1"}, {"step-1", "step-2"})

    found = ranks.run(2, load_and_save_two, str(tmp_path), wanted)
    assert [problems for problems, _, _, _ in found] == [[[], [], []]] * 2
    # Boxes of another layout are others: what it refers to is what no layout cuts. In the save after that all boxes are the same again.
    assert sum(reused[0] for _, reused, _, _ in found) < found[0][2] <= sum(reused[1] for _, reused, _, _ in found)
    for _, _, _, (first, second) in found:
        assert any("are written again: it cuts them into other chunks" in text for text in first), first
        assert not any("written again" in text for text in second), second
    for number in (4, 5):
        holds(tmp_path / f"step-{number}", wanted[2])


def run_a_loop(root: str) -> tuple[Full, list[int]]:
    mesh = mesh_of(all=dist.get_world_size())
    torch.manual_seed(1)
    frozen = distribute_tensor(torch.randn(9, 40), mesh, [Shard(0)])
    head = distribute_tensor(torch.randn(4, 3), mesh, [Replicate()])
    with ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(1), reuse=True, job=ckpt.Job(timeout=60)) as checkpointer:
        for step in (1, 2, 3, 4):
            head.add_(step)
            checkpointer.save(step, {"frozen": frozen, "head": head, "own": ckpt.PerRank(torch.full((3,), float(dist.get_rank())))})
            checkpointer.wait()
    return {"frozen": frozen.full_tensor(), "head": head.full_tensor()}, [s.number or 0 for s in ckpt.list_steps(root) if s.committed]


def test_a_loop_keeps_the_step_that_the_newest_refers_to(ranks: Ranks, tmp_path: Path) -> None:
    wanted, kept = ranks.run(2, run_a_loop, str(tmp_path))[0]
    assert kept == [1, 4]
    last = tmp_path / "step-00000004"
    assert owners(last) == {"step-00000001"}
    stored = oracle.read(last)
    assert {name: stored[name][2] for name in wanted} == {name: t.contiguous().numpy().tobytes() for name, t in wanted.items()}
    assert not verify(str(last)).problems
    assert sum(f.stat().st_size for f in (last / "data").iterdir()) < 2 * 3 * 4096


def save_trusting(root: str) -> tuple[Full, list[int]]:
    """Four saves of sharded frozen blocks that nobody hashes again; before the last, rank 1 changes its shard in place. What each save
    hashed here."""
    which, hashed = frozen_blocks(7, "fsdp"), [0]
    for group in which.optimizer.param_groups:
        group["fused"] = False  # what a fused step writes torch does not count: none of its parameters is trusted
    hash_chunks = reuse._hash

    def counted(source: ChunkSource, numbers: Sequence[int], digests: dict[int, str]) -> None:
        hashed[-1] += len(numbers)
        hash_chunks(source, numbers, digests)

    reuse._hash = counted
    try:
        with ckpt.Checkpointer(root, save=EverySteps(1), reuse=TrustFrozen(hash_every=100), job=ckpt.Job(timeout=60)) as checkpointer:
            for step in (1, 2, 3, 4):
                which.train()
                if step == 4 and dist.get_rank() == 1:
                    parameter = dict(which.model.named_parameters())[CHANGED]
                    assert isinstance(parameter, DTensor)
                    with torch.no_grad():
                        parameter.to_local().add_(1)
                checkpointer.save(step, which.state()).result()
                checkpointer.wait()
                hashed.append(0)
    finally:
        reuse._hash = hash_chunks
    return full_state(which), hashed[:4]


def test_sharded_frozen_tensors_are_trusted_until_one_is_changed(ranks: Ranks, tmp_path: Path) -> None:
    (wanted, first), (_, second) = ranks.run(2, save_trusting, str(tmp_path))
    assert first[0] > 1 and second[0] > 1
    assert (first[1:], second[1:]) == ([0, 0, 0], [0, 0, 1])
    holds(tmp_path / "step-00000004", wanted)


def save_differences(root: str) -> Full:
    """Three saves of a loop: an anchor, and two that are differences from it; rows of one tensor on each rank, all of the other on all."""
    mesh = mesh_of(all=dist.get_world_size())
    torch.manual_seed(3)
    rows = distribute_tensor(torch.randn(301, 200) * 0.02, mesh, [Shard(0)])
    same = distribute_tensor((torch.randn(200, 100) * 0.02).bfloat16(), mesh, [Replicate()])
    with ckpt.Checkpointer(root, save=EverySteps(1), reuse=Anchor(every=3), job=ckpt.Job(timeout=60)) as checkpointer:
        for step in (1, 2, 3):
            torch.manual_seed(step)
            rows.add_(distribute_tensor(torch.randn(301, 200) * 1e-6, mesh, [Shard(0)]))
            same.mul_(1 + step * 2**-7)
            checkpointer.save(step, {"rows": rows, "same": same})
            checkpointer.wait()
    return {"rows": rows.full_tensor(), "same": same.full_tensor()}


def load_columns(url: str) -> list[tuple[Full, int]]:
    """In other boxes, each rank by itself and together."""
    results = []
    for exchange in (False, True):
        mesh = mesh_of(all=dist.get_world_size())
        columns = distribute_tensor(torch.zeros(301, 200), mesh, [Shard(1)])
        same = distribute_tensor(torch.zeros(200, 100, dtype=torch.bfloat16), mesh, [Replicate()])
        report = ckpt.load(url, {"rows": columns, "same": same}, read=ckpt.ReadOptions(exchange=exchange))
        results.append(({"rows": columns.full_tensor(), "same": same.full_tensor()}, report.bytes_read))
    return results


def test_differences_of_several_ranks_load_into_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.run(3, save_differences, str(tmp_path))[0]
    last = tmp_path / "step-00000003"
    assert owners(last) == {"step-00000001"}
    catalog = open_catalog(str(last))
    entry = catalog.tensors["rows"]
    assert {extent.codec for extent in catalog.extents(entry, range(len(entry.grid)))} == {"xor-planes-zstd"}
    holds(last, wanted)
    read = [0, 0]
    for results in ranks.run(2, load_columns, str(last)):
        for way, (state, bytes_read) in enumerate(results):
            assert differences(state, wanted) == []
            read[way] += bytes_read
    assert read[1] < 0.7 * read[0]  # together each chunk and its anchor are read once


def save_and_count(root: str) -> list[tuple[int, Counter[str]]]:
    """Three saves by ranks that know nothing of their first base. Of each, bytes that were referred to, and what this rank read of other
    checkpoints, on storage that is no file system."""
    load.is_file_system = lambda url: False
    reads: list[tuple[str, str]] = []

    class CountedBackend(FaultyBackend):
        def __init__(self, inner: Backend) -> None:
            super().__init__(inner)
            process = self.process

            def operate(what: str, effect: Callable[[], Any], half: Any = None) -> Any:
                if what.startswith(("read", "size")):
                    reads.append((self.url.rpartition("/")[2], what.split()[1]))
                return effect()

            process.operate = operate  # type: ignore[method-assign]

    mesh, saves = mesh_of(all=dist.get_world_size()), []
    rows, same = distribute_tensor(torch.arange(800.0).reshape(80, 10), mesh, [Shard(0)]), torch.arange(9000.0)
    with wrap_backends(CountedBackend):
        for step in (2, 3, 4):
            reads.clear()
            state = {"rows": rows, "same": same, "step": step}
            report = ckpt.save_async(f"{root}/step-{step}", state, reuse=f"{root}/step-{step - 1}").result()
            kinds = Counter(path.rpartition("/")[2].partition(".")[2] for url, path in reads if url != f"step-{step}")
            saves.append((report.reused_bytes, kinds))
            dist.barrier()
    return saves


def test_one_rank_opens_a_base_that_none_knows_and_none_opens_one_that_they_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, save_first, str(tmp_path / "step-1"))
    results = ranks.run(4, save_and_count, str(tmp_path))
    for saves in zip(*results, strict=True):
        assert sum(reused for reused, _ in saves) == 3200 + 36_000
    for rank, (first, *others) in enumerate(results):
        index = first[1]["arrow"] + (first[1]["json"] if rank else 0)  # the leader's commit reads the record as well
        assert (index > 0, first[1]["safetensors"]) == (rank == 0, 2)  # of one file the size, and the header
        assert [kinds.total() - (kinds["json"] if rank == 0 else 0) for _, kinds in others] == [0, 0], rank
    for step in (2, 3, 4):
        holds(tmp_path / f"step-{step}", {"rows": torch.arange(800.0).reshape(80, 10), "same": torch.arange(9000.0)})


def save_first(url: str) -> None:
    mesh = mesh_of(all=dist.get_world_size())
    rows = distribute_tensor(torch.arange(800.0).reshape(80, 10), mesh, [Shard(0)])
    ckpt.save(url, {"rows": rows, "same": torch.arange(9000.0), "step": 1}, reuse=True)


def save_replicas(url: str, base: str | None = None) -> int:
    return ckpt.save(url, {name: torch.full((9000,), float(ord(name))) for name in "abc"}, reuse=base or True).reused_bytes


def test_fewer_ranks_refer_to_files_of_ranks_that_they_have_not(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save_replicas, str(tmp_path / "step-1"))
    assert sum(ranks.run(1, save_replicas, str(tmp_path / "step-2"), str(tmp_path / "step-1"))) == 3 * 36_000
    assert max(file.rank for file in open_catalog(str(tmp_path / "step-2")).files) > 0
    holds(tmp_path / "step-2", {name: torch.full((9000,), float(ord(name))) for name in "abc"})
