"""What several runs, links and sources that change must not lose: nothing that was there goes, and no "finished" is false."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.conversion import Conversion, ConversionJournal
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import AccessError, ConflictError, CorruptError, FormatError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH
from ckpt.formats.native.writer import CheckpointJournal
from ckpt.plan.views import Box, part, whole
from tests.failures.damage import Copy, arrow_file

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
    refusal = (FormatError, "data files of a checkpoint") if name == "data" else (UsageError, "into itself")
    with pytest.raises(refusal[0], match=refusal[1]):
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


# --------------------------------------------------------------------------------------------------------- several runs


class Dead(BaseException):
    """A process that was killed: nothing handles it."""


def convert(source: str, url: str, to: str, **options: Any) -> Any:
    return ckpt.convert(source, url, to=to, shard_size=None if to == "torch" else 20_000, threads=1, **options)


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torch"])
def test_a_second_run_that_dies_takes_nothing_of_the_first(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found no file there, and removes what the first has made since as a leftover; then it dies. The first must not say that all is
    there."""
    source, url = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(source, HELD)
    write, done = Conversion.write, ConversionJournal.done
    looked, first_is_done = threading.Event(), threading.Event()

    def slow(self: Conversion, planned: Any, missing: Any, **options: Any) -> int:
        if threading.current_thread().name != "second":
            return write(self, planned, missing, **options)
        self._new = False  # as one that goes on with what was begun before
        looked.set()
        assert first_is_done.wait(30)
        with pytest.raises(ConflictError, match="another run"):
            write(self, planned, missing, **options)  # it looks again
        self.backend.delete(planned.files[0].path)  # as if it had looked just before
        raise Dead

    def second_run() -> None:
        with pytest.raises(Dead):
            convert(source, url, to)

    def then_the_second(self: ConversionJournal, number: int) -> None:
        done(self, number)
        if number == 0:
            first_is_done.set()
            second.join()

    monkeypatch.setattr(Conversion, "write", slow)
    monkeypatch.setattr(ConversionJournal, "done", then_the_second)
    second = threading.Thread(target=second_run, name="second")
    second.start()
    assert looked.wait(30)
    with pytest.raises(ConflictError, match="durable is gone"):
        convert(source, url, to)
    monkeypatch.undo()
    assert to == "torch" or not Path(url, COMMIT_PATH).exists()
    report = convert(source, url, to)
    assert report.finished and report.written_files == 1 and same(url)


