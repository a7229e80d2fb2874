"""What killed conversions left: it stays while they may go on, then it goes, and never a file that is not theirs."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ckpt import convert
from ckpt.cli.main import cli
from ckpt.errors import CkptError, NotCommittedError, NotFoundError
from ckpt.formats.registry import ExportRecord, open_catalog
from ckpt.io_backends import open_backend
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.faulty import Fault, FaultyBackend, FaultyProcess, SimulatedCrash
from ckpt.io_backends.posix_backend import PosixBackend
from ckpt.io_backends.protocol import Backend, PendingUpload
from ckpt.io_backends.registry import wrap_backends
from ckpt.runs.orphans import Orphan, find_orphans, remove_orphans
from tests.cli.checkpoints import write_checkpoint
from tests.formats import oracle

DAY = 86_400.0
TARGETS = {"native": "run/step-1", "hf": "run/export", "dcp": "run/dcp", "torch": "run/model.pt"}
ARRAYS = {"a": np.arange(3000.0), "b": np.ones((5, 7), np.float32), "c": np.arange(9)}


@pytest.fixture
def source(tmp_path: Path) -> str:
    write_checkpoint(str(tmp_path / "source"), ARRAYS)
    return str(tmp_path / "source")


def converted(source: str, tmp_path: Path, to: str) -> None:
    convert(source, str(tmp_path / TARGETS[to]), to=to, shard_size=None if to == "torch" else 1000)


def killed(source: str, tmp_path: Path, to: str, at: int, kind: str = "crash") -> bool:
    """Whether the conversion was killed at this operation; False if it has fewer."""
    try:
        with wrap_backends(FaultyProcess(Fault(at=at, kind=kind)).wrap):  # type: ignore[arg-type]
            converted(source, tmp_path, to)
    except SimulatedCrash:
        return True
    return False


def begun(source: str, tmp_path: Path, to: str) -> None:
    """Killed when at least one file was durable and its mark written, if it has several. Threads write, so when that is changes."""
    operations = FaultyProcess()
    with wrap_backends(operations.wrap):
        converted(source, tmp_path / "counted", to)
    for at in range(len(operations.log) // 2, len(operations.log)):
        for path in (tmp_path / "run").glob(f"{Path(TARGETS[to]).name}*"):  # of the attempt before
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert killed(source, tmp_path, to, at)
        files = everything(open_backend(str(tmp_path / "run")))
        marked = to == "torch" or any("convert-" in path for path in files)
        if marked and any(path.endswith("convert.json") for path in files):
            return
    raise AssertionError("it was never killed between its first mark and its end")


def looked(tmp_path: Path, later: float, older_than: float = DAY) -> list[Orphan]:
    return find_orphans(open_backend(str(tmp_path / "run")), older_than=older_than, now=time.time() + later)


@pytest.mark.parametrize("to", TARGETS)
def test_it_stays_while_it_may_go_on_and_then_goes(source: str, tmp_path: Path, to: str) -> None:
    begun(source, tmp_path, to)
    before = everything(open_backend(str(tmp_path / "run")))
    (young,) = looked(tmp_path, DAY - 60)
    assert (young.what, young.removable, young.path) == ("conversion", False, TARGETS[to].removeprefix("run/"))
    assert {e.path for e in young.entries} == before.keys() and "may go on" in young.reason
    remove_orphans(open_backend(str(tmp_path / "run")), [young])
    assert everything(open_backend(str(tmp_path / "run"))) == before
    (old,) = looked(tmp_path, DAY + 60)
    assert old.removable and "nobody touched it" in old.reason
    remove_orphans(open_backend(str(tmp_path / "run")), [old])
    assert everything(open_backend(str(tmp_path / "run"))) == {}
    converted(source, tmp_path, to)  # from the beginning
    assert looked(tmp_path, 2 * DAY) == []
    assert open_catalog(str(tmp_path / TARGETS[to])).tensors.keys() == ARRAYS.keys()


@pytest.mark.parametrize("to", TARGETS)
def test_a_conversion_goes_on_after_it_was_looked_at(source: str, tmp_path: Path, to: str) -> None:
    begun(source, tmp_path, to)
    remove_orphans(open_backend(str(tmp_path / "run")), looked(tmp_path, 60))
    converted(source, tmp_path, to)
    assert looked(tmp_path, 2 * DAY) == []


class _EndsMeanwhile(PosixBackend):
    """A conversion removes its record after it was listed."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith("convert.json"):
            self.delete(path)
        return super().read(path, offset, length)


def test_a_conversion_that_ends_meanwhile(source: str, tmp_path: Path) -> None:
    begun(source, tmp_path, "hf")
    assert find_orphans(_EndsMeanwhile(str(tmp_path / "run")), older_than=DAY, now=time.time() + 2 * DAY) == []


def test_a_listing_does_not_call_it_a_save(source: str, tmp_path: Path) -> None:
    begun(source, tmp_path, "native")
    shown = CliRunner().invoke(cli, ["ls", "--json", str(tmp_path / "run")])
    (step,) = json.loads(shown.stdout)["steps"]
    assert not step["committed"] and step["reason"].startswith("a conversion did not finish")


