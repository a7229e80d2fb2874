"""Conversions between all formats: what frameworks load of the result is what was stored, bit for bit; and nothing half is ever there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import convert, settings
from ckpt.cli.start import main
from ckpt.converters.importer import import_checkpoint
from ckpt.converters.target import FileItem, OutputFile
from ckpt.converters.targets.hf import check_readable
from ckpt.dtypes import dtype
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, CorruptError, NamesError, NotCommittedError, UsageError
from ckpt.formats.journal import ConversionJournal
from ckpt.formats.native.writer import CheckpointJournal
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box
from tests.distributed.ranks import Lost, Ranks
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex64)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    made = {f"w{i}": (torch.randn(9, 5, 3) * 50).to(d) for i, d in enumerate(DTYPES)}
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "long": torch.arange(40_000, dtype=torch.float64)}


def trained() -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))
    model[0].tied = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 5)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 7, "rng": ckpt.PerRank(torch.get_rng_state()), "t": (1, 2.5, "x")}


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    found = tensor.detach().contiguous()
    return found.dtype, tuple(found.shape), found.reshape(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


def dcp_load(url: str, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=url, no_dist=True)
    return state


def native_codec(url: str) -> None:
    ckpt.save(url, tensors(), codec="zstd")


def native_plain(url: str) -> None:
    ckpt.save(url, tensors())


def native_virtual(url: str) -> None:
    ckpt.save(f"{url}-source", tensors())
    import_checkpoint(f"{url}-source", url)


def hugging_face(url: str) -> None:
    os.mkdir(url)
    held = tensors()
    names = sorted(held)
    for i, part in enumerate((names[:4], names[4:])):
        save_file({n: held[n] for n in part}, f"{url}/model-{i + 1:05d}-of-00002.safetensors")


def torch_file(url: str) -> None:
    torch.save(tensors(), url)


def dcp_directory(url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors(), checkpoint_id=url, no_dist=True)


SOURCES = (native_codec, native_virtual, hugging_face, torch_file, dcp_directory)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("to", ["native", "hf", "torch", "dcp"])
def test_every_format_into_every_other(tmp_path: Path, source: Any, to: str) -> None:
    url, made = str(tmp_path / "source"), str(tmp_path / "made")
    source(url)
    size = None if to == "torch" else 20_000
    report = convert(url, made, to=to, shard_size=size, memory=32 << 20, verify=True)
    assert report.finished and report.written_files == len(report.files) and (to == "torch" or len(report.files) > 1)
    assert not [p for p in tmp_path.rglob("*convert*") if p.name.startswith(("convert", "made.convert"))]
    expected = tensors()
    if to == "native":
        fresh = {n: torch.zeros_like(t) for n, t in expected.items()}
        ckpt.load(made, fresh)
        same(fresh, expected)
        assert verify(made).ok and verify(made).undigested == 0
    elif to == "hf":
        index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        assert set(index["weight_map"].values()) == set(report.files)
        same({k: v for f in report.files for k, v in load_file(tmp_path / "made" / f).items()}, expected)
    elif to == "torch":
        same(torch.load(made, weights_only=True), expected)
        same(torch.load(made, weights_only=True, mmap=True), expected)
        assert zipfile.ZipFile(made).testzip() is None
    else:
        same(dcp_load(made, {n: torch.zeros_like(t) for n, t in expected.items()}), expected)


@pytest.mark.parametrize(
    ("source", "to", "verified"),
    pairwise([hugging_face, torch_file, dcp_directory, native_plain], ["native", "hf", "torch", "dcp"], [False, True]),
)
def test_straight_from_file_to_file(tmp_path: Path, source: Any, to: str, verified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is stored as it will be, in pieces of two pages and jobs of a few pieces; no window takes any of it."""
    from ckpt.converters import file_stream
    from ckpt.converters import file_stream as passthrough

    monkeypatch.setattr(settings, "PIECE", 8192)
    monkeypatch.setattr(passthrough, "JOB", 20_000)
    left: list[int] = []
    monkeypatch.setattr(file_stream.FileStream, "_fill_windows", lambda stream, opened, items, told: left.extend(items))
    url, made = str(tmp_path / "source"), str(tmp_path / "made")
    source(url)
    report = convert(url, made, to=to, verify=verified, shard_size=None if to == "torch" else 100_000)
    assert report.read_bytes >= report.tensor_bytes and not left
    same({t.name: t.read() for t in ckpt.open(made).tensors()}, tensors())
    if to == "native":
        assert verify(made).ok


