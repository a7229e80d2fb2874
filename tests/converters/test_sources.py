"""Which files a virtual checkpoint may read: it can point anywhere, so whoever opens one can say where its files may lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import AccessError, CorruptError, UsageError
from tests.failures.damage import Copy, arrow_file

W = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def virtual(tmp_path: Path) -> str:
    """A virtual checkpoint of one file in ``models/a``."""
    (tmp_path / "models" / "a").mkdir(parents=True)
    save_file({"w": W}, tmp_path / "models" / "a" / "model.safetensors")
    import_checkpoint(str(tmp_path / "models" / "a"), str(tmp_path / "imported"))
    return str(tmp_path / "imported")


def load(url: str, **options: object) -> torch.Tensor:
    state = {"w": torch.zeros(3, 4)}
    ckpt.load(url, state, **options)  # type: ignore[arg-type]
    return state["w"]


def test_by_default_it_reads_what_was_imported(virtual: str) -> None:
    assert torch.equal(ckpt.open(virtual)["w"][...], W)
    assert torch.equal(load(virtual), W)


def test_roots_that_hold_its_files_are_enough(virtual: str, tmp_path: Path) -> None:
    for sources in ([str(tmp_path / "models")], str(tmp_path / "models" / "a"), ["s3://elsewhere", f"file://{tmp_path}/models/"]):
        assert torch.equal(ckpt.open(virtual, sources=sources)["w"][...], W)
        assert torch.equal(load(virtual, read=ckpt.ReadOptions(sources=sources)), W)


def test_files_elsewhere_are_refused_by_name(virtual: str, tmp_path: Path) -> None:
    (tmp_path / "mod").mkdir()  # "models" begins with the same letters
    for sources in ((), [str(tmp_path / "mod")], ["s3://models"]):
        with pytest.raises(AccessError, match=r"model\.safetensors.*models/a.*may be read"):
            ckpt.open(virtual, sources=sources)["w"][...]
        with pytest.raises(AccessError):
            load(virtual, read=ckpt.ReadOptions(sources=sources))


def test_the_environment_says_it_to_commands(virtual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SOURCES", f"/nowhere ; {tmp_path}/models")
    assert CliRunner().invoke(cli, ["verify", virtual]).exit_code == 0
    for roots in ("", "/nowhere"):
        monkeypatch.setenv("CKPT_SOURCES", roots)
        for command in (
            ["verify", virtual],
            ["cp", virtual, str(tmp_path / "copy")],
            ["convert", "--to", "hf", "--no-config", virtual, str(tmp_path / "hf")],
        ):
            result = CliRunner().invoke(cli, command)
            assert result.exit_code in (20, 30), result.output
            assert "may be read" in result.output
        assert torch.equal(ckpt.open(virtual, sources=str(tmp_path))["w"][...], W)  # the argument wins


def test_a_link_does_not_lead_out_of_a_root(virtual: str, tmp_path: Path) -> None:
    source = tmp_path / "models" / "a" / "model.safetensors"
    outside = tmp_path / "outside.safetensors"
    shutil.copy2(source, outside)
    source.unlink()
    source.symlink_to(outside)
    with pytest.raises(AccessError):
        ckpt.open(virtual, sources=str(tmp_path / "models"))["w"][...]


def test_a_root_does_not_lead_out_of_those_that_may_be_read(virtual: str, tmp_path: Path) -> None:
    (tmp_path / "mod").mkdir()
    pointing_at(f"file://{tmp_path}/mod/%2e%2e/models/a", virtual)
    with pytest.raises(AccessError):
        ckpt.open(virtual, sources=[str(tmp_path / "mod"), f"file://{tmp_path}/mod", f"local://{tmp_path}/mod"])["w"][...]
    assert torch.equal(ckpt.open(virtual, sources=str(tmp_path / "models"))["w"][...], W)


def pointing_at(root: str, virtual: str) -> None:
    copy = Copy(virtual)
    table = copy.table("sources.arrow")
    types = {field.name: field.type for field in copy.arrow("sources.arrow").schema}
    table["root"], table["stamp"] = [root] * len(table["root"]), [None] * len(table["root"])
    copy.set_index("sources.arrow", arrow_file({c: pa.array(v, types[c]) for c, v in table.items()}))


def test_sources_that_are_no_roots(virtual: str) -> None:
    for wrong in ([""], [3]):
        with pytest.raises(UsageError, match="sources"):
            ckpt.open(virtual, sources=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["../../../..", "models/a", "", ".", "/data/../etc", "zip::file:///etc", "simplecache::s3://x/y", "a\0b"])
def test_roots_that_cannot_be_meant_are_refused(virtual: str, tmp_path: Path, root: str) -> None:
    pointing_at(root, virtual)
    assert json.loads((Path(virtual) / "checkpoint.json").read_text())["features"] == ["extents"]
    with pytest.raises(CorruptError, match="root"):
        ckpt.open(virtual)


def test_a_run_that_begins_from_one(virtual: str, tmp_path: Path) -> None:
    state = {"w": torch.zeros(3, 4)}
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        with pytest.raises(AccessError, match="not among the sources"):
            c.restore(state, begin_from=ckpt.BeginFrom(virtual, step=3, sources=[tmp_path / "elsewhere"]))
        origin = ckpt.BeginFrom(virtual, step=3, sources=[tmp_path / "models"])
        assert c.restore(state, begin_from=origin, read=ckpt.ReadOptions(sources=[tmp_path / "elsewhere"])) == 3
    assert torch.equal(state["w"], W)
