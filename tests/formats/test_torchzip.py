"""Files of ``torch.save`` against ``torch.load``, and archives that nobody should read."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import enum
import io
import json
import pathlib
import random
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt.dtypes import DTYPES
from ckpt.errors import CkptError, CorruptError, FormatError, NotFoundError, StorageError
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.faulty import Fault, FaultyProcess
from ckpt.io_backends.registry import wrap_backends
from tests.formats.reading import FIXTURES, counted, same


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.from_numpy(np.random.default_rng(count).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8))
    return raw.view(dtype).reshape(shape)


def saved(tmp_path, value, **options) -> str:
    path = tmp_path / "x.pt"
    torch.save(value, path, **options)
    return str(path)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(name, tmp_path):
    dtype = getattr(torch, name)
    value = {"a": filled(dtype, 3, 5), "scalar": filled(dtype), "none": filled(dtype, 1, 4)[:0]}
    view = ckpt.open(saved(tmp_path, value))
    assert set(view) == set(value)
    assert all(same(view[n].read(), t) for n, t in value.items())
    assert same(view["a"][1:2, 2:], value["a"][1:2, 2:])


class Colour(enum.Enum):
    RED = 1


class Other:
    def __init__(self) -> None:
        self.weight = torch.ones(2)
        self.text = "t"


def test_values_and_names_are_those_of_our_own_save(tmp_path):
    """The same state through ``ckpt.save`` and ``torch.save``: equal nodes and names."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {
        "model": dict(model.state_dict()),
        "step": 7,
        "deep": [{"t": torch.arange(3)}, (1, "x", torch.ones(1))],
        5: {"a.b": torch.zeros(2), "$odd": 1.5, 1.0: None},
        "numbers": [float("nan"), float("-inf"), 1 << 70, 2j, b"bytes", True],
        "kinds": {"dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"), "set": {1, 2}},
        "numpy": {"array": np.arange(4.0), "scalar": np.int32(5)},
        "unicode": {"ключ": "знач"},
    }
    ckpt.save(str(tmp_path / "ours"), state)
    ours, theirs = open_catalog(str(tmp_path / "ours")), open_catalog(saved(tmp_path, state))
    assert theirs.state == ours.state
    assert {n: (e.dtype, e.shape) for n, e in theirs.tensors.items()} == {n: (e.dtype, e.shape) for n, e in ours.tensors.items()}
    assert theirs.opaque == {}


def test_objects_are_kept_as_data_and_told(tmp_path):
    value = {
        "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/a")),
        "colour": Colour.RED,
        "when": datetime.date(2024, 1, 2),
        "other": Other(),
        "function": torch.relu,
        "rng": random.getstate(),
    }
    catalog = open_catalog(saved(tmp_path, value))
    assert catalog.state["args"]["__class__"] == "argparse.Namespace"
    assert catalog.state["args"]["__state__"]["lr"] == 0.1
    assert catalog.state["colour"]["__args__"] == [1]
    assert catalog.opaque["colour"].endswith("test_torchzip.Colour")
    assert {"args", "colour", "when", "other", "function"} <= set(catalog.opaque) and "rng" not in catalog.opaque
    assert list(catalog.tensors) == ["other.__state__.weight"]
    assert same(ckpt.open(catalog.url)["other.__state__.weight"].read(), value["other"].weight)
    assert ckpt.open(catalog.url).state()["rng"] == random.getstate()


def test_a_module_is_a_mapping_without_its_class(tmp_path):
    """A whole module is saved by some: its tensors can be had, though its code is not there."""
    model = nn.Linear(2, 3)
    catalog = open_catalog(saved(tmp_path, {"net": model}))
    assert catalog.opaque["net"] == "torch.nn.modules.linear.Linear"
    assert sorted(e.shape for e in catalog.tensors.values()) == [(3,), (3, 2)]


def test_parameters_and_tensors_with_attributes(tmp_path):
    odd = nn.Parameter(torch.randn(3))
    odd.note = "x"
    marked = torch.randn(2)
    marked.note = 1
    value = {"p": nn.Parameter(torch.randn(2, 2)), "odd": odd, "marked": marked}
    view = ckpt.open(saved(tmp_path, value))
    assert all(same(view[n].read(), value[n]) for n in value)


def test_a_single_tensor(tmp_path):
    tensor = torch.randn(4)
    view = ckpt.open(saved(tmp_path, tensor))
    assert same(view["tensor"].read(), tensor)


# ------------------------------------------------------------------------------------------------- views of a storage