def test_a_training_state_keeps_everything(tmp_path: Path) -> None:
    state, url = trained(), str(tmp_path / "source")
    ckpt.save(url, state)
    for to in ("native", "torch", "dcp"):
        convert(url, str(tmp_path / to), to=to)
    again = trained()
    for value in again["optimizer"].state.values():
        value["exp_avg"].zero_()
    with torch.no_grad():
        again["model"][0].weight.zero_()
    again["step"] = 0
    ckpt.load(str(tmp_path / "native"), again)
    model, optimizer = state["model"].state_dict(), state["optimizer"].state_dict()
    same(again["model"].state_dict(), model)
    assert again["step"] == 7 and again["t"] == (1, 2.5, "x")
    names = [n for n, _ in state["model"].named_parameters()]
    loaded = torch.load(tmp_path / "torch", weights_only=True)
    dcp_state: dict[str, Any] = {
        "model": {n: torch.zeros_like(t) for n, t in model.items()},
        "optimizer": {"state": {n: {"exp_avg": torch.zeros_like(optimizer["state"][i]["exp_avg"])} for i, n in enumerate(names)}},
        "step": 0,
    }
    dcp_load(str(tmp_path / "dcp"), dcp_state)
    for found in (loaded, dcp_state):
        same(found["model"], model)
        assert found["step"] == 7
        for i, name in enumerate(names):
            assert raw(found["optimizer"]["state"][name]["exp_avg"]) == raw(optimizer["state"][i]["exp_avg"])
            assert raw(again["optimizer"].state_dict()["state"][i]["exp_avg"]) == raw(optimizer["state"][i]["exp_avg"])
    assert loaded["model"]["0.tied"].data_ptr() == loaded["model"]["2.weight"].data_ptr()
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.25 and loaded["optimizer"]["param_groups"][0]["params"] == names
    assert torch.equal(loaded["rng"][0], state["rng"].value) and loaded["t"] == (1, 2.5, "x")


def test_weights_alone_cast_and_filtered(tmp_path: Path) -> None:
    state, url = trained(), str(tmp_path / "source")
    ckpt.save(url, state)
    report = convert(url, str(tmp_path / "a.safetensors"), to="hf", dtype="bfloat16", exclude=["*.bias"])
    expected = {n: t.bfloat16() for n, t in state["model"].state_dict().items() if not n.endswith("bias")}
    same(load_file(tmp_path / "a.safetensors"), expected)
    assert report.left_out and all(n.startswith(("optimizer", "rng")) or n.endswith("bias") for n in report.left_out)
    convert(url, str(tmp_path / "n"), to="native", optimizer=False, only=["model.*"])
    view = ckpt.open(str(tmp_path / "n"))
    assert {n.split(".")[0] for n in view} == {"model"} and set(view.state()) == {"model", "step", "rng", "t"}
    convert(url, str(tmp_path / "c"), to="native", dtype="float16")
    kinds = {n: t.dtype for n, t in ((t.name, t) for t in ckpt.open(str(tmp_path / "c")).tensors())}
    assert all(k == (torch.float16 if n.startswith("model") else torch.float32) for n, k in kinds.items() if not n.startswith("rng"))


