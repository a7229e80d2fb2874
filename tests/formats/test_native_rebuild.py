"""Rebuilding a lost index from the data files alone."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.rebuild import rebuild
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box
from tests.formats.native_sample import ID, Sample, coded_samples, read, sample, samples, save, two_ranks, write_data
from tests.formats.oracle import read as oracle

OTHER = "f" * 16


@pytest.fixture
def backend():
    InProcessBackend.reset()
    return open_backend("inprocess://r")


def cells_of(grid):
    """Boxes and files of a grid, whatever its order."""
    return {(grid.box(i), grid.file(i)) for i in range(len(grid))}


@given(samples())
def test_round_trip(made):
    InProcessBackend.reset()
    backend = open_backend("inprocess://r")
    rows, where = write_data(backend, made)
    if not rows:
        with pytest.raises(NotFoundError, match=ID):
            rebuild(backend, ID)
        return
    found = rebuild(backend, ID).contents
    assert found.files == rows
    by_name = {t.name: t for t in found.tensors}
    assert set(by_name) == {s.name for s in made}
    for s in made:
        entry = by_name[s.name]
        assert (entry.dtype, entry.shape, entry.logical, entry.alias) == (s.dtype, s.shape, None, None)
        assert cells_of(entry.grid) == cells_of(s.grid(where[s.name]))
        assert s.cuts is None or entry.grid.cuts == s.cuts
    write_index(CheckpointJournal(backend, id=ID, previous=None), found, world_size=1)
    catalog = NativeCatalog(backend)
    for s in made:
        np.testing.assert_array_equal(read(backend, catalog, s.name), s.data)


def test_regular_boxes_become_cuts_in_row_major_order(backend):
    data = np.arange(24, dtype=np.uint8).reshape(4, 6, 1)
    boxes = tuple(Box((r, c), (2, 2)) for c in (4, 0, 2) for r in (2, 0))
    write_data(backend, [Sample(name="w", dtype=DTYPES["uint8"], data=data, boxes=boxes, ranks=(0, 1, 2, 0, 1, 2))])
    grid = rebuild(backend, ID).contents.tensors[0].grid
    assert grid.cuts == ((0, 2, 4), (0, 2, 4, 6))
    assert grid.files.tolist() == [0, 2, 1, 2, 1, 0]


def test_only_files_of_this_save(backend):
    save(backend, two_ranks())
    write_data(backend, [sample("x", "int8", (3,))], id=OTHER)
    assert {t.name for t in rebuild(backend, ID).contents.tensors} == {s.name for s in two_ranks()}
    assert {t.name for t in rebuild(backend, OTHER).contents.tensors} == {"x"}


def test_several_files_of_a_rank(backend):
    made = [sample(f"t{n}", "int8", (3,), ranks=(4,)) for n in range(200)]
    rows, _ = write_data(backend, made, limit=4088)
    assert len(rows) > 3
    found = rebuild(backend, ID).contents
    assert set(found.files) == set(rows)
    assert {t.name for t in found.tensors} == {s.name for s in made}


@pytest.mark.parametrize("codec", ["zstd", "planes-zstd"])
def test_coded_chunks(tmp_path, codec):
    backend = open_backend(str(tmp_path))
    made = coded_samples()
    rows, where = write_data(backend, made, codec=codec)
    found = rebuild(backend, ID)
    assert (found.features, found.contents.files) == (("codecs",), rows)
    by_name = {t.name: t for t in found.contents.tensors}
    assert set(by_name) == {s.name for s in made}
    for s in made:
        entry = by_name[s.name]
        assert (entry.dtype, entry.shape, cells_of(entry.grid)) == (s.dtype, s.shape, cells_of(s.grid(where[s.name])))
    write_index(CheckpointJournal(backend, id=ID, previous=None), found.contents, world_size=2, features=found.features)
    assert {n: t[2] for n, t in oracle(tmp_path).items()} == {s.name: s.data.tobytes() for s in made}


def test_no_features_without_coded_chunks(backend):
    write_data(backend, two_ranks(), codec="zstd")
    assert rebuild(backend, ID).features == ()


def test_lost_rows_of_a_coded_tensor_are_noticed(backend):
    """Unlike those of others: a coded chunk says the global shape."""
    rows, _ = write_data(backend, coded_samples(), codec="zstd")
    backend.delete(next(r.path for r in rows if r.rank == 1))
    with pytest.raises(CorruptError, match=r"'layers.0/é\[1\]': \[32:96,0:128\] is in no data file"):
        rebuild(backend, ID)


# --------------------------------------------------------------------------------------------------------- damage


def pieces(name, boxes, dtypes=("int8",)):
    """Chunks as tensors of their own, so that they may contradict each other: one rank for each."""
    out = []
    for rank, box in enumerate(boxes):
        kind = DTYPES[dtypes[rank % len(dtypes)]]
        shape = (8, 8) if len(box.shape) == 2 else (8,)
        data = np.zeros((*shape, kind.itemsize), dtype=np.uint8)
        out.append(Sample(name=name, dtype=kind, data=data, boxes=(box,), ranks=(rank,)))
    return out


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([Box((0,), (2,)), Box((5,), (3,))], ["'w'", "[2:5]", "in no data file"]),
        ([Box((1,), (7,))], ["[0:1]", "in no data file"]),
        ([Box((0,), (4,)), Box((3,), (5,))], ["[3:4]", "stored 2 times"]),
        ([Box((0, 0), (8, 4)), Box((0, 4), (4, 4))], ["[4:8,4:8]", "in no data file"]),
        ([Box((0,), (8,)), Box((0,), (8,))], ["[0:8]", "stored 2 times"]),
        ([Box((0,), (4,))], ["not whole", "'w[0:4]'"]),
        ([Box((0, 0), (4, 8))], ["not whole", "'w[0:4,:]'"]),
    ],
)
def test_holes_and_overlaps(backend, boxes, words):
    write_data(backend, pieces("w", boxes))
    with pytest.raises(CorruptError) as caught:
        rebuild(backend, ID)
    assert all(w in str(caught.value) for w in words)


@pytest.mark.parametrize("dtypes", [("int8", "uint8"), ("complex128", "complex32"), ("int16", "bfloat16")])
def test_chunks_that_differ_in_dtype(backend, dtypes):
    write_data(backend, pieces("w", [Box((0,), (4,)), Box((4,), (4,))], dtypes))
    with pytest.raises(CorruptError, match=rf"w\[4:8\].*{dtypes[1]}.*{dtypes[0]}"):
        rebuild(backend, ID)


def test_chunks_that_differ_in_dimensions(backend):
    write_data(backend, pieces("w", [Box((0,), (8,)), Box((0, 0), (8, 8))]))
    with pytest.raises(CorruptError, match="'w'"):
        rebuild(backend, ID)


def put(backend, path, data):
    backend.delete(path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4095, 4096, 4100])
def test_truncated_files(backend, size):
    (row,), _ = write_data(backend, [sample("w", "int8", (8,))])
    put(backend, row.path, backend.read(row.path)[:size])
    with pytest.raises(CorruptError) as caught:
        rebuild(backend, ID)
    assert caught.value.where == f"inprocess://r/{row.path}"


def test_a_length_that_cannot_be(backend):
    (row,), _ = write_data(backend, [sample("w", "int8", (8,))])
    put(backend, row.path, struct.pack("<Q", 2**62) + backend.read(row.path)[8:])
    with pytest.raises(CorruptError, match="truncated"):
        rebuild(backend, ID)


def test_a_file_that_is_not_ours(backend):
    write_data(backend, [sample("w", "int8", (8,))])
    put(backend, f"data/{ID}-notes.safetensors", struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CorruptError, match="has no rank"):
        rebuild(backend, ID)


@pytest.mark.parametrize(
    ("key", "dtype", "shape", "size"),
    [
        ("w[0:4]", "I8", [3], 3),
        ("w[0:3,0:1]", "I8", [3], 3),
        ("w[0:3]", "U8", [3, 5], 15),
        ("w[3:0]", "I8", [3], 3),
        ("w]", "I8", [3], 3),
        ("w[]", "F4", [4], 2),
    ],
)
def test_keys_that_do_not_fit_their_entries(backend, key, dtype, shape, size):
    metadata = {"ckpt.version": "1", "ckpt.id": ID, "ckpt.rank": "0", "ckpt.digests": "0" * 16}
    text = json.dumps({"__metadata__": metadata, key: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    put(backend, f"data/{ID}-00000.safetensors", struct.pack("<Q", 4088) + text.ljust(4088) + bytes(size))
    with pytest.raises(CorruptError) as caught:
        rebuild(backend, ID)
    assert repr(key) in str(caught.value)


DTYPES_OF = {"ckpt.dtypes": '{"w": "int8"}', "ckpt.shapes": '{"w": [100]}'}


@pytest.mark.parametrize(
    ("key", "entry", "more", "word", "error"),
    [
        ("w[:]#zstd", ("U8", [9]), {}, "no dtype and shape", CorruptError),
        ("v[:]#zstd", ("U8", [9]), DTYPES_OF, "no dtype and shape", CorruptError),
        ("w[:]#zstd", ("I8", [9]), DTYPES_OF, "cannot be a coded box", CorruptError),
        ("w[:]#zstd", ("U8", [3, 3]), DTYPES_OF, "cannot be a coded box", CorruptError),
        ("w[:,:]#zstd", ("U8", [9]), DTYPES_OF, "cannot be a coded box", CorruptError),
        ("w]#zstd", ("U8", [9]), DTYPES_OF, "does not end in a box", CorruptError),
        ("w[0:100]#zstd", ("U8", [9]), DTYPES_OF, "not 'w[:]#zstd'", CorruptError),
        ("w[0:101]#zstd", ("U8", [9]), DTYPES_OF, "leaves the shape", CorruptError),
        ("w[0:99]#zstd", ("U8", [9]), DTYPES_OF, "[99:100] is in no data file", CorruptError),
        ("w[:]#lz4", ("U8", [9]), DTYPES_OF, "codec 'lz4'", FormatError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.dtypes": "{"}, "ckpt.dtypes", CorruptError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.dtypes": "[]"}, "ckpt.dtypes", CorruptError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.dtypes": '{"w": "int7"}'}, "int7", CorruptError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.shapes": '{"w": 7}'}, "ckpt.shapes", CorruptError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.shapes": '{"w": [-7]}'}, "ckpt.shapes", CorruptError),
        ("w[:]#zstd", ("U8", [9]), DTYPES_OF | {"ckpt.shapes": '{"w": [1.5]}'}, "ckpt.shapes", CorruptError),
        ("w[:]#zstd", ("U8", [9]), {"ckpt.dtypes": '{"w": "int8"}'}, "ckpt.shapes", CorruptError),
    ],
)
def test_coded_entries_that_cannot_be(backend, key, entry, more, word, error):
    metadata = {"ckpt.version": "1", "ckpt.id": ID, "ckpt.rank": "0", "ckpt.digests": "0" * 16} | more
    text = json.dumps({"__metadata__": metadata, key: {"dtype": entry[0], "shape": entry[1], "data_offsets": [0, 9]}}).encode()
    put(backend, f"data/{ID}-00000.safetensors", struct.pack("<Q", 4088) + text.ljust(4088) + bytes(9))
    with pytest.raises(error) as caught:
        rebuild(backend, ID)
    assert word in str(caught.value)
