"""DCP checkpoints against DCP's own loader; those of several ranks are fixtures that FSDP1 and FSDP2 wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.view import StoredTensor
from ckpt.errors import CkptError, CorruptError, FormatError, NotCommittedError
from ckpt.formats.dcp_container import read_metadata
from ckpt.formats.registry import find_format, list_foreign, open_catalog
from ckpt.io_backends.registry import open_backend
from tests.formats import reading
from tests.formats.reading import FIXTURES, counted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

DIRECTORIES = ["fsdp1_sharded_orig0", "fsdp1_sharded_orig1", "fsdp2_ws2"]


def expected(path: Path) -> dict[str, Any]:
    """The nested state as DCP itself gives it."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def plain(value: Any) -> Any:
    """A state with whole tensors."""
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def same(a: Any, b: Any) -> bool:
    """Equal structure, values and bits."""
    if isinstance(a, torch.Tensor):
        return reading.same(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", DIRECTORIES)
def test_states_of_two_ranks(name):
    path = FIXTURES / "fsdp" / name
    view = ckpt.open(str(path))
    assert same(plain(view.state()), expected(path))
    catalog = open_catalog(str(path))
    assert catalog.world_size == 2 and [f.rank for f in catalog.files] == [0, 1]
    assert any(len(entry.grid) > 1 for entry in catalog.tensors.values())


@pytest.mark.parametrize("name", DIRECTORIES)
def test_parts_across_chunks(name):
    view = ckpt.open(str(FIXTURES / "fsdp" / name))
    tensor = view["model.m.emb.weight"]
    assert same(tensor[15:20, 3:9], tensor.read()[15:20, 3:9])


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        str(dtype).removeprefix("torch."): torch.randint(0, 100, (5, 7), generator=generator).to(dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.float64)
    }
    return {
        "model": tensors | {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "big": torch.randn(300, 100, generator=generator)},
        "optim": {"state": [{"step": torch.tensor(1.0)}, {"step": torch.tensor(2.0)}], "groups": [{"lr": 0.1, "params": [0, 1]}]},
        "step": 7,
        "inner": ("x", torch.arange(5), {"deep": torch.ones(3)}),
        "text": "t",
        "part": torch.randn(8, 9, generator=generator)[2:4],
    }