def test_views_filling_and_padding(tmp_path: Path) -> None:
    url = str(tmp_path / "source")
    layout = ckpt.Layout({"tp": 1}, rules=[("v", ckpt.Padded(0, 3)), ("*", ckpt.Replicate())])
    held = {"v": torch.arange(10.0).reshape(5, 2), "q": torch.arange(12.0).reshape(4, 3), "k": torch.ones(2, 3)}
    ckpt.save(url, held, layout=layout)
    assert ckpt.open(url)["v"].shape == (3, 2)
    convert(url, str(tmp_path / "n"), to="native")
    fresh = {n: torch.zeros_like(t) for n, t in held.items()}
    ckpt.load(str(tmp_path / "n"), fresh, layout=layout)
    same(fresh, held)
    convert(url, str(tmp_path / "h"), to="hf")
    assert raw(load_file(tmp_path / "h" / "model.safetensors")["v"]) == raw(held["v"][:3])

    def made(shapes: Any) -> dict[str, views.LogicalTensor]:
        q, k = (views.whole(n, shapes[n]) for n in "qk")
        return {"qk": views.padded(views.interleave([q, k], 0, 2), 0, 7), "qt": views.transpose(q, [1, 0])}

    convert(url, str(tmp_path / "v.safetensors"), to="hf", views=made)
    q, k = held["q"], held["k"]
    fused = torch.cat([q[:2], k[:1], q[2:], k[1:], torch.zeros(1, 3)])
    same(load_file(tmp_path / "v.safetensors"), {"qk": fused, "qt": q.T})


def test_a_tiny_window_reads_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.converters import buffered, file_stream

    monkeypatch.setattr(settings, "CHUNK", 1000)
    monkeypatch.setattr(buffered, "LEAST", 5000)
    monkeypatch.setattr(file_stream, "runs_of", lambda chosen, items: {})
    monkeypatch.setattr("ckpt.settings.LEAST_MEMORY", 1)
    ckpt.save(str(tmp_path / "s"), tensors())
    convert(str(tmp_path / "s"), str(tmp_path / "t"), to="dcp", memory=4096)
    same(dcp_load(str(tmp_path / "t"), {n: torch.zeros_like(t) for n, t in tensors().items()}), tensors())


@pytest.mark.parametrize("to", ["native", "hf", "torch", "dcp"])
def test_storage_that_is_no_file_system(tmp_path: Path, to: str) -> None:
    url, made = str(tmp_path / "s"), f"inprocess://convert-{to}/made"
    ckpt.save(url, tensors())
    convert(url, made, to=to, verify=True)
    same({t.name: t.read() for t in ckpt.open(made).tensors()}, tensors())


def test_the_library_of_the_format_has_the_last_word(tmp_path: Path) -> None:
    """With ``verify`` a written file is opened as its readers will open it."""
    ckpt.save(str(tmp_path / "s"), {"w": torch.arange(6.0), "b": torch.zeros(2)})
    convert(str(tmp_path / "s"), str(tmp_path / "hf"), to="hf", verify=True)
    path, backend = tmp_path / "hf/model.safetensors", open_backend(str(tmp_path / "hf"))
    data = path.read_bytes()
    items = tuple(FileItem(name, Box.whole((n,)), 0, 4) for name, n in (("w", 6), ("b", 2)))
    check_readable(backend, OutputFile(path=path.name, size=len(data), items=items, ends=lambda digests: []))
    with pytest.raises(CorruptError, match="shows other tensors: 'b'"):
        check_readable(backend, OutputFile(path=path.name, size=len(data), items=items[:1], ends=lambda digests: []))
    assert not path.exists(), "nobody can load it by mistake"
    path.write_bytes(data.replace(b"F32", b"F99", 1))
    with pytest.raises(CorruptError, match="the safetensors library refuses the file"):
        check_readable(backend, OutputFile(path=path.name, size=len(data), items=items, ends=lambda digests: []))
    assert not path.exists()


