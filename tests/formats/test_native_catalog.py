"""Reading native checkpoints: round trips, and damage found and named. tests/failures/test_flipped_bytes.py flips every byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from ckpt.catalog import Contents, Format
from ckpt.dtypes import DTYPES
from ckpt.errors import AccessError, CorruptError, FormatError, NotCommittedError, NotFoundError
from ckpt.formats.external import WithFile
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.formats.registry import formats, open_catalog
from ckpt.io_backends.faulty import FaultyBackend
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.registry import open_backend
from tests.formats.native_sample import ID, contents_of, read, sample, samples, save, two_ranks, write_data

OTHER = "f" * 16


@pytest.fixture
def backend():
    InProcessBackend.reset()
    return open_backend("inprocess://c")


def on_disk(root: Path) -> list[Path]:
    save(open_backend(str(root)), two_ranks(), state={"step": 3})
    return sorted(p for p in root.rglob("*") if p.is_file())


# -------------------------------------------------------------------------------------------------- round trips


@given(samples())
def test_round_trip(made):
    InProcessBackend.reset()
    backend = open_backend("inprocess://c")
    record = save(backend, made, state={"step": [1, 2.5]})
    catalog = NativeCatalog(backend)
    assert catalog.record == record == CommitRecord.from_bytes(backend.read("checkpoint.json"), "there")
    assert record.tensor_bytes == sum(s.data.size for s in made)
    assert (catalog.format, catalog.url, catalog.state, catalog.ranks) == ("ckpt 1", "inprocess://c", {"step": [1, 2.5]}, {})
    assert set(catalog.tensors) == {s.name for s in made}
    for s in made:
        entry = catalog.tensors[s.name]
        assert (entry.dtype, entry.shape) == (s.dtype, s.shape)
        np.testing.assert_array_equal(read(backend, catalog, s.name), s.data)


def test_alias_is_read_under_its_own_name(backend):
    made = [sample("tok.weight", "bfloat16", (4, 2), [[0, 2, 4], [0, 2]], ranks=(0, 1))]
    rows, where = write_data(backend, made)
    contents = contents_of(made, rows, where)
    tied = replace(contents.tensors[0], name="lm_head.weight", alias="tok.weight")
    record = write_index(
        CheckpointJournal(backend, id=ID, previous=None), replace(contents, tensors=(*contents.tensors, tied)), world_size=2
    )
    assert record.tensor_bytes == 16
    np.testing.assert_array_equal(read(backend, NativeCatalog(backend), "lm_head.weight"), made[0].data)


def test_extents_in_the_order_asked_for(backend):
    made = [sample("w", "int16", (6, 4), [[0, 1, 3, 6], [0, 2, 4]], ranks=(0, 1, 1))]
    save(backend, made)
    catalog = NativeCatalog(backend)
    entry = catalog.tensors["w"]
    for order in ([], [5], [4, 0, 4, 1], iter([2, 3])):
        order = list(order)
        extents = catalog.extents(entry, iter(order))
        assert len(extents) == len(order)
        for n, e in zip(order, extents, strict=True):
            assert backend.read(e.path, e.offset, e.length) == made[0].data[entry.grid.box(n).slices].tobytes()


def test_only_the_headers_that_are_needed_are_read(backend):
    save(backend, [sample("a", "int8", (4,), ranks=(0,)), sample("b", "int8", (4,), ranks=(1,))])
    counted = FaultyBackend(backend)
    catalog = NativeCatalog(counted)
    catalog.extents(catalog.tensors["b"], [0])
    catalog.extents(catalog.tensors["b"], [0])
    assert [w for w in counted.process.log if "data/" in w] == [f"size data/{ID}-00001.safetensors", f"read data/{ID}-00001.safetensors"]


def test_threads_read_a_header_once(backend):
    save(backend, two_ranks())
    counted = FaultyBackend(backend)
    catalog = NativeCatalog(counted)
    start = threading.Barrier(8)

    def ask(_):
        start.wait()
        return [id(catalog.header(0)), id(catalog.header(1))]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert all(f == found[0] for f in found)
    assert sum(w.startswith("read data/") for w in counted.process.log) == 2


# ------------------------------------------------------------------------------------------------- nothing there


def test_nothing_there(backend):
    with pytest.raises(NotFoundError, match="inprocess://c"):
        NativeCatalog(backend)
    backend.put_if("notes.txt", b"x", expected=None)
    with pytest.raises(NotFoundError):
        NativeCatalog(backend)


@pytest.mark.parametrize("kept", ["index-", "data/"])
def test_not_committed(backend, kept):
    save(backend, two_ranks())
    for entry in list(backend.list_prefix()):
        if not entry.path.startswith(kept):
            backend.delete(entry.path)
    with pytest.raises(NotCommittedError, match="did not finish"):
        NativeCatalog(backend)


# --------------------------------------------------------------------------------------------------------- damage


def touch_everything(root: Path) -> None:
    catalog = NativeCatalog(open_backend(str(root)))
    for n in range(len(catalog.files)):
        catalog.header(n)


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "empty"])
def test_wrong_size_is_found_and_named(tmp_path, how):
    for path in on_disk(tmp_path):
        name = path.relative_to(tmp_path).as_posix()
        data = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes({"truncated": data[:-1], "longer": data + b"\0", "empty": b""}[how])
        if name == "checkpoint.json" and how == "missing":
            with pytest.raises(NotCommittedError):
                touch_everything(tmp_path)
        else:
            with pytest.raises(CorruptError) as caught:
                touch_everything(tmp_path)
            assert name in str(caught.value)
            assert caught.value.hint
        path.write_bytes(data)
    touch_everything(tmp_path)


def wrong(contents: Contents, **change) -> Contents:
    return replace(contents, tensors=tuple(replace(t, **change) if t.name == "w" else t for t in contents.tensors))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": DTYPES["int32"]}, ["w[0:2,0:3]", "F32 [2, 3]", "I32 [2, 3]"]),
        ({"dtype": DTYPES["float64"]}, ["w[0:2,0:3]", "F32 [2, 3]", "F64 [2, 3]"]),
        ({"name": "v"}, ["v[0:2,0:3]", "is not in its data file"]),
    ],
)
def test_index_and_data_of_different_saves(backend, change, words):
    made = [sample("w", "float32", (4, 3), [[0, 2, 4], [0, 3]], ranks=(0, 1))]
    contents = wrong(contents_of(made, *write_data(backend, made)), **change)
    write_index(CheckpointJournal(backend, id=ID, previous=None), contents, world_size=2)
    catalog = NativeCatalog(backend)
    with pytest.raises(CorruptError) as caught:
        catalog.extents(catalog.tensors[change.get("name", "w")], [0])
    assert all(w in str(caught.value) for w in [*words, f"data/{ID}-00000.safetensors"])


def test_chunk_in_another_file_than_the_index_says(backend):
    made = [sample("w", "float32", (4, 3), [[0, 2, 4], [0, 3]], ranks=(0, 1))]
    rows, where = write_data(backend, made)
    write_index(CheckpointJournal(backend, id=ID, previous=None), contents_of(made, rows, {"w": where["w"][::-1]}), world_size=2)
    catalog = NativeCatalog(backend)
    with pytest.raises(CorruptError, match=r"w\[0:2,0:3\] is not in its data file"):
        catalog.extents(catalog.tensors["w"], [0])


# ------------------------------------------------------------------------------------------------- replaced meanwhile


class Replaced(FaultyBackend):
    """Somebody replaces the checkpoint, and removes the old one, between the reading of the record and of the index."""

    def __init__(self, inner, replacement) -> None:
        super().__init__(inner)
        self._replacement = replacement

    def read(self, path, offset=0, length=None):
        data = super().read(path, offset, length)
        if path == "checkpoint.json" and self._replacement:
            self._replacement.pop()()
        return data


def test_opening_while_the_checkpoint_is_replaced(backend):
    old, new = [sample("old", "int8", (3,))], [sample("new", "int8", (3,))]
    save(backend, old)

    def replacement():
        save(backend, new, id=OTHER, previous=backend.read("checkpoint.json"))
        for entry in list(backend.list_prefix(f"index-{ID}/")):
            backend.delete(entry.path)

    catalog = NativeCatalog(Replaced(backend, [replacement]))
    assert list(catalog.tensors) == ["new"]
    assert catalog.record.id == OTHER


# ---------------------------------------------------------------------------------------------- Which format a URL is in: by content alone.


def test_native(tmp_path):
    backend = open_backend(str(tmp_path))
    save(backend, two_ranks())
    catalog = open_catalog(str(tmp_path))
    assert catalog.format == "ckpt 1"
    assert read(backend, catalog, "w").tobytes() == two_ranks()[0].data.tobytes()


def test_nothing(tmp_path):
    for url in (str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(NotFoundError) as caught:
            open_catalog(url)
        assert caught.value.where == url


def test_a_url_where_nothing_is_committed(tmp_path):
    save(open_backend(str(tmp_path)), two_ranks())
    (tmp_path / "checkpoint.json").unlink()
    with pytest.raises(NotCommittedError):
        open_catalog(str(tmp_path))


def test_damaged(tmp_path):
    save(open_backend(str(tmp_path)), two_ranks())
    (tmp_path / "checkpoint.json").write_bytes(b"")
    with pytest.raises(CorruptError):
        open_catalog(str(tmp_path))


def test_unknown_names_what_was_found(tmp_path):
    for n in range(12):
        (tmp_path / f"file{n:02d}").write_text("x")
    with pytest.raises(FormatError, match=r"\(ckpt, .*\).*file00, file01, .*file07 and 4 more"):
        open_catalog(str(tmp_path))


def test_several_torch_files(tmp_path):
    for name in ("model.pt", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(FormatError, match="several torch.save files: name one of them, such as model.pt"):
        open_catalog(str(tmp_path))


def test_a_run_is_not_a_checkpoint(tmp_path):
    save(open_backend(str(tmp_path / "step-00001000")), two_ranks())
    with pytest.raises(FormatError, match="step-00001000"):
        open_catalog(str(tmp_path))


def test_formats_of_other_distributions(tmp_path, monkeypatch):
    """Found by entry point, asked after our own, and given the backend."""
    opened = []

    def open_foreign(backend):
        opened.append(backend.url)
        save(open_backend("inprocess://foreign"), two_ranks())
        return NativeCatalog(open_backend("inprocess://foreign"))

    ours = [f.name for f in formats()]
    foreign = Format(
        name="foreign", recognises=lambda backend, names: backend.read("magic") == b"F" and "magic" in names, open=open_foreign
    )
    point = metadata.EntryPoint("foreign", "somewhere:FORMAT", "ckpt.formats")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: {"somewhere:FORMAT": foreign}[self.value])
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [point] if group == "ckpt.formats" else [])
    (tmp_path / "magic").write_text("F")
    assert [f.name for f in formats()] == [*ours, "foreign"]
    assert open_catalog(str(tmp_path)).format == "ckpt 1"
    assert opened == [open_backend(str(tmp_path)).url]
    (tmp_path / "magic").write_text("G")
    with pytest.raises(FormatError, match=r"\(ckpt, .*, foreign\)"):
        open_catalog(str(tmp_path))


# -------------------------------------------------------------- A storage with one file more: both can be read, and nothing can be written.


@pytest.fixture
def one_more(tmp_path: Path) -> WithFile:
    (tmp_path / "there").write_bytes(b"0123456789")
    return WithFile(open_backend(str(tmp_path)), "more", b"abcdef")


def test_both_are_read(one_more: WithFile) -> None:
    out = bytearray(3)
    for path, whole in (("there", b"0123456789"), ("more", b"abcdef")):
        one_more.read_into(path, 2, memoryview(out))
        assert (one_more.read(path), one_more.size(path), bytes(out)) == (whole, len(whole), whole[2:5])
    assert one_more.list_dir() == ["there"]
    with pytest.raises(CorruptError, match="bytes 4 to 8 of 6"):
        one_more.read("more", 4, 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.create("there", 1),
        lambda b: b.put_if("new", b"", expected=None),
        lambda b: b.delete("there"),
        lambda b: b.prepare(),
    ],
)
def test_nothing_is_written(one_more: WithFile, tmp_path: Path, change: Callable[[WithFile], object]) -> None:
    with pytest.raises(AccessError, match="is not written to") as refused:
        change(one_more)
    assert refused.value.hint == "write to a separate URL"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"there": b"0123456789"}
