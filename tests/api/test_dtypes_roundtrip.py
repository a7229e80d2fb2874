"""Every dtype and every way in which a tensor can lie in memory: stored and loaded to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckpt
from ckpt.errors import StateError
from tests.api.checked import data_files, described, files_below, pattern, raw, save, save_exactly
from tests.formats.oracle import DTYPES as NAMES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # complex32 is stored all the same

DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]  # torch 2.6 lacks two
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (1, 1, 1), (4, 3), (2, 3, 5)]

Made = Callable[[torch.dtype], torch.Tensor]


def filled(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"t{i}": pattern(dtype, *shape, seed=i) for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_shape(url: str, dtype: torch.dtype) -> None:
    state = filled(dtype)
    save_exactly(url, dict(state), state)
    target = {name: pattern(dtype, *t.shape, seed=99) for name, t in state.items()}
    report = ckpt.load(url, dict(target))
    assert {name: described(t) for name, t in target.items()} == {name: described(t) for name, t in state.items()}
    assert report.bytes_needed == sum(t.numel() for t in state.values()) * dtype.itemsize
    view = ckpt.open(url)
    for name, tensor in state.items():
        assert (view[name].dtype, view[name].shape, described(view[name].read())) == (dtype, tuple(tensor.shape), described(tensor))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if str(d) not in ("torch.complex32", "torch.complex128")], ids=str)
def test_safetensors_reads_the_data_files(url: str, dtype: torch.dtype) -> None:
    """complex32 and complex128 have no spelling in safetensors: they are bytes there."""
    tensor = pattern(dtype, 4, 6)
    ckpt.save(url, {"t": tensor})
    (path,) = data_files(url)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["t"]
        found = file.get_tensor("t")
    assert (found.dtype, raw(found)) == (tensor.dtype, raw(tensor))


# ------------------------------------------------------------------------------------------------------------- memory


def _channels_last(dtype: torch.dtype) -> torch.Tensor:
    return pattern(dtype, 2, 5, 3, 4).to(memory_format=torch.channels_last)


LYING: dict[str, Made] = {
    "transposed": lambda d: pattern(d, 5, 7).t(),
    "permuted": lambda d: pattern(d, 2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last": _channels_last,
    "every third": lambda d: pattern(d, 30)[::3],
    "every second column": lambda d: pattern(d, 6, 8)[:, 1::2],
    "one column": lambda d: pattern(d, 6, 8)[:, 3:4],
    "one column, flat": lambda d: pattern(d, 6, 8)[:, 3],
    "rows of a larger one": lambda d: pattern(d, 100, 3)[40:43],
    "a block of a larger one": lambda d: pattern(d, 9, 9, 9)[2:5, 1:8, 3:4],
    "one element": lambda d: pattern(d, 100)[42],
    "one element with a stride": lambda d: pattern(d, 10)[::5][:1],
    "one element with strides": lambda d: pattern(d, 4, 6)[1:2, ::5][:, 1:],
    "one row with a stride": lambda d: pattern(d, 6, 4)[::5][:1],
}
"""Views that do not lie row-major from the start of their storage."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("make", LYING.values(), ids=LYING.keys())
def test_views_are_stored_and_filled_where_they_lie(url: str, make: Made, dtype: torch.dtype) -> None:
    stored = make(dtype)
    save_exactly(url, {"t": stored}, {"t": stored})
    target = make(dtype)
    memory = target.untyped_storage()
    memory.fill_(0x2A)
    place = (target.data_ptr(), target.stride())
    ckpt.load(url, {"t": target})
    assert described(target) == described(stored)
    assert (target.data_ptr(), target.stride()) == place
    beside = bytes(memory.tolist()).count(0x2A) - raw(stored).count(0x2A)
    assert beside == memory.nbytes() - len(raw(stored)), "bytes beside the view were written"


@pytest.mark.parametrize("make", LYING.values(), ids=LYING.keys())
def test_only_the_bytes_of_a_view_are_stored(url: str, make: Made) -> None:
    tensor = make(torch.float64)
    report = ckpt.save(url, {"t": tensor})
    (path,) = data_files(url)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert report.tensor_bytes == path.stat().st_size - header == tensor.numel() * 8