def test_a_small_tensor_takes_two_writes(tmp_path: Path) -> None:
    """Its elements, and all of the archives up to the next one's elements."""
    state = {f"w{n}": torch.full((3,), float(n)) for n in range(60)}
    ckpt.save(tmp_path / "from", state)
    process = FaultyProcess()
    with wrap_backends(process.wrap):
        convert(tmp_path / "from", tmp_path / "to", to="dcp")
    assert sum(line.startswith("write") for line in process.log) <= 2 * len(state) + 10
    loaded = {name: torch.zeros(3) for name in state}
    ckpt.load(tmp_path / "to", loaded)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_tensors_that_no_state_names(tmp_path: Path) -> None:
    from tests.cli.checkpoints import write_checkpoint

    url, arrays = str(tmp_path / "s"), {n: t.numpy() for n, t in tensors().items() if n in ("w0", "long", "scalar")}
    write_checkpoint(url, arrays, state={"step": 3})
    convert(url, str(tmp_path / "t.pt"), to="torch")
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)
    assert loaded.pop("step") == 3
    same(loaded, {n: torch.from_numpy(a) for n, a in arrays.items()})


def test_small_tensors_among_the_values_are_read_without_trust(tmp_path: Path) -> None:
    """A learning rate that is a tensor is kept in the state, beside what is a tensor of the checkpoint."""
    model = torch.nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), capturable=False, foreach=False)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ckpt.save(str(tmp_path / "s"), {"model": model, "optimizer": optimizer})
    convert(str(tmp_path / "s"), str(tmp_path / "t.pt"), to="torch")
    for options in ({}, {"mmap": True}):
        found = torch.load(tmp_path / "t.pt", weights_only=True, **options)
        assert torch.equal(found["optimizer"]["param_groups"][0]["lr"], torch.tensor(0.25))
        assert torch.equal(found["model"]["weight"], model.weight) and found["optimizer"]["state"]["weight"]["step"] == 1
    assert zipfile.ZipFile(tmp_path / "t.pt").testzip() is None
    assert torch.equal(ckpt.open(str(tmp_path / "t.pt"))["model.weight"].read(), model.weight)
    convert(str(tmp_path / "s"), str(tmp_path / "d"), to="dcp")
    assert ckpt.open(str(tmp_path / "d")).state()["optimizer"]["param_groups"][0]["lr"].read() == 0.25


