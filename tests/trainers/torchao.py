"""torchao: optimizers with 8-bit, 4-bit and FP8 states, and weights that are quantised. Their tensors are subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Int8WeightOnlyConfig, quantize_

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


class Adapted(torch.nn.Module):
    """A quantised base, the same for every seed, and an adapter beside it: QLoRA in small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Sequential(torch.nn.Linear(128, 128)).requires_grad_(False)
        quantize_(self.base, Int8WeightOnlyConfig())
        torch.manual_seed(seed)
        self.adapter = torch.nn.Linear(128, 128)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.base(data) + self.adapter(data)


def adapter_job(seed: int, **options: Any) -> Job:
    model = Adapted(seed)
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
    "int8-base-trainable": lambda seed: adapter_job(seed, trainable=True),
}