def test_two_that_finish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins to finish when the first has written the index and not yet committed."""
    source, url = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(source, HELD)
    commit, inside = CheckpointJournal.commit, []

    def twice(*arguments: Any, **named: Any) -> None:
        if not inside:
            inside.append(True)
            assert convert(source, url, "native").finished
        commit(*arguments, **named)

    monkeypatch.setattr(CheckpointJournal, "commit", twice)
    assert convert(source, url, "native").finished
    assert inside and same(url) and verify(url).ok and not list(Path(url).glob("convert*"))


@pytest.mark.parametrize("to", ["native", "hf", "torch"])
def test_one_that_another_run_finishes_is_not_done(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has claimed the end and may be killed before the commit: so the first must not end as if all were there."""
    source, url, done = str(tmp_path / "s"), str(tmp_path / "made"), ConversionJournal.done
    ckpt.save(source, HELD)
    monkeypatch.setattr(ConversionJournal, "done", lambda self, number: (done(self, number), self.claim()))
    with pytest.raises(ConflictError, match="another run"):
        convert(source, url, to)
    monkeypatch.undo()
    assert convert(source, url, to).finished and same(url)


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_tasks_of_an_array_that_are_started_again(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, url = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(source, HELD)

    def task(rank: str, source: str = source) -> Result:
        if to == "native":
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setenv("RANK", rank)
        part = [] if to == "native" else ["--part", f"{rank}/2"]
        return CliRunner().invoke(cli, ["convert", "--to", to, "--no-config", "--shard-size", "20KB", *part, source, url])

    for one in ("one", "one", *(["one.safetensors", "one.safetensors"] if to == "hf" else [])):  # an array of one task
        alone = CliRunner().invoke(cli, ["convert", "--to", to, "--no-config", "--part", "0/1", source, str(tmp_path / one)])
        assert alone.exit_code == 0, alone.output
    assert "others are not yet" in task("1").stdout and task("0").stdout.startswith("ok: ")
    made = {path: path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}
    for rank in ("1", "0", "1"):
        again = task(rank)
        assert again.exit_code == 0 and again.stdout.startswith("ok, complete already: "), again.output
    assert same(url) and made == {path: path.read_bytes() for path in Path(url).rglob("*") if path.is_file()}
    other = str(tmp_path / "other")
    ckpt.save(other, {name: value + 1 for name, value in HELD.items()})
    assert task("1", other).exit_code == 33 and same(url)
    if to == "hf":  # other weights of the same sizes are there now: the claim of the first must not speak for them
        for path in Path(url).glob("*.*"):
            path.unlink()
        ckpt.convert(other, url, to=to, shard_size=20_000)
        assert task("1").exit_code == 33


def test_files_that_went_between_two_runs_are_written_again(tmp_path: Path) -> None:
    source, url = str(tmp_path / "s"), str(tmp_path / "made")
    ckpt.save(source, HELD)
    ckpt.save(url, {"old": torch.ones(2)})
    convert(source, url, "native", overwrite=True, part=(0, 2))
    ckpt.save(url, {"newer": torch.ones(2)})  # which removes the files of saves that were not committed
    with pytest.raises(ConflictError, match="durable is gone"):
        convert(source, url, "native", overwrite=True, part=(1, 2))
    assert convert(source, url, "native", overwrite=True).finished and same(url) and verify(url).ok


def test_what_only_looks_like_a_conversions_file_is_in_the_way(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "s"), HELD)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "converted.safetensors").write_text("mine")
    with pytest.raises(ConflictError, match=r"converted\.safetensors"):
        convert(str(tmp_path / "s"), str(tmp_path / "made"), "hf")


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "s"), HELD)
    os.symlink("nowhere", tmp_path / "made.pt")
    with pytest.raises(ConflictError):
        convert(str(tmp_path / "s"), str(tmp_path / "made.pt"), "torch")
    assert os.readlink(tmp_path / "made.pt") == "nowhere"


@pytest.mark.parametrize(("to", "name"), [("hf", "other.safetensors"), ("torch", "model.pt")])
def test_a_file_among_those_of_the_source(tmp_path: Path, to: str, name: str) -> None:
    """It would make the source one with a tensor in two files, or of an unknown format."""
    save_file(HELD, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="taken for one of the source"):
        convert(str(tmp_path), str(tmp_path / name), to)
    assert same(str(tmp_path)) and os.listdir(tmp_path) == ["model.safetensors"]
    assert convert(str(tmp_path / "model.safetensors"), str(tmp_path / name), to).finished  # of one file alone


# ------------------------------------------------------------------------------------------------- a source that changes


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torch"])
def test_a_source_that_changes_while_it_is_converted(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch, virtual: bool) -> None:
    file, url = tmp_path / "s.safetensors", str(tmp_path / "made")
    save_file(HELD, file)
    source = str(file)
    if virtual:
        source = str(tmp_path / "virtual")
        import_checkpoint(str(file), source)
    done = ConversionJournal.done

    def then_changed(self: ConversionJournal, number: int) -> None:
        done(self, number)
        if number == 0:
            save_file({n: t + 1 for n, t in HELD.items()}, file)
            os.utime(file, ns=(1, 1))

    monkeypatch.setattr(ConversionJournal, "done", then_changed)
    with pytest.raises(CorruptError, match="changed"):
        convert(source, url, to)
    monkeypatch.undo()
    with pytest.raises(ckpt.CkptError):
        ckpt.open(url)
    if virtual:
        with pytest.raises(CorruptError, match="changed after it was imported"):
            convert(source, url, to)
    else:  # nothing is left that could be gone on with
        assert convert(source, url, to).finished and not same(url)


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("parts", [False, True])
def test_damage_gets_no_digest_of_its_own(tmp_path: Path, parts: bool) -> None:
    """An import with digests reads all bytes: those of damaged chunks must not become right by that."""
    source, url = str(tmp_path / "s"), str(tmp_path / "virtual")
    ckpt.save(source, HELD)
    (file,) = (tmp_path / "s" / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(HELD["w2"].numpy().tobytes()) + 8] ^= 1
    file.write_bytes(data)
    halves = (lambda shapes: {n: part(whole(n, s), Box((2,), (2,))) for n, s in shapes.items()}) if parts else None
    with pytest.raises(CorruptError, match="digest"):
        import_checkpoint(source, url, views=halves, digest=True)
    assert not Path(url).exists()