def test_archives_of_more_than_4_gib(tmp_path: Path) -> None:
    """Of zeros that the file system does not store: sizes and offsets that take 64 bits."""
    from ckpt.converters.targets.torch_file import ArchivePlan, StorageStub

    stands = [StorageStub(0, dtype("uint8"), (5 << 30,)), StorageStub(1, dtype("float32"), (3,))]
    archive = ArchivePlan({"large": stands[0], "after": stands[1]}, stands, base=0)
    with open(tmp_path / "large.pt", "wb") as file:
        file.truncate(archive.size)
        for offset, data in archive.ends([7, 8]):
            file.seek(offset)
            file.write(data)
        file.seek(archive.starts[1])
        file.write(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    sizes = {i.filename: i.file_size for i in zipfile.ZipFile(tmp_path / "large.pt").infolist()}
    assert (sizes["archive/data/0"], sizes["archive/data/1"]) == (5 << 30, 12)
    loaded = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert loaded["large"].shape == (5 << 30,) and loaded["after"].tolist() == [1.0, 2.0, 3.0]
    assert ckpt.open(str(tmp_path / "large.pt"))["after"].read().tolist() == [1.0, 2.0, 3.0]


# ----------------------------------------------------------------------------------------------------------- failures


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    url, made = str(tmp_path / "s"), tmp_path / "made"
    ckpt.save(url, tensors())
    made.mkdir()
    (made / "notes.txt").write_text("mine")
    for to in ("native", "hf", "dcp"):
        with pytest.raises(ConflictError, match=r"notes\.txt"):
            convert(url, str(made), to=to)
    with pytest.raises(ConflictError, match="made"):
        convert(url, str(made), to="torch")
    assert [p.name for p in made.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="cannot be replaced"):
        convert(url, str(made), to="hf", overwrite=True)
    ckpt.save(str(tmp_path / "n"), {"w": torch.ones(3)})
    with pytest.raises(ConflictError, match="--overwrite"):
        convert(url, str(tmp_path / "n"), to="native")
    convert(url, str(tmp_path / "n"), to="native", overwrite=True)
    same({t.name: t.read() for t in ckpt.open(str(tmp_path / "n")).tensors()}, tensors())
    assert len(list((tmp_path / "n" / "data").iterdir())) == 1


@pytest.mark.parametrize("to", ["native", "hf", "torch", "dcp"])
def test_a_damaged_source_leaves_nothing_to_open(tmp_path: Path, to: str) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(url, tensors())
    (file,) = (tmp_path / "s" / "data").iterdir()
    data = bytearray(file.read_bytes())
    at = data.index(tensors()["long"][20_000:20_100].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="long"):
        convert(url, made, to=to)
    with pytest.raises(ckpt.CkptError):
        ckpt.open(made)
    file.write_bytes(data[:-1])
    with pytest.raises(CorruptError):
        convert(url, made, to=to)


def test_options_that_cannot_be(tmp_path: Path) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(url, {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2, dtype=torch.complex128)}})
    for error, match, options in (
        (UsageError, "cannot convert to 'gguf': no such format", {"to": "gguf"}),
        (NamesError, "'z\\*'", {"to": "native", "only": ["z*"]}),
        (NamesError, "'y\\*'", {"to": "native", "exclude": ["y*"]}),
        (UsageError, "cannot convert to dtype 'int8'", {"to": "native", "dtype": "int8"}),
        (UsageError, "no tensor of a model", {"to": "hf", "root": "c"}),
        (UsageError, "several parts", {"to": "hf"}),
        (UsageError, "have no complex128", {"to": "hf", "root": "b"}),
        (UsageError, "too few", {"to": "native", "memory": 5}),
        (UsageError, "one file", {"to": "torch", "shard_size": 5}),
    ):
        with pytest.raises(error, match=match):
            convert(url, made, **options)  # type: ignore[arg-type]
    assert not Path(made).exists()
    report = convert(url, made, to="native", dry_run=True)
    assert (report.finished, report.written_files, report.tensor_bytes) == (False, 1, 40) and not Path(made).exists()


def killed(ranks: Ranks, work: Callable[..., None], *args: Any) -> None:
    """A process of its own does the work, and ends by SIGKILL in it."""
    (lost,) = ranks.run(1, work, *args, process_group=False, allow_death=True)
    assert isinstance(lost, Lost) and lost.exitcode == -signal.SIGKILL, lost


def die_after(left: int, url: str, made: str, to: str) -> None:
    """So many items are done, and no more."""
    done = ConversionJournal.done

    def dies(self: ConversionJournal, number: int) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        done(self, number)

    ConversionJournal.done = dies  # the process ends with it
    convert(url, made, to=to, shard_size=20_000)


@pytest.mark.parametrize("to", ["native", "hf"])
def test_killed_and_gone_on_with(ranks: Ranks, tmp_path: Path, to: str) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    held = {f"w{i}": torch.full((4000,), float(i)) for i in range(6)}
    ckpt.save(url, held)
    killed(ranks, die_after, 3, url, made, to)
    with pytest.raises(NotCommittedError, match="convert"):
        ckpt.open(made)
    with pytest.raises(ConflictError, match="another conversion"):
        convert(url, made, to=to, shard_size=20_001)
    report = convert(url, made, to=to, shard_size=20_000)
    assert (len(report.files), report.written_files, report.finished) == (6, 3, True)
    assert report.read_bytes == 3 * 16_000
    same({t.name: t.read() for t in ckpt.open(made).tensors()}, held)
    if to == "native":  # it may have been killed after all was done: the commit record says that it is this very conversion
        again = convert(url, made, to=to, shard_size=20_000)
        assert (again.id, again.written_files, again.finished) == (report.id, 0, True)
    with pytest.raises(ConflictError, match="already"):
        convert(url, made, to=to, shard_size=20_001)