@pytest.mark.parametrize("to", ["native", "dcp"])
def test_wherever_it_was_killed_nothing_is_left_or_all_is_there(source: str, tmp_path: Path, to: str) -> None:
    at, whole = 0, 0
    while killed(source, tmp_path, to, at):
        remove_orphans(open_backend(str(tmp_path / "run")), looked(tmp_path, DAY + 60))
        left = everything(open_backend(str(tmp_path / "run")))
        if left:
            whole += 1
            assert open_catalog(str(tmp_path / TARGETS[to])).tensors.keys() == ARRAYS.keys()
            shutil.rmtree(tmp_path / "run")
        at += 1
    assert at > 30 and whole > 1


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_a_removal_that_is_killed(source: str, tmp_path: Path, to: str) -> None:
    """What is left can be opened by nobody, is an orphan still, or begins again."""
    for at in range(100):
        begun(source, tmp_path / str(at), to)
        root = tmp_path / str(at)
        process = FaultyProcess(Fault(at=at, kind="crash"))
        backend = FaultyBackend(open_backend(str(root / "run")), process=process)
        try:
            remove_orphans(backend, looked(root, DAY + 60))
        except SimulatedCrash:
            with pytest.raises((NotCommittedError, NotFoundError)):
                open_catalog(str(root / TARGETS[to]))
            converted(source, root, to)
            assert open_catalog(str(root / TARGETS[to])).tensors.keys() == ARRAYS.keys()
            continue
        break
    assert at > 3


# -------------------------------------------------------------------------------------------------- what is not theirs


def test_a_file_that_somebody_else_wrote_there(source: str, tmp_path: Path) -> None:
    begun(source, tmp_path, "hf")
    (name,) = (p.name for p in (tmp_path / "run/export").glob("model-00001-*"))
    (tmp_path / "run/export" / name).write_bytes(bytes(100_000))
    (found,) = looked(tmp_path, 9 * DAY)
    assert not found.removable and name in found.reason and "somebody else" in found.reason
    (tmp_path / "run/export" / name).write_bytes(bytes(10))  # it was durable, and longer
    assert not looked(tmp_path, 9 * DAY, older_than=0)[0].removable
    put(open_backend(str(tmp_path)), "run/notes/convert.json", b'{"mine": true}')
    assert [d.place.directory for d in looked(tmp_path, 9 * DAY)] == ["export"]


@pytest.mark.parametrize(
    "files",
    [
        None,
        {"../source/checkpoint.json": 5},
        {"/etc/passwd": 1},
        {"a": "b"},
        {"checkpoint.json": 9},
        {"data/0mwpsxo3h46af000-00000.safetensors": 9},
    ],
)
def test_a_record_that_is_not_ours(source: str, tmp_path: Path, files: object) -> None:
    said = {"format": "ckpt-convert", "version": 1, "id": "0mwpsxo3h46af2rm", "digest": "0"}
    put(open_backend(str(tmp_path / "run")), "convert.json", json.dumps(said if files is None else said | {"files": files}).encode())
    (found,) = looked(tmp_path, 9 * DAY, older_than=0)
    assert not found.removable and "another version" in found.reason


def test_marks_of_a_conversion_that_ended(source: str, tmp_path: Path) -> None:
    """Killed after it had committed: the checkpoint stays, record and marks go."""
    converted(source, tmp_path, "native")
    target = tmp_path / TARGETS["native"]
    id = json.loads((target / "checkpoint.json").read_text())["id"]
    record = {"format": "ckpt-convert", "version": 1, "id": id, "digest": "0", "files": {f"data/{id}-00000.safetensors": None}}
    put(open_backend(str(target)), "convert.json", json.dumps(record).encode())
    put(open_backend(str(target)), f"convert-{id}/00000", b"{}")
    (found,) = looked(tmp_path, DAY + 60)
    assert found.removable and len(found.entries) == 2 and "it has ended" in found.reason
    remove_orphans(open_backend(str(tmp_path / "run")), [found])
    put(open_backend(str(target)), f"convert-{id}/00000", b"{}")  # or after its record had gone
    (found,) = looked(tmp_path, DAY + 60)
    remove_orphans(open_backend(str(tmp_path / "run")), [found])
    assert oracle.read(target).keys() == ARRAYS.keys() and looked(tmp_path, 9 * DAY) == []


def test_what_happened_since_it_was_looked_at(source: str, tmp_path: Path) -> None:
    begun(source, tmp_path, "dcp")
    found = looked(tmp_path, DAY + 60)
    converted(source, tmp_path, "dcp")
    remove_orphans(open_backend(str(tmp_path / "run")), found)
    assert open_catalog(str(tmp_path / TARGETS["dcp"])).tensors.keys() == ARRAYS.keys()


class _Uploading:
    """A storage on which an upload of this path began a while ago."""

    def __init__(self, inner: Backend, path: str, started: float) -> None:
        self._inner, self._uploads = inner, [PendingUpload(path=path, started=started, token="t")]

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def pending_uploads(self, prefix: str = "") -> object:
        return iter(self._uploads)


