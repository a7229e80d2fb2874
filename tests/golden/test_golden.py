"""Checkpoints of every past format version load as they were saved."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import FormatError
from ckpt.formats.native import commit
from ckpt.formats.registry import open_catalog
from tests.formats.oracle import read
from tests.golden import generate_anchors as anchored
from tests.golden import generate_codecs as coded
from tests.golden import generate_joint as joint
from tests.golden import generate_references as referring
from tests.golden.generate import TENSORS, expected_bytes, expected_values, itemsize, per_rank

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # complex32 is stored all the same

HERE = Path(__file__).parent
VERSIONS = ["v1"]
CODED = "v1-codecs"
REFERENCES = "v1-references"
ANCHORS = "v1-anchors"
JOINT = "v1-joint"


def test_every_version_is_kept() -> None:
    assert sorted(p.name for p in HERE.glob("v*") if p.is_dir()) == sorted([*VERSIONS, CODED, REFERENCES, ANCHORS, JOINT])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_oracle_reads_it(version: str) -> None:
    found = read(HERE / version)
    for name, (dtype, shape) in TENSORS.items():
        assert found[name] == (dtype, shape, expected_bytes(name)), name


@pytest.mark.parametrize("version", VERSIONS)
def test_open_reads_it(version: str) -> None:
    view = ckpt.open(str(HERE / version))
    for name, (dtype, shape) in TENSORS.items():
        tensor = view[name][...]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape), name
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert raw == expected_bytes(name), name
        assert len(raw) == tensor.numel() * itemsize(dtype)
    assert view.state()["values"] == expected_values()
    for rank in (0, 1):
        own = view.per_rank("own", rank)
        assert own["t"][...].tolist() == [rank] * 3
        assert {k: v for k, v in own.items() if k != "t"} == per_rank(rank)


@pytest.mark.parametrize("version", VERSIONS)
def test_load_reads_it(version: str) -> None:
    state = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in TENSORS.items()}
    state |= {"values": None, "own": ckpt.PerRank(None, reshard=lambda values, rank, world: values[1])}
    ckpt.load(str(HERE / version), state)
    for name in TENSORS:
        tensor = state[name]
        assert (tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"") == expected_bytes(name), name
    assert state["values"] == expected_values()
    assert state["own"].value["seed"] == 101


# ------------------------------------------------------------------------------------------------------- coded chunks


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_the_golden_checkpoint_has_chunks_of_both_codecs() -> None:
    headers = [p.read_bytes()[:4096] for p in sorted((HERE / CODED / "data").iterdir())]
    assert sum(h.count(b']#planes-zstd"') for h in headers) == 8
    assert sum(h.count(b']#zstd"') for h in headers) == 5


def test_the_oracle_reads_coded_chunks() -> None:
    found = read(HERE / CODED)
    assert found == {name: (dtype, shape, coded.expected_bytes(name)) for name, (dtype, shape, _, _) in coded.TENSORS.items()}


def test_open_reads_coded_chunks() -> None:
    view = ckpt.open(str(HERE / CODED))
    for name, (dtype, shape, _, _) in coded.TENSORS.items():
        tensor = view[name][...]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape), name
        assert raw_bytes(tensor) == coded.expected_bytes(name), name
    part = np.frombuffer(coded.expected_bytes("weights"), dtype="<u2").reshape(64, 48)[20:43, 7:9]
    np.testing.assert_array_equal(view["weights"][20:43, 7:9].view(torch.uint16).numpy(), part)


def test_load_reads_coded_chunks() -> None:
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape, _, _) in coded.TENSORS.items()}
    ckpt.load(str(HERE / CODED), tensors, strict=False)
    for name, tensor in tensors.items():
        assert raw_bytes(tensor) == coded.expected_bytes(name), name


@pytest.mark.parametrize("step", referring.CODECS)
def test_references_are_read_by_both_readers(step: int) -> None:
    url = HERE / REFERENCES / f"step-{step}"
    view, found = ckpt.open(str(url)), read(url)
    for name, tensor in referring.tensors(step).items():
        assert torch.equal(torch.as_tensor(view[name][...]), tensor), name
        assert found[name][2] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    paths = [file.path for file in open_catalog(str(url)).files]
    assert [path.startswith("../step-1/") for path in paths] == [False] * (step == 1) + [False, True] * (step > 1)


@pytest.mark.parametrize("step", [1, 2])
def test_differences_are_read_by_both_readers(step: int) -> None:
    url = HERE / ANCHORS / f"step-{step}"
    view, found = ckpt.open(str(url)), read(url)
    for name, tensor in anchored.tensors(step).items():
        assert torch.equal(torch.as_tensor(view[name][...]), tensor), name
        assert found[name][2] == raw_bytes(tensor), name
    header = next((url / "data").iterdir()).read_bytes()[:4096]
    assert (header.count(b"#xor-planes-zstd"), header.count(b"#planes-zstd")) == ((0, 4), (2, 1))[step - 1]


@pytest.mark.parametrize("member", joint.MEMBERS)
def test_both_readers_read_the_members_of_a_joint_step(member: str) -> None:
    for step in (1, 2):
        right, url = joint.state(member, step), HERE / JOINT / f"step-{step:08d}"
        view = ckpt.open(str(url), member=member)
        assert torch.equal(torch.as_tensor(view["own"][...]), right["own"])
        assert (view.state()["name"], view.state()["queue"]) == (member, right["queue"])
        assert read(HERE / JOINT / member / url.name)["own"] == ("int32", (6,), raw_bytes(right["own"]))


def test_a_reader_without_the_extension_refuses_a_joint_record_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    url = HERE / JOINT / "step-00000002"
    with pytest.raises(AssertionError, match="unknown feature"):
        read(url)
    monkeypatch.setattr(commit, "FEATURES", commit.FEATURES - {commit.JOINT})
    with pytest.raises(FormatError, match="members"):
        ckpt.open(str(url))


def test_the_members_of_the_golden_run_go_on_from_its_last_step(tmp_path: Path) -> None:
    root = str(shutil.copytree(HERE / JOINT, tmp_path / "run"))

    def restored(member: str) -> int | None:
        state = joint.state(member, 0)
        with ckpt.Checkpointer(root, member=ckpt.Member(member, of=joint.MEMBERS), job=ckpt.Job(timeout=60)) as c:
            step = c.restore(state)
        right = joint.state(member, 2)
        assert torch.equal(state.pop("own"), right.pop("own")) and state == right
        return step

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(restored, joint.MEMBERS)) == [2, 2]