@pytest.fixture
def saved(tmp_path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def test_dtypes_values_and_tensors_inside_values(saved):
    found = plain(ckpt.open(str(saved)).state())
    assert same(found, state())
    assert {"inner.1", "inner.2.deep", "model.bfloat16", "optim.state.0.step"} <= set(ckpt.open(str(saved)))


def test_load_in_place(saved):
    target = {"model": {n: torch.zeros_like(t) for n, t in state()["model"].items()}, "step": 0, "text": ""}
    report = ckpt.load(str(saved), target, strict=False)
    assert same(target, {k: state()[k] for k in target})
    assert not report.missing and set(report.unexpected) >= {"part", "inner.1"}


def test_one_tensor_reads_little_more_than_its_bytes(tmp_path):
    value = {f"layers.{i}": torch.full((256, 1024), float(i)) for i in range(48)}
    dcp.save(value, checkpoint_id=tmp_path, no_dist=True)
    with counted() as counts:
        assert same(ckpt.open(str(tmp_path))["layers.30"].read(), value["layers.30"])
    assert counts.bytes < (1 << 20) + (64 << 10)
    with counted() as counts:
        assert same(ckpt.open(str(tmp_path))["layers.30"][5:6], value["layers.30"][5:6])
    assert counts.bytes < 64 << 10


def test_many_small_items_take_few_reads(tmp_path):
    dcp.save({f"w{i}": torch.ones(4) for i in range(200)}, checkpoint_id=tmp_path, no_dist=True)
    view = ckpt.open(str(tmp_path))
    catalog = open_catalog(str(tmp_path))
    with counted() as counts:
        catalog = open_catalog(str(tmp_path))
        catalog.extents_of([(entry, 0) for entry in catalog.tensors.values()])
    assert counts.calls < 10 and len(view) == 200


# -------------------------------------------------------------------------------------------------- what is refused


def test_transposed_tensors_are_said(tmp_path):
    dcp.save({"odd": torch.randn(30, 40).t(), "good": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    view = ckpt.open(str(tmp_path))
    assert same(view["good"].read(), torch.ones(2))
    with pytest.raises(FormatError, match="tensor odd .*not stored row by row"):
        view["odd"].read()


def test_compressed_items_are_refused_by_name(tmp_path):
    StreamTransformExtension = pytest.importorskip("torch.distributed.checkpoint._extension").StreamTransformExtension
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Same(StreamTransformExtension):
        @staticmethod
        def from_descriptor(version):
            return Same()

        @staticmethod
        def registry_name():
            return "stream.same"

        def get_descriptor(self):
            return "stream.same/1"

        def transform_to(self, output):
            return output

        def transform_from(self, input):
            return input

    dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path, _extensions=[Same()]), no_dist=True)
    with pytest.raises(FormatError, match="stored through stream"):
        open_catalog(str(tmp_path))


def test_items_as_safetensors_are_refused(tmp_path):
    from torch.distributed.checkpoint import filesystem

    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("DCP of torch 2.6 writes none")

    writer = filesystem.FileSystemWriter(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CkptError):
        ckpt.open(str(tmp_path))["a"].read()


def test_metadata_of_each_rank_are_refused(tmp_path):
    (tmp_path / "__0.metadata").write_bytes(b"x")
    with pytest.raises(FormatError, match="every rank kept its own metadata"):
        open_catalog(str(tmp_path))


def changed(path: Path, change) -> str:
    """The checkpoint with other metadata."""
    file = path / ".metadata"
    metadata: Metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return str(path)


def read_all(url: str) -> None:
    for tensor in ckpt.open(url).tensors():
        tensor.read()


def infos(metadata: Metadata, **fields: object) -> None:
    for info in metadata.storage_data.values():
        for key, value in fields.items():
            object.__setattr__(info, key, value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: infos(m, relative_path="../x/__0_0.distcp"), "file that cannot be"),
        (lambda m: infos(m, relative_path="/etc/passwd"), "file that cannot be"),
        (lambda m: infos(m, relative_path=5), "file that cannot be"),
        (lambda m: infos(m, relative_path="__9_9.distcp"), "are missing: __9_9.distcp"),
        (lambda m: infos(m, offset=-1), "not a count"),
        (lambda m: infos(m, length=1 << 50), "should end at byte"),
        (lambda m: infos(m, length=10), "wanted of|no end of its directory"),
        (lambda m: infos(m, offset=3), "not an archive|no end"),
        (lambda m: m.storage_data.clear(), "lies nowhere"),
        (lambda m: m.state_dict_metadata.update(x=5), "has no attribute"),
        (lambda m: m.state_dict_metadata.update({5: 5}), "a name of the kind int"),
        (lambda m: m.__dict__.pop("storage_data"), "storage_data"),
        (lambda m: m.planner_data.update({"step": ("model", "scalar", "x")}), "lead through another value"),
        (lambda m: m.planner_data.update({"step": ("x",) * 5000}), "4999 containers deep"),
    ],
)
def test_metadata_that_cannot_be(change, text, saved):
    url = changed(saved, change)
    with pytest.raises(CkptError, match=text):
        read_all(url)


def test_metadata_of_another_save(saved):
    """Two boxes that are exchanged have the wrong shape or dtype; the bytes are never taken for something else."""

    def exchange(metadata: Metadata) -> None:
        keys = {key.fqn: key for key in metadata.storage_data}
        rows = metadata.storage_data
        rows[keys["model.bool"]], rows[keys["model.int64"]] = rows[keys["model.int64"]], rows[keys["model.bool"]]

    with pytest.raises(CorruptError, match=r"bool \[5, 7\] of model\.bool here, and the file has int64"):
        ckpt.open(changed(saved, exchange))["model.bool"].read()