def test_an_upload_that_may_go_on_keeps_the_conversion(source: str, tmp_path: Path) -> None:
    begun(source, tmp_path, "dcp")
    now = time.time() + 9 * DAY
    for hours, removable in ((2, False), (30, True)):
        backend = _Uploading(open_backend(str(tmp_path / "run")), "dcp/__0_0.distcp", now - hours * 3600)
        found = {d.what: d for d in find_orphans(backend, older_than=DAY, now=now)}  # type: ignore[arg-type]
        assert (found["conversion"].removable, found["upload"].removable) == (removable, removable)


def test_the_command(source: str, tmp_path: Path) -> None:
    for to in ("native", "torch"):
        begun(source, tmp_path, to)
    root = str(tmp_path / "run")
    alone = json.loads(CliRunner().invoke(cli, ["gc", "--json", "--older-than", "0", f"{root}/step-1"]).stdout)
    assert [(d["what"], d["url"], d["outcome"]) for d in alone["orphans"]] == [("conversion", f"{root}/step-1", "removed")]
    shown = CliRunner().invoke(cli, ["gc", root])
    assert shown.exit_code == 0 and shown.output.count("unfinished conversion") == 2 and "may go on" in shown.output
    for path in Path(root).rglob("*"):
        os.utime(path, (0, 0))
    before = everything(open_backend(root))
    said = json.loads(CliRunner().invoke(cli, ["gc", "--json", "--older-than", "0", "--dry-run", root]).stdout)
    assert [(d["what"], d["outcome"]) for d in said["orphans"]] == [("conversion", "removed")] * 2
    assert {d["url"] for d in said["orphans"]} == {f"{root}/step-1", f"{root}/model.pt"}
    assert everything(open_backend(root)) == before
    assert CliRunner().invoke(cli, ["gc", "--older-than", "0", "--yes", root]).exit_code == 0
    assert everything(open_backend(root)) == {}
    with pytest.raises(CkptError):
        open_catalog(f"{root}/step-1")


def test_empty_directories_are_not_in_the_way(source: str, tmp_path: Path) -> None:
    """A conversion that is killed between making a directory and its first file leaves one, and ``ckpt gc`` sees no files in it."""
    left = tmp_path / "run" / "step-1" / "data" / "deeper"
    left.mkdir(parents=True)
    arguments = ["convert", "--to", "native", source, str(tmp_path / "run" / "step-1")]
    (left / "file").write_bytes(b"of somebody")
    assert "something is there already: data/" in CliRunner().invoke(cli, arguments).stderr
    (left / "file").unlink()
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert CliRunner().invoke(cli, ["verify", str(tmp_path / "run" / "step-1")]).exit_code == 0


# ------------------------------------------------------------------------------------------------------------- exports


def _killed_export(root: Path, *, replaces: bool) -> None:
    """What an export leaves that was killed while its files got their names."""
    backend = open_backend(str(root))
    put(backend, "out/convert.json", ExportRecord(id="e1", replaces=replaces, files=("model-00001-of-00002.safetensors", "b")).to_bytes())
    put(backend, "out/model-00001-of-00002.safetensors", b"weights")
    put(backend, "out/notes.txt", b"of somebody else")
    put(backend, "out/.model-00002-of-00002.safetensors.0123456789abcdef.shared", b"weights, aside")


def test_an_export_that_was_killed(tmp_path: Path) -> None:
    _killed_export(tmp_path / "run", replaces=False)
    assert not any(o.removable for o in looked(tmp_path, 60))
    left = {o.what: o for o in looked(tmp_path, 2 * DAY)}
    assert left.keys() == {"export", "temporary"} and all(o.removable for o in left.values())
    assert (left["export"].path, left["export"].bytes > 7, left["export"].id) == ("out", True, "e1")
    remove_orphans(open_backend(str(tmp_path / "run")), left.values())
    assert [p.name for p in (tmp_path / "run/out").iterdir()] == ["notes.txt"]


def test_an_export_that_replaces_another_stays(tmp_path: Path) -> None:
    """Files of its names may still be those of the export that it was to replace."""
    _killed_export(tmp_path / "run", replaces=True)
    left = {o.what: o for o in looked(tmp_path, 2 * DAY, older_than=0)}
    assert not left["export"].removable and "export again" in left["export"].reason
    remove_orphans(open_backend(str(tmp_path / "run")), left.values())
    assert {p.name for p in (tmp_path / "run/out").iterdir()} == {"convert.json", "model-00001-of-00002.safetensors", "notes.txt"}


def test_an_export_that_began_anew_meanwhile_stays(tmp_path: Path) -> None:
    _killed_export(tmp_path / "run", replaces=False)
    left = looked(tmp_path, 2 * DAY)
    again = ExportRecord(id="e2", files=("model-00001-of-00002.safetensors",)).to_bytes()
    (tmp_path / "run/out/convert.json").write_bytes(again)
    remove_orphans(open_backend(str(tmp_path / "run")), [o for o in left if o.what == "export"])
    assert (tmp_path / "run/out/model-00001-of-00002.safetensors").exists()
    assert (tmp_path / "run/out/convert.json").read_bytes() == again
