"""A codec from outside the package: one object and its entry point. Saved, verified, loaded and converted with; and what readers
say that do not have it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import CkptError, FormatError
from ckpt.formats.native.codecs import CODECS
from ckpt.formats.native.rebuild import rebuild
from ckpt.io_backends.registry import open_backend
from tests.toy_plugins import DEFLATE, installed

STATE = {"w": torch.arange(20000, dtype=torch.float32) // 7, "bytes": torch.zeros(5000, dtype=torch.uint8)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A checkpoint that was saved with it."""
    with installed():
        ckpt.save(str(tmp_path / "a"), dict(STATE), codec="deflate")
    return str(tmp_path / "a")


def identity(url: str) -> str:
    record: dict[str, str] = json.loads(Path(url, "checkpoint.json").read_bytes())
    return record["id"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_it_saves_verifies_loads_and_converts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, DEFLATE.name, DEFLATE)
    (file,) = Path(url).rglob("*.safetensors")
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    assert header.keys() == {"__metadata__", "w[:]#deflate", "bytes"}, "elements that the codec does not take are stored as they are"
    start, stop = header["w[:]#deflate"]["data_offsets"]
    assert zlib.decompress(data[size + start : size + stop]) == STATE["w"].numpy().tobytes()

    target = {name: torch.ones_like(t) for name, t in STATE.items()}
    ckpt.load(url, dict(target))
    assert all(torch.equal(target[name], t) for name, t in STATE.items())
    assert run("verify", url)[0] == 0
    assert sorted(t.name for t in rebuild(open_backend(url), identity(url)).contents.tensors) == sorted(STATE)

    assert run("convert", url, f"{url}-hf", "--to", "hf", "--no-config")[0] == 0
    converted = load_file(next(iter(Path(f"{url}-hf").glob("*.safetensors"))))
    assert all(torch.equal(converted[name], t) for name, t in STATE.items())


def test_a_reader_without_it_names_it(url: str) -> None:
    with pytest.raises(FormatError, match="unknown codec 'deflate'") as caught:
        ckpt.load(url, {name: torch.ones_like(t) for name, t in STATE.items()})
    assert caught.value.hint is not None and "zstd" in caught.value.hint
    with pytest.raises(FormatError, match="'deflate'"):
        rebuild(open_backend(url), identity(url))
    for command in (("verify", url), ("convert", url, f"{url}-hf", "--to", "hf", "--no-config")):
        code, output = run(*command)
        assert code != 0 and "deflate" in output, output
    assert not list(Path(f"{url}-hf").glob("*.safetensors"))
    with pytest.raises(CkptError):
        ckpt.open(url)["w"].read()
