"""Tensors on a GPU: saved from it, loaded onto it, and between it and host memory. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt

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

    from ckpt.converters.exporting import export

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
