"""``ckpt cp`` as a command: what it says, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything
from tests.cli.checkpoints import data_files, flip, sample, write_checkpoint
from tests.cli.running import run


@pytest.fixture
def step(tmp_path: Path) -> Path:
    write_checkpoint(str(tmp_path / "run" / "step-00000007"), sample())
    return tmp_path / "run" / "step-00000007"


def test_copies_into_a_run_under_its_own_name(tmp_path: Path, step: Path) -> None:
    found = run("cp", str(step), f"{tmp_path}/other/", "--json")
    assert found.exit_code == 0
    said = json.loads(found.stdout)
    expected = everything(open_backend(str(step)))
    assert everything(open_backend(str(tmp_path / "other" / "step-00000007"))) == expected
    size = sum(len(d) for p, d in expected.items() if p != "checkpoint.json")
    assert said == {
        "source": str(step),
        "target": f"{tmp_path}/other/step-00000007",
        "id": json.loads(expected["checkpoint.json"])["id"],
        "files": 6,
        "bytes": size,
        "copied_files": 6,
        "copied_bytes": size,
        "committed": True,
        "uncompared_bytes": 0,
        "seconds": said["seconds"],
        "dry_run": False,
    }
    assert "6 files already at the destination" in run("cp", str(step), f"{tmp_path}/other/").stdout


def test_a_dry_run_only_tells(tmp_path: Path, step: Path) -> None:
    found = run("cp", str(step), str(tmp_path / "copy"), "--dry-run")
    assert found.exit_code == 0
    assert found.stdout.startswith("would copy 6 files")
    assert not (tmp_path / "copy").exists()
    assert run("cp", "-q", str(step), str(tmp_path / "copy")).stdout == ""
    assert (tmp_path / "copy" / "checkpoint.json").exists()


@pytest.mark.parametrize("command", ["cp", "import", "convert"])
def test_nothing_is_put_beside_what_is_no_checkpoint_of_ours(tmp_path: Path, step: Path, command: str) -> None:
    """A model of Hugging Face would be hidden by it; so would a directory of data files with other names."""
    arguments = [command, "--to", "native"] if command == "convert" else [command]
    target = tmp_path / "model"
    for name in ("model.safetensors", "data/train.bin", "logs/a/events"):
        file = target / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"{}")
        before = sorted(target.rglob("*"))
        refused = run(*arguments, str(step), str(target))
        assert refused.exit_code == 33, refused.output
        assert f"something is there already: {name.partition('/')[0]}" in refused.stderr
        assert "remove what is there" not in refused.stderr  # other runs, perhaps
        assert sorted(target.rglob("*")) == before
        shutil.rmtree(target)
    (target / "empty").mkdir(parents=True)
    (target / ".hidden").touch()
    assert run(*arguments, str(step), str(target)).exit_code == 0


def test_nothing_is_put_into_another_checkpoint(tmp_path: Path, step: Path) -> None:
    target = tmp_path / "copy"
    assert run("cp", str(step), str(target)).exit_code == 0
    before = sorted(target.rglob("*"))
    refused = run("cp", str(step), f"{target}/")
    assert (refused.exit_code, sorted(target.rglob("*"))) == (33, before)
    assert "DST is a checkpoint itself" in refused.stderr


def test_exit_codes(tmp_path: Path, step: Path) -> None:
    assert run("cp", str(tmp_path / "no"), str(tmp_path / "copy")).exit_code == 10
    assert run("cp", str(step), str(step)).exit_code == 2
    write_checkpoint(str(tmp_path / "other"), {"x": np.ones(2)})
    assert run("cp", str(step), str(tmp_path / "other")).exit_code == 33
    flip(data_files(step)[0], data_files(step)[0].stat().st_size - 1)
    assert run("cp", str(step), str(tmp_path / "copy")).exit_code == 20
    assert run("cp", str(tmp_path / "run"), str(tmp_path / "copy")).exit_code == 12
