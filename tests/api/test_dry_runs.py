"""A dry run says what the load does then: the same bytes, reads and files, names and errors; and it changes nothing."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt
from ckpt.engine.digest_reader import DigestReader
from ckpt.engine.load import chunk_scan, reader
from ckpt.errors import NamesError, ShapeError, StateError, UsageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.posix_writer import PosixWriter
from tests.api.torchless import NAMES, plain, values


def model(*, meta: bool = False) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        net = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 40))
    return net if meta else _filled(net)


def _filled(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for tensor in net.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator)
    return net


def job() -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3, 300)).sum().backward()
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "step": 7}


def forecast_and_load(url: str, state: dict[str, Any], **options: Any) -> tuple[ckpt.LoadReport, ckpt.LoadReport]:
    """The report of a dry run, and that of the load, which a count of what storage was asked for confirms."""
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    dry = ckpt.load(url, state, dry_run=True, **options)
    for name, tensor in state["model"].state_dict().items():
        assert tensor.is_meta == before[name].is_meta and (tensor.is_meta or torch.equal(tensor, before[name]))
    asked: list[tuple[str, int, int]] = []

    def counted(self: DigestReader, path: str, offset: int, memory: memoryview, *more: Any) -> None:
        asked.append((path, offset, len(memory)))
        fill(self, path, offset, memory, *more)

    fill = DigestReader.fill
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DigestReader, "fill", counted)
        real = ckpt.load(url, state, **options)
    assert (real.requests, real.bytes_read, real.files) == (len(asked), sum(n for _, _, n in asked), len({p for p, *_ in asked}))
    return dry, real


def check(dry: ckpt.LoadReport, real: ckpt.LoadReport) -> None:
    assert dry.dry_run and dry.estimated_from is not None and dry.seconds >= 0
    assert not real.dry_run and real.estimated_from is None
    assert real.memory <= dry.memory
    unsure = {"seconds": 0.0, "memory": 0, "dry_run": False, "estimated_from": None}
    assert replace(dry, **unsure) == replace(real, **unsure)
    assert dry.bytes_read > 0 and dry.requests > 0


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("chunk", [1 << 10, 64 << 20])
def test_a_load_does_what_its_dry_run_said(url: str, chunks_of: Callable[[int], None], chunk: int, codec: str | None) -> None:
    chunks_of(chunk)
    ckpt.save(url, job(), codec=codec)
    for verify in ("full", "partial", "off"):
        for net in (model(), model(meta=True), model().double()):
            check(*forecast_and_load(url, {"model": net}, only="model.*", cast=True, read=ckpt.ReadOptions(verify=verify)))
    net = model()
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters()), "step": 0}
    check(*forecast_and_load(url, state))
    assert state["step"] == 7


@pytest.mark.parametrize("ahead", [0, 256])
def test_tensors_that_are_filled_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Memory in another order than the stored one, planned file by file or all at once."""
    monkeypatch.setattr(reader, "MANY", 0)
    monkeypatch.setattr(chunk_scan, "AHEAD", ahead)
    url = str(tmp_path / "a")
    full = torch.arange(6000 * 128, dtype=torch.float32).view(6000, 128)
    ckpt.save(url, {"w": full, "b": torch.ones(5)})
    net = nn.Module()
    net.register_buffer("w", torch.zeros(128, 6000).t())
    dry, real = forecast_and_load(url, {"model": net}, rename={"w": "model.w"}, only="model.w")
    check(dry, real)
    assert torch.equal(net.w, full)


def test_another_format(tmp_path: Path) -> None:
    """No digests: what is read is not verified, and the report says so before."""
    save_file({name: t.contiguous() for name, t in model().state_dict().items()}, tmp_path / "m.safetensors")
    dry, real = forecast_and_load(str(tmp_path / "m.safetensors"), {"model": model(meta=True)}, rename={"*": "model.*"})
    check(dry, real)
    assert dry.bytes_unverified == dry.bytes_read


def test_what_does_not_fit_is_an_error_of_the_dry_run(url: str) -> None:
    ckpt.save(url, {"model": model()})
    with pytest.raises(NamesError, match="missing"):
        ckpt.load(url, {"model": model(), "more": torch.ones(2)}, dry_run=True)
    with pytest.raises(ShapeError, match=r"shape \[200, 300\] in the checkpoint, \[2, 3\]"):
        ckpt.load(url, {"model": nn.Linear(3, 2)}, dry_run=True, only=["model.weight", "model.bias"], rename={"model.0.*": "model.*"})
    report = ckpt.load(url, {"model": model(), "more": torch.ones(2)}, dry_run=True, strict=False)
    assert report.missing == ("more",)


