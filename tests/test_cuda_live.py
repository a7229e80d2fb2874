"""Tensors on a GPU that go to others without files: published, taken, resharded, kept in memory, averaged. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.live import Sink, Source
from ckpt.nodes.memory_client import MemoryClient
from tests.distributed.ranks import Ranks
from tests.memory.conftest import _daemon, daemon
from tests.test_cuda import trained

__all__ = ["_daemon", "daemon"]
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TIMEOUT = 30.0
ROWS, COLUMNS = 1001, 2048


def numbered(step: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Values of which each element tells name, place and step; the larger tensor spans several blocks of a segment."""
    wide = torch.arange(ROWS * COLUMNS, device=device, dtype=torch.float64).reshape(ROWS, COLUMNS) % 9973 + 10_000 * step
    return {"wide": wide.float(), "half": (wide[:37] % 256).bfloat16(), "strided": wide.float()[:, ::3]}


def busy() -> None:
    """Queue work that takes about a tenth of a second, on the current stream."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def put(state: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        tensor.copy_(values[name])


def same(state: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[name].cpu(), values[name].cpu()) for name in values)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("switch", ["double", "in-place"])
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_versions_are_taken_from_and_onto_a_gpu(source: str, target: str, switch: Any, *, delta: bool) -> None:
    """What is queued before ``publish`` is in the version, what follows is not; what is queued before a take comes before it."""
    state, into = numbered(0, source), {name: torch.zeros_like(t, device=target) for name, t in numbered(0, source).items()}
    with (
        Source("tcp://127.0.0.1:0/a", state, delta=delta, job=ckpt.Job(timeout=TIMEOUT)) as trainer,
        Sink(trainer.address, into, switch=switch) as sink,
    ):
        version = None
        values = numbered(1, source)
        for step in (1, 2, 3):
            values = {**values, "half": numbered(step, source)["half"]}
            busy()
            put(state, values)
            publication = trainer.publish(step)
            publication.fence()
            busy()
            put(state, numbered(99, source))
            publication.result(TIMEOUT)
            if target == "cuda":
                busy()
                into["wide"].fill_(-1) if step == 1 else None
            version = sink.take(newer_than=version, timeout=TIMEOUT)
            assert version.step == step
            assert same(into, values)


def moved(step: int) -> dict[str, int]:
    """Rows over two ranks become columns, in the memory of one GPU; then it is compared with what it should be."""
    torch.cuda.set_device(0)
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    whole = numbered(step)["wide"]
    old = {"wide": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    new = {"wide": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)], src_data_rank=None)}
    expected = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None).to_local()
    busy()
    report = ckpt.live.reshard(old, new)
    assert torch.equal(new["wide"].to_local(), expected)
    return {"needed": report.bytes_needed, "sent": report.bytes_sent, "copied": report.bytes_copied}


def test_a_state_on_a_gpu_is_resharded() -> None:
    reports = Ranks(2).run(2, moved, 3)
    assert sum(r["needed"] for r in reports) == sum(r["copied"] + r["sent"] for r in reports) == ROWS * COLUMNS * 4
    assert all(r["sent"] for r in reports)


def test_the_memory_tier_has_the_state_of_the_call(daemon: MemoryClient) -> None:
    model, optimizer = trained("cuda")
    for step in range(2):
        before = {name: t.clone() for name, t in model.state_dict().items()}
        busy()
        handle = ckpt.save_async(f"memory://gpu/step-{step}", {"model": model, "optimizer": optimizer})
        model(torch.randn(8, 33, device="cuda")).square().mean().backward()
        optimizer.step()
        handle.result()
        loaded, again = trained("cuda", seed=1)
        ckpt.load(f"memory://gpu/step-{step}", {"model": loaded, "optimizer": again})
        assert all(torch.equal(t, before[name]) for name, t in loaded.state_dict().items())


def test_a_base_on_a_gpu_is_referred_to(tmp_path: Path) -> None:
    model, optimizer = trained("cuda")
    big = torch.randn(1 << 20, device="cuda")
    ckpt.save(str(tmp_path / "a"), {"model": model, "optimizer": optimizer, "big": big}, reuse=True)
    model(torch.randn(8, 33, device="cuda")).square().mean().backward()
    optimizer.step()
    report = ckpt.save(str(tmp_path / "b"), {"model": model, "optimizer": optimizer, "big": big}, reuse=str(tmp_path / "a"))
    assert report.reused_bytes >= big.nbytes
    loaded, other = trained("cuda", seed=1)[0], torch.zeros_like(big)
    ckpt.load(str(tmp_path / "b"), {"model": loaded, "big": other}, strict=False)
    assert torch.equal(other, big)
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.state_dict().items())


def test_an_average_on_a_gpu_is_that_of_host_memory(tmp_path: Path) -> None:
    models = [torch.nn.Linear(65, 33) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].cuda()
    averages = [ckpt.training.Average(m, 0.9) for m in models]
    for step in range(3):
        for model in models:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(step + 0.125)
        for average in averages:
            average.update()
    ckpt.save(str(tmp_path), {"ema": averages[1]})
    stored = ckpt.open(str(tmp_path))
    for name, weight in averages[0].weights.items():
        assert torch.equal(stored[f"ema.weights.{name}"][...], weight)
