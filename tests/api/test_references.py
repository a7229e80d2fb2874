"""Saves that refer to an earlier checkpoint for what has not changed."""

from __future__ import annotations

import json
import shutil
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.catalog import Contents, DataFile
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.save.job import SaveCache, save_cache
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, CorruptError, FormatError, MismatchError, NotFoundError, UsageError
from ckpt.formats.native.commit import COMMIT_PATH, CommitRecord
from ckpt.formats.native.paths import RunBackend
from ckpt.formats.native.rebuild import rebuild_checkpoint
from ckpt.formats.native.tables import find_problem
from ckpt.formats.native.writer import set_tags
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.posix_backend import PosixBackend
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.net.group import current_group
from ckpt.policies import EverySteps, Latest, retention
from ckpt.runs.orphans import find_orphans, remove_orphans
from ckpt.runs.removal import infos, remove_at, remove_steps
from ckpt.runs.step_listing import list_steps
from tests.formats import oracle

READS = ("read", "read_into", "size")
FROZEN = 4 * (256 * 256 + 256) * 4


class Tuned:
    """A frozen model with a small trained head, its optimizer, and an average of the head that is updated by hand."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        self.model.requires_grad_(False)
        self.model.append(torch.nn.Linear(256, 3))
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad])
        self.train()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.model(torch.randn(2, 256)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"model.{n}": t.clone() for n, t in self.model.state_dict().items()}


def own_bytes(url: Path) -> int:
    """Bytes of the data files in a checkpoint's own directory."""
    return sum(f.stat().st_size for f in (url / "data").glob("*"))


def references(url: Path) -> list[str]:
    return [f.path for f in open_catalog(str(url)).files if f.path.startswith("../")]