def test_shared_storages(tmp_path):
    base = torch.randn(6, 4)
    value = {"base": base, "tied": base, "row": base[2:4], "flat": base.view(24)[5:9], "turned": base.t()[:, :1]}
    url = saved(tmp_path, value)
    catalog, view = open_catalog(url), ckpt.open(url)
    assert {n: e.alias for n, e in catalog.tensors.items()} == {"base": None, "tied": "base", "row": None, "flat": None, "turned": None}
    assert all(same(view[n].read(), t) for n, t in value.items())


def test_strided_views_are_read_row_by_row(tmp_path):
    base = torch.randn(6, 4, 5)
    value = {
        "columns": base[:, :, 1:3],
        "middle": base[:, 1:3],
        "steps": base[::2],
        "mixed": base.transpose(0, 1)[1:3],
        "one": base[:, :1, :],
        "expanded": torch.randn(3).expand(4, 3),
        "small transposed": torch.randn(3, 2).t(),
        "ones": torch.randn(1, 5).t(),
    }
    view = ckpt.open(saved(tmp_path, value))
    for name, tensor in value.items():
        assert same(view[name].read(), tensor), name
        assert same(view[name][1:2, 0:1], tensor[1:2, 0:1]), name


def test_very_many_rows_of_many_tensors_are_not_listed(tmp_path, monkeypatch):
    """A few bytes of pickle make thousands of rows: there is a limit for all tensors together."""
    monkeypatch.setattr("ckpt.formats.torchzip.MAX_ROWS_OF_ALL", 1000)
    base = torch.randn(400, 3)
    value = {f"t{i}": base[:, i : i + 2] for i in range(2)} | {"u": base[:300, 2:], "whole": base}
    view = ckpt.open(saved(tmp_path, value))
    assert same(view["t1"].read(), value["t1"]) and same(view["whole"].read(), base)
    with pytest.raises(FormatError, match="tensor u"):
        view["u"].read()


