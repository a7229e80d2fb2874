"""Tensors on a GPU: saved from it, loaded onto it, and between it and host memory. Skipped without CUDA."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.save.staging import Arena
from ckpt.training import Generators
from tests.distributed.ranks import Ranks

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def trained(device: str, *, fused: bool = False, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 129), torch.nn.BatchNorm1d(129), torch.nn.Linear(129, 7)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    for _ in range(2):
        model(torch.randn(8, 33, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same(one: tuple[torch.nn.Module, torch.optim.Optimizer], two: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    for (name, a), b in zip(one[0].state_dict().items(), two[0].state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name
    for a, b in zip(one[1].state.values(), two[1].state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("fused", [False, True])
def test_between_devices(tmp_path: Path, source: str, target: str, *, fused: bool) -> None:
    saved = trained(source, fused=fused)
    ckpt.save(str(tmp_path), {"model": saved[0], "optimizer": saved[1]})
    loaded = trained(target, fused=fused, seed=1)
    ckpt.load(str(tmp_path), {"model": loaded[0], "optimizer": loaded[1]})
    assert_same(saved, loaded)
    assert all(p.device.type == target for p in loaded[0].parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_state_is_made_where_torch_would_make_it(tmp_path: Path, *, fused: bool) -> None:
    saved = trained("cuda", fused=fused)
    ckpt.save(str(tmp_path), {"model": saved[0], "optimizer": saved[1]})
    model = trained("cuda", seed=1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    ckpt.load(str(tmp_path), {"model": model, "optimizer": optimizer})
    assert_same(saved, (model, optimizer))
    for mine, theirs in zip(optimizer.state.values(), saved[1].state.values(), strict=True):
        assert {k: v.device for k, v in mine.items()} == {k: v.device for k, v in theirs.items()}
    model(torch.randn(8, 33, device="cuda")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128, torch.int64])
def test_dtypes_and_strides(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (64, 50, 16), device="cuda", dtype=torch.uint8)
    tensor = whole.view(dtype) if dtype.itemsize > 1 else whole.to(torch.float32).to(dtype)
    strided = tensor.transpose(0, 1)[::2]
    ckpt.save(str(tmp_path), {"t": strided, "scalar": strided[0, 0, 0]})
    state = {"t": torch.zeros_like(strided), "scalar": torch.zeros((), device="cuda", dtype=dtype)}
    ckpt.load(str(tmp_path), state)
    assert state["t"].contiguous().view(torch.uint8).equal(strided.contiguous().view(torch.uint8))
    assert ckpt.open(str(tmp_path))["t"][...].view(torch.uint8).equal(strided.contiguous().cpu().view(torch.uint8))


def test_large_tensor_in_many_chunks(tmp_path: Path) -> None:
    tensor = torch.randn(40_000_000, device="cuda")
    ckpt.save(str(tmp_path), {"t": tensor})
    state = {"t": torch.zeros_like(tensor)}
    report = ckpt.load(str(tmp_path), state)
    assert torch.equal(state["t"], tensor)
    assert report.bytes_read == report.bytes_needed == 160_000_000


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_exports(tmp_path: Path, dtype: str | None) -> None:
    from safetensors.torch import load_file

    from ckpt import export

    model = trained("cuda")[0]
    export(str(tmp_path / "a.safetensors"), model, dtype=dtype)
    wanted = {n: t.cpu() if dtype is None else t.to(torch.bfloat16).cpu() for n, t in model.state_dict().items()}
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


def test_fsdp2_over_nccl(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        saved = trained("cuda")
        fully_shard(saved[0])
        sharded = (saved[0], torch.optim.AdamW(saved[0].parameters(), lr=1e-3))
        sharded[0](torch.randn(8, 33, device="cuda")).square().mean().backward()
        sharded[1].step()
        ckpt.save(str(tmp_path / "c"), {"model": sharded[0], "optimizer": sharded[1]})
        model, optimizer = trained("cpu", seed=1)
        ckpt.load(str(tmp_path / "c"), {"model": model, "optimizer": optimizer})
        for name, value in sharded[0].state_dict().items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(full.cpu(), model.state_dict()[name]), name
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------- streams, graphs, memory

LONG = 2_000_000_000
"""Cycles: about a second."""


def busy() -> None:
    """Queue work that takes about a second, on the current stream."""
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]


def test_a_lazy_save_has_the_state_of_the_call_and_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    model, optimizer = trained("cuda")
    for n in range(2):  # the first one makes the arena
        before = {name: t.clone() for name, t in model.state_dict().items()}
        busy()
        began = time.perf_counter()
        handle = ckpt.save_async(str(tmp_path / str(n)), {"model": model, "optimizer": optimizer})
        assert n == 0 or time.perf_counter() - began < 0.5
        model(torch.randn(8, 33, device="cuda")).square().mean().backward()  # changes the buffers
        optimizer.step()
        handle.result()
        found = ckpt.open(str(tmp_path / str(n)))
        for name, tensor in before.items():
            assert torch.equal(found[f"model.{name}"][...], tensor.cpu()), name


@pytest.mark.parametrize("capture", ["lazy", "eager", None])
def test_what_is_queued_on_a_stream_of_the_callers_is_saved(tmp_path: Path, capture: str | None) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        tensor += 1
        if capture is None:
            ckpt.save(str(tmp_path), {"t": tensor})
        else:
            ckpt.save_async(str(tmp_path), {"t": tensor}, capture=capture).result()  # type: ignore[arg-type]
    assert torch.equal(ckpt.open(str(tmp_path))["t"][...], torch.ones(1 << 20))


def test_a_load_comes_after_what_is_queued_and_before_what_follows(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path), {"t": torch.full((1 << 20,), 3.0), "rows": torch.full((1000, 8), 4.0)})
    tensor, wide = torch.zeros(1 << 20, device="cuda"), torch.zeros(1000, 16, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        tensor += 1
        ckpt.load(str(tmp_path), {"t": tensor, "rows": wide[:, ::2]})
        tensor *= 2
        wide *= 2
    torch.cuda.synchronize()
    assert torch.equal(tensor.cpu(), torch.full((1 << 20,), 6.0))
    assert torch.equal(wide[:, ::2].cpu(), torch.full((1000, 8), 8.0)) and not wide[:, 1::2].any()


def test_the_replay_of_a_graph_waits_for_the_capture(tmp_path: Path) -> None:
    tensor = torch.zeros(64 << 20, device="cuda")
    ckpt.save_async(str(tmp_path / "first"), {"t": tensor}).result()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
    graph.replay()
    for n in range(1, 4):
        handle = ckpt.save_async(str(tmp_path / str(n)), {"t": tensor})
        graph.replay()
        handle.result()
        assert torch.equal(ckpt.open(str(tmp_path / str(n)))["t"][...], torch.full((64 << 20,), float(n)))


def test_nothing_is_saved_or_loaded_inside_of_a_graph(tmp_path: Path) -> None:
    tensor = torch.zeros(1000, device="cuda")
    ckpt.save(str(tmp_path / "a"), {"t": tensor})
    for call in (
        lambda: ckpt.save(str(tmp_path / "b"), {"t": tensor}),
        lambda: ckpt.save_async(str(tmp_path / "b"), {"t": tensor}),
        lambda: ckpt.load(str(tmp_path / "a"), {"t": tensor}),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
            with pytest.raises(ckpt.CkptError, match="CUDA graph"):
                call()
        graph.replay()
    assert torch.equal(tensor.cpu(), torch.full((1000,), 3.0)) and not (tmp_path / "b").exists()


def test_a_compiled_model_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained("cuda")
    compiled = torch.compile(model, mode="reduce-overhead")
    for n in range(4):
        compiled(torch.randn(8, 33, device="cuda")).square().mean().backward()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        handle = ckpt.save_async(str(tmp_path / str(n)), {"model": model, "optimizer": optimizer})
        optimizer.step()
        optimizer.zero_grad()
        handle.result()
        found = ckpt.open(str(tmp_path / str(n)))
        assert all(torch.equal(found[f"model.{name}"][...], tensor.cpu()) for name, tensor in before.items())


def test_memory_that_cannot_be_pinned_is_an_error_and_the_gpu_goes_on() -> None:
    arena = Arena()
    device = torch.device("cuda", 0)
    assert arena.reserve(5000, device).is_pinned()
    with pytest.raises(ckpt.CkptError, match="staging_bytes"):
        arena.reserve(1 << 45, device)
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    memory = arena.reserve(100_000, device)
    assert memory.is_pinned() and memory.numel() < 200_000


def sharded_on_a_gpu(folder: str) -> bool:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 129), torch.nn.Linear(129, 7)).to("cuda")
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for n, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, n + 1.0)
    optimizer.step()
    saved = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    handle = ckpt.save_async(folder, {"model": model, "optimizer": optimizer})
    optimizer.step()
    handle.result()
    ckpt.load(folder, {"model": model, "optimizer": optimizer})
    return all(torch.equal(p.to_local(), s) for p, s in zip(model.parameters(), saved, strict=True))  # type: ignore[attr-defined]


def test_several_processes_share_a_gpu(tmp_path: Path) -> None:
    assert Ranks(2).run(2, sharded_on_a_gpu, str(tmp_path / "c")) == [True, True]


# ------------------------ The random number generator of a GPU: it goes on exactly, comes with CUDA and goes without. Skipped without CUDA.


def test_the_gpu_goes_on(tmp_path: Path) -> None:
    own = torch.Generator("cuda").manual_seed(3)
    torch.rand(5, device="cuda")
    state = {"rng": Generators(), "own": Generators({"own": own})}
    ckpt.save(str(tmp_path), state)
    expected = torch.rand(5, device="cuda"), torch.rand(5, device="cuda", generator=own), torch.rand(5)
    ckpt.load(str(tmp_path), state)
    found = torch.rand(5, device="cuda"), torch.rand(5, device="cuda", generator=own), torch.rand(5)
    assert all(map(torch.equal, found, expected))
    assert ckpt.open(str(tmp_path)).per_rank("rng", 0)["streams"]["cuda"]["kind"] == "torch.cuda"


def test_a_gpu_that_the_checkpoint_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_initialized", lambda: False)
        ckpt.save(str(tmp_path), {"rng": Generators()})
    drawn = []
    for _ in range(2):
        torch.cuda.manual_seed(7)
        ckpt.load(str(tmp_path), {"rng": Generators()})
        drawn.append(torch.rand(5, device="cuda"))
    assert torch.equal(*drawn)
    torch.cuda.manual_seed(7)
    assert not torch.equal(drawn[0], torch.rand(5, device="cuda"))
