"""Nothing is removed or replaced beyond a symbolic link: at most the link itself goes, and that is said."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import ckpt
from ckpt import export
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, StorageError, UsageError
from ckpt.formats.native.writer import set_tags
from ckpt.integrations.dcp import CkptWriter
from ckpt.io_backends import open_backend
from ckpt.policies import EverySteps, Latest
from ckpt.runs.removal import remove_at, remove_checkpoint, remove_steps
from ckpt.runs.step_listing import list_steps
from tests.failures.states import state, stored


def save(url: Path, number: int) -> Path:
    ckpt.save(str(url), state(number))
    return url


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def numbers(root: Path) -> list[int | None]:
    return [s.number for s in list_steps(str(root)) if s.committed]


def contents(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A checkpoint that belongs to somebody else."""
    return save(tmp_path / "shared" / "step-1", 1)


@pytest.fixture
def started(tmp_path: Path, shared: Path) -> Path:
    """A run that starts from it."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "step-00000001").symlink_to(shared)
    return root


# ---- what goes by policy


def test_retention_removes_the_link_and_says_so(started: Path, shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(shared)
    caplog.set_level(logging.INFO, "ckpt")
    with ckpt.Checkpointer(str(started), save=EverySteps(1), keep=Latest(2)) as c:
        target = state(0)
        assert c.restore(target) == 1 and target["step"] == 1
        for n in range(2, 6):
            c.save(n, state(n))
            c.wait()
    assert contents(shared) == before and stored(str(shared)) == 1
    assert numbers(started) == [4, 5] and not os.path.lexists(started / "step-00000001")
    assert f"step-00000001 is removed; {shared}, where it led, stays" in caplog.text


def test_a_local_tier_likewise(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "step-00000001").symlink_to(shared)
    with ckpt.Checkpointer(str(tmp_path / "run"), local=str(tmp_path / "local"), keep=Latest(1)) as c:
        for n in (2, 3):
            c.save(n, state(n))
            c.wait()
    assert stored(str(shared)) == 1 and numbers(tmp_path / "local") == [3] == numbers(tmp_path / "run")


def test_gc_removes_the_link_and_says_so(started: Path, shared: Path) -> None:
    before = contents(shared)
    save(started / "step-5", 5)
    told = json.loads(run("gc", started, "--keep", "latest=1", "--json").stdout)["steps"]
    assert [(s["step"], s["outcome"], s["link"]) for s in told] == [(1, "removed", str(shared)), (5, "kept", None)]
    assert f"only the link goes, {shared} stays" in told[0]["reasons"][-1]
    assert str(shared) in run("ls", started, "--json").stdout
    assert run("gc", started, "--keep", "latest=1", "--yes").exit_code == 0
    assert contents(shared) == before and numbers(started) == [5] and not os.path.lexists(started / "step-00000001")


@pytest.mark.parametrize("name", ["step-0", "step-99", "latest"])
def test_a_checkpoint_with_two_names_counts_once(tmp_path: Path, name: str) -> None:
    """Under that of the directory: what is newest by a link's number is not emptied as an old step of another number."""
    root = tmp_path / "run"
    for n in (3, 4, 5):
        save(root / f"step-{n}", n)
    (root / name).symlink_to("step-5")
    assert numbers(root) == [3, 4, 5] and list_steps(str(root))[-1].also == (name,)
    assert json.loads(run("ls", root, "--json").stdout)["foreign"] == []
    assert run("ls", root).stdout.rstrip().endswith(name) and len(run("ls", root).stdout.splitlines()) == 4  # a column, not a row
    told = run("gc", root, "--keep", "latest=2", "--yes")
    assert told.exit_code == 0 and f"links to it: {name}" in told.stdout
    assert numbers(root) == [4, 5] and stored(str(root / name)) == 5
    save(root / "step-6", 6)
    told = run("gc", root, "--keep", "latest=1", "--yes")
    assert f"links that will lead nowhere: {name}" in told.stdout
    assert numbers(root) == [6] and os.path.islink(root / name)


def test_links_to_one_place_elsewhere_count_once_too(started: Path, shared: Path) -> None:
    (started / "step-2").symlink_to(shared)
    (started / "best").symlink_to(started / "step-2")
    (found,) = list_steps(str(started))
    assert (found.number, found.link, found.also) == (2, str(shared), ("best", "step-00000001"))
    remove_steps(str(started), [found], {})
    assert stored(str(shared)) == 1 and numbers(started) == [1]


def test_a_link_elsewhere_without_a_number_is_kept(started: Path, shared: Path) -> None:
    (started / "step-00000001").rename(started / "best")
    save(started / "step-5", 5)
    assert run("gc", started, "--keep", "latest=1", "--yes").exit_code == 0
    assert stored(str(started / "best")) == 1 == stored(str(shared))


