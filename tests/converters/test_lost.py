"""What several runs, links and sources that change must not lose: nothing that was there goes, and no "finished" is false."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.converters.importing import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import UsageError

HELD = {f"w{i}": torch.full((4000,), float(i)) for i in range(3)}


def same(url: str) -> bool:
    view = ckpt.open(url)
    return set(view) == set(HELD) and all(torch.equal(view[n].read(), t) for n, t in HELD.items())


@pytest.mark.parametrize("name", ["link", "file://", "data"])
def test_importing_a_checkpoint_over_itself_by_another_name(tmp_path: Path, name: str) -> None:
    url = str(tmp_path / "real")
    ckpt.save(url, HELD)
    os.symlink("real", tmp_path / "link")
    source = {"link": str(tmp_path / "link"), "file://": f"file://{url}", "data": f"{url}/data"}[name]  # its data files are safetensors
    with pytest.raises(UsageError, match="into itself"):
        import_checkpoint(source, url, overwrite=True)
    assert same(url) and verify(url).ok


def test_importing_a_file_that_links_into_what_is_replaced(tmp_path: Path) -> None:
    url = str(tmp_path / "real")
    ckpt.save(url, HELD)
    (file,) = (tmp_path / "real" / "data").iterdir()
    (tmp_path / "hf").mkdir()
    os.symlink(file, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UsageError, match="into itself"):
        import_checkpoint(str(tmp_path / "hf"), url, overwrite=True)
    assert same(url)


def test_importing_beside_linked_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_file({"a": torch.ones(5)}, tmp_path / "real" / "model.safetensors")
    os.symlink("real", tmp_path / "link")
    with pytest.raises(UsageError, match="into itself"):
        import_checkpoint(str(tmp_path / "link"), str(tmp_path / "real"))
    assert os.listdir(tmp_path / "real") == ["model.safetensors"]
