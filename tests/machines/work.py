"""What the ranks of a job on the bed do: saves and loads of a state with one of each kind of tensor, and phases to stop at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt import Flat, GlobalShape, Layout, Replicate, Shard
from ckpt.policies import OnPreemption

PHASES = ("begin", "write", "written", "commit", "committed", "match", "read", "exchange", "copy")
"""Of a save: before its begin, before the data are written, when they are; on the leader before index and record are written, and after.
Of a load: before states are matched, and before data are read. Of both: when ranks begin to exchange bytes.
Of a second copy: when all bytes of a file were sent, and it is not there yet."""

ROWS, FLAT = (24, 1024), (173, 129)


@dataclass(frozen=True, kw_only=True)
class Task:
    """``do``: save, save_async or load. ``version``: of the numbers that are saved, or that must be loaded."""

    do: str
    url: str
    version: int
    timeout: float = 20.0
    exchange: bool = False


def run(tasks: list[Task]) -> list[str]:
    """Do all; gives a text for each that says what came out."""
    return [_do(task) for task in tasks]


def train(root: str, timeout: float, seconds: float) -> int:
    """Steps of training for so many seconds, with a policy for which ranks talk to each other all the time; then a save."""
    state = {"same": torch.ones(1000)}
    with ckpt.Checkpointer(root, save=OnPreemption(), job=ckpt.Job(timeout=timeout)) as checkpointer:
        end, step = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            step += 1
            checkpointer.step(step, state)
            time.sleep(0.05)
        checkpointer.save(step, state)
    return step


def _do(task: Task) -> str:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = _state(task.version if task.do != "load" else None, rank, world)
    rules = [("rows", Shard(0, "dp")), ("flat", Flat("dp"), GlobalShape(FLAT)), ("*", Replicate())]
    layout = Layout({"dp": world}, rules)
    if task.do == "save":
        ckpt.save(task.url, state, layout=layout, job=ckpt.Job(timeout=task.timeout))
    elif task.do == "save_async":
        ckpt.save_async(task.url, state, layout=layout, job=ckpt.Job(timeout=task.timeout)).result()
    else:
        options: dict[str, Any] = {"read": ckpt.ReadOptions(exchange=True)} if task.exchange else {}
        ckpt.load(task.url, state, layout=layout, job=ckpt.Job(timeout=task.timeout), **options)
        wanted = _state(task.version, rank, world)
        wrong = [name for name in ("rows", "flat", "same") if not torch.equal(state[name], wanted[name])]
        if wrong or state["version"] != task.version:
            raise AssertionError(f"loaded wrong: {wrong}, version {state['version']}")
    return f"{task.do} {task.version}"


def _state(version: int | None, rank: int, world: int) -> dict[str, Any]:
    """This rank's part of the numbers of a version, whatever the number of ranks; None: of zeros."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        if version is None:
            return torch.zeros(shape)
        return torch.from_numpy(np.random.default_rng([version, seed]).standard_normal(shape, dtype=np.float32))

    rows = ROWS[0] // world
    total = FLAT[0] * FLAT[1]
    each = -(-total // world)
    return {
        "rows": numbers(1, *ROWS)[rank * rows : (rank + 1) * rows].clone(),
        "flat": numbers(2, *FLAT).flatten()[rank * each : min((rank + 1) * each, total)].clone(),
        "same": numbers(3, 256, 256),
        "version": version,
    }


def stop_at(phase: str, folder: Path, rank: int) -> None:
    """Have this process wait when it comes to ``phase`` for the first time, until the job is told to go on."""
    import ckpt.engine.load.load as load
    import ckpt.engine.save.leader as leader
    import ckpt.engine.save.save as save
    import ckpt.net.exchange as exchange
    import ckpt.nodes.file_server as remote_node

    def wait() -> None:
        there = folder / f"{rank}.there"
        if not there.exists():
            there.touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    places: dict[str, tuple[Any, str, bool]] = {
        "begin": (save, "begin", False),
        "write": (save, "write", False),
        "written": (save, "write", True),
        "commit": (leader, "write_index", False),
        "committed": (leader, "write_index", True),
        "match": (load, "match", False),
        "read": (load, "read", False),
        "exchange": (exchange.Exchange, "start", True),
        "copy": (remote_node.RemoteWriter, "_make_durable", False),
    }
    owner, name, after = places[phase]
    inner: Callable[..., Any] = getattr(owner, name)

    def with_stop(*args: Any, **options: Any) -> Any:
        if not after:
            wait()
        result = inner(*args, **options)
        if after:
            wait()
        return result

    setattr(owner, name, with_stop)
