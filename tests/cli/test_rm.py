"""``ckpt rm``: one checkpoint goes, and never one that is tagged or that others need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt import units
from ckpt.converters.importer import import_checkpoint
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends import InProcessBackend, open_backend
from ckpt.io_backends.conformance.reading import everything, put
from tests.cli.running import run

FROZEN = torch.arange(20_000, dtype=torch.float32)


def refused(url: str, code: int, *texts: str) -> None:
    before = everything(open_backend(url))
    for more in ([], ["--yes"]):
        result = run("rm", url, *more)
        assert result.exit_code == code and not result.stdout
        assert all(text in result.stderr for text in texts), result.stderr
    assert everything(open_backend(url)) == before


@pytest.mark.parametrize("scheme", ["", "local://", "inprocess://"])
def test_one_goes_and_nothing_else(tmp_path: Path, scheme: str) -> None:
    InProcessBackend.reset()
    root = f"inprocess://{tmp_path.name}/run" if scheme == "inprocess://" else f"{scheme}{tmp_path}/run"
    for n in (1, 2):
        ckpt.save(f"{root}/step-{n}", {"x": torch.full((10,), float(n))})
    url, before = f"{root}/step-1", everything(open_backend(root))
    size = sum(len(data) for path, data in before.items() if path.startswith("step-1/"))
    assert run("rm", url).stdout == f"would remove: {url}, {units.size(size)}; --yes removes it\n"
    said = json.loads(run("rm", url, "--json").stdout)
    assert said == {"url": url, "step": 1, "id": said["id"], "link": None, "bytes": size, "removed": False, "left": []}
    assert everything(open_backend(root)) == before and run("rm", "--yes", "--dry-run", url).exit_code == 2
    assert run("rm", f"{url}/", "--yes").stdout == f"removed: {url}, {units.size(size)}\n"
    assert everything(open_backend(root)) == {path: data for path, data in before.items() if path.startswith("step-2/")}
    assert open_backend(root).list_dir() == ["step-2/"]
    assert run("rm", url, "--yes").exit_code == 10
    put(open_backend(f"{root}/step-2"), "notes.txt", b"mine")
    assert json.loads(run("rm", f"{root}/step-2", "--yes", "--json").stdout)["left"] == ["notes.txt"]
    assert list(everything(open_backend(root))) == ["step-2/notes.txt"]


def test_what_is_tagged_or_needed_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = {"frozen": FROZEN, "x": torch.zeros(3)}
    ckpt.save(root / "step-1", state, reuse=True)
    ckpt.save(root / "step-2", {**state, "x": torch.ones(3)}, reuse=root / "step-1")
    import_checkpoint(str(root / "step-2"), str(root / "final"))
    refused(f"{root}/step-1", 33, "it has to stay: ", "step-2", "refer", "ckpt cp")
    refused(f"{root}/step-2", 33, "it has to stay: final refers to it")
    set_tags(open_backend(f"{root}/final"), ["release 1", "b"])
    refused(f"{root}/final", 33, "it is tagged: b, release 1", "ckpt tag -d ")
    set_tags(open_backend(f"{root}/final"), [])
    for name in ("final", "step-2", "step-1"):
        assert run("rm", f"{root}/{name}", "--yes").exit_code == 0
    assert not any(root.iterdir())


def test_a_whole_state_stays_as_long_as_a_part_needs_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    ckpt.save(tmp_path / "step-1", {"model": model})
    ckpt.save(tmp_path / "step-2", {"model": model}, trainable=True)
    refused(f"{tmp_path}/step-1", 33, "it has the rest of the state of step 2, saved in part")
    assert run("rm", f"{tmp_path}/step-2", "--yes").exit_code == 0
    assert run("rm", f"{tmp_path}/step-1", "--yes").exit_code == 0


@pytest.mark.parametrize(("base", "part"), [("base", "step-2"), ("base", "adapter"), ("step-1", "adapter")])
def test_so_does_one_where_a_number_is_missing(tmp_path: Path, base: str, part: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3).requires_grad_(False), torch.nn.Linear(3, 2))
    ckpt.save(tmp_path / base, {"model": model})
    ckpt.save(tmp_path / part, {"model": model}, trainable=True)
    ckpt.save(tmp_path / "step-9", {"model": model})
    refused(f"{tmp_path}/{base}", 33, f"it may have the rest of the state of {part.replace('step-', 'step ')}, saved in part")
    assert run("gc", tmp_path, "--keep", "latest=1", "--yes").exit_code == 0
    assert {base, part} - {"step-2"} <= {path.name for path in tmp_path.iterdir()}
    for name in {part, base} & {path.name for path in tmp_path.iterdir()}:
        assert name == base or run("rm", f"{tmp_path}/{name}", "--yes").exit_code == 0
    assert run("rm", f"{tmp_path}/{base}", "--yes").exit_code == 0


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    ckpt.save(root / "step-1", {"x": torch.zeros(3)})
    refused(str(root), 2, "this is a run, not a checkpoint", f"ckpt gc {root}")
    refused(str(tmp_path / "none"), 10)
    (tmp_path / "model").mkdir()
    save_file({"x": torch.zeros(3)}, tmp_path / "model" / "model.safetensors")
    refused(str(tmp_path / "model"), 12, "this is safetensors")
    shutil.copytree(root / "step-1", root / "step-2")
    (root / "step-2" / "checkpoint.json").unlink()
    refused(f"{root}/step-2", 11, "a save did not finish", f"ckpt gc {root} --yes")


def test_a_damaged_one_goes_and_of_a_link_only_the_link(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for n in (1, 2):
        ckpt.save(root / f"step-{n}", {"x": torch.zeros(3)})
    (root / "step-1" / "checkpoint.json").write_text("{")
    (root / "latest").symlink_to("step-2")
    assert run("rm", f"{root}/step-1", "--yes").exit_code == 0
    assert run("rm", f"{root}/latest").stdout.startswith(f"would remove: the link {root}/latest to ")
    assert run("rm", f"{root}/latest", "--yes").exit_code == 0
    assert sorted(path.name for path in root.iterdir()) == ["step-2"]
    assert run("verify", f"{root}/step-2").exit_code == 0
