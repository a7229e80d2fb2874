"""``python -m benchmarks.bytecheckpoint``: ckpt, DCP and ByteCheckpoint save and load one FSDP2 model with its AdamW state.

ByteCheckpoint 0.0.2 wants torch 2.5 or older, but runs with newer ones; so it is installed beside the environment::

    pip install --target peers --no-deps bytecheckpoint==0.0.2 grpcio protobuf
    python -m benchmarks.bytecheckpoint --peers peers

It takes part *as shipped*, whose cache of plans never hits and whose asynchronous saves block therefore until all is written, and
*repaired*: the planner is given the state before it is asked whether it knows the plan.
Each contestant has jobs of its own, since ByteCheckpoint keeps servers and plans for the life of a process; the jobs take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

import ckpt

from .report import aligned

SAVES = ("ckpt", "dcp", "bytecheckpoint", "ckpt async", "dcp async", "bytecheckpoint fast", "bytecheckpoint fast repaired")
LOADS = ("ckpt", "dcp", "bytecheckpoint")
LAYERS = 4
ROUNDS = 2
"""Jobs of each contestant."""
WAIT = 300.0
"""Seconds that a job may take."""

Samples = dict[str, list[dict[str, float]]]


@dataclass(eq=False)
class Training:
    """A model and an optimizer under FSDP2, one step done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    pending: list[Callable[[], object]] = field(default_factory=list)
    """What waits until a save in the background is durable."""

    @classmethod
    def build(cls, nbytes: int) -> Training:
        """``nbytes`` of parameters and moments on all ranks together."""
        from torch.distributed.fsdp import fully_shard

        width = max(64, int((nbytes / (4 * 3 * LAYERS * 8)) ** 0.5) // 8 * 8)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(LAYERS)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return cls(model, optimizer)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def memory(self) -> list[torch.Tensor]:
        """This rank's parts of all parameters and moments."""
        found = [p.to_local() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [state[key].to_local() for key in ("exp_avg", "exp_avg_sq")]
        return [t.detach() for t in found]

    def wait(self) -> None:
        while self.pending:
            self.pending.pop()()


def save(training: Training, contestant: str, directory: str, step: int) -> None:
    """Save in one way; what is not done when the call returns is in ``training.pending``."""
    if contestant == "ckpt":
        ckpt.save(directory, {"model": training.model, "optimizer": training.optimizer})
    elif contestant == "ckpt async":
        training.pending.append(ckpt.save_async(directory, {"model": training.model, "optimizer": training.optimizer}).result)
    elif contestant == "dcp":
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        dcp_save(training.state(), checkpoint_id=directory)
    elif contestant == "dcp async":
        from torch.distributed.checkpoint.state_dict_saver import async_save

        future: Any = async_save(training.state(), checkpoint_id=directory)
        training.pending.append(future.result)
    else:
        _peer_save(training, directory, step, fast="fast" in contestant, repaired="repaired" in contestant)


def _peer_save(training: Training, directory: str, step: int, *, fast: bool, repaired: bool) -> None:
    import bytecheckpoint  # type: ignore[import-not-found]
    import bytecheckpoint.checkpointer.base_checkpointer as base  # type: ignore[import-not-found]
    from bytecheckpoint.engine import _store_engine  # type: ignore[import-not-found]

    original = base.save_state_dict

    def prepared(state_dict: Any, state_path: Any, planner: Any, **options: Any) -> Any:
        planner.set_up_planner(state_dict, dist.get_rank() == 0)
        return original(state_dict=state_dict, state_path=Path(state_path), planner=planner, **options)

    def drain() -> None:
        for part in ("model", "optimizer"):
            _store_engine.sync_io_futures(part, "fsdp2", "")

    state = {"model": training.model, "optimizer": training.optimizer}
    base.save_state_dict = prepared if repaired else original
    try:
        bytecheckpoint.save(directory, state, framework="fsdp2", fast_saving=fast, global_steps=step)
    finally:
        base.save_state_dict = original
    training.pending.append(drain)


def load(training: Training, contestant: str, directory: str, step: int) -> None:
    if contestant == "ckpt":
        ckpt.load(directory, {"model": training.model, "optimizer": training.optimizer})
    elif contestant == "dcp":
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        state = training.state()
        dcp_load(state, checkpoint_id=directory)
        set_state_dict(training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        import bytecheckpoint

        state = {"model": training.model, "optimizer": training.optimizer}
        bytecheckpoint.load(f"{directory}/global_step_{step}", state, framework="fsdp2")


# ----------------------------------------------------------------------------------------------------------------- a rank


def work(root: str, result: str, nbytes: int, repeat: int, contestant: str) -> None:
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    training = Training.build(nbytes)
    truth = [t.clone() for t in training.memory()]
    samples: Samples = {}
    for step in range(repeat + 1):
        directory = f"{root}/run" if "bytecheckpoint" in contestant else f"{root}/run-{step}"
        found = _timed(training, partial(save, training, contestant, directory, step))
        _note(samples, f"save {contestant}", found, step)
        if contestant in LOADS:
            for tensor in training.memory():
                tensor.zero_()
            found = _timed(training, partial(load, training, contestant, directory, step))
            right = all(torch.equal(a, b) for a, b in zip(training.memory(), truth, strict=True))
            assert right, f"{contestant} loaded other values than it saved"
            _note(samples, f"load {contestant}", found, step)
        if dist.get_rank() == 0:
            shutil.rmtree(f"{directory}/global_step_{step}" if "bytecheckpoint" in contestant else directory)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(samples))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # servers of the peer would keep the process


def _timed(training: Training, call: Callable[[], None]) -> dict[str, float]:
    """Seconds that the slowest rank is blocked, until all is durable, and CPU seconds of all ranks."""
    dist.barrier()
    began, cpu = time.monotonic(), time.process_time()
    call()
    blocked = time.monotonic() - began
    training.wait()
    durable = time.monotonic() - began
    slowest = torch.tensor([blocked, durable], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(spent)
    return {"blocked": float(slowest[0]), "durable": float(slowest[1]), "cpu": float(spent)}


def _note(samples: Samples, what: str, found: dict[str, float], repetition: int) -> None:
    if repetition > 0:  # the first save of the peer starts its servers, and every first one imports
        samples.setdefault(what, []).append(found)


# ------------------------------------------------------------------------------------------------------------ the command


@click.command(context_settings={"show_default": True})
@click.option("--peers", type=click.Path(exists=True, file_okay=False, resolve_path=True), help="Where ByteCheckpoint is installed.")
@click.option("--dir", "parent", type=click.Path(exists=True, file_okay=False), default="/dev/shm", help="Where to save.")
@click.option("--size", type=click.IntRange(1), default=256, help="MB of state on all ranks together.")
@click.option("--ranks", type=click.IntRange(1), default=2)
@click.option("--repeat", type=click.IntRange(1), default=5, help="Repetitions that count, after one that does not.")
def main(*, peers: str | None, parent: str, size: int, ranks: int, repeat: int) -> None:
    """Compare ckpt with DCP and, if --peers is given, ByteCheckpoint."""
    contestants = [s for s in SAVES if peers or "bytecheckpoint" not in s]
    samples: Samples = {}
    for turn in range(ROUNDS):
        for contestant in contestants[turn:] + contestants[:turn]:
            click.echo(f"{contestant}, {turn + 1} of {ROUNDS}", err=True)
            for what, found in job(contestant, peers, parent, size * 1_000_000, ranks, repeat).items():
                samples.setdefault(what, []).extend(found)
    click.echo(
        f"FSDP2 with AdamW on {ranks} ranks, {size} MB in all, {parent}; medians of {ROUNDS * repeat}, ratios to dcp of the same kind"
    )
    for line in aligned([("", "blocked s", "of dcp's", "durable s", "of dcp's", "CPU s", "of dcp's"), *rows_of(samples)]):
        click.echo(line)


def job(contestant: str, peers: str | None, parent: str, nbytes: int, ranks: int, repeat: int) -> Samples:
    """Run one contestant in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=parent) as root:
        result, log = Path(root, "result.json"), Path(root, "log")
        environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "BYTECHECKPOINT_LOGGING_LEVEL": "ERROR"}
        environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (peers, environment.get("PYTHONPATH"))))
        said = json.dumps([root, str(result), nbytes, repeat, contestant])
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", __spec__.name, said]
        with log.open("w") as file:  # no pipe: servers of the peer would hold it open
            code = subprocess.run(launch, env=environment, stdout=file, stderr=file, timeout=WAIT, check=False).returncode
        if code or not result.exists():
            raise click.ClickException(f"the job of {contestant} failed:\n{log.read_text()[-4000:]}")
        found: Samples = json.loads(result.read_text())
        return found


def rows_of(samples: Samples) -> list[tuple[str, ...]]:
    """A row per contestant; asynchronous saves are compared with DCP's asynchronous one."""
    mine = {what: {key: median(s[key] for s in found) for key in found[0]} for what, found in samples.items()}
    rows = []
    for what, figures in mine.items():
        kind = "load dcp" if what.startswith("load") else "save dcp async" if "async" in what or "fast" in what else "save dcp"
        cells = (cell for key in ("blocked", "durable", "cpu") for cell in (f"{figures[key]:.3f}", f"{figures[key] / mine[kind][key]:.2f}"))
        rows.append((what, *cells))
    return sorted(rows, key=lambda row: (row[0].split()[0] == "load", "async" in row[0] or "fast" in row[0]))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        work(*json.loads(sys.argv[1]))
    else:
        main()
