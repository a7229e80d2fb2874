"""Orphans: files that nobody can need any more go, and nothing that a save or a copy may still be writing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.formats.native.commit import began, new_id
from ckpt.formats.native.paths import id_of
from ckpt.io_backends import Backend, InProcessBackend, open_backend
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.protocol import PendingUpload
from ckpt.runs.orphans import SETTLED, find_orphans, remove_orphans
from tests.cli.checkpoints import write_checkpoint
from tests.formats import oracle
from tests.io_backends.bucket import buckets

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _storages() -> Iterator[None]:
    InProcessBackend.reset()
    with buckets():
        yield


@pytest.fixture(params=["posix", "memory", "fsspec"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"posix": str(tmp_path / "run"), "memory": "inprocess://m/run", "fsspec": "testbucket://b/run"}[request.param]


def unfinished(url: str) -> str:
    """A save that never committed; its id."""
    write_checkpoint(url, {"x": np.ones(9)}, commit=False)
    path = next(p for p in everything(open_backend(url)) if p.startswith("data/"))
    return path.removeprefix("data/")[:16]


def test_the_time_of_an_id() -> None:
    before = time.time()
    assert before - 0.01 <= (began(new_id()) or 0) <= time.time()
    assert began("not-an-id") is None


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("index-0mwpsxo3h46af2rm/tensors.arrow", "0mwpsxo3h46af2rm"),
        ("data/0mwpsxo3h46af2rm-00000.safetensors", "0mwpsxo3h46af2rm"),
        ("data/0mwpsxo3h46af2rm-100000-3.safetensors", "0mwpsxo3h46af2rm"),
        ("data/model.safetensors", None),
        ("data/short-00000.safetensors", None),
        ("index-0mwpsxo3h46af2rm", None),
        ("checkpoint.json", None),
        ("notes/index-0mwpsxo3h46af2rm/tensors.arrow", None),
    ],
)
def test_only_paths_of_the_format_have_an_id(path: str, found: str | None) -> None:
    assert id_of(path) == found


def test_only_what_was_left_alone_for_long_enough_goes(root: str) -> None:
    id = unfinished(f"{root}/step-1")
    put(open_backend(root), "step-1/data/notes.txt", b"not ours")
    backend = open_backend(root)
    (young,) = find_orphans(backend, older_than=HOUR, now=time.time() + HOUR - 60)
    assert (young.removable, young.id, young.what, len(young.entries)) == (False, id, "save", 2)
    assert "may go on" in young.reason
    remove_orphans(backend, [young])
    assert len(everything(backend)) == 3
    (old,) = find_orphans(backend, older_than=HOUR, now=time.time() + HOUR + 60)
    assert old.removable
    remove_orphans(backend, [old])
    assert everything(backend) == {"step-1/data/notes.txt": b"not ours"}


def test_files_that_are_still_written_keep_an_old_save(tmp_path: Path) -> None:
    """A copy of an old checkpoint bears its old id: the times of its files count."""
    backend = open_backend(str(tmp_path))
    put(backend, "step-1/data/0aaaaaaaa1234567-00000.safetensors")
    put(backend, "step-1/data/0aaaaaaaa1234567-00001.safetensors")
    os.utime(tmp_path / "step-1/data/0aaaaaaaa1234567-00000.safetensors", (0, 0))
    (found,) = find_orphans(backend, older_than=HOUR, now=time.time())
    assert not found.removable
    os.utime(tmp_path / "step-1/data/0aaaaaaaa1234567-00001.safetensors", (0, 0))
    (found,) = find_orphans(backend, older_than=HOUR, now=time.time())
    assert found.removable


def test_beside_a_committed_checkpoint(root: str) -> None:
    """What began before it goes when the commit cannot be taken back any more; what began after it may be a save that replaces it."""
    url = f"{root}/step-1"
    older = unfinished(url)
    time.sleep(0.002)
    write_checkpoint(url, {"x": np.zeros(9)})
    time.sleep(0.002)
    before = set(everything(open_backend(url)))
    write_checkpoint(url, {"x": np.ones(9)}, commit=False)
    newer = {p for p in everything(open_backend(url)) if p not in before}
    backend = open_backend(root)
    assert not any(d.removable for d in find_orphans(backend, older_than=HOUR, now=time.time()))
    found = {d.id: d for d in find_orphans(backend, older_than=HOUR, now=time.time() + SETTLED + 1)}
    assert {id: d.removable for id, d in found.items()} == {older: True, next(iter(newer))[5:21]: False}
    remove_orphans(backend, found.values())
    left = set(everything(open_backend(url)))
    assert newer < left
    assert not [p for p in left if older in p]
    remove_orphans(backend, find_orphans(backend, older_than=0, now=time.time()))
    assert everything(open_backend(url)).keys() == left - newer


def test_a_damaged_record_keeps_everything(root: str) -> None:
    url = f"{root}/step-1"
    unfinished(url)
    write_checkpoint(url, {"x": np.ones(9)})
    backend = open_backend(url)
    record = backend.read("checkpoint.json")
    backend.put_if("checkpoint.json", record.replace(b'"id"', b'"iD"'), expected=record)
    found = find_orphans(open_backend(root), older_than=0, now=time.time())
    assert len(found) == 2
    assert not any(d.removable for d in found)


def test_what_commits_meanwhile_stays(root: str) -> None:
    url = f"{root}/step-1"
    write_checkpoint(url, {"x": np.ones(9)})
    backend = open_backend(url)
    record = backend.read("checkpoint.json")
    backend.delete("checkpoint.json")
    found = find_orphans(open_backend(root), older_than=0, now=time.time())
    assert [d.removable for d in found] == [True]
    backend.put_if("checkpoint.json", record, expected=None)
    before = everything(backend)
    remove_orphans(open_backend(root), found)
    assert everything(backend) == before


def test_temporary_files(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), {"x": np.ones(9)})
    backend = open_backend(str(tmp_path))
    names = {f"step-1/.publish-{'0' * 16}.tmp", f".prepare-{'a' * 16}.tmp"}
    for name in names | {".publish-notes.tmp", f"step-1/publish-{'0' * 16}.tmp"}:
        put(backend, name, b"xy")
    assert not any(d.removable for d in find_orphans(backend, older_than=HOUR, now=time.time()))
    found = find_orphans(backend, older_than=HOUR, now=time.time() + 2 * HOUR)
    assert {d.path for d in found if d.removable} == names
    assert {d.bytes for d in found} == {2}
    remove_orphans(backend, found)
    assert oracle.read(tmp_path / "step-1").keys() == {"x"}
    assert not names & everything(backend).keys()


def test_where_no_time_is_kept_only_an_age_of_0_removes(tmp_path: Path) -> None:
    backend = open_backend("inprocess://m/run")
    put(backend, f".prepare-{'a' * 16}.tmp")
    (found,) = find_orphans(backend, older_than=1, now=time.time() + 9 * HOUR)
    assert (found.removable, "age of 0" in found.reason) == (False, True)
    remove_orphans(backend, find_orphans(backend, older_than=0, now=time.time()))
    assert everything(backend) == {}


class WithUploads(InProcessBackend):
    def __init__(self, url: str, uploads: list[PendingUpload]) -> None:
        super().__init__(url)
        self.uploads = uploads

    def pending_uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        return iter(self.uploads)

    def abort_upload(self, upload: PendingUpload) -> None:
        self.uploads.remove(upload)


def test_uploads_that_nobody_ends() -> None:
    now = time.time()
    path = "step-1/data/0mwpsxo3h46af2rm-00000.safetensors"
    old, young = (PendingUpload(path=path, started=now - hours * HOUR, token=str(hours)) for hours in (30, 2))
    backend: Backend = WithUploads("inprocess://m/run", [old, young])
    found = find_orphans(backend, older_than=24 * HOUR, now=now)
    assert [(d.path, d.id, d.removable) for d in found] == [(path, "0mwpsxo3h46af2rm", True), (path, "0mwpsxo3h46af2rm", False)]
    remove_orphans(backend, found)
    assert list(backend.pending_uploads()) == [young]


def test_a_root_that_is_one_checkpoint(root: str) -> None:
    older = unfinished(root)
    time.sleep(0.002)
    write_checkpoint(root, {"x": np.zeros(9)})
    backend = open_backend(root)
    (found,) = find_orphans(backend, older_than=HOUR, now=time.time() + SETTLED + 1)
    assert (found.id, found.removable, found.path) == (older, True, "")
    remove_orphans(backend, [found])
    assert find_orphans(backend, older_than=0, now=time.time() + SETTLED + 1) == []
    assert backend.read("checkpoint.json")
