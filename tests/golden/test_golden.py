"""Checkpoints of every past format version load as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from tests.formats.oracle import read
from tests.golden.generate import TENSORS, expected_bytes, expected_values, itemsize, per_rank

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # complex32 is stored all the same

HERE = Path(__file__).parent
VERSIONS = sorted(p.name for p in HERE.glob("v*") if p.is_dir())


def test_every_version_is_kept() -> None:
    assert VERSIONS == ["v1"]


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
