"""The scenario ``gpu``: what saves and loads cost a training job whose state is on a GPU, beside DCP and a copy by PyTorch alone.

One process, one GPU, a perceptron with AdamW. The machine's limit is a copy of the same tensors into pinned memory on a side stream. DCP
stages into pinned memory, too. Without a GPU nothing is measured; with ``device="cpu"`` a test runs the same code.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt

from .async_saves import DcpSaver
from .findings import Finding, at_least, at_most
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

WIDTH = 4096
STEPS = 8
COPY, CALL, SLOWER, BLOCKED, VERIFIED = 0.9, 10.0, 1.02, 0.2, 0.9
"""Least part of a plain copy's speed; most milliseconds of a lazy call; most times that a step takes during a capture; most part of what
DCP keeps the job waiting; least part of a load's speed that is left with digests."""
NAMES = {
    "copy": "pinned copy on a side stream, ms",
    "eager": "ckpt eager: call, ms",
    "call": "ckpt lazy: call, ms",
    "blocked": "ckpt lazy: call and the optimizer's step, ms",
    "dcp": "DCP async, pinned: call, ms",
    "step": "forward and backward pass, ms",
    "step_captured": "the same during a capture, ms",
    "load": "ckpt load, digests checked, ms",
    "load_unchecked": "ckpt load, nothing checked, ms",
    "export": "export of the weights, ms",
}


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Measure on the first GPU, if there is one."""
    if not pool.run(has_gpu, on=1)[0]:
        tell("gpu: needs a GPU; nothing is measured")
        note = "needs a GPU, and this machine has none that PyTorch sees: nothing was measured"
        return [Finding(scenario="gpu", title="a state on a GPU", columns=("",), rows=(), figures={}, notes=(note,))]
    given = {"directory": place.fresh("gpu"), "size": settings.size, "repeat": settings.repeat, "device": "cuda"}
    found = pool.run(measure, on=1, **given)[0]
    tell(f"gpu: a lazy call takes {1000 * found['call']:.2f} ms")
    return [finding_of(found)]


def finding_of(found: dict[str, float]) -> Finding:
    """The table and the checks of what :func:`measure` gave."""
    return Finding(
        scenario="gpu",
        title=f"{found['bytes'] / 1e6:,.0f} MB of a state on a GPU",
        columns=("", "ms", "GB/s"),
        rows=[
            (what, f"{1000 * found[key]:.2f}", f"{found['bytes'] / found[key] / 1e9:.2f}" if not key.startswith("step") else "")
            for key, what in NAMES.items()
        ],
        figures=found,
        checks=(
            at_least("eager capture / pinned copy", found["copy"] / found["eager"], COPY),
            at_most("lazy call", 1000 * found["call"], CALL, "ms"),
            at_most("step during a capture / step", found["step_captured"] / found["step"], SLOWER),
            at_most("blocked, ckpt lazy / DCP", found["blocked"] / found["dcp"], BLOCKED),
            at_least("load with digests / without, speed", found["load_unchecked"] / found["load"], VERIFIED),
        ),
    )


def has_gpu(rank: Rank) -> bool:
    del rank
    return torch.cuda.is_available()


class Trainer:
    """A perceptron with AdamW of about ``size`` bytes on ``device``, after one step."""

    def __init__(self, size: int, device: str) -> None:
        torch.manual_seed(0)
        width = min(WIDTH, max(16, int((size / 12) ** 0.5)))
        layers = max(1, round(size / 12 / width**2))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.batch = torch.randn(width, width, device=device)
        self.device = device
        self.pass_through()
        self.optimizer.step()
        self.settle()

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = (value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))
        return [*(p.detach() for p in self.model.parameters()), *states]

    def pass_through(self) -> None:
        """Queue a forward and a backward pass."""
        self.model(self.batch).square().mean().backward()

    def settle(self) -> None:
        """Wait for what is queued."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds of ``work`` and all that it queues."""
        self.settle()
        began = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - began


def measure(rank: Rank, *, directory: str, size: int, repeat: int, device: str) -> dict[str, float]:
    """Seconds, each the median of so many repetitions after one that does not count; and the bytes of the state."""
    trainer = Trainer(size, device)
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in trainer.tensors]
    on_gpu = device == "cuda"
    stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))  # pinned, not shared, in the call, non-blocking
    dcp = DcpSaver(rank.groups.get(1), stager)
    samples: list[dict[str, float]] = []
    try:
        for number in range(repeat + 1):
            gc.collect()
            sample = {"copy": trainer.timed(lambda: _copy(trainer, pinned))}
            sample |= _saves(trainer, f"{directory}/{number}")
            sample["dcp"] = _dcp(trainer, dcp, f"{directory}/{number}-dcp")
            sample |= _loads(trainer, f"{directory}/{number}")
            samples.append(sample)
            shutil.rmtree(directory)
    finally:
        dcp.close()
    return {key: median(s[key] for s in samples[1:]) for key in samples[0]} | {"bytes": sum(t.nbytes for t in trainer.tensors)}


def _copy(trainer: Trainer, pinned: list[torch.Tensor]) -> None:
    if trainer.device != "cuda":
        for to, tensor in zip(pinned, trainer.tensors, strict=True):
            to.copy_(tensor)
        return
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for to, tensor in zip(pinned, trainer.tensors, strict=True):
            to.copy_(tensor, non_blocking=True)
    side.synchronize()


def _saves(trainer: Trainer, directory: str) -> dict[str, float]:
    """An eager save; a lazy one with work in the queue, and the step after it; one more, with passes beside its capture."""
    handles = []
    eager = trainer.timed(lambda: handles.append(ckpt.save_async(f"{directory}/eager", trainer.tree, capture="eager")))
    handles[0].result()

    for _ in range(2):
        trainer.pass_through()
    began = time.perf_counter()
    handle = ckpt.save_async(f"{directory}/lazy", trainer.tree)
    call = time.perf_counter() - began
    trainer.pass_through()
    began = time.perf_counter()
    handle.fence()
    blocked = call + time.perf_counter() - began
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    handle.result()

    step = trainer.timed(lambda: [trainer.pass_through() for _ in range(STEPS)]) / STEPS
    count = 0

    def beside() -> None:
        nonlocal count
        handle = ckpt.save_async(f"{directory}/beside", trainer.tree)
        handles.append(handle)
        while count < STEPS or not handle.captured.done():
            trainer.pass_through()
            trainer.settle()
            count += 1

    captured = trainer.timed(beside) / count
    handles[1].result()
    trainer.optimizer.zero_grad()
    return {"eager": eager, "call": call, "blocked": blocked, "step": step, "step_captured": captured}


def _dcp(trainer: Trainer, dcp: DcpSaver, directory: str) -> float:
    """Seconds for which DCP keeps the trainer waiting."""
    trainer.settle()
    began = time.perf_counter()
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    saving = dcp.save(directory, {"model": model, "optimizer": optimizer})
    blocked = time.perf_counter() - began
    saving.result()
    return blocked


def _loads(trainer: Trainer, directory: str) -> dict[str, float]:
    from ckpt import export

    os.makedirs(directory, exist_ok=True)
    return {
        "load": trainer.timed(lambda: ckpt.load(f"{directory}/lazy", trainer.tree, read=ckpt.ReadOptions(verify="full"))),
        "load_unchecked": trainer.timed(lambda: ckpt.load(f"{directory}/lazy", trainer.tree, read=ckpt.ReadOptions(verify="off"))),
        "export": trainer.timed(lambda: export(f"{directory}/model.safetensors", trainer.model)),
    }