@given(st.data())
@settings(max_examples=40)
def test_any_view(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = torch.randn(shape).permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = data.draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor.narrow(dim, start, data.draw(st.integers(0, tensor.shape[dim] - start)))
    url = saved(tmp_path_factory.mktemp("view"), {"t": tensor})
    assert same(ckpt.open(url)["t"].read(), tensor)


ODD = {
    "transposed": torch.randn(400, 300).t(),
    "expanded": torch.randn(1).expand(1 << 40),
    "expanded rows": torch.randn(2).expand(1 << 40, 2),
    "conj": torch.randn(3, dtype=torch.complex64).conj(),
    "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("tensor", ODD.values(), ids=list(ODD))
def test_what_is_not_stored_row_by_row_is_said_and_leaves_the_others(tensor, tmp_path):
    url = saved(tmp_path, {"odd": tensor, "good": torch.ones(2)})
    view = ckpt.open(url)
    assert view["odd"].shape == tensor.shape
    assert same(view["good"].read(), torch.ones(2))
    with pytest.raises(FormatError, match="tensor odd .*not stored row by row"):
        view["odd"].read()


OTHER_KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_kinds_are_refused(kind, tmp_path):
    with pytest.raises(FormatError, match="not known here"):
        open_catalog(saved(tmp_path, {"t": OTHER_KINDS[kind]()}))


# -------------------------------------------------------------------------------------------------------------- loading


def test_load_in_place(tmp_path):
    model, again = nn.Linear(3, 4), nn.Linear(3, 4)
    url = saved(tmp_path, {"model": model.state_dict(), "step": 9})
    state = {"model": again, "step": 0}
    report = ckpt.load(url, state)
    assert same(again.weight, model.weight) and same(again.bias, model.bias) and state["step"] == 9
    assert (report.url, report.bytes_unverified) == (url, report.bytes_read)


def test_a_whole_state_dict_into_a_model(tmp_path):
    model, again = nn.Linear(3, 4), nn.Linear(3, 4)
    ckpt.load(saved(tmp_path, model.state_dict()), {"net": again}, rename={"*": "net.*"})
    assert same(again.weight, model.weight)


@pytest.mark.parametrize("url", ["inprocess://torchzip/a/x.bin", "inprocess://torchzip/a"])
def test_any_backend(url, tmp_path):
    from ckpt.io_backends.registry import open_backend

    data = (FIXTURES / "fsdp/fsdp1_full_orig0/full.pt").read_bytes()
    backend = open_backend("inprocess://torchzip")
    with backend.create("a/x.bin", len(data)) as writer:
        writer.write(0, [data])
        writer.commit()
    try:
        assert same(ckpt.open(url)["model.m.l0.bias"].read(), torch.load(io.BytesIO(data))["model"]["m.l0.bias"])
        with pytest.raises(NotFoundError):
            ckpt.open("inprocess://torchzip/b.bin")
    finally:
        backend.delete("a/x.bin")


@pytest.mark.parametrize("url", ["full.pt", "./full.pt", "file://{}/full.pt", "."])
def test_urls(url, monkeypatch):
    monkeypatch.chdir(FIXTURES / "fsdp/fsdp1_full_orig0")
    view = ckpt.open(url.format(FIXTURES / "fsdp/fsdp1_full_orig0"))
    expected = torch.load("full.pt")["model"]
    assert {f"model.{n}" for n in expected} == set(view)
    assert all(same(view[f"model.{n}"].read(), t) for n, t in expected.items())


def test_formats_are_told_by_content(tmp_path):
    """Names say nothing: a file of each format under a name without a suffix, and under that of the other."""
    from safetensors.torch import save_file

    for name in ("weights", "x.safetensors", "y.pt"):
        torch.save({"a": torch.ones(2)}, tmp_path / name)
        if name != "x.safetensors":
            assert open_catalog(str(tmp_path / name)).format == "torch.save archive"
        save_file({"a": torch.ones(2)}, tmp_path / name)
        assert open_catalog(str(tmp_path / name)).format == "safetensors"
    (tmp_path / "weights").write_text("something else")
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        open_catalog(str(tmp_path / "weights"))


class Scaled(torch.Tensor):
    """A subclass that may mean something else than its elements."""


def test_tensor_subclasses_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"class .*test_torchzip\.Scaled"):
        open_catalog(saved(tmp_path, {"t": torch.ones(2).as_subclass(Scaled)}))


def test_shards_with_an_index(tmp_path):
    value = {f"w{i}": torch.randn(3, i + 1) for i in range(4)}
    names = {"w0": "a.bin", "w1": "b.bin", "w2": "a.bin", "w3": "b.bin"}
    for file in ("a.bin", "b.bin"):
        torch.save({n: t for n, t in value.items() if names[n] == file}, tmp_path / file)
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    view = ckpt.open(str(tmp_path))
    assert set(view) == set(value) and all(same(view[n].read(), t) for n, t in value.items())
    index.write_text(json.dumps({"weight_map": names | {"w4": "b.bin"}}))
    with pytest.raises(CorruptError, match="w4"):
        ckpt.open(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {n: f"../{f}" for n, f in names.items()}}))
    with pytest.raises(CorruptError, match="not a plain path"):
        ckpt.open(str(tmp_path))


def test_one_tensor_reads_little_more_than_its_bytes(tmp_path):
    value = {f"layers.{i}": torch.full((256, 1024), float(i)) for i in range(64)}  # 64 MiB
    url = saved(tmp_path, value)
    with counted() as counts:
        assert same(ckpt.open(url)["layers.40"].read(), value["layers.40"])
    assert counts.bytes < (1 << 20) + (64 << 10)
    with counted() as counts:
        assert same(ckpt.open(url)["layers.40"][7], value["layers.40"][7])
    assert counts.bytes < 64 << 10


# ---------------------------------------------------------------------------------------------------- what is refused


def test_files_before_torch_1_6(tmp_path):
    url = saved(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="before 1.6") as caught:
        open_catalog(url)
    assert "torch.save" in caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_torchscript(tmp_path):
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "x.pt"))
    with pytest.raises(FormatError, match="TorchScript"):
        open_catalog(str(tmp_path / "x.pt"))


def test_several_files_are_not_guessed_between(tmp_path):
    for name in ("a.pt", "b.pt"):
        torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        open_catalog(str(tmp_path))
    assert list(ckpt.open(str(tmp_path / "b.pt"))) == ["a"]


def parts() -> dict[str, bytes]:
    """The records of a good archive."""
    out = io.BytesIO()
    torch.save({"a": torch.arange(100.0), "b": torch.ones(3)}, out)
    with zipfile.ZipFile(out) as z:
        return {name: z.read(name) for name in z.namelist()}


def zipped(records: dict[str, bytes] | list[tuple[str, bytes]], **options) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as z:
        for name, data in records.items() if isinstance(records, dict) else records:
            z.writestr(name, data)
    return out.getvalue()


