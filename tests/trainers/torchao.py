"""torchao: optimizers with 8-bit, 4-bit and FP8 states, and weights that are quantised. Their tensors are subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from .lives import Job


def optimizer_job(make: Callable[..., Any], width: int) -> Callable[[int], Job]:
    """States of parameters with fewer than 4,096 elements are plain tensors."""

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Linear(width, width)
        optimizer = make(model.parameters(), lr=1e-2)

        def step(number: int) -> None:
            model(torch.randn(4, width)).square().sum().backward()
            with torch.compiler.set_stance("force_eager"):  # compiling takes a minute, and computes the same on every run
                optimizer.step()
            optimizer.zero_grad()

        return Job({"model": model, "optimizer": optimizer}, step)

    return made


def int8(base: torch.nn.Module) -> None:
    quantize_(base, Int8WeightOnlyConfig())


class Nf4Linear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(to_nf4(weight, 64, 64), requires_grad=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return linear_nf4(data, self.weight)


def nf4(base: torch.nn.Module) -> None:
    base[0] = Nf4Linear(base[0].weight.detach())  # type: ignore[operator,index]  # it is a Sequential


class Adapted(torch.nn.Module):
    """A quantised base, and an adapter beside it: QLoRA in small."""

    def __init__(self, seed: int, quantise: Callable[[torch.nn.Module], None], base_seed: int) -> None:
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = torch.nn.Sequential(torch.nn.Linear(128, 128)).requires_grad_(False)
        quantise(self.base)
        torch.manual_seed(seed)
        self.adapter = torch.nn.Linear(128, 128)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.base(data) + self.adapter(data)


def adapter_job(seed: int, quantise: Callable[[torch.nn.Module], None] = int8, **options: Any) -> Job:
    """With ``trainable`` the base is not in the checkpoint, so it is the same for every seed."""
    model = Adapted(seed, quantise, 0 if options else seed)
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-2)

    def step(number: int) -> None:
        model(torch.randn(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Job({"model": model, "optimizer": optimizer}, step, **options)


CASES = {
    "adamw-8bit": optimizer_job(AdamW8bit, 128),
    "adamw-4bit": optimizer_job(AdamW4bit, 128),
    "adamw-fp8": optimizer_job(AdamWFp8, 256),
    "adamw-8bit-small": optimizer_job(AdamW8bit, 16),
    "int8-weights": adapter_job,
    "int8-dynamic-weights": lambda seed: adapter_job(seed, lambda base: quantize_(base, Int8DynamicActivationInt8WeightConfig())),
    "float8-weights": lambda seed: adapter_job(seed, lambda base: quantize_(base, Float8WeightOnlyConfig())),
    "nf4-weights": lambda seed: adapter_job(seed, nf4),
    "int8-base-trainable": lambda seed: adapter_job(seed, trainable=True),
}