@pytest.mark.parametrize("shape", [(300, 64), (5, 7), (1,)])
def test_items_that_are_alike_but_for_something(tmp_path, shape):
    """Boxes of one shape are looked into by comparing them with one that was read: whatever else differs is noticed in each."""
    value = {f"w{i}": torch.full(shape, float(i)) for i in range(6)}
    dcp.save(value, checkpoint_id=tmp_path, no_dist=True)
    items = {index.fqn: place for index, place in FileSystemReader(tmp_path).read_metadata().storage_data.items()}
    file, before = tmp_path / "__0_0.distcp", (tmp_path / "__0_0.distcp").read_bytes()
    catalog = open_catalog(str(tmp_path))
    assert all(same(ckpt.open(str(tmp_path))[n].read(), t) for n, t in value.items())
    found = [e.offset for e in catalog.extents_of([(catalog.tensors[n], 0) for n in sorted(value)])]
    assert [before[at : at + 4] for at in found] == [value[n].numpy().tobytes()[:4] for n in sorted(value)]
    item = items["w4"]
    inside = before[item.offset : item.offset + item.length]
    for part in (b"FloatStorage", b"/data/0", b"PK\x01\x02"):  # the pickle, a header of a record, the directory
        end = item.offset + inside.index(part) + len(part)
        file.write_bytes(before[: end - 1] + bytes([before[end - 1] ^ 1]) + before[end:])
        catalog = open_catalog(str(tmp_path))
        with pytest.raises(CkptError):
            catalog.extents_of([(catalog.tensors[n], 0) for n in sorted(value)])
        assert [catalog.extents(catalog.tensors[n], [0])[0].offset for n in ("w0", "w5")] == [found[0], found[5]]


