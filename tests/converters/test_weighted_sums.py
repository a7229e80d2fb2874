"""The formula of an average: bit-equal to torch, step by step, wherever its blocks end."""

from __future__ import annotations

import itertools

import pytest
import torch

from ckpt.converters import merge
from ckpt.converters.merge import WeightedSum
from ckpt.errors import MismatchError
from ckpt.plan.layout.geometry import Box

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHTS = (0.5, 0.3, 0.2)


def computed(operands: list[torch.Tensor], dtype: torch.dtype, *, allow_nan: bool = False) -> torch.Tensor:
    out = torch.empty(operands[0].shape, dtype=dtype)
    formula = WeightedSum(weights=WEIGHTS, sources=("a", "b", "c"), allow_nan=allow_nan)
    formula.compute("w", Box((0,) * out.ndim, tuple(out.shape)), operands, out)
    return out


def in_torch(operands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in {dtype, *(x.dtype for x in operands)} else torch.float32
    acc = operands[0].to(wide) * WEIGHTS[0]
    for x, weight in zip(operands[1:], WEIGHTS[1:], strict=True):
        acc = acc + x.to(wide) * weight
    return acc.to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("stored", "dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_bits_are_those_of_torch(stored: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    count = merge._BLOCK + merge._CAST + 77
    operands = [torch.randn(count, dtype=torch.float64).mul_(10.0 ** (i - 4)).to(stored) for i in range(3)]
    operands[1][:1000] *= 1e-36 if stored != torch.float16 else 1e-3  # subnormal numbers
    assert torch.equal(raw(computed(operands, dtype)), raw(in_torch(operands, dtype)))


def test_mixed_dtypes_and_small_floats() -> None:
    torch.manual_seed(2)
    mixed = [torch.randn(3, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    assert torch.equal(raw(computed(mixed, torch.float32)), raw(in_torch(mixed, torch.float32)))
    eight = [torch.randn(3, 5).to(torch.float8_e4m3fn) for _ in range(3)]
    assert torch.equal(raw(computed(eight, torch.float8_e4m3fn)), raw(in_torch(eight, torch.float8_e4m3fn)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_named_in_every_block(dtype: torch.dtype, value: float) -> None:
    operands = [torch.ones(merge._BLOCK + 10, dtype=dtype) for _ in range(3)]
    operands[1][merge._BLOCK + 9] = value
    with pytest.raises(MismatchError, match=rf"w\[{merge._BLOCK + 9}\] is {value!s}") as raised:
        computed(operands, dtype)
    assert raised.value.where == "b"
    assert torch.equal(raw(computed(operands, dtype, allow_nan=True)), raw(in_torch(operands, dtype)))


def test_the_largest_numbers_are_finite() -> None:
    for dtype in DTYPES:
        largest = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(computed([largest, largest, -largest], dtype), in_torch([largest, largest, -largest], dtype))
