"""safetensors files and directories against the safetensors library."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import CkptError, CorruptError, FormatError
from ckpt.formats.registry import open_catalog
from tests.formats.reading import FIXTURES, counted, same


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_hugging_face_directories(model):
    path = FIXTURES / "hf" / model
    expected = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
    view = ckpt.open(str(path))
    assert set(view) == set(expected)
    assert all(same(view[n].read(), t) for n, t in expected.items())
    assert open_catalog(str(path)).format == "safetensors"


def test_one_file_an_index_and_shards_without_one(tmp_path):
    source = FIXTURES / "hf/llama"
    shards = sorted(source.glob("*.safetensors"))
    expected = load_file(shards[0])
    one = ckpt.open(str(shards[0]))
    assert set(one) == set(expected) and all(same(one[n].read(), t) for n, t in expected.items())
    assert one.url == str(shards[0])
    by_index = ckpt.open(str(source / "model.safetensors.index.json"))
    for shard in shards:
        shutil.copy(shard, tmp_path)
    assert set(ckpt.open(str(tmp_path))) == set(by_index) == set(ckpt.open(str(source)))


def test_dtypes(tmp_path):
    names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 complex64"
    value = {n: (torch.arange(12) % 2).to(getattr(torch, n)).reshape(3, 4) for n in names.split()} | {"scalar": torch.tensor(2.5)}
    value["none"] = torch.empty(0, 3)
    save_file(value, tmp_path / "x.safetensors", metadata={"format": "pt"})
    view = ckpt.open(str(tmp_path))
    assert set(view) == set(value) and all(same(view[n].read(), t) for n, t in value.items())
    assert same(view["bfloat16"][1:, 2], value["bfloat16"][1:, 2])
    assert list(ckpt.open(str(tmp_path)).state()) == sorted(value)


def test_load_into_a_model(tmp_path):
    model, again = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    ckpt.load(str(tmp_path), {"model": again}, rename={"*": "model.*"})
    assert same(again.weight.detach(), model.weight.detach())


def test_one_tensor_reads_little_more_than_its_bytes(tmp_path):
    value = {f"layers.{i}": torch.full((256, 1024), float(i)) for i in range(48)}
    for shard in range(4):
        save_file({n: t for n, t in value.items() if int(n[7:]) % 4 == shard}, tmp_path / f"model-{shard}.safetensors")
    with counted() as counts:
        assert same(ckpt.open(str(tmp_path))["layers.30"].read(), value["layers.30"])
    assert counts.bytes < (1 << 20) + 4 * (32 << 10) + 100


# ------------------------------------------------------------------------------------------------- what is not as it should


def written(path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


BAD = {
    "leaves a hole of 2 bytes after a": ({"a": entry(0, 4), "b": entry(6, 8)}, 8),
    "overlaps a": ({"a": entry(0, 4), "b": entry(2, 8)}, 8),
    "accounts for": ({"a": entry(0, 4)}, 9),
    "takes": ({"a": entry(0, 4, [5])}, 4),
    "not a JSON object": ([1], 0),
    "malformed entry": ({"a": {"dtype": "U8", "shape": [4]}}, 4),
    "malformed entry for 'b'": ({"b": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}, 4),
    "malformed entry for 'c'": ({"c": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1),
    "the same name twice in its header: 'x'": (b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":1}', 1),
    "not JSON": (b"{", 0),
}


@pytest.mark.parametrize("text", BAD)
def test_headers_that_lie(text, tmp_path):
    header, size = BAD[text]
    with pytest.raises(CorruptError, match=text) as caught:
        open_catalog(written(tmp_path / "x.safetensors", header, bytes(size)))
    assert caught.value.where.endswith("x.safetensors")


def test_absurd_headers_take_no_memory(tmp_path):
    for length in (2**63, 10**8 + 1, 10**8):
        with pytest.raises(CorruptError, match="header of"):
            open_catalog(written(tmp_path / "x.safetensors", b"{}", length=length))
    for size in (2**61, 2**64, 10**30):
        with pytest.raises(CorruptError):
            open_catalog(written(tmp_path / "x.safetensors", {"a": entry(0, size)}))


def test_an_unknown_dtype(tmp_path):
    with pytest.raises(FormatError, match="unknown dtype 'F3'"):
        open_catalog(written(tmp_path / "x.safetensors", {"a": entry(0, 4, dtype="F3")}, bytes(4)))


def test_the_same_tensor_in_two_shards(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    with pytest.raises(CorruptError, match=r"both 1\.safetensors and 2\.safetensors have b"):
        open_catalog(str(tmp_path))
    assert list(ckpt.open(str(tmp_path / "2.safetensors"))) == ["b"]


def indexed(tmp_path, weights: object) -> str:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(weights if isinstance(weights, str) else json.dumps({"weight_map": weights}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"a": "1.safetensors"}, None),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "a should be in 2.safetensors and is in 1.safetensors"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}, "in no file: c"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, "not in the index: b"),
        ({"a": "1.safetensors", "b": "3.safetensors"}, "are missing: 3.safetensors"),
        ({"a": "1.safetensors", "b": "../2.safetensors"}, "'b' in a file that cannot be"),
        ({"a": "1.safetensors", "b": "/etc/passwd"}, "'b' in a file that cannot be"),
        ({"a": "1.safetensors", "b": 5}, "'b' in a file that cannot be"),
        ("{}", "the index is damaged"),
        ("[", "the index is damaged"),
    ],
)
def test_an_index_that_disagrees(weights, text, tmp_path):
    url = indexed(tmp_path, weights)
    if text is None:
        assert list(open_catalog(url).tensors) == ["a"]  # a file that the index does not name is none of the checkpoint's
        return
    with pytest.raises(CorruptError, match=text):
        open_catalog(url)


def test_several_indexes_are_not_guessed_between(tmp_path):
    url = indexed(tmp_path, {"a": "1.safetensors"})
    (tmp_path / "model.fp16.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "2.safetensors"}}))
    assert list(ckpt.open(url)) == ["a"]  # the plain name is the model's own
    assert list(ckpt.open(f"{url}/model.fp16.safetensors.index.json")) == ["b"]
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "other.x.safetensors.index.json")
    with pytest.raises(FormatError, match="several indexes"):
        ckpt.open(url)


SAMPLE = struct.pack("<Q", 120) + json.dumps({"a": entry(0, 4), "b": entry(4, 8, [2, 1], "F16")}).encode().ljust(120) + bytes(8)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=5))
@settings(max_examples=150)
def test_damage_ends_in_tensors_or_an_error(tmp_path_factory, changes):
    data = bytearray(SAMPLE)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(CkptError):
        for tensor in ckpt.open(str(path)).tensors():
            tensor.read()


# ------------------------------------------------------------------------------------------- shards that DCP wrote


def test_boxes_of_a_tensor_in_several_files(tmp_path):
    whole = torch.arange(35.0).reshape(7, 5)
    for number, (lo, hi) in enumerate([(0, 4), (4, 7)]):
        info = json.dumps({"w": {"saved_offsets": [lo, 0]}})
        save_file({"w": whole[lo:hi].clone()}, tmp_path / f"shard-{number}.safetensors", metadata={"DCP_SHARDING_INFO": info})
    view = ckpt.open(str(tmp_path))
    assert same(view["w"].read(), whole) and same(view["w"][3:6, 1:2], whole[3:6, 1:2])
    for bad in ('{"w": {}}', "[]", '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {"saved_offsets": ["0", 0]}}'):
        save_file({"w": whole[4:].clone()}, tmp_path / "shard-1.safetensors", metadata={"DCP_SHARDING_INFO": bad})
        with pytest.raises(CorruptError, match="DCP_SHARDING_INFO"):
            ckpt.open(str(tmp_path))
    save_file(
        {"w": whole[4:].bfloat16()}, tmp_path / "shard-1.safetensors", metadata={"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4, 0]}}'}
    )
    with pytest.raises(CorruptError, match="disagree about tensor w"):
        ckpt.open(str(tmp_path))


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (["model-00001-of-00003", "model-00003-of-00003"], "model-00002-of-00003.safetensors"),
        (["model-00001-of-00002"], "model-00002-of-00002.safetensors"),
        (["model-00000-of-00002", "x"], "model-00001-of-00002.safetensors"),
        (["shard-1-model-00001-of-00002", "shard-2-model-00001-of-00002"], "model-00002-of-00002.safetensors"),
        (["a-1-of-1", "b-1-of-9"], r"b-2-of-9.safetensors, .* and 3 more"),
    ],
)
def test_shards_that_are_missing_without_an_index(present, missing, tmp_path):
    for number, name in enumerate(present):
        save_file({f"t{number}": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CorruptError, match=f"files are missing: {missing}"):
        ckpt.open(str(tmp_path))
    assert list(ckpt.open(str(tmp_path / f"{present[0]}.safetensors"))) == ["t0"]


def test_shards_of_which_all_are_there(tmp_path):
    names = ["model-00000-of-00002", "model-00001-of-00002", "lm-1-of-2", "lm-2-of-2", "shard-1-x-1-of-2", "shard-2-x-2-of-2", "end-of-4"]
    for name in names:
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert sorted(ckpt.open(str(tmp_path))) == sorted(names)
