"""Saves with a codec: what is stored decodes to the same bytes for every reader, whatever the tensors are like and however many files
they take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt import settings
from ckpt.cli.main import cli
from ckpt.dtypes import DTYPES
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError, UsageError
from ckpt.formats.native import datafile
from tests.api.checked import Stored, data_files, described, empty_directory, pattern, same
from tests.formats import oracle

CODECS = ("zstd", "planes-zstd")
ENGINES = ("sync", "eager", "lazy")

KINDS = {name: kind for name in DTYPES if isinstance(kind := getattr(torch, name, None), torch.dtype)}


def save(url: str, state: dict[str, Any], codec: Any, engine: str = "sync", **options: Any) -> Stored:
    """Save in one of the ways, and give what the oracle finds."""
    if engine == "sync":
        ckpt.save(url, state, codec=codec, **options)
    else:
        ckpt.save_async(url, state, codec=codec, capture=engine, **options).result()  # type: ignore[arg-type]
    return oracle.read(url)


def features(url: str) -> list[str]:
    found: list[str] = json.loads(Path(url, "checkpoint.json").read_bytes())["features"]
    return found


def keys(url: str) -> list[str]:
    """The keys of all data files, but for the metadata."""
    found = []
    for path in data_files(url):
        data = path.read_bytes()
        found += json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [k for k in found if k != "__metadata__"]


def is_coded(key: str) -> bool:
    return key.endswith(tuple(f"#{codec}" for codec in CODECS))


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Such as shrink by either codec."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.to(dtype)


def blank(like: torch.Tensor) -> torch.Tensor:
    """Zeros of any dtype; torch cannot fill all of them."""
    return torch.zeros(like.numel() * like.element_size(), dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def check(url: str, state: dict[str, torch.Tensor], found: Stored) -> None:
    """Exactly these tensors are stored, and load as they were; verify has no complaint."""
    assert found.keys() == state.keys()
    assert [n for n, t in state.items() if found[n] != described(t)] == []
    target = {n: blank(t) for n, t in state.items()}
    ckpt.load(url, target)
    assert [n for n, t in state.items() if not same(target[n], t)] == []
    view = ckpt.open(url)
    assert [n for n, t in state.items() if described(view[n].read()) != described(t)] == []
    report = verify(url)
    assert report.problems == ()
    assert report.undigested == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("codec", CODECS)
def test_every_dtype(url: str, codec: str, engine: str) -> None:
    """Of each, what shrinks, what does not, a scalar, and nothing; complex views are stored as they read."""
    state = {}
    for name, kind in KINDS.items():
        state[f"{name}.zeros"] = torch.zeros(40 * 1024, dtype=torch.uint8).view(kind).reshape(4, -1)
        state[f"{name}.noise"] = pattern(kind, 40, 64)
        state[f"{name}.scalar"] = pattern(kind)
        state[f"{name}.empty"] = torch.empty(0, 3, dtype=kind)
        state[f"{name}.columns"] = torch.zeros(64, 1024, dtype=torch.uint8).view(kind)[:, ::2]
    state["conj"] = torch.ones(4096, dtype=torch.complex64).mul(2 + 3j).conj()
    state["neg"] = torch.ones(4096, dtype=torch.complex64).mul(2 + 3j).conj().imag
    check(url, state, save(url, state, codec, engine))
    assert features(url) == ["codecs"]
    stored = keys(url)
    assert {f"{name}.zeros[:,:]#{codec}" for name in KINDS} <= {*stored}
    assert not any(is_coded(k) for k in stored if ".noise" in k and "bool" not in k)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_feature_is_named_only_where_something_is_coded(url: str, engine: str) -> None:
    noise = {"w": pattern(torch.uint8, 100_000), "s": torch.tensor(1.0), "e": torch.empty(0)}
    check(url, noise, save(url, noise, "zstd", engine))
    assert features(url) == []
    assert not any(map(is_coded, keys(url)))
    state = noise | {"z": torch.zeros(100_000)}
    check(url, state, save(url, state, "zstd", engine))
    assert features(url) == ["codecs"]
    assert [is_coded(k) for k in sorted(keys(url))] == [False, False, False, True]
    check(url, state, save(url, state, None, engine))
    assert features(url) == []


@pytest.mark.parametrize("codec", CODECS)
def test_a_state_without_tensors(url: str, codec: str) -> None:
    assert save(url, {"step": 3, "name": "x"}, codec) == {}  # type: ignore[dict-item]
    assert features(url) == []
    state: dict[str, Any] = {"step": 0, "name": ""}
    ckpt.load(url, state)
    assert state == {"step": 3, "name": "x"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("codec", CODECS)
def test_chunks_of_one_tensor(url: str, chunks_of: Callable[[int], None], codec: str, engine: str) -> None:
    """Some of its chunks shrink, others do not; the last is shorter."""
    chunks_of(10_000)
    state = {
        "mixed": torch.cat([weights(50, 100), pattern(torch.bfloat16, 75, 100), weights(76, 100, seed=1)]),
        "line": torch.arange(9_999, dtype=torch.int64),
        "deep": weights(3, 4, 5, 600, dtype=torch.float32),
    }
    check(url, state, save(url, state, codec, engine))
    mixed = [is_coded(k) for k in keys(url) if k.startswith("mixed[")]
    assert len(mixed) == 5
    assert 0 < sum(mixed) < 5
    assert sum(k.startswith("line[") for k in keys(url)) == 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("size", "count"), [(30_000, 16_384), (1 << 20, 3)])
def test_several_files(
    url: str, monkeypatch: pytest.MonkeyPatch, chunks_of: Callable[[int], None], engine: str, size: int, count: int
) -> None:
    """Files of at most so many bytes before coding, or so many chunks."""
    monkeypatch.setattr(settings, "CODED_FILE", size)
    monkeypatch.setattr(datafile, "CODED_CHUNKS", count)
    chunks_of(20_000)
    state = {f"t{i:02}": weights(100, 40 + i, seed=i) for i in range(20)}
    state |= {"noise": pattern(torch.uint8, 50_000), "scalar": torch.tensor(1.0), "empty": torch.empty(0)}
    check(url, state, save(url, state, "planes-zstd", engine))
    files = data_files(url)
    assert len(files) >= 6
    assert len({p.name for p in files}) == len(files)
    lengths = [len([k for k in json.loads(_header(p)) if k != "__metadata__"]) for p in files]
    assert max(lengths) <= count
    if size == 30_000:
        assert max(p.stat().st_size for p in files) <= 30_000 + 3 * 4096


def _header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_a_small_staging_budget(url: str, chunks_of: Callable[[int], None]) -> None:
    """Capturing waits for coding, and nothing that is stored as it is changes when its place is used again."""
    chunks_of(20_000)
    state = {f"t{i:02}": (weights(100, 100, seed=i) if i % 2 else pattern(torch.uint8, 20_000, seed=i)) for i in range(30)}
    check(url, state, save(url, state, "zstd", "lazy", staging_bytes=100_000))
    assert features(url) == ["codecs"]


@pytest.mark.parametrize("engine", [pytest.param("sync", marks=pytest.mark.slow), "lazy"])
def test_thousands_of_tiny_tensors(url: str, engine: str) -> None:
    values = torch.arange(6_000 * 16, dtype=torch.float32).reshape(6_000, 16)
    state = {f"layer{i:05}.w": values[i].clone() for i in range(6_000)}
    found = save(url, state, "planes-zstd", engine)
    assert found.keys() == state.keys()
    assert b"".join(found[n][2] for n in sorted(found)) == described(values)[2]
    target = {n: torch.empty(16) for n in state}
    ckpt.load(url, target)
    assert torch.equal(torch.stack([target[n] for n in sorted(target)]), values)


@pytest.mark.parametrize("codec", CODECS)
def test_tied_and_per_rank_tensors(url: str, codec: str) -> None:
    tied = weights(300, 20)
    state = {"a": tied, "b": tied, "rank": ckpt.PerRank({"rng": torch.zeros(5000, dtype=torch.uint8)})}
    found = save(url, state, codec)
    assert found["a"] == found["b"] == described(tied)
    assert len(found) == 3
    target = {"a": torch.zeros_like(tied), "b": torch.zeros_like(tied), "rank": ckpt.PerRank(None)}
    ckpt.load(url, target)
    assert same(target["a"], tied)
    assert same(target["rank"].value["rng"], torch.zeros(5000, dtype=torch.uint8))  # type: ignore[attr-defined]


def test_a_codec_that_is_not_known(url: str) -> None:
    for call in (ckpt.save, ckpt.save_async):
        with pytest.raises(UsageError, match="planes-zstd"):
            call(url, {"w": torch.ones(3)}, codec="gzip")  # type: ignore[operator]
    with pytest.raises(UsageError, match="planes-zstd"):
        ckpt.Checkpointer(url, codec="gzip")
    assert not Path(url).exists()


# ------------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture(scope="module")
def coded() -> Any:
    with empty_directory() as root:
        url = f"{root}/step-1"
        ckpt.save(url, {"w": weights(300, 200), "noise": pattern(torch.uint8, 5000)}, codec="planes-zstd")
        yield url


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_verify_reads_coded_chunks(coded: str) -> None:
    assert json.loads(run("verify", "--json", coded))["problems"] == []
    (path,) = data_files(coded)
    header = json.loads(_header(path))
    start = 8 + len(_header(path))
    good = path.read_bytes()
    for key, name in ((next(k for k in header if k.startswith("w[")), "w"), ("noise", "noise")):
        a, b = header[key]["data_offsets"]
        for at in (start + a, start + (a + b) // 2, start + b - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            try:
                (problem,) = json.loads(run("verify", "--json", coded, code=20))["problems"]
                assert problem["tensor"] == name
                with pytest.raises(CorruptError, match=name):
                    ckpt.load(coded, {name: _target(name)}, strict=False)
            finally:
                path.write_bytes(good)
    assert run("verify", coded).startswith("ok")


def _target(name: str) -> torch.Tensor:
    return torch.zeros(300, 200, dtype=torch.bfloat16) if name == "w" else torch.zeros(5000, dtype=torch.uint8)


def test_inspect_shows_tensors_as_they_were(coded: str) -> None:
    text = run("inspect", coded)
    assert "bfloat16" in text
    document = json.loads(run("inspect", "--json", coded))
    (row,) = [t for t in document["tensors"] if t["name"] == "w"]
    assert (row["dtype"], row["shape"]) == ("bfloat16", [300, 200])
    assert sum(os.path.getsize(p) for p in data_files(coded)) < 300 * 200 * 2 + 5000