def opened(tmp_path, data: bytes) -> dict[str, torch.Tensor]:
    path = tmp_path / "made.pt"
    path.write_bytes(data)
    return {t.name: t.read() for t in ckpt.open(str(path)).tensors()}


def test_an_archive_by_another_zip_writer(tmp_path):
    assert same(opened(tmp_path, zipped(parts()))["a"], torch.arange(100.0))


def test_zip64(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    data = zipped(parts())
    assert b"PK\6\6" in data
    assert same(opened(tmp_path, data)["a"], torch.arange(100.0))


def test_a_comment_at_the_end(tmp_path):
    out = io.BytesIO(zipped(parts()))
    with zipfile.ZipFile(out, "a") as z:
        z.comment = b"x" * 60_000
    assert same(opened(tmp_path, out.getvalue())["a"], torch.arange(100.0))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_no_torch_writes(tmp_path):
    good = parts()
    cases = {
        "compressed": zipped(good, compression=zipfile.ZIP_DEFLATED),
        "two records": zipped([*good.items(), ("archive/data/0", b"x" * 400)]),
        "called 'archive/../../etc/passwd'": zipped({**good, "archive/../../etc/passwd": b"x"}),
        "called '/archive/x'": zipped({**good, "/archive/x": b"x"}),
        "not one that `torch.save`": zipped({**good, "other/x": b"x"}),
        "it has no data.pkl": zipped({"archive/x": b"x"}),
        "a zip archive, but not one": b"PK\3\4" + zipped({}),
        "has no record": zipped({n: d for n, d in good.items() if n != "archive/data/0"}),
        "a record of": zipped({**good, "archive/data/0": b"x" * 10}),
        "little-endian": zipped({**good, "archive/byteorder": b"big"}),
        "not a pickle|no pickle": zipped({**good, "archive/data.pkl": b"\x80\x02"}),
    }
    for text, data in cases.items():
        with pytest.raises(CkptError, match=text):
            opened(tmp_path, data)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("more", [-1, 1])
def test_an_end_that_says_another_count_of_records(long, more, tmp_path, monkeypatch):
    if long:
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    data = bytearray(zipped(parts()))
    at, form = (data.index(b"PK\6\6") + 24, "<QQ") if long else (data.index(b"PK\5\6") + 8, "<HH")
    here, count = struct.unpack_from(form, data, at)
    struct.pack_into(form, data, at, here + more, count + more)
    with pytest.raises(CorruptError, match=f"a directory of {count} records, its end lists {count + more}"):
        opened(tmp_path, bytes(data))


def test_records_that_overlap(tmp_path):
    """Two entries of the directory that point at one local header, as zip bombs do; and one that reaches over the next."""
    data = bytearray(zipped(parts()))
    places = [i for i in range(len(data)) if data[i : i + 4] == b"PK\1\2"]
    twins = bytearray(data)
    twins[places[-1] + 42 : places[-1] + 46] = data[places[-2] + 42 : places[-2] + 46]
    longer = bytearray(data)
    for at in (20, 24):
        longer[places[0] + at : places[0] + at + 4] = struct.pack("<I", 5000)
    for damaged in (twins, longer):
        with pytest.raises(CorruptError, match="reaches into"):
            opened(tmp_path, bytes(damaged))


def test_a_local_header_that_is_not_there(tmp_path):
    data = bytearray(zipped(parts()))
    at = data.index(b"archive/data/0")
    data[at : at + 14] = b"archive/data/9"
    with pytest.raises(CorruptError, match="not at its place in the directory"):
        opened(tmp_path, bytes(data))


def test_storage_that_fails_is_no_damage(tmp_path):
    """Else a job would go on from an older checkpoint because of an error that passes."""
    torch.save({str(n): torch.ones(1) for n in range(300)}, tmp_path / "a.pt")  # a directory that is longer than the first read
    with wrap_backends((whole := FaultyProcess()).wrap):
        open_catalog(str(tmp_path / "a.pt"))
    reads = [n for n, what in enumerate(whole.log) if what.startswith("read ")]
    assert len(reads) > 3
    for n in reads:
        with wrap_backends(FaultyProcess(Fault(at=n, kind="error")).wrap), pytest.raises(StorageError, match="injected fault"):
            open_catalog(str(tmp_path / "a.pt"))


def test_absurd_sizes_take_no_memory(tmp_path):
    data = bytearray(zipped(parts()))
    end = data.rindex(b"PK\5\6")
    for count, size, offset in [(0xFFFE, 0xFFFFFFFE, 0), (1, 0xFFFFFFFE, 0xFFFFFFFE), (5, 10, 0), (0xFFFF, 1, 1)]:
        data[end + 8 : end + 20] = struct.pack("<HHLL", count, count, size, offset)
        with pytest.raises(CorruptError):
            opened(tmp_path, bytes(data))


def test_a_pickle_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    url = saved(tmp_path, {"a": "x" * 100_000})
    monkeypatch.setattr("ckpt.settings.FOREIGN_PICKLE", 50_000)
    with counted() as counts, pytest.raises(FormatError, match=r"record 'data\.pkl' has 100,\d\d\d bytes"):
        open_catalog(url)
    assert counts.bytes < 60_000  # it is looked at twice: what cannot be read may have been damaged on its way


def test_every_truncation_is_noticed(tmp_path):
    data = (FIXTURES / "fsdp/fsdp1_full_orig0/full.pt").read_bytes()
    for length in range(4, len(data), 97):
        with pytest.raises(CkptError):
            opened(tmp_path, data[:length])


GOOD = zipped(parts())


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=150)
def test_damage_ends_in_tensors_or_an_error(tmp_path_factory, changes):
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    with contextlib.suppress(CkptError):
        opened(tmp_path_factory.mktemp("damaged"), bytes(data))