def test_seconds_come_from_the_log_of_the_run(root: str) -> None:
    """Once a Checkpointer has loaded a step, its spans say how fast that was."""
    state = job()
    with ckpt.Checkpointer(root) as c:
        c.save(1, state)
    assert "probe" in str(ckpt.load(f"{root}/step-00000001", state, dry_run=True).estimated_from)
    with ckpt.Checkpointer(root) as c:
        assert c.restore(state) is not None
        with pytest.raises(UsageError, match="restore loads"):
            c.restore(state, dry_run=True)
    (step,) = ckpt.list_steps(root)
    assert "the run's log: a load by 1 rank" in str(ckpt.load(step.url, state, dry_run=True).estimated_from)


# ------------------------------------------------------------------------------------------------------------------- saves


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_save_writes_what_its_dry_run_said(url: str, codec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    state, writes = job(), list[str]()
    Path(url).parent.mkdir(parents=True)
    dry = ckpt.save(url, state, codec=codec, dry_run=True)
    assert not any(Path(url).parent.iterdir()), "nothing is written, and no directory is made"
    assert dry.dry_run and dry.id == "" and math.isnan(dry.seconds) and dry.estimated_from is None

    def write(self: PosixWriter, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        writes.append(self._file)
        write_parts(self, offset, parts)

    def write_hashed(self: PosixWriter, offset: int, data: memoryview, update: Callable[[memoryview], object]) -> None:
        writes.append(self._file)
        write_and_hash(self, offset, data, update)

    write_parts, write_and_hash = PosixWriter.write, PosixWriter.write_hashed
    monkeypatch.setattr(PosixWriter, "write", write)
    monkeypatch.setattr(PosixWriter, "write_hashed", write_hashed)
    real = ckpt.save(url, state, codec=codec)
    monkeypatch.undo()
    files = list((Path(url) / "data").iterdir())
    assert real.rank_bytes == sum(file.stat().st_size for file in files)
    assert (dry.tensor_bytes, dry.requests, dry.files) == (real.tensor_bytes, real.requests, len(files))
    assert real.requests == sum("/data/" in path for path in writes)
    assert dry.rank_bytes == real.rank_bytes if codec is None else dry.rank_bytes >= real.rank_bytes
    again = ckpt.save(f"{Path(url).parent}/step-2", state, dry_run=True)
    assert again.seconds >= 0 and again.estimated_from == f"the spans of {url}"


def test_what_cannot_be_saved_is_an_error_of_the_dry_run(url: str) -> None:
    with pytest.raises(StateError, match="has no name"):
        ckpt.save(url, {"optimizer": torch.optim.SGD(model().parameters())}, dry_run=True)


# -------------------------- A process that has no torch saves and loads values, alone and as a member of a run whose other job has tensors.

BLOCKED = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('tests.api.torchless', run_name='__main__')"
INSTALLED = BLOCKED.replace("sys.modules['torch'] = None; ", "")


def run(work: str, url: object, code: str = BLOCKED) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, work, str(url)], stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


@pytest.mark.parametrize("code", [BLOCKED, INSTALLED], ids=["without torch", "torch not imported"])
def test_a_process_without_torch_saves_and_loads_values(tmp_path: Path, code: str) -> None:
    assert str(ckpt.save(tmp_path / "theirs", values(3))).startswith("saved values to ")
    assert printed(run("alone", tmp_path, code)) == ["b c d"], "what was not finished at step 2, and what nobody had"
    stored = open_catalog(str(tmp_path / "theirs"))
    for name in ("now", "later"):
        state = values(0)
        ckpt.load(tmp_path / name, state)
        assert plain(state) == plain(values(3))
        same = open_catalog(str(tmp_path / name))
        assert (same.state, same.ranks[0]) == (stored.state, stored.ranks[0])


def test_a_process_without_torch_is_told_what_needs_it_before_anything_changes(tmp_path: Path) -> None:
    class Tensors:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.ones(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    own = ckpt.PerRank(torch.ones(2))
    state = {"a": 2, "counter": Tensors(), "dtype": [torch.float32], "w": torch.ones(3), "own": own}
    ckpt.save(tmp_path / "theirs", state)
    whose = ("the tensor counter.w of the checkpoint", "dtype of the checkpoint", "the tensor own@rank0 of the checkpoint", "a tensor")
    others = ("the value at 'dtype.0'", "ckpt.training.Generators")
    expected = [f"{what} needs PyTorch, which is not installed" for what in (*whose, *others)]
    assert [line.partition("; ")[0] for line in printed(run("refused", tmp_path / "theirs"))] == expected


def test_a_member_without_torch_saves_with_one_that_has_tensors(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for start in (0, 1):
        buffer = run("buffer", root)
        state = {"w": torch.zeros(5)}
        with ckpt.Checkpointer(root, member=ckpt.Member("trainer", of=NAMES), job=ckpt.Job(timeout=60)) as c:
            assert (c.restore(state) or 0) == start
            assert state["w"].tolist() == [start] * 5
            state["w"].fill_(start + 1)
            c.save(start + 1, state)
            c.wait()
        assert printed(buffer) == [f"{start} True"]
    assert [step.number for step in ckpt.list_steps(root) if step.committed] == [1, 2]
