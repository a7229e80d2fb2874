"""The table of dtypes against torch, numpy and safetensors, which are the authorities on it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from ckpt.dtypes import DTYPES, FROM_SAFETENSORS, DType, dtype
from ckpt.errors import FormatError

AS_BYTES = {"complex32", "complex128"}
"""safetensors has no spelling for these: they are stored as U8."""

SHAPES = [(), (6,), (2, 3), (2, 0)]


@pytest.fixture(params=sorted(DTYPES))
def row(request: pytest.FixtureRequest) -> DType:
    return DTYPES[request.param]


def torch_dtype(row: DType) -> torch.dtype:
    found = getattr(torch, row.name, None)
    if found is None:
        pytest.skip(f"this torch has no {row.name}")
    return found


def some_bytes(row: DType, shape: tuple[int, ...]) -> bytes:
    raw = bytes(i % 251 for i in range(math.prod(shape) * row.itemsize))
    return bytes(b & 1 for b in raw) if row.name == "bool" else raw


def tensor_of(row: DType, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.tensor(list(some_bytes(row, shape)), dtype=torch.uint8)
    return raw.view(torch_dtype(row)).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_names_and_sizes_are_torchs(row: DType) -> None:
    found = torch_dtype(row)
    assert str(found) == f"torch.{row.name}"
    assert found.itemsize == row.itemsize


def test_every_torch_dtype_with_whole_bytes_is_known() -> None:
    """Quantised and bit dtypes hold no plain values, and torch has no tensors of the integers below a byte."""
    found = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    opaque = {n for n in found if n.startswith(("bits", "qint", "quint"))} | {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    untried = {"bcomplex32"}  # torch 2.15 warns that most operators do not take it; a state with one is refused by name
    assert found - opaque - untried <= set(DTYPES)


def test_numpy_names_are_numpys(row: DType) -> None:
    if row.numpy is None:
        with pytest.raises(TypeError):
            np.dtype(row.name)
    else:
        assert np.dtype(row.numpy).name == row.name
        assert np.dtype(row.numpy).itemsize == row.itemsize
        assert raw_bytes(torch.ones((), dtype=torch_dtype(row))) == np.ones((), dtype=row.numpy).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_safetensors_reads_what_the_table_says(row: DType, shape: tuple[int, ...], tmp_path: Path) -> None:
    """A file whose header follows the table; safetensors itself checks that dtype and shape give the number of bytes."""
    raw = some_bytes(row, shape)
    header = json.dumps({"x": {"dtype": row.safetensors, "shape": row.stored_shape(shape), "data_offsets": [0, len(raw)]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)
    with safetensors.safe_open(path, "pt") as opened:
        found = opened.get_tensor("x")
    assert raw_bytes(found) == raw
    if row.name in AS_BYTES:
        assert found.dtype == torch.uint8
        found = found.view(torch_dtype(row)).reshape(shape)
    assert found.dtype == torch_dtype(row)
    assert found.shape == (shape if shape or row.safetensors != "F4" else (1,))  # a scalar of two packed values is written as a row of two


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_safetensors_writes_what_the_table_says(row: DType, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(row, shape)
    if row.name in AS_BYTES:
        with pytest.raises(KeyError):  # when this starts to pass, there is a spelling to use in a new version of the format
            safetensors.torch.save({"x": tensor})
        return
    if row.safetensors == "F4" and not shape:
        tensor = tensor.reshape(1)
    blob = safetensors.torch.save({"x": tensor})
    start = 8 + int.from_bytes(blob[:8], "little")
    entry = json.loads(blob[8:start])["x"]
    assert (entry["dtype"], tuple(entry["shape"])) == (row.safetensors, row.stored_shape(shape))
    assert blob[start:] == some_bytes(row, shape)


def test_stored_shapes() -> None:
    assert dtype("float4_e2m1fn_x2").stored_shape((3, 5)) == (3, 10)
    assert dtype("float4_e2m1fn_x2").stored_shape(()) == (2,)
    assert dtype("complex32").stored_shape((3,)) == (3, 4)
    assert dtype("complex128").stored_shape(()) == (16,)
    assert dtype("uint8").stored_shape((3,)) == (3,)


def test_safetensors_spellings_lead_back(row: DType) -> None:
    expected = "uint8" if row.name in AS_BYTES else row.name
    assert FROM_SAFETENSORS[row.safetensors].name == expected


def test_names_are_keys() -> None:
    assert all(dtype(name) is row and row.name == name for name, row in DTYPES.items())


@pytest.mark.parametrize("name", ["float", "F32", "", "torch.float32"])
def test_an_unknown_name_is_refused_by_name(name: str) -> None:
    with pytest.raises(FormatError, match=f"unknown dtype {name!r}") as caught:
        dtype(name)
    assert "float32" in str(caught.value.hint)