def test_boxes_with_a_hole(tmp_path):
    shutil.copytree(FIXTURES / "fsdp/fsdp2_ws2", tmp_path / "x")

    def lose(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.m.emb.weight"].chunks.pop()

    url = changed(tmp_path / "x", lose)
    with pytest.raises(CorruptError, match="stored parts of tensor model.m.emb.weight have"):
        ckpt.open(url)["model.m.emb.weight"].read()


def test_a_claimed_shape_takes_no_memory(saved):
    def grow(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.bool"].size = torch.Size([1 << 40, 1 << 20])

    with pytest.raises(CorruptError, match="stored parts of tensor model.bool"):
        ckpt.open(changed(saved, grow))


def test_metadata_are_never_run(tmp_path, saved):
    class Runs:
        def __reduce__(self):
            return (Path.mkdir, (tmp_path / "made",))

    def add(metadata: Metadata) -> None:
        metadata.planner_data = Runs()

    view = ckpt.open(changed(saved, add))
    assert same(view["model.bool"].read(), state()["model"]["bool"]) and not (tmp_path / "made").exists()
    pickle.loads((saved / ".metadata").read_bytes())
    assert (tmp_path / "made").exists()


SAMPLE = (FIXTURES / "fsdp/fsdp2_ws2/.metadata").read_bytes()


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=60)
def test_damaged_metadata_end_in_tensors_or_an_error(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("damaged") / "x"
    shutil.copytree(FIXTURES / "fsdp/fsdp2_ws2", path)
    data = bytearray(SAMPLE)
    for at, byte in changes:
        data[at] = byte
    (path / ".metadata").write_bytes(data)
    with contextlib.suppress(CkptError):
        read_all(str(path))


@dataclasses.dataclass
class Derived(Metadata):
    """As Megatron-Core 0.15 has one of its own."""

    more: dict[str, int] | None = None


class Other:
    def __init__(self) -> None:
        self.state_dict_metadata = {"w": 1}


def test_metadata_of_classes_that_are_not_torchs(tmp_path):
    """A class derived from DCP's own is known by its parts; another one is named, and no damage is claimed."""
    dcp.save({"w": torch.arange(5.0)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    said = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(Derived(**vars(said), more={"w": 1})))
    assert b"Derived" in path.read_bytes()
    assert torch.equal(ckpt.open(str(tmp_path))["w"].read(), torch.arange(5.0))
    path.write_bytes(pickle.dumps(Other()))
    with pytest.raises(FormatError, match=r"a tests\.formats\.test_dcp\.Other without storage_data"):
        read_metadata(open_backend(str(tmp_path)))


# ------------------------------------------------------------------------------------------------- classes that are not read


def test_tensors_of_torchao_are_not_damaged(tmp_path: Path) -> None:
    """Quantised tensors, which DCP stores as pickled objects: the others are verified, and these are named."""
    path = FIXTURES / "torchao" / "dcp"
    ours = {"optim.exp_avg", "q.0.weight", "tiny.0.weight"}
    result = CliRunner().invoke(cli, ["verify", "--json", str(path)])
    report = json.loads(result.stdout)
    assert result.exit_code == 12 and {(p["kind"], p["tensor"]) for p in report["problems"]} == {("unread", name) for name in ours}
    assert all("class torchao." in p["message"] for p in report["problems"]) and "restore" not in report["remedy"]
    assert report["chunks"] == 3
    (note,) = json.loads(CliRunner().invoke(cli, ["inspect", "--json", str(path)]).stdout)["notes"]
    assert note.startswith("2 tensors cannot be read, such as optim.exp_avg: ") and "OptimState8bit" in note  # of the tiny one nobody knows
    view = ckpt.open(path)
    assert same(view["plain"].read(), torch.arange(12.0).view(3, 4))
    for name in ours:
        state = {"plain": torch.zeros(3, 4), name: torch.zeros(view[name].shape)}
        with pytest.raises(
            FormatError, match=rf"(?s)a tensor of the class torchao.*\(tensor {name}, .*try: load it with.*ckpt.save.*or leave"
        ):
            ckpt.load(str(path), state, only=[*state])
        assert not state["plain"].any()
        for option in ("--dry-run", "--threads=1"):
            refused = CliRunner().invoke(
                cli, ["convert", "--to", "native", option, "--only", "plain", "--only", name, str(path), str(tmp_path / "n")]
            )
            assert refused.exit_code == 12 and f"tensor {name}, " in refused.output and not (tmp_path / "n").exists()
    copy = shutil.copytree(path, tmp_path / "c")
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    at = data.index(torch.arange(12.0).numpy().tobytes())
    (copy / "__0_0.distcp").write_bytes(data[:at] + b"\1" + data[at + 1 :])
    damaged = CliRunner().invoke(cli, ["verify", str(copy)])
    assert damaged.exit_code == 20 and "digest: " in damaged.stdout and "remedy: restore the files" in damaged.stdout


def test_a_save_that_died_is_listed_and_no_checkpoint(tmp_path: Path) -> None:
    """``.metadata`` comes last. The checkpoint beside it stays in the listing, too."""
    model = torch.nn.Linear(3, 2)
    for step in (1, 2):
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / f"step-{step}"), no_dist=True)
    died = tmp_path / "step-2"
    (died / ".metadata").unlink()
    assert find_format(str(died)) == "unfinished save of torch.distributed.checkpoint"
    assert list_foreign(str(tmp_path), ()).keys() == {str(tmp_path / f"step-{step}") for step in (1, 2)}
    with pytest.raises(NotCommittedError, match="not finished"):
        ckpt.load(str(died), {"model": model}, strict=False)
    with pytest.raises(FormatError, match=r"says nothing without \.metadata"):
        open_catalog(str(died / "__0_0.distcp"))
