"""Loaders with a state: torchdata's, over a map and over streams of Hugging Face datasets. What they give next goes into the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .lives import Job


def job(source: Callable[[], Any], **options: Any) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        torch.manual_seed(17)
        loader = StatefulDataLoader(source(), batch_size=2, generator=torch.Generator().manual_seed(5), **options)
        return drawn(seed, loader, lambda: (batch["x"] for batch in loader))

    return made


def stream(shards: int, shuffled: bool) -> Any:
    rows = Dataset.from_dict({"x": list(range(96))}).to_iterable_dataset(num_shards=shards)
    return rows.shuffle(seed=3, buffer_size=8) if shuffled else rows


def stream_alone(seed: int) -> Job:
    rows = stream(3, True)
    return drawn(seed, rows, lambda: (torch.tensor([row["x"]] * 2) for row in rows))


def drawn(seed: int, source: Any, begun: Callable[[], Any]) -> Job:
    weight = torch.full((2,), float(seed))
    batches = None

    def step(number: int) -> None:
        nonlocal batches
        batches = batches or begun()
        weight.mul_(0.5).add_(next(batches))

    made = Job({"weight": weight, "data": source}, step)
    made.digests = lambda: {"weight": repr(weight.tolist())}  # type: ignore[method-assign]
    return made


def rows() -> Any:
    return Dataset.from_dict({"x": list(range(96))}).with_format("torch")


CASES = {
    "torchdata": job(rows, shuffle=True),
    "torchdata-2-workers": job(rows, shuffle=True, num_workers=2),
    "torchdata-over-stream": job(lambda: stream(1, False)),
    "datasets-stream": stream_alone,
}
