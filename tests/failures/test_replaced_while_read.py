"""A checkpoint that another save replaces while it is read: nothing is damaged, and nobody says so."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import convert
from ckpt.converters.conversion import Conversion
from ckpt.engine import verify as verifying
from ckpt.engine.copy import Transfer, copy_checkpoint
from ckpt.engine.load import load as loading
from ckpt.errors import ConflictError, CorruptError
from tests.failures.states import blank, number_of, state, stored

REPLACED = "replaced by another save while it was read"


@pytest.fixture
def url(tmp_path: Path) -> str:
    ckpt.save(str(tmp_path / "c"), state(1))
    return str(tmp_path / "c")


def test_a_view(url: str) -> None:
    view = ckpt.open(url)
    names = list(view)
    ckpt.save(url, state(2))
    with pytest.raises(ConflictError, match=f"{REPLACED}(.|\n)*open it again"):
        view[names[0]].read()
    assert ckpt.open(url)["model.w"].read().shape == (40, 8)


def test_a_view_of_what_was_removed(url: str) -> None:
    view = ckpt.open(url)
    shutil.rmtree(url)
    with pytest.raises(ConflictError, match="removed while it was read"):
        view["model.w"].read()


def test_damage_stays_damage(url: str) -> None:
    view = ckpt.open(url)
    shutil.rmtree(Path(url) / "data")
    with pytest.raises(CorruptError, match="is missing"):
        view["model.w"].read()


@pytest.mark.parametrize("moment", ["match", "fill"])
def test_a_load_begins_anew(url: str, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """As long as nothing in the state was changed."""
    work, saves = getattr(loading, moment), []

    def replaced_then(*args: Any, **options: Any) -> Any:
        matched = work(*args, **options) if moment == "match" else None
        if not saves:
            saves.append(2)
            ckpt.save(url, state(2))
        return matched if moment == "match" else work(*args, **options)

    monkeypatch.setattr(loading, moment, replaced_then)
    assert stored(url) == 2 and saves == [2]


def test_a_load_that_had_begun_to_write_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = loading.Reader.run

    def replaced_first(self: Any, *args: Any) -> None:
        shutil.rmtree(Path(url) / "data")
        ckpt.save(url, state(2))
        run(self, *args)

    monkeypatch.setattr(loading.Reader, "run", replaced_first)
    with pytest.raises(ConflictError, match=f"{REPLACED}; the state given to load is now partly overwritten"):
        ckpt.load(url, blank())


def test_verify_copies_and_conversions(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced_by(number: int) -> None:
        ckpt.save(url, state(number))

    structure = verifying.check_tiling
    monkeypatch.setattr(verifying, "check_tiling", lambda catalog: (replaced_by(2), structure(catalog))[1])
    with pytest.raises(ConflictError, match=REPLACED):
        verifying.verify(url)
    copy = Transfer.copy
    monkeypatch.setattr(Transfer, "copy", lambda self, *args: (replaced_by(3), copy(self, *args))[1])
    with pytest.raises(ConflictError, match=REPLACED):
        copy_checkpoint(url, str(tmp_path / "copy"))
    write = Conversion.write
    monkeypatch.setattr(Conversion, "write", lambda self, *args, **options: (replaced_by(4), write(self, *args, **options))[1])
    with pytest.raises(ConflictError, match=REPLACED):
        convert(url, str(tmp_path / "made"), to="native")


def test_a_restore_takes_what_is_there_now(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save(str(tmp_path / "run" / "step-1"), state(1))
    step = str(tmp_path / "run" / "step-2")
    ckpt.save(step, state(2))
    run, saves = loading.Reader.run, []

    def replaced_first(self: Any, *args: Any) -> None:
        if not saves:
            saves.append(3)
            ckpt.save(step, state(3))
        run(self, *args)

    monkeypatch.setattr(loading.Reader, "run", replaced_first)
    target = blank()
    with ckpt.Checkpointer(str(tmp_path / "run")) as checkpointer:
        assert checkpointer.restore(target) == 2
    assert number_of(target) == 3


def test_readers_beside_a_job_that_saves_to_one_place(url: str) -> None:
    over = threading.Event()
    saved: list[int] = []
    told: list[str] = []
    failed: list[BaseException] = []

    def save() -> None:
        try:
            while not over.is_set():
                ckpt.save(url, state(2 + len(saved)))
                saved.append(1)
        except BaseException as err:  # noqa: BLE001  told below
            failed.append(err)

    thread = threading.Thread(target=save)
    thread.start()
    read = 0
    try:
        while len(saved) < 30 and not failed:
            try:
                view = ckpt.open(url)
                for name in view:
                    view[name].read()
                stored(url)
                read += 1
            except ConflictError as err:
                told.append(str(err))
    finally:
        over.set()
        thread.join()
    assert not failed and read and all(REPLACED in text for text in told)