def test_dangling_links_are_nobodys(tmp_path: Path) -> None:
    save(tmp_path / "run" / "step-5", 5)
    (tmp_path / "run" / "step-1").symlink_to(tmp_path / "gone")
    (tmp_path / "run" / "step-7").symlink_to("step-8")
    (tmp_path / "run" / "step-8").symlink_to("step-7")
    (tmp_path / "run" / "step-3").mkdir()
    (tmp_path / "run" / "step-3" / "checkpoint.json").symlink_to("checkpoint.json")
    assert numbers(tmp_path / "run") == [5]
    assert run("gc", tmp_path / "run", "--keep", "latest=1", "--older-than", "0", "--yes").exit_code == 0
    assert os.path.islink(tmp_path / "run" / "step-1")


def test_a_run_that_is_a_link_is_worked_on(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    root = tmp_path / "runs"
    with ckpt.Checkpointer(str(root), keep=Latest(2)) as c:
        for n in (1, 2, 3):
            c.save(n, state(n))
            c.wait()
    assert numbers(root) == [2, 3] == numbers(tmp_path / "disk")
    (tmp_path / "disk" / ".prepare-0123456789abcdef.tmp").touch()
    (tmp_path / "disk" / "step-1").mkdir()
    (tmp_path / "disk" / "step-1" / "data").mkdir()
    (tmp_path / "disk" / "step-1" / "data" / "0123456789abcdef-00000.safetensors").touch()
    assert run("gc", root, "--keep", "latest=1", "--older-than", "0", "--yes").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["step-00000003"]


def test_gc_of_a_link_to_a_checkpoint_removes_nothing(tmp_path: Path, shared: Path) -> None:
    (shared / "data" / "0123456789abcdef-00000.safetensors").touch()
    (tmp_path / "here").symlink_to(shared)
    told = run("gc", tmp_path / "here", "--older-than", "0", "--yes")
    assert told.exit_code == 2 and "this is a single checkpoint" in told.stderr
    assert (shared / "data" / "0123456789abcdef-00000.safetensors").exists()


@pytest.mark.parametrize("way", ["{}/runs", "file://{}/disk", "file://localhost{}/runs/", "~/disk", "{}/runs/../disk", "local://{}/runs"])
def test_what_a_virtual_checkpoint_points_into_stays_whatever_the_way_there(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    save(tmp_path / "runs" / "step-1", 1)
    import_checkpoint(str(tmp_path / "disk" / "step-1"), str(tmp_path / "disk" / "step-2"))
    save(tmp_path / "runs" / "step-3", 3)
    assert run("gc", way.format(tmp_path), "--keep", "latest=2", "--yes").exit_code == 0
    assert numbers(tmp_path / "runs") == [1, 2, 3] and verify(str(tmp_path / "runs" / "step-2")).ok


def test_two_dots_after_a_link_lead_where_the_system_says(tmp_path: Path) -> None:
    """To the parent of the place behind the link, whose runs the user sees there; not to a run of that name beside the link."""
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "a").symlink_to(tmp_path / "disk" / "a")
    for place in ("disk", "home"):
        for n in (1, 2):
            save(tmp_path / place / "b" / f"step-{n}", n)
    assert run("gc", f"{tmp_path}/home/a/../b", "--keep", "latest=1", "--yes").exit_code == 0
    assert (numbers(tmp_path / "disk" / "b"), numbers(tmp_path / "home" / "b")) == ([2], [1, 2])


def test_a_local_tier_that_is_the_root_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    with pytest.raises(UsageError, match="same place as the root"):
        ckpt.Checkpointer(f"file://{tmp_path}/runs", local=str(tmp_path / "disk"))


# ---- what is removed by hand


def test_what_was_said_of_a_url_holds_when_it_is_removed(tmp_path: Path) -> None:
    """Options of a checkpoint's own URL, as Lightning gives them with a save, say nothing of the URL above."""
    url = "gs://bucket/run/a.ckpt"
    ckpt.configure_storage(url, filesystem=fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file")))
    try:
        ckpt.save(url, state(1))
        remove_at(url)
        assert contents(tmp_path) == {}
    finally:
        ckpt.configure_storage(url)


def test_file_systems_of_fsspec_on_this_machine(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to(shared)
    before = contents(shared)
    url = f"local://{tmp_path}/run"
    with pytest.raises(ConflictError, match=f"symbolic link to local://{shared}"):
        ckpt.save(f"{url}/latest", state(9))
    with pytest.raises(StorageError, match="beyond a symbolic link"):
        open_backend(url).delete("latest/checkpoint.json")
    remove_at(f"{url}/latest")
    assert contents(shared) == before and os.listdir(tmp_path / "run") == []


def test_a_directory_that_became_a_link_since_it_was_listed(tmp_path: Path, shared: Path) -> None:
    before = contents(shared)
    save(tmp_path / "run" / "step-1", 7)
    step = list_steps(str(tmp_path / "run"))[0]
    (tmp_path / "run" / "step-1").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-1").symlink_to(shared)
    remove_steps(str(tmp_path / "run"), [step], {})
    (tmp_path / "run" / "step-1").symlink_to(shared)
    with pytest.raises(StorageError, match="symbolic link"):
        remove_checkpoint(open_backend(str(tmp_path / "run")), "step-1/")
    assert contents(shared) == before


def test_links_inside_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its data were moved to another disk: reading works, and what would remove them raises or says that it did not."""
    url = save(tmp_path / "run" / "step-1", 1)
    (url / "data").rename(tmp_path / "disk")
    (url / "data").symlink_to(tmp_path / "disk")
    before = contents(tmp_path / "disk")
    assert stored(str(url)) == 1
    with pytest.raises(StorageError, match="beyond a symbolic link.*disk"):
        open_backend(str(url)).delete(f"data/{next(iter(before))}")
    ckpt.save(str(url), state(2))
    assert "orphan" in caplog.text and "symbolic link" in caplog.text
    assert before.items() <= contents(tmp_path / "disk").items() and stored(str(url)) == 2
    assert len([*url.glob("index-*")]) == 1, "the index of what was replaced is gone"
    remove_at(str(url))
    assert before.items() <= contents(tmp_path / "disk").items()


# ---- what is written


def cp(source: Path, target: Path) -> object:
    return copy_checkpoint(str(source), str(target))


def convert(to: str) -> Callable[[Path, Path], object]:
    return lambda source, target: ckpt.convert(
        str(source), str(target), to=to, overwrite=to == "native", root="model" if to == "hf" else None
    )


def saved_async(source: Path, target: Path) -> object:
    return ckpt.save_async(str(target), state(9)).result()


def through_dcp(source: Path, target: Path) -> object:
    try:
        return dcp.save({"w": torch.ones(3)}, storage_writer=CkptWriter(str(target)), no_dist=True)
    except dcp.api.CheckpointException as err:
        raise next(iter(err.failures.values()))[0] from None


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda source, target: ckpt.save(str(target), state(9)),
    "save_async": saved_async,
    "dcp": through_dcp,
    "cp": cp,
    "import": lambda source, target: import_checkpoint(str(source), str(target), overwrite=True),
    "tag": lambda source, target: set_tags(open_backend(str(target)), ["x"]),
    "native": convert("native"),
    "hf": convert("hf"),
    "export": lambda source, target: export(str(target), torch.nn.Linear(2, 3), overwrite=True),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path: Path, shared: Path, how: str) -> None:
    before = contents(tmp_path / "shared")
    other = save(tmp_path / "other", 2)
    (tmp_path / "latest").symlink_to(shared)
    with pytest.raises(ConflictError, match=f"symbolic link to {shared}") as caught:
        WRITERS[how](other, tmp_path / "latest")
    assert str(shared) in str(caught.value.hint)
    assert contents(tmp_path / "shared") == before and os.path.islink(tmp_path / "latest")


@pytest.mark.parametrize("how", ["save", "cp", "native"])
def test_nor_through_one_that_leads_nowhere(tmp_path: Path, how: str) -> None:
    other = save(tmp_path / "other", 2)
    (tmp_path / "latest").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConflictError, match="symbolic link to"):
        WRITERS[how](other, tmp_path / "latest")
    assert not (tmp_path / "nowhere").exists()


def test_a_checkpointer_does_not_save_through_a_link(started: Path, shared: Path) -> None:
    before = contents(shared)
    with ckpt.Checkpointer(str(started)) as c:
        c.save(1, state(9))
        with pytest.raises(ConflictError, match=f"symbolic link to {shared}"):
            c.wait()
    assert contents(shared) == before


def test_publishing_does_not_replace_through_a_link(started: Path, tmp_path: Path, shared: Path) -> None:
    before = contents(shared)
    c = ckpt.Checkpointer(str(started), local=str(tmp_path / "local"), publish_timeout=0.1)
    c.save(1, state(9))
    with pytest.raises(StorageError, match="could not be published.*symbolic link"):
        c.close()
    assert contents(shared) == before and stored(str(tmp_path / "local" / "step-00000001")) == 9


def test_a_single_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 2)
    (tmp_path / "precious.pt").write_bytes(b"precious")
    (tmp_path / "m.pt").symlink_to(tmp_path / "precious.pt")
    with pytest.raises(ConflictError):
        ckpt.convert(str(other), str(tmp_path / "m.pt"), to="torch")
    assert (tmp_path / "precious.pt").read_bytes() == b"precious"
