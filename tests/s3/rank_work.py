"""What the ranks of the tests do; each sets the environment that leads to the store first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.io_backends import s3_client as s3_client
from ckpt.io_backends.s3_backend import S3Backend
from ckpt.policies import EverySteps, Latest

ROWS, COLUMNS = 3_000, 1_001


def whole(seed: int) -> torch.Tensor:
    """12 MB: more than one part of an upload where parts are small."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def sharded(seed: int, rank: int, ranks: int) -> tuple[dict[str, Any], ckpt.Layout]:
    """A tensor cut by rows, one that all ranks have, and a number."""
    step = ROWS // ranks
    state = {"w": whole(seed)[rank * step : (rank + 1) * step].clone(), "b": whole(seed + 1)[:50].clone(), "seed": seed}
    return state, ckpt.Layout({"dp": ranks}, [("w", ckpt.Shard(0, "dp")), ("*", ckpt.Replicate())])


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.full_like(v, -1.0) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def save_sharded(environment: dict[str, str], url: str, seed: int) -> None:
    os.environ.update(environment)
    state, layout = sharded(seed, dist.get_rank(), dist.get_world_size())
    ckpt.save(url, state, layout=layout, job=ckpt.Job(timeout=60))


def seen_while_saving(environment: dict[str, str], url: str, seed: int) -> list[str]:
    """What was asked of the store by a save: the operation and the last part of the path of each request."""
    os.environ.update(environment)
    seen: list[str] = []
    on_request(lambda operation, request: seen.append(f"{operation} {request.url.partition('?')[0].rpartition('/')[2]}"))
    save_sharded(environment, url, seed)
    return seen


def load_sharded(environment: dict[str, str], url: str, seed: int) -> tuple[bool, int]:
    """Whether every byte is right, and the bytes of data that the store was asked for."""
    os.environ.update(environment)
    asked = count_data()
    state, layout = sharded(seed, dist.get_rank(), dist.get_world_size())
    found = blank(state)
    ckpt.load(url, found, layout=layout, job=ckpt.Job(timeout=60))
    return all(torch.equal(found[k], state[k]) for k in ("w", "b")) and found["seed"] == seed, sum(asked)


def load_replicated(environment: dict[str, str], url: str, seed: int) -> tuple[bool, int]:
    """As ``load_sharded``, of a state that all ranks have."""
    os.environ.update(environment)
    asked = count_data()
    state = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(ROWS, COLUMNS)}
    ckpt.load(url, state, job=ckpt.Job(timeout=60))
    return torch.equal(state["w"], whole(seed)) and torch.equal(state["b"], whole(seed + 1)), sum(asked)


def on_request(handle: Callable[[str, Any], None]) -> None:
    """Call ``handle`` with operation and request before each is sent."""
    make = s3_client._make

    def made(*args: Any) -> Any:
        boto = make(*args)
        boto.meta.events.register("before-send.s3", lambda request, event_name, **_: handle(event_name.rpartition(".")[2], request))
        return boto

    s3_client._make = made


def count_data() -> list[int]:
    """Bytes of each range of a data file that is asked for from now on."""
    asked: list[int] = []

    def note(operation: str, request: Any) -> None:
        if operation == "GetObject" and "/data/" in request.url:
            first, _, last = request.headers["Range"].decode().removeprefix("bytes=").partition("-")
            asked.append(int(last) - int(first) + 1)

    on_request(note)
    return asked


def die_while_saving(environment: dict[str, str], url: str, seed: int, operation: str, at: int) -> None:
    """Rank 1 is killed when it is about to send its request number ``at`` of this kind."""
    os.environ.update(environment)
    seen: list[str] = []

    def note(found: str, request: Any) -> None:
        if "/.prepare-" not in request.url:
            seen.append(found)
        if dist.get_rank() == 1 and seen.count(operation) > at:
            os.kill(os.getpid(), signal.SIGKILL)

    on_request(note)
    S3Backend.__init__.__kwdefaults__["part"] = 5 << 20
    state, layout = sharded(seed, dist.get_rank(), dist.get_world_size())
    ckpt.save(url, state, layout=layout, job=ckpt.Job(timeout=8))


def train(environment: dict[str, str], root: str, until: int) -> tuple[int | None, bool]:
    """Go on from the newest step, if any, and save every step; gives where it went on, and whether the state was right."""
    os.environ.update(environment)
    right = True
    state, layout = sharded(0, dist.get_rank(), dist.get_world_size())
    with ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(2), layout=layout, job=ckpt.Job(timeout=60)) as c:
        found = blank(state)
        began = c.restore(found)
        if began is not None:
            wanted, _ = sharded(began, dist.get_rank(), dist.get_world_size())
            right = all(torch.equal(found[k], wanted[k]) for k in ("w", "b"))
        for step in range((began or 0) + 1, until + 1):
            c.step(step, sharded(step, dist.get_rank(), dist.get_world_size())[0])
    return began, right