def test_a_damaged_archive_gets_no_digest(tmp_path: Path) -> None:
    file, url = tmp_path / "s.pt", str(tmp_path / "virtual")
    torch.save(HELD, file)
    import_checkpoint(str(file), url, digest=True)
    data = bytearray(file.read_bytes())
    data[data.index(HELD["w2"].numpy().tobytes()) + 8] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="w2 is damaged: its CRC-32 is"):
        import_checkpoint(str(file), url, digest=True, overwrite=True)


# ------------------------------------------------------------------------------------------------- no place in a format


def test_a_tensor_in_a_tuple_is_not_a_value_of_dcp(tmp_path: Path) -> None:
    """torch.distributed.checkpoint keeps a tuple as one pickled value: the tensors in it would be there without elements."""
    source = str(tmp_path / "s")
    ckpt.save(source, {"deep": [{"e": (torch.ones(100), 2)}], "list": [torch.ones(100), 1], "w": torch.ones(100)})
    with pytest.raises(UsageError, match=r"'deep\.0\.e\.0' lies in a tuple"):
        convert(source, str(tmp_path / "made"), "dcp")
    assert not (tmp_path / "made").exists()
    assert convert(source, str(tmp_path / "made"), "dcp", exclude=["deep.*"]).finished
    assert set(ckpt.open(str(tmp_path / "made"))) == {"list.0", "w"}


@pytest.mark.parametrize("name", ["", "__metadata__"])
def test_names_that_safetensors_files_do_not_have(tmp_path: Path, name: str) -> None:
    source = str(tmp_path / "s")
    ckpt.save(source, {"model": {name: torch.ones(100), "w": torch.ones(100)}})
    with pytest.raises(UsageError, match="no tensor called"):
        convert(source, str(tmp_path / "made"), "hf")
    assert convert(source, str(tmp_path / "made"), "hf", exclude=[name]).finished
    assert set(ckpt.open(str(tmp_path / "made"))) == {"w"}


# ------------------ Which files a virtual checkpoint may read: it can point anywhere, so whoever opens one can say where its files may lie.

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


# ------------------- What is made of a checkpoint that refers to others: conversions, averages and deltas of it have every byte themselves.

SHAPE = (40, 25)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 2 refers to step 1 for all but ``c``."""
    torch.manual_seed(0)
    state = {name: torch.randn(SHAPE) for name in "abc"}
    ckpt.save(tmp_path / "run" / "step-1", {"model": state}, reuse=True)
    state["c"] += 1
    report = ckpt.save(tmp_path / "run" / "step-2", {"model": state}, reuse=tmp_path / "run" / "step-1")
    assert report.reused_bytes == 2 * 4 * SHAPE[0] * SHAPE[1]
    return tmp_path / "run"


def tensors(url: Path) -> dict[str, torch.Tensor]:
    view = ckpt.open(url)
    return {name.removeprefix("model."): torch.as_tensor(view[name][...]).clone() for name in view}


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_convert(run: Path, tmp_path: Path, to: str) -> None:
    expected = tensors(run / "step-2")
    ckpt.convert(run / "step-2", tmp_path / "made", to=to)
    shutil.rmtree(run)
    made = tensors(tmp_path / "made")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_merge(run: Path, tmp_path: Path) -> None:
    a, b = tensors(run / "step-1"), tensors(run / "step-2")
    ckpt.merge(tmp_path / "made", [run / "step-1", run / "step-2"], weights=[0.25, 0.75])
    shutil.rmtree(run)
    made = tensors(tmp_path / "made")
    assert all(torch.equal(made[name], 0.25 * a[name] + 0.75 * b[name]) for name in a)


def test_export_of_a_state_that_refers(run: Path, tmp_path: Path) -> None:
    """A state that was loaded from it is exported, whole and as a delta."""
    state = {"model": {name: torch.zeros(SHAPE) for name in "abc"}}
    ckpt.load(run / "step-2", state)
    expected = tensors(run / "step-2")
    ckpt.export(tmp_path / "hf", state["model"])
    shutil.rmtree(run)
    made = tensors(tmp_path / "hf")
    assert all(torch.equal(made[name], expected[name]) for name in expected)
