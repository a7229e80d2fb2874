"""Two jobs that share nothing but an address: a trainer that publishes, and engines that take. Each runs on ranks of its own.

Values are a function of name and step, so that any mix of versions shows, and any misplaced element.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.live import Source
from tests.distributed.ranks import Ranks

SHAPES = {"embed": (97, 32), "up": (64, 48), "down": (48, 64), "norm": (33,), "big": (300, 1024)}
"""One of them is larger than a block of a segment."""


def full(name: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All of a tensor, as it is at a step."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    values = torch.arange(count, dtype=torch.float64) % 4093 + 10_000 * step + 100 * sorted(SHAPES).index(name)
    return values.reshape(shape).to(dtype)


def fsdp_state(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Every tensor cut by rows over all ranks, as FSDP2 does."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {name: distribute_tensor(full(name, step, dtype), mesh, [Shard(0)], src_data_rank=None) for name in SHAPES}


def replicated_state(step: int) -> dict[str, Any]:
    """Every tensor whole on every second rank's pair: cut by rows over two, replicated over the rest."""
    half = dist.get_world_size() // 2
    mesh = DeviceMesh("cpu", torch.arange(2 * half).reshape(half, 2), mesh_dim_names=("replica", "shard"))
    return {name: distribute_tensor(full(name, step), mesh, [Replicate(), Shard(0)], src_data_rank=None) for name in SHAPES}


def tp_state(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Cut over columns or rows as tensor parallelism does, with other values than any step has."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    cut = {"embed": Shard(0), "up": Shard(0), "down": Shard(1), "norm": Replicate(), "big": Shard(1)}
    return {
        name: distribute_tensor(torch.full(shape, -1.0, dtype=dtype), mesh, [cut[name]], src_data_rank=None)
        for name, shape in SHAPES.items()
    }


def step_of(state: dict[str, Any]) -> int | None:
    """The step whose values a state has in every element; None if it is as ``tp_state`` makes it.

    Raises:
        AssertionError: it is a mix.
    """
    locals_ = {name: local_of(t) for name, t in state.items()}
    if all(bool((t == -1).all()) for t in locals_.values()):
        return None
    first = next(iter(state))
    step = round((float(full_like(state[first], first, 0)[1].flatten()[0]) - float(full(first, 0).flatten()[0])) / 10_000)
    for name, tensor in state.items():
        expected, values = full_like(tensor, name, step)
        assert torch.equal(expected, values), f"{name}: not all of it is of step {step}"
    return step


def full_like(tensor: Any, name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a tensor's local part should be at a step, and what it is."""
    values = local_of(tensor)
    expected = full(name, step, values.dtype)
    if isinstance(tensor, DTensor):
        expected = distribute_tensor(expected, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return expected, values


def local_of(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wait_for(path: Path, seconds: float = 60.0) -> str:
    """The content of a file, when it is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


def leave(path: Path, text: str) -> None:
    """Write a file at once."""
    beside = path.with_suffix(f".part{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def train(folder: Path, steps: int, make: str = "fsdp_state", options: dict[str, Any] | None = None) -> str:
    """A trainer: publishes step after step, each when the file ``go-<step>`` is there, until ``stop`` is."""
    state = globals()[make](0)
    with Source("tcp://127.0.0.1:0/actor", state, job=ckpt.Job(timeout=20), **(options or {})) as source:
        if dist.get_rank() == 0:
            leave(folder / "address", source.address)
        for step in range(1, steps + 1):
            wait_for(folder / f"go-{step}")
            for name, tensor in state.items():
                with torch.no_grad():
                    local_of(tensor).copy_(full_like(tensor, name, step)[0])
            source.publish(step, capture="eager").result(20)
            if dist.get_rank() == 0:
                leave(folder / f"published-{step}", "")
        wait_for(folder / "stop")
        return source.address


class Job:
    """A run of ``ranks`` in the background."""

    def __init__(self, ranks: Ranks, size: int, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(ranks, size, function, args, options))
        self._thread.start()

    def _run(self, ranks: Ranks, size: int, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            self.results = ranks.run(size, function, *args, **options)
        except BaseException as err:  # noqa: BLE001  result() raises it
            self.error = err

    def result(self) -> list[Any]:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.results


def until(what: Callable[[], Any]) -> Any:
    """What it gives, as soon as that is something."""
    end = time.monotonic() + 60
    while not (value := what()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return value
