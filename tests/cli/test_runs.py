"""Listing the steps of a run: what counts as a checkpoint, as an orphan, and as neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt import open as open_view
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.paths import step_number
from ckpt.runs.step_listing import UNFINISHED, list_steps
from tests.cli.checkpoints import flip, sample, write_checkpoint
from tests.cli.running import run as ckpt
from tests.formats.reading import FIXTURES

TINY = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step-00001000", 1000),
        ("step_100", 100),
        ("100", 100),
        ("global_step12", 12),
        ("iter_0000400", 400),
        ("checkpoint-500", 500),
        ("epoch=1-step=30", 30),
        ("ckpt-5", 5),
        ("weights-ckpt5", 5),
        ("iteration_5", 5),
        ("Step-5", 5),
        ("timestep7", None),
        ("llama-3", None),
        ("run-2024", None),
        ("v2", None),
        ("final", None),
        ("step-", None),
        ("step-10-broken", None),
    ],
)
def test_step_numbers(name: str, number: int | None) -> None:
    assert step_number(name) == number


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_is_listed_by_step(tmp_path: Path, scheme: str) -> None:
    root = str(tmp_path) if scheme == "file" else f"inprocess://{tmp_path.name}"
    for name, ranks in (("step-10", 1), ("step-9", 3), ("final", 2)):
        write_checkpoint(f"{root}/{name}", sample(), ranks=ranks)
    steps = list_steps(root)
    assert [(s.number, s.url, s.world_size) for s in steps] == [
        (None, f"{root}/final", 2),
        (9, f"{root}/step-9", 3),
        (10, f"{root}/step-10", 1),
    ]
    assert {s.tensor_bytes for s in steps} == {sum(a.nbytes for a in sample().values())}
    assert all(s.committed and not s.damaged and s.reason is None and s.created for s in steps)


def test_what_did_not_finish_is_listed_with_the_reason(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    write_checkpoint(str(tmp_path / "step-2"), TINY, commit=False)
    write_checkpoint(str(tmp_path / "step-3"), TINY)
    (tmp_path / "step-3" / "checkpoint.json").unlink()
    steps = list_steps(str(tmp_path))
    assert [(s.number, s.committed, s.reason) for s in steps] == [(1, True, None), (2, False, UNFINISHED), (3, False, UNFINISHED)]


def test_other_directories_and_files_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.txt").write_text("x")
    (tmp_path / "dataset" / "data").mkdir(parents=True)
    (tmp_path / "dataset" / "data" / "train-00000.safetensors").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    assert [s.number for s in list_steps(str(tmp_path))] == [1]


def test_a_damaged_record_is_listed_not_raised(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    write_checkpoint(str(tmp_path / "step-2"), TINY)
    flip(tmp_path / "step-1" / "checkpoint.json", 40)
    (tmp_path / "step-2" / "checkpoint.json").write_text(json.dumps({"format": "something else"}))
    first, second = list_steps(str(tmp_path))
    assert (first.committed, first.damaged) == (second.committed, second.damaged) == (False, True)
    assert "damaged" in (first.reason or "")
    assert "something else" in (second.reason or "")


def test_a_record_of_a_later_version_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.formats.native.commit.VERSION", 2)
        write_checkpoint(str(tmp_path / "step-1"), TINY)
        assert CommitRecord.from_bytes((tmp_path / "step-1" / "checkpoint.json").read_bytes(), "").world_size == 2
    (step,) = list_steps(str(tmp_path))
    assert (step.committed, step.damaged) == (False, True)
    assert "version 2" in (step.reason or "")


def test_a_checkpoint_lists_itself(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-7"), TINY)
    write_checkpoint(str(tmp_path / "step-7" / "step-8"), TINY)
    (step,) = list_steps(str(tmp_path / "step-7"))
    assert (step.number, step.url, step.committed) == (7, str(tmp_path / "step-7"), True)


def test_an_absent_or_empty_root_has_no_steps(tmp_path: Path) -> None:
    assert list_steps(str(tmp_path)) == []
    assert list_steps(str(tmp_path / "nothing")) == []


# -------------------------------------------------------------------------------------------- The commands on checkpoints of other formats.

ALL = {
    "hf/llama": ("safetensors", 21, 21),
    "hf/llama/model-00001-of-00002.safetensors": ("safetensors", 10, 10),
    "fsdp/fsdp1_full_orig0": ("torch.save archive", 7, 0),
    "fsdp/fsdp1_local_orig0": ("torch.save files of ranks", 1, 0),
    "deepspeed/zero3/global_step3": ("DeepSpeed ZeRO-3", 25, 0),
    "fsdp/fsdp2_ws2": ("torch.distributed.checkpoint", 28, 0),
}
"""Format, number of tensors, and number of chunks that nothing can be compared with."""


@pytest.mark.parametrize("name", ALL)
def test_inspect_and_verify(name: str) -> None:
    format, tensors, undigested = ALL[name]
    shown = json.loads(ckpt("inspect", "--json", "--files", FIXTURES / name).stdout)
    assert (shown["format"], shown["totals"]["tensors"]) == (format, tensors)
    path = FIXTURES / name
    assert all(((path.parent if path.is_file() else path) / f["path"]).stat().st_size == f["size"] for f in shown["files"])
    report = json.loads(ckpt("verify", "--json", path).stdout)
    assert report["ok"] and report["bytes"] >= shown["totals"]["bytes"]
    assert (report["undigested"] > 0) == ("this format keeps no digests" in ckpt("verify", path).stdout)
    assert report["undigested"] == undigested


def test_inspect_state() -> None:
    result = ckpt("inspect", "--state", FIXTURES / "fsdp/fsdp2_ws2")
    assert "optim.param_groups" in result.stdout


def test_tags_are_of_our_own_checkpoints(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "hf/llama", tmp_path / "hf")
    before = sorted((tmp_path / "hf").iterdir())
    for args in ([], ["release-1"], ["-d", "release-1"]):
        result = ckpt("tag", tmp_path / "hf", *args)
        assert result.exit_code == 12 and "only checkpoints of ckpt's own format have tags" in result.stderr
    assert sorted((tmp_path / "hf").iterdir()) == before


def test_gc_of_other_formats(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "hf/llama", tmp_path / "hf")
    result = ckpt("gc", tmp_path, "--yes")
    assert result.exit_code == 10 and "only checkpoints of other formats are here, which gc leaves alone" in result.stderr
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == sorted(p.name for p in (FIXTURES / "hf/llama").iterdir())


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_runs_further_below_are_named(tmp_path: Path, command: str) -> None:
    for n in range(6):
        write_checkpoint(str(tmp_path / f"run-{n}/step-5"), sample())
    (tmp_path / "empty/logs").mkdir(parents=True)
    result = ckpt(command, tmp_path)
    assert result.exit_code == 10
    assert f"name one of the runs below: {', '.join(f'{tmp_path}/run-{n}' for n in range(4))} and 2 more" in result.stderr
    assert "name the directory that holds the steps" in ckpt(command, tmp_path / "empty").stderr
    nowhere = ckpt(command, tmp_path / "nowhere" / "at-all")
    assert nowhere.exit_code == 10
    assert f"error: there is no such file or directory\n  where: {tmp_path}/nowhere/at-all\n  try: check the path" in nowhere.stderr


def test_ls(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp/fsdp2_ws2", tmp_path / "step-3")
    shutil.copytree(FIXTURES / "hf/llama", tmp_path / "hf")
    write_checkpoint(str(tmp_path / "step-5"), sample())
    (tmp_path / "logs").mkdir()
    listed = json.loads(ckpt("ls", "--json", tmp_path).stdout)
    assert [s["url"] for s in listed["steps"]] == [f"{tmp_path}/step-5"]
    assert listed["foreign"] == [
        {"url": f"{tmp_path}/hf", "format": "safetensors"},
        {"url": f"{tmp_path}/step-3", "format": "torch.distributed.checkpoint"},
    ]
    assert "torch.distributed.checkpoint" in ckpt("ls", tmp_path).stdout
    assert ckpt("ls", "-q", tmp_path).stdout.split() == [f"{tmp_path}/step-5"]
    alone = json.loads(ckpt("ls", "--json", tmp_path / "hf").stdout)
    assert alone["foreign"] == [{"url": f"{tmp_path}/hf", "format": "safetensors"}]


def damage(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "x"
    shutil.copytree(FIXTURES / name, path)
    return path


def test_verify_tells_what_is_damaged(tmp_path: Path) -> None:
    path = damage(tmp_path, "hf/llama")
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    result = ckpt("verify", path)
    assert (result.exit_code, "model-00002-of-00002.safetensors" in result.stdout) == (20, True)


@pytest.mark.parametrize(("name", "file"), [("fsdp1_full_orig0", "full.pt"), ("fsdp2_ws2", "__1_0.distcp")])
def test_verify_finds_a_flipped_bit_in_an_archive(tmp_path: Path, name: str, file: str) -> None:
    path, tensor = damage(tmp_path, f"fsdp/{name}"), "model.m.emb.weight"
    last = open_view(str(path))[tensor].read()[-1:].numpy().tobytes()
    data = bytearray((path / file).read_bytes())
    data[data.index(last)] ^= 1
    (path / file).write_bytes(data)
    (problem,) = json.loads(ckpt("verify", "--json", path).stdout)["problems"]
    assert (problem["kind"], problem["tensor"], problem["file"]) == ("digest", tensor, file) and "CRC-32" in problem["message"]


def test_verify_finds_a_flipped_bit_in_a_flat_buffer(tmp_path: Path) -> None:
    path, tensor = damage(tmp_path, "deepspeed/zero3"), "optimizer.state.model.fc2.weight.exp_avg"
    begins = open_view(str(path))[tensor].read().flatten()[:6].numpy().tobytes()
    file = path / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[data.index(begins)] ^= 1
    file.write_bytes(data)
    (problem,) = json.loads(ckpt("verify", "--json", path).stdout)["problems"]
    assert problem["kind"] == "digest" and problem["file"].endswith(file.name)
    assert problem["tensor"].endswith(".exp_avg") and "others, which lie in the same storage" in problem["message"]


def test_verify_tells_which_tensors_a_cut_off_file_lacks(tmp_path: Path) -> None:
    path = damage(tmp_path, "fsdp/fsdp2_ws2")
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:40_000])
    result = ckpt("verify", path)
    assert result.exit_code == 20 and "__1_0.distcp" in result.stdout