def holds(url: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor is there bit for bit, by our reader and by one that was written from the specification alone."""
    view, other = ckpt.open(str(url)), oracle.read(url)
    for name, tensor in tensors.items():
        assert torch.equal(torch.as_tensor(view[name][...]), tensor), name
        assert other[name][2] == tensor.numpy().tobytes(), name
    assert not verify(str(url)).problems


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of no other test: older pytest gives the path of one that has passed again, and the process remembers runs by their paths."""
    return tmp_path / uuid.uuid4().hex[:8]


@pytest.fixture(params=["remembered", "read"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where saves know their bases."""
    if request.param == "read":
        monkeypatch.setattr(SaveCache, "remember", lambda *_: None)
        save_cache(current_group()).bases.clear()


@pytest.mark.usefixtures("known")
def test_frozen_tensors_are_written_once(run: Path) -> None:
    tuned, wanted = Tuned(), {}
    first = ckpt.save(run / "step-1", tuned.state, reuse=True)
    wanted[1] = tuned.tensors()
    assert (first.reused_bytes, first.rank_bytes > FROZEN) == (0, True)
    for step in (2, 3):
        tuned.train()
        report = ckpt.save(run / f"step-{step}", tuned.state, reuse=run / f"step-{step - 1}")
        wanted[step] = tuned.tensors()
        assert report.reused_bytes == FROZEN
        assert own_bytes(run / f"step-{step}") < 30_000
    # Flat: step 3 refers to what step 1 has, and not to a reference of step 2.
    assert references(run / "step-3") == references(run / "step-2") == [f"../step-1/data/{first.id}-00000.safetensors"]
    for step, tensors in wanted.items():
        holds(run / f"step-{step}", tensors)
    tuned.train()
    ckpt.load(run / "step-2", tuned.state)
    assert all(torch.equal(t, wanted[2][n]) for n, t in tuned.tensors().items())


@pytest.mark.usefixtures("known")
def test_a_file_that_is_referred_to_may_have_a_tensor_of_the_same_name_in_another_dtype(run: Path) -> None:
    state = {"same": torch.arange(9000.0), "w": torch.arange(9000.0)}
    ckpt.save(run / "step-1", state, codec="zstd", reuse=True)
    state["w"] = state["w"].double()
    assert ckpt.save(run / "step-2", state, codec="zstd", reuse=run / "step-1").reused_bytes == 36_000
    holds(run / "step-2", state)


def test_a_run_that_is_moved_stays_readable(run: Path, tmp_path: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    run.rename(tmp_path / "elsewhere")
    holds(tmp_path / "elsewhere" / "step-2", tuned.tensors())


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("codec", ["zstd", "planes-zstd"])
def test_the_codec_of_the_base_does_not_matter(run: Path, codec: str) -> None:
    tuned = Tuned()
    tuned.model[0].weight.data.zero_()
    ckpt.save(run / "step-1", tuned.state, reuse=True, codec=codec)
    plain = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    tuned.train()
    coded = ckpt.save(run / "step-3", tuned.state, reuse=run / "step-2", codec=codec)
    assert plain.reused_bytes == coded.reused_bytes == FROZEN
    assert "codecs" in json.loads((run / "step-2" / "checkpoint.json").read_text())["features"]
    holds(run / "step-3", tuned.tensors())


def test_a_change_that_torch_does_not_count_is_seen(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    before = tuned.model[1].weight._version
    tuned.model[1].weight.data.numpy()[7, 7] += 1
    assert tuned.model[1].weight._version == before
    report = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert report.reused_bytes == FROZEN - 256 * 256 * 4
    holds(run / "step-2", tuned.tensors())


def test_a_background_save_captures_only_what_it_writes(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    handle = ckpt.save_async(run / "step-2", tuned.state, reuse=run / "step-1")
    saved = tuned.tensors()
    tuned.train()
    assert handle.progress().total < 30_000
    assert handle.result().reused_bytes == FROZEN
    holds(run / "step-2", saved)


def test_plain_tensors_that_do_not_change_are_reused(run: Path) -> None:
    state = {"fixed": torch.randn(64, 1024), "moving": torch.randn(1024)}
    ckpt.save(run / "step-1", state, reuse=True)
    state["moving"] += 1
    report = ckpt.save(run / "step-2", state, reuse=run / "step-1")
    assert report.reused_bytes == 64 * 1024 * 4
    holds(run / "step-2", state)


def test_tensors_of_another_run_that_changed_count_for_that_run_alone(run: Path, tmp_path: Path) -> None:
    other, name = tmp_path / "other", "what another run has, too"
    for n in range(1, 6):  # until nobody asks any more whether it is as it was
        ckpt.save(other / f"step-{n}", {name: torch.full((64, 1024), float(n))}, reuse=n == 1 or other / f"step-{n - 1}")
    state = {name: torch.ones(64, 1024)}
    ckpt.save(run / "step-1", state, reuse=True)
    assert ckpt.save(run / "step-2", state, reuse=run / "step-1").reused_bytes == 64 * 1024 * 4


def test_the_same_state_refers_to_everything_and_empty_tensors_are_no_trouble(run: Path) -> None:
    state = {"fixed": torch.randn(64), "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    ckpt.save(run / "step-1", state, reuse=True)
    ckpt.save(run / "step-2", state, reuse=run / "step-1")
    holds(run / "step-2", state)


def test_full_training_refers_to_nothing_and_hashes_nothing(run: Path) -> None:
    tuned = Tuned()
    tuned.model.requires_grad_(True)
    tuned.optimizer = torch.optim.Adam(tuned.model.parameters())
    tuned.train()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    tuned.train()
    report = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert (report.reused_bytes, references(run / "step-2")) == (0, [])
    assert json.loads((run / "step-2" / "checkpoint.json").read_text())["features"] == []
    assert b"digests128" not in next((run / "step-2" / "data").iterdir()).read_bytes()[:65536]


def test_a_base_without_128_bits_is_written_again_and_then_reused(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state)
    assert ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1").reused_bytes == 0
    assert "step-1 are written again: it was saved without reuse=True" in caplog.text
    assert ckpt.save(run / "step-3", tuned.state, reuse=run / "step-2").reused_bytes >= FROZEN


def test_bases_that_cannot_be_are_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    (run / "latest").symlink_to("step-1")
    (run / "unfinished" / "data").mkdir(parents=True)
    for base, target, error, message in [
        ("step-0", "step-2", NotFoundError, "no checkpoint"),
        ("latest", "step-2", UsageError, "is a link"),
        ("step-1", "step-1", UsageError, "replaces"),
        ("step-1", "../other/step-1", UsageError, "does not lie in"),
    ]:
        with pytest.raises(error, match=message):
            ckpt.save(run / target, tuned.state, reuse=run / base)
    with pytest.raises(MismatchError, match="none of this state's tensors"):
        ckpt.save(run / "step-2", {"other": torch.zeros(3)}, reuse=run / "step-1")
    with pytest.raises(MismatchError, match="none of this state's tensors"):
        ckpt.save(run / "step-2", {"model": {"0.weight": torch.zeros(3)}}, reuse=run / "step-1")
    assert not (run / "step-2").exists()
    assert not (tmp_path / "other").exists()


def test_a_damaged_base_is_an_error(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    file = next((run / "step-1" / "data").iterdir())
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    save_cache(current_group()).bases.clear()  # as another process, which has to read it
    with pytest.raises(CorruptError, match="header"):
        ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert not (run / "step-2").exists()


def test_a_base_that_vanished_is_named(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    shutil.rmtree(run / "step-1")
    with pytest.raises(CorruptError, match="which step-1 should have"):
        ckpt.load(run / "step-2", tuned.state)
    assert any("../step-1/" in str(p) for p in verify(str(run / "step-2")).problems)


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_base_that_goes_in_the_middle_of_a_save_fails_it(run: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    import ckpt.engine.save.leader as leader

    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    write_index = leader.write_index

    def after(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(leader, "write_index", write_index)
        shutil.rmtree(run / "step-1") if what == "removed" else ckpt.save(run / "step-1", tuned.state)
        return write_index(*args, **kwargs)

    monkeypatch.setattr(leader, "write_index", after)
    with pytest.raises(ConflictError, match=what):
        ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert not (run / "step-2" / "checkpoint.json").exists()
    assert ckpt.save(run / "step-2", tuned.state).reused_bytes == 0


def test_a_base_that_this_process_saved_is_not_read(run: Path) -> None:
    """Neither by the call, nor by the rest of the save but for the commit, which looks whether it is still there."""
    tuned, process = Tuned(), FaultyProcess()
    with wrap_backends(process.wrap):
        ckpt.save(run / "step-1", tuned.state, reuse=True)
        for step in (2, 3):
            tuned.train()
            before = len(process.log)
            handle = ckpt.save_async(run / f"step-{step}", tuned.state, reuse=run / f"step-{step - 1}")
            assert handle.result().reused_bytes == FROZEN
            files = {operation.split()[1].rsplit("/", 1)[-1] for operation in process.log[before:] if operation.split()[0] in READS}
            assert files == {COMMIT_PATH}
    holds(run / "step-3", tuned.tensors())


def test_a_base_whose_chunks_are_others_now_is_read(run: Path) -> None:
    state = {"same": torch.randn(64, 64), "other": torch.randn(64)}
    ckpt.save(run / "step-1", state, reuse=True)
    state["other"] = torch.randn(65)
    assert ckpt.save(run / "step-2", state, reuse=run / "step-1").reused_bytes == 64 * 64 * 4
    holds(run / "step-2", state)


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_base_that_is_another_one_by_now_is_never_referred_to(run: Path, what: str) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "elsewhere", tuned.state, reuse=True)
    shutil.rmtree(run / "step-1")
    if what == "replaced":
        (run / "elsewhere").rename(run / "step-1")
    with pytest.raises(ConflictError, match=what):
        ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert not (run / "step-2" / "checkpoint.json").exists()
    if what == "replaced":  # the next one reads it
        assert ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1").reused_bytes >= FROZEN
        holds(run / "step-2", tuned.tensors())
    else:
        with pytest.raises(NotFoundError):
            ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")


def test_a_base_that_this_process_has_saved_again_is_the_new_one(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-1", tuned.state)  # nothing may refer to it
    assert ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1").reused_bytes == 0
    holds(run / "step-2", tuned.tensors())


def test_a_loop_whose_base_is_gone_is_told_once_and_writes_all(run: Path) -> None:
    tuned = Tuned()
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=True) as checkpointer:
        checkpointer.save(1, tuned.state)
        checkpointer.wait()
        shutil.rmtree(checkpointer.url(1))
        checkpointer.save(2, tuned.state)
        with pytest.raises(ConflictError, match="removed meanwhile"):
            checkpointer.wait()
        checkpointer.save(3, tuned.state)
        checkpointer.wait()
    holds(run / "step-00000003", tuned.tensors())


@pytest.mark.parametrize("how", ["deleted", "moved away", "copied away and back"])
def test_files_that_a_remembered_base_refers_to_are_there(run: Path, how: str) -> None:
    """The base is there, with its id; the checkpoint that has its frozen tensors is not."""
    tuned = Tuned()
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, tuned.state)
            checkpointer.wait()
        first, second = (Path(checkpointer.url(step)) for step in (1, 2))
        if how == "moved away":
            first.rename(run.parent / "moved")
            first.symlink_to(run.parent / "moved")  # as it is read through the link, so it is referred to
        elif how == "copied away and back":
            copy_checkpoint(second, run.parent / "copy")  # which has the frozen tensors itself
            shutil.rmtree(second)
            copy_checkpoint(run.parent / "copy", second)
            assert not references(second)
        if how != "moved away":
            shutil.rmtree(first)
        checkpointer.save(3, tuned.state)
        if how == "moved away":
            checkpointer.wait()
            assert references(run / "step-00000003")
        else:
            with pytest.raises(ConflictError, match=f"by way of the earlier checkpoint {second.name}, are not there any more"):
                checkpointer.wait()
            assert not (run / "step-00000003" / "checkpoint.json").exists()
        checkpointer.save(4, tuned.state)
        checkpointer.wait()
    holds(run / "step-00000004", tuned.tensors())
    assert verify(str(run / "step-00000004")).problems == ()


def test_a_base_that_becomes_a_copy_while_a_save_that_refers_to_it_is_published(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base has its id again when the save looks after the commit; the files that it referred to, which were listed before, are gone."""
    tuned = Tuned()
    for step in (1, 2):
        ckpt.save(run / f"step-{step}", tuned.state, reuse=run / "step-1" if step == 2 else True)
    copy_checkpoint(run / "step-2", run.parent / "copy")
    put_if = PosixBackend.put_if

    def after(backend: PosixBackend, path: str, data: bytes, *, expected: bytes | None) -> None:
        assert path == COMMIT_PATH
        monkeypatch.undo()
        shutil.rmtree(run / "step-2")
        shutil.rmtree(run / "step-1")
        copy_checkpoint(run.parent / "copy", run / "step-2")
        put_if(backend, path, data, expected=expected)

    monkeypatch.setattr(PosixBackend, "put_if", after)
    with pytest.raises(ConflictError, match="replaced by a copy of it, which has other files, meanwhile"):
        ckpt.save(run / "step-3", tuned.state, reuse=run / "step-2")
    assert not (run / "step-3" / "checkpoint.json").exists()


def test_a_base_that_is_tagged_while_a_save_that_refers_to_it_is_published(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    put_if = PosixBackend.put_if

    def after(backend: PosixBackend, path: str, data: bytes, *, expected: bytes | None) -> None:
        assert path == COMMIT_PATH
        monkeypatch.undo()
        set_tags(open_backend(str(run / "step-1")), ["best"])
        put_if(backend, path, data, expected=expected)

    monkeypatch.setattr(PosixBackend, "put_if", after)
    assert ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1").reused_bytes >= FROZEN
    holds(run / "step-2", tuned.tensors())


def test_a_restored_step_is_not_opened_again_to_refer_to_it(run: Path) -> None:
    tuned, again, process = Tuned(), Tuned(seed=1), FaultyProcess()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    save_cache(current_group()).bases.clear()  # as another process
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=True) as checkpointer:
        assert checkpointer.restore(again.state) == 1
        with wrap_backends(process.wrap):
            checkpointer.save(2, again.state)
            checkpointer.wait()
    assert not [operation for operation in process.log if operation.startswith("read") and ("index-" in operation or "data/" in operation)]
    assert references(run / "step-00000002") and own_bytes(run / "step-00000002") < 30_000
    holds(run / "step-00000002", tuned.tensors())


@pytest.mark.usefixtures("known")
def test_a_chain_cannot_close_on_itself(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    with pytest.raises(ConflictError, match="step-2 refers to files of step-1"):
        ckpt.save(run / "step-1", tuned.state, reuse=run / "step-2")
    holds(run / "step-2", tuned.tensors())


def test_readers_that_do_not_know_references_refuse_them_by_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckpt.formats.native.commit as commit

    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    record = (run / "step-2" / "checkpoint.json").read_bytes()
    assert CommitRecord.from_bytes(record, "").features == ("references",)
    monkeypatch.setattr(commit, "FEATURES", commit.FEATURES - {commit.REFERENCED})
    with pytest.raises(FormatError, match="'references'"):
        ckpt.open(str(run / "step-2"))


def test_a_training_loop_refers_to_the_save_before(run: Path) -> None:
    tuned = Tuned()
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=True) as checkpointer:
        for step in (1, 2, 3):
            tuned.train()
            checkpointer.save(step, tuned.state)
        checkpointer.wait()
        sizes = [own_bytes(Path(checkpointer.url(step))) for step in (1, 2, 3)]
    assert sizes[0] > FROZEN > 30 * max(sizes[1:])
    holds(run / "step-00000003", tuned.tensors())

    again = Tuned(seed=1)
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=True) as checkpointer:
        assert checkpointer.restore(again.state) == 3
        again.train()
        checkpointer.save(4, again.state)
        checkpointer.wait()
    assert references(run / "step-00000004") == references(run / "step-00000002")
    holds(run / "step-00000004", again.tensors())


def test_reuse_does_not_go_with_a_local_tier(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="local tier"):
        ckpt.Checkpointer(run, reuse=True, local=tmp_path / "fast")


def test_a_copy_needs_no_other_checkpoint_and_keeps_metrics_tags_and_codec(run: Path, tmp_path: Path) -> None:
    tuned = Tuned()
    tuned.model[0].weight.data.zero_()
    ckpt.save(run / "step-1", tuned.state, reuse=True, codec="zstd")
    tuned.train()
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    set_tags(open_backend(str(run / "step-2")), ["kept"])
    report = copy_checkpoint(run / "step-2", tmp_path / "copy")
    assert report.committed
    assert copy_checkpoint(run / "step-2", tmp_path / "copy").copied_files == 0  # the same command again finds it whole
    shutil.rmtree(run)
    holds(tmp_path / "copy", tuned.tensors())
    record = CommitRecord.from_bytes((tmp_path / "copy" / "checkpoint.json").read_bytes(), "")
    assert (record.features, record.tags) == (("codecs",), ("kept",))
    # What was referred to can be referred to again.
    (tmp_path / "copy").rename(tmp_path / "step-2")
    assert ckpt.save(tmp_path / "step-3", tuned.state, reuse=tmp_path / "step-2").reused_bytes >= FROZEN


def test_what_is_referred_to_stays_until_nobody_refers_to_it(run: Path) -> None:
    tuned = Tuned()
    with ckpt.Checkpointer(run, save=EverySteps(1), keep=Latest(1), reuse=True) as checkpointer:
        for step in (1, 2, 3, 4):
            tuned.train()
            checkpointer.save(step, tuned.state)
            checkpointer.wait()
        assert [s.number for s in checkpointer.steps()] == [1, 4]
        listed = {s.number: s for s in checkpointer.steps()}
        assert listed[4].sources == (listed[1].url,)
        assert listed[4].shared_bytes > FROZEN > listed[1].shared_bytes == 0
    verdicts = {v.step: str(v) for v in retention(Latest(1), infos(list_steps(run)), datetime.now(timezone.utc))}
    assert verdicts[1] == "kept: step 4 refers to it"
    with pytest.raises(ConflictError, match="step-00000004"):
        remove_at(str(run / "step-00000001"))
    holds(run / "step-00000004", tuned.tensors())
    remove_at(str(run / "step-00000004"))
    remove_at(str(run / "step-00000001"))
    assert not list(run.rglob("*.safetensors"))


def test_a_step_that_is_replaced_leaves_the_files_that_others_refer_to(run: Path) -> None:
    tuned, other = Tuned(), Tuned(seed=5)
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    wanted = tuned.tensors()
    ckpt.save(run / "step-1", other.state, reuse=True)
    ckpt.save(run / "step-1", other.state)
    backend = open_backend(str(run))
    orphans = find_orphans(backend, older_than=0, now=backend.now() or 0.0)
    assert [(o.removable, o.reason) for o in orphans] == [(False, "step-2 refers to it")]
    remove_orphans(backend, orphans)
    holds(run / "step-1", other.tensors())
    holds(run / "step-2", wanted)
    remove_at(str(run / "step-2"))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    assert len(list(run.rglob("*.safetensors"))) == 1


def test_a_save_that_comes_in_the_middle_of_a_removal_keeps_its_base(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-3", {"other": torch.zeros(2)})
    step = list_steps(run)[0]
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")  # after the listing that decided
    assert remove_steps(str(run), [step], {}) == []
    holds(run / "step-2", tuned.tensors())
    assert list_steps(run)[0].committed


@pytest.mark.parametrize("what", ["damaged", "missing", "rebuilt", "replaced"])
def test_what_is_referred_to_stays_whatever_became_of_its_record(run: Path, what: str) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    record = run / "step-1" / "checkpoint.json"
    match what:
        case "damaged":
            record.write_text("{")
        case "missing":
            record.unlink()
        case "rebuilt":
            next((run / "step-1").glob("index-*/tensors.arrow")).unlink()
            assert rebuild_checkpoint(str(run / "step-1")).rebuilt
        case _:
            ckpt.save(run / "step-1", {"other": torch.zeros(2)})
    before = record.read_bytes() if record.exists() else None
    with pytest.raises(ConflictError, match="step-2"):
        remove_at(str(run / "step-1"))
    assert remove_steps(str(run), [s for s in list_steps(run) if s.number == 1], {}) == []
    assert (record.read_bytes() if record.exists() else None) == before
    holds(run / "step-2", tuned.tensors())
    remove_at(str(run / "step-2"))
    remove_at(str(run / "step-1"))
    assert not list(run.rglob("*.safetensors"))


def test_a_removal_that_cannot_see_who_refers_to_it_changes_nothing(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    next((run / "step-2").glob("index-*/files.arrow")).write_bytes(b"")
    with pytest.raises(ConflictError, match="step-2 may refer to it"):
        remove_at(str(run / "step-1"))
    holds(run / "step-1", tuned.tensors())
    remove_at(str(run / "step-2"))
    remove_at(str(run / "step-1"))
    assert not list(run.rglob("*.safetensors"))


def test_rebuild_refuses_what_its_own_files_do_not_say(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert not rebuild_checkpoint(str(run / "step-2")).rebuilt
    next((run / "step-2").glob("index-*/grids.arrow")).write_bytes(b"")
    with pytest.raises(FormatError, match="refers to data files of others"):
        rebuild_checkpoint(str(run / "step-2"))


def test_rebuild_without_the_record_refuses_too(run: Path) -> None:
    """What was referred to would be missing, and the index that says where it is overwritten."""
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    id = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1").id
    before = tuned.tensors()
    record = run / "step-2" / "checkpoint.json"
    good = record.read_bytes()
    for left in (None, good[:100]):
        record.unlink()
        if left is not None:
            record.write_bytes(left)
        with pytest.raises(FormatError, match="refers to data files of others"):
            rebuild_checkpoint(str(run / "step-2"), id=id)
        record.write_bytes(good)
    holds(run / "step-2", before)


def test_rebuild_without_record_and_table_of_files_says_that_something_may_be_lacking(run: Path) -> None:
    state = {"a": torch.ones(5), "b": torch.arange(300.0)}
    ckpt.save(run / "step-1", state, reuse=True)
    state["a"].zero_()
    saved = ckpt.save(run / "step-2", state, reuse=run / "step-1")
    assert saved.reused_bytes == state["b"].nbytes
    id = saved.id
    (run / "step-2" / "checkpoint.json").unlink()
    next((run / "step-2").glob("index-*/files.arrow")).unlink()
    assert rebuild_checkpoint(str(run / "step-2"), id=id, dry_run=True).lost[-1] == "what lies in other checkpoints"
    assert "what lies in other checkpoints" in rebuild_checkpoint(str(run / "step-2"), id=id).lost
    with pytest.raises(CorruptError, match=r"missing(.|\n)*could not recover the checkpoint's values, .*what lies in other checkpoints"):
        ckpt.load(run / "step-2", state)
    alone = run / "other" / "step-3"
    id = ckpt.save(alone, state, reuse=True).id
    (alone / "checkpoint.json").unlink()
    next(alone.glob("index-*/files.arrow")).unlink()
    assert rebuild_checkpoint(str(alone), id=id).lost == ("values", "aliases and padding", "metrics and tags")


@pytest.mark.parametrize(
    "path",
    [
        "../../x/data/0123456789abcdef-00000.safetensors",
        "../../data/x",
        "../step-1/checkpoint.json",
        "../step-1/data/../../../x",
        "/etc/passwd",
    ],
)
def test_a_hostile_index_leads_nowhere(path: str) -> None:
    row = DataFile(path=path, size=5000, header=4096, digest="0" * 32, rank=0)
    assert find_problem(Contents(tensors=(), files=(row,))) is not None
    with pytest.raises(UsageError):
        RunBackend(open_backend("/tmp/nowhere")).read(path)


@pytest.mark.parametrize("digest", [False, True])
def test_what_is_imported_points_at_the_files_that_have_the_bytes(run: Path, tmp_path: Path, digest: bool) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    tuned.train()
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    import_checkpoint(run / "step-2", tmp_path / "imported", digest=digest)
    view = ckpt.open(str(tmp_path / "imported"))
    for name, tensor in tuned.tensors().items():
        assert torch.equal(torch.as_tensor(view[name][...]), tensor), name
    assert not verify(str(tmp_path / "imported")).problems
    import_checkpoint(run / "step-2", run / "imported")
    assert all("used by imported" in info.tags for info in infos(list_steps(str(run)))), "its sources are both of them"


def test_a_dry_run_writes_nothing_and_says_what_would_be_reused(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    tuned.train()
    dry = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1", dry_run=True)
    assert not (run / "step-2").exists()
    real = ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    assert (dry.reused_bytes, dry.rank_bytes, dry.tensor_bytes) == (FROZEN, real.rank_bytes, real.tensor_bytes)
    holds(run / "step-2", tuned.tensors())


def test_commands_name_a_base_that_vanished(run: Path) -> None:
    tuned = Tuned()
    ckpt.save(run / "step-1", tuned.state, reuse=True)
    ckpt.save(run / "step-2", tuned.state, reuse=run / "step-1")
    commands = [("ls", str(run)), ("ls", "--json", str(run)), *(("gc", str(run), "--dry-run", *as_json) for as_json in ((), ("--json",)))]
    commands += [("inspect", str(run / "step-2"), *as_json) for as_json in ((), ("--json",))]

    def naming() -> list[bool]:
        outputs = [" ".join(CliRunner().invoke(cli, list(arguments)).stdout.split()) for arguments in commands]
        return ["step-1 has vanished" in output for output in outputs]

    assert naming() == [False] * 6
    assert CliRunner().invoke(cli, ["ls", "-q", str(run)]).stdout.split() == [str(run / "step-1"), str(run / "step-2")]
    shutil.rmtree(run / "step-1")
    assert CliRunner().invoke(cli, ["ls", "-q", str(run)]).stdout.split() == []
    assert naming() == [True] * 6