WRITTEN = io.BytesIO()
torch.save({"a": torch.arange(100.0), "b": torch.ones(3), "step": 5}, WRITTEN)


def test_no_flipped_byte_outside_of_tensors_gives_other_tensors_or_values(tmp_path):
    """As torch writes it: records have a CRC-32, and end where the next one begins."""
    path, good = tmp_path / "made.pt", WRITTEN.getvalue()
    tensors = [torch.arange(100.0).numpy().tobytes(), torch.ones(3).numpy().tobytes()]
    inside = {i for t in tensors for i in range(good.index(t), good.index(t) + len(t))}
    named = {i for i in range(len(good)) if good[i : i + 2] == b"PK"}
    headers = {i for at in named for i in range(at + 4, min(at + 46, len(good)), 2)} | set(range(64, 900, 9))
    for at in sorted(headers - inside):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with contextlib.suppress(CkptError):
            view = ckpt.open(str(path))
            assert view.state()["step"] == 5, at
            for name, tensor in (("a", torch.arange(100.0)), ("b", torch.ones(3))):
                with contextlib.suppress(CkptError):
                    assert same(view[name].read(), tensor), at


def test_a_wrong_length_of_what_stands_before_the_bytes(tmp_path):
    """Eight bytes more of padding: what is read then begins two elements too late, and ends within what follows."""
    data = bytearray(WRITTEN.getvalue())
    header = data.rindex(b"PK\3\4", 0, data.index(b"/data/0"))
    length = struct.unpack_from("<H", data, header + 28)[0]
    struct.pack_into("<H", data, header + 28, length + 8)
    with pytest.raises(CorruptError, match="not at its place in the directory"):
        opened(tmp_path, bytes(data))


def test_records_without_a_checksum_are_read(tmp_path):
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always writes them")
    torch.serialization.set_crc32_options(False)
    try:
        url = saved(tmp_path, {"a": torch.arange(5.0), "step": 5})
    finally:
        torch.serialization.set_crc32_options(True)
    assert ckpt.open(url).state()["step"] == 5 and same(ckpt.open(url)["a"].read(), torch.arange(5.0))


def test_two_keys_that_make_one_name(tmp_path):
    with pytest.raises(CorruptError, match=r"two tensors have the name 'a\.1'"):
        open_catalog(saved(tmp_path, {"a": {1: torch.ones(1), "1": torch.zeros(1)}}))


def test_a_state_that_contains_itself(tmp_path):
    around = {}
    around["a"] = around
    with pytest.raises(CorruptError, match="contains itself"):
        open_catalog(saved(tmp_path, around))


def test_ordered_state_dicts_keep_their_order(tmp_path):
    value = OrderedDict((n, torch.ones(1)) for n in ("z", "a", "m"))
    assert list(open_catalog(saved(tmp_path, value)).state) == ["z", "a", "m"]


def test_one_of_several_shards_without_an_index(tmp_path):
    name = "pytorch_model-00001-of-00002.bin"
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CorruptError, match=r"files are missing: pytorch_model-00002-of-00002\.bin"):
        ckpt.open(str(tmp_path))
    assert list(ckpt.open(str(tmp_path / name))) == ["a"]