def die_while_it_is_cleared(left: int, url: str, made: str, to: str) -> None:
    def remove(record: Any, **options: Any) -> None:
        for path in [record.record, *sorted(record.marks())][:left]:
            record.backend.delete(path)
        os.kill(os.getpid(), signal.SIGKILL)

    ConversionJournal.remove = remove
    convert(url, made, to=to)


@pytest.mark.parametrize(("to", "gone"), [("native", 0), ("native", 1), ("native", 3), ("hf", 0), ("hf", 2), ("torch", 1)])
def test_killed_after_the_commit_and_before_the_end(ranks: Ranks, tmp_path: Path, to: str, gone: int) -> None:
    """Of record, mark and claim so many are gone: the same command says that all is there, and leaves nothing but the checkpoint."""
    url, made = str(tmp_path / "s"), str(tmp_path / "made.pt")
    ckpt.save(url, tensors())
    killed(ranks, die_while_it_is_cleared, gone, url, made, to)
    report = convert(url, made, to=to)
    assert (report.written_files, report.finished) == (0, True)
    same({t.name: t.read() for t in ckpt.open(made).tensors()}, tensors())
    assert not list(tmp_path.glob("**/*convert*"))


def die_at_the_commit(url: str, made: str, **options: Any) -> None:
    CheckpointJournal.commit = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL)
    convert(url, made, to="native", **options)


def die_as_a_task(url: str, made: str) -> None:
    die_at_the_commit(url, made, part=(1, 2), shard_size=20_000)


def test_killed_while_finishing(ranks: Ranks, tmp_path: Path) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(url, tensors())
    killed(ranks, die_at_the_commit, url, made)
    assert list(Path(made).glob("index-*/*")) and list(Path(made).glob("convert-*/finish"))
    with pytest.raises(NotCommittedError):
        ckpt.open(made)
    assert not convert(url, made, to="native", part=(1, 2)).finished
    report = convert(url, made, to="native")
    assert (report.finished, report.written_files) == (True, 0)
    assert verify(made).ok and not list(Path(made).glob("convert*"))
    made = str(tmp_path / "by parts")
    assert not convert(url, made, to="native", part=(0, 2), shard_size=20_000).finished
    killed(ranks, die_as_a_task, url, made)
    again = convert(url, made, to="native", part=(1, 2), shard_size=20_000)  # the task that died, and no other
    assert (again.finished, again.written_files) == (True, 0) and verify(made).ok


def test_a_save_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(url, {f"w{i}": torch.full((4000,), float(i)) for i in range(2)})
    convert(url, made, to="native", shard_size=20_000, part=(0, 2))
    ckpt.save(made, {"mine": torch.ones(3)})
    with pytest.raises(ConflictError, match="by now"):
        convert(url, made, to="native", shard_size=20_000, part=(1, 2))
    assert set(ckpt.open(made)) == {"mine"}


