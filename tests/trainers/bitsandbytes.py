"""bitsandbytes: optimizers with 8-bit states, and adapters beside a base in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch

from .lives import Job


def optimizer_job(make: Callable[..., Any]) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 64)
        optimizer = make(model.parameters(), lr=1e-3, min_8bit_size=1024)
        return Job({"model": model, "optimizer": optimizer}, on(model, optimizer))

    return made


def on(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    def step(number: int) -> None:
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Adapted(torch.nn.Module):
    """A quantised base, the same for every seed, and an adapter beside it: QLoRA in small."""

    def __init__(self, seed: int, layer: type[torch.nn.Linear], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = layer(128, 128, **options).requires_grad_(False).to("cpu")
        torch.manual_seed(seed)
        self.adapter = torch.nn.Linear(128, 128)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.base(data).float() + self.adapter(data)


def adapter_job(layer: type[torch.nn.Linear], **options: Any) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        model = Adapted(seed, layer, **options)
        optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-2)
        job = Job({"model": model, "optimizer": optimizer}, on(model, optimizer), trainable=True)
        job.digests = lambda: Job({"a": model.adapter, "o": optimizer}, job.step).digests()  # type: ignore[method-assign]
        return job

    return made


CASES = {
    "adamw-8bit": optimizer_job(bnb.optim.AdamW8bit),
    "lion-8bit": optimizer_job(bnb.optim.Lion8bit),
    "ademamix-8bit": optimizer_job(bnb.optim.AdEMAMix8bit),
    "4bit-base-trainable": adapter_job(bnb.nn.Linear4bit, compute_dtype=torch.float32),
    "8bit-base-trainable": adapter_job(bnb.nn.Linear8bitLt, has_fp16_weights=False),
}