OVERLAPPING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.arange(4.0)[:, None].expand(4, 3),
    "expanded scalar": lambda: torch.tensor(3.0).expand(2, 5),
    "windows": lambda: torch.arange(10.0).unfold(0, 4, 2),
}


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_elements_that_share_memory_are_stored_each(url: str, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    save_exactly(url, {"t": tensor}, {"t": tensor})
    target = torch.zeros(tensor.shape)
    ckpt.load(url, {"t": target})
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("kind", ["expanded", "expanded scalar"])
def test_an_expanded_tensor_cannot_be_loaded_into(url: str, kind: str) -> None:
    tensor = OVERLAPPING[kind]()
    ckpt.save(url, {"a": torch.ones(2), "t": tensor + 1})
    target = {"a": torch.zeros(2), "t": OVERLAPPING[kind]()}
    with pytest.raises(StateError, match=r"(?s)share memory.*tensor t.*clone"):
        ckpt.load(url, dict(target))
    assert torch.equal(target["a"], torch.zeros(2))
    assert torch.equal(target["t"], tensor)


def test_conjugated_and_negated_views_have_values_of_their_own(url: str) -> None:
    """They share memory, shape and strides with what they are views of: they are not tied to it."""
    base = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    state = {"base": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag, "conj.t": base.conj().t(), "again": base.conj()}
    assert state["conj"].is_conj() and state["neg"].is_neg()
    save_exactly(url, state, {name: t.clone() for name, t in state.items()})
    target = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    ckpt.load(url, dict(target))
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor.clone()), name


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_loading_into_conjugated_and_negated_views(url: str, dtype: torch.dtype) -> None:
    values = {"conj": torch.randn(5, dtype=dtype), "neg": torch.randn(5, dtype=dtype).real.clone()}
    ckpt.save(url, dict(values))
    first, second = torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype)
    ckpt.load(url, {"conj": first.conj(), "neg": second.conj().imag})
    assert torch.equal(first, values["conj"].conj())
    assert torch.equal(second.imag, -values["neg"])
    assert torch.equal(second.real, torch.zeros_like(second.real))


# ------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("limit", [1, 8, 64, 100])
def test_tensors_larger_than_a_chunk(url: str, chunks_of: Callable[[int], None], limit: int) -> None:
    """Rows are cut first; a row larger than a chunk is cut too; only a single element may be larger."""
    chunks_of(limit)
    state = {
        "rows": pattern(torch.float32, 10, 6, seed=1),
        "wide": pattern(torch.float32, 3, 40, seed=2),
        "deep": pattern(torch.int16, 2, 3, 50, seed=3),
        "long": pattern(torch.uint8, 257, seed=4),
        "large elements": pattern(torch.complex128, 5, 2, seed=5),
        "scalar": pattern(torch.complex128, seed=6),
        "none": pattern(torch.float32, 0, 7, seed=7),
        "transposed": pattern(torch.float64, 9, 11, seed=8).t(),
    }
    save_exactly(url, dict(state), state)
    (path,) = data_files(url)
    with safe_open(path, framework="pt") as file:
        sizes = {key: math.prod(part.get_shape()) * _width(part.get_dtype()) for key in list(file.keys()) for part in [file.get_slice(key)]}
    element = {name: t.element_size() for name, t in state.items()}
    for key, size in sizes.items():
        assert size <= max(limit, element[key.partition("[")[0]]), key
    if limit == 64:
        assert sum(key.startswith("rows[") for key in sizes) == 5  # 24 bytes a row: two rows a chunk
        assert sum(key.startswith("wide[") for key in sizes) == 3 * 3  # 160 bytes a row: three chunks each
    for strided in (False, True):
        target = {name: _target(t, strided) for name, t in state.items()}
        report = ckpt.load(url, dict(target))
        assert {n: described(t) for n, t in target.items()} == {n: described(t) for n, t in state.items()}
        assert report.bytes_read == report.bytes_needed == sum(t.numel() * t.element_size() for t in state.values())


def _width(stored: str) -> int:
    return {"F32": 4, "I16": 2, "U8": 1, "F64": 8}[stored]


def _target(like: torch.Tensor, strided: bool) -> torch.Tensor:
    if not strided:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.zeros(*like.shape, 2, dtype=like.dtype)[..., 1]


# ------------------------------------------------------------------------------------------------------------ refused


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "quantised": (_quantised, "cannot be stored"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "freed": (_freed, "freed"),
}


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*quantiz.*")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_values_is_refused_and_nothing_is_written(url: str, kind: str) -> None:
    make, word = REFUSED[kind]
    ckpt.save(url, {"old": torch.ones(1)})
    before = files_below(url)
    with pytest.raises(StateError, match=word) as caught:
        ckpt.save(url, {"fine": torch.ones(2), "bad": make()})
    assert "bad" in str(caught.value)
    assert caught.value.hint
    assert files_below(url) == before


def test_two_tensors_without_memory_are_not_tied(url: str) -> None:
    with pytest.raises(StateError, match="freed"):
        save(url, {"a": _freed(), "b": _freed()})