def run_command(command: list[str], rank: int, size: int) -> Any:
    """In a process that a launcher has given a rank: what the command prints, as JSON; its exit code is 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    sys.argv = command
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return json.loads(out.getvalue())


@pytest.mark.parametrize("to", ["native", "dcp"])
def test_processes_divide_the_files(ranks: Ranks, tmp_path: Path, to: str) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    held = {f"w{i}": torch.full((4000,), float(i)) for i in range(5)}
    ckpt.save(url, held)
    command = ["ckpt", "convert", "--json", "--to", to, "--shard-size", "20KB", url, made]
    with ThreadPoolExecutor(2) as both:
        said = list(both.map(lambda rank: ranks.run(1, run_command, command, rank, 2, process_group=False)[0], range(2)))
    assert [s["written_files"] for s in said] == [3, 2] and any(s["finished"] for s in said)
    same({t.name: t.read() for t in ckpt.open(made).tensors()}, held)
    assert [path.name for path in Path(made).glob("convert*/*")] == ["finish"] * (to != "native")  # by which a repeated task knows


def test_one_process_after_another(tmp_path: Path) -> None:
    url, made = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(url, {f"w{i}": torch.full((4000,), float(i)) for i in range(3)})
    for part in ((0, 0), (4, 4), (-1, 4), (1,), ("0", "4"), [0, 4]):
        with pytest.raises(UsageError, match="part= is the number of this process"):
            convert(url, made, to="hf", shard_size=20_000, part=part)  # type: ignore[arg-type]
    first = convert(url, made, to="hf", shard_size=20_000, part=(1, 4))
    assert not first.finished and first.written_files == 1
    assert not convert(url, made, to="hf", shard_size=20_000, part=(3, 4)).written_files
    with pytest.raises(NotCommittedError):
        ckpt.open(made)
    assert not convert(url, made, to="hf", shard_size=20_000, part=(0, 4)).finished
    assert convert(url, made, to="hf", shard_size=20_000, part=(2, 4)).finished
    assert convert(url, made, to="hf", shard_size=20_000, part=(3, 4)).written_files == 0


PEAK = """
import sys
from ckpt import convert
import ckpt.converters.buffered, ckpt.converters.targets.torch_file

def resident(field):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(field)))

convert(sys.argv[1] + "/small", sys.argv[2] + "-small", to=sys.argv[3])
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
convert(sys.argv[1] + "/large", sys.argv[2], to=sys.argv[3], memory=64 << 20)
print((resident("VmHWM") - before) >> 10)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "small"), {"w": torch.zeros(10)})
    ckpt.save(str(tmp_path / "large"), {"w": torch.zeros(300 << 18), "v": torch.zeros(20, 1 << 18)})
    made = str(tmp_path / "made")
    for to in ("hf", "torch"):
        found = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path), f"{made}-{to}", to], check=True, capture_output=True, text=True, timeout=200
        )
        assert int(found.stdout) < 64 + 60


# -------------------------------------------------------------------------------------------------------- transformers

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": ("LlamaConfig", {}, "linear_qkv"),
    "qwen-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "local_experts.3.linear_fc1"),
}


@pytest.mark.parametrize("names", MODELS)
def test_transformers_loads_what_was_converted(tmp_path: Path, names: str) -> None:
    transformers = pytest.importorskip("transformers")
    from ckpt.converters.mapping.convention import translated_views

    kind, more, fused_name = MODELS[names]
    url, fused, back, copy = (str(tmp_path / n) for n in ("model", "fused", "back", "copy"))
    torch.manual_seed(9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**COMMON, **more)).save_pretrained(url)
        convert(url, fused, to="native", views=translated_views(url, names, "megatron", {}))
        assert any(fused_name in name for name in ckpt.open(fused))
        shutil.copy(f"{url}/config.json", f"{fused}/config.json")
        convert(fused, back, to="hf", views=translated_views(fused, names, "huggingface", {}), shard_size=20_000)
        shutil.copy(f"{url}/config.json", f"{back}/config.json")
        convert(url, copy, to="hf")
        models = [transformers.AutoModelForCausalLM.from_pretrained(p) for p in (url, back, copy)]
    assert Path(copy, "config.json").read_bytes() == Path(url, "config.json").read_bytes()
    assert len(list(Path(back).glob("*.safetensors"))) > 2
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        logits = [m.eval()(ids).logits for m in models]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
