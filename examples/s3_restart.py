"""A job that checkpoints to an object store is killed again and again; each time it resumes on another number of ranks, bit for bit.

``python examples/s3_restart.py s3://bucket/runs/a --kills 20``. Endpoint and credentials come from the usual places: ``AWS_*``, ``~/.aws``.
With ``--local DIR`` every save is committed in that directory first. The example trains the same job once without any interruption, in a
directory of this machine, and fails unless the killed job ends with the same bits, after every kill went on from the newest committed step,
and leaves nothing but committed checkpoints once ``ckpt gc`` has run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import socket
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.engine.verify import verify
from ckpt.io_backends import open_backend
from ckpt.policies import EverySteps, Latest
from ckpt.runs.orphans import find_orphans, remove_orphans

BATCH = 12
"""Samples of a step, shared by all ranks."""
TIMEOUT = 10.0
"""Seconds without a sign of life after which a rank counts as dead."""


# ------------------------------------------------------------------------------------------------------------ the training


def exact(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in double precision with 20 binary places: sums of these are exact, so that they do not depend on who adds what first."""
    return (gradient.double() * 2**20).round() / 2**20


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Of the whole batch; each rank computes its samples one by one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for sample in range(step * BATCH + rank, (step + 1) * BATCH, world):
        x = torch.randn(1, 16, generator=torch.Generator().manual_seed(sample))
        loss = (model(x) - x.square()).square().mean()
        for total, gradient in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += exact(gradient)
    for total in sums:
        dist.all_reduce(total)
    return [(total / BATCH).float() for total in sums]


def averaged(model: nn.Module) -> dict[str, DTensor]:
    """A copy of every parameter, cut over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(p.detach().clone(), mesh, [Shard(0)]) for name, p in model.named_parameters()}


def train(run: str, local: str | None, steps: int, log: str) -> None:
    """One life of the job. It says in the log what it went on from, and every step that it has trained."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = averaged(model)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": average, "seen": 0}

    with ckpt.Checkpointer(run, local=local, save=EverySteps(3), keep=Latest(2), job=ckpt.Job(timeout=TIMEOUT)) as c:
        start = c.restore(state)
        say(log, start=start, copy=str(c.restored_from) if start is not None else None, ranks=dist.get_world_size())
        saved = True
        for step in range(0 if start is None else start + 1, steps):
            for parameter, gradient in zip(model.parameters(), gradients(model, step), strict=True):
                parameter.grad = gradient
            optimizer.step()
            for name, parameter in model.named_parameters():
                mine = distribute_tensor(parameter.detach(), average[name].device_mesh, [Shard(0)])
                average[name].to_local().lerp_(mine.to_local(), 0.1)
            state["seen"] += BATCH
            saved = c.step(step, state)
            say(log, step=step)
        if not saved:
            c.save(steps - 1, state)


def say(log: str, **what: Any) -> None:
    if dist.get_rank() == 0:
        with Path(log).open("a") as file:
            file.write(json.dumps(what) + "\n")


# ------------------------------------------------------------------------------------------------------------ lives and deaths


def rank_main(rank: int, world: int, port: int, output: str, arguments: tuple[Any, ...]) -> None:
    with Path(output).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.barrier()
    train(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def start(world: int, output: str, *arguments: Any) -> list[Any]:
    """Ranks are forked from this process, which has imported everything and computed nothing, so that a life begins at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [mp.get_context("fork").Process(target=rank_main, args=(rank, world, port, output, arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    return ranks


def began(ranks: list[Any], log: Path, life: int) -> None:
    """Wait until this life trains."""
    while len(lives(log)) <= life and all(rank.exitcode is None for rank in ranks):
        time.sleep(0.02)


def end(ranks: list[Any], output: str, *, kill_after: float = 1e6, one_by_one: float = 0.0) -> None:
    """Wait for ranks, and then kill them: one, and after a while the next."""
    until = time.monotonic() + kill_after
    while (left := until - time.monotonic()) > 0 and (alive := [r.sentinel for r in ranks if r.exitcode is None]):
        connection.wait(alive, left)
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"a rank that nobody killed has failed:\n{Path(output).read_text()[-4000:]}")
    for rank in random.sample(ranks, len(ranks)):
        if rank.exitcode is None:
            rank.kill()
            time.sleep(one_by_one)
    for rank in ranks:
        rank.join()


# ------------------------------------------------------------------------------------------------------------ what must hold


def newest(run: str, local: str | None) -> int | None:
    """The newest committed step of both tiers; nothing that is committed may be damaged."""
    steps = [s for root in (run, local) if root is not None for s in ckpt.list_steps(root)]
    assert not any(s.damaged for s in steps)
    return max((s.number for s in steps if s.committed and s.number is not None), default=None)


def content(url: str) -> dict[str, Any]:
    view = ckpt.open(url)
    return {name: view[name][...] for name in view} | {"seen": view.state()["seen"]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def bits(value: Any) -> Any:
        return value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else value

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def collect_garbage(root: str) -> int:
    """What ``ckpt gc ROOT --older-than 0 --yes`` does; how much there was. Nothing may be left then."""
    backend = open_backend(root)
    orphans = find_orphans(backend, older_than=0, now=time.time())
    remove_orphans(backend, orphans)
    assert find_orphans(backend, older_than=0, now=time.time()) == []
    return len(orphans)


def lives(log: Path) -> list[dict[str, Any]]:
    """What the log says, a life each; the last line of one that was killed may be cut."""
    found: list[dict[str, Any]] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        said = json.loads(line) if line.endswith("}") else {}
        if "start" in said:
            found.append({**said, "trained": []})
        elif "step" in said:
            found[-1]["trained"].append(said["step"])
    return found


def story(run: str, local: str | None, kills: int, longest: float, folder: Path) -> bool:
    log, output = folder / "log", str(folder / "output")
    torn = 0
    for death in range(kills + 1):
        expected, before = newest(run, local), len(lives(log))
        world = 4 if death == 0 else random.randint(1, 4)
        last = death == kills
        steps = (expected or 0) + 20 if last else 1_000_000
        ranks = start(world, output, run, local, steps, str(log))
        if random.random() < 0.8:  # the others may be killed before they have restored anything
            began(ranks, log, before)
        end(ranks, output, kill_after=1e6 if last else random.uniform(0, longest), one_by_one=random.choice([0.0, 0.1]))
        torn += any(not s.committed for root in (run, local) if root is not None for s in ckpt.list_steps(root))
        for life in lives(log)[before:]:
            assert life["start"] == expected, f"went on from {life['start']}, but {expected} is the newest that is committed"
            trained = f"{len(life['trained'])} steps from {life['copy'] or 'the beginning'}"
            print(f"{world} ranks: {trained}, {'done' if last else 'killed'}", flush=True)

    straight = str(folder / "straight")
    end(start(2, output, straight, None, steps, str(folder / "log of straight")), output)
    url, reference = (f"{root}/step-{steps - 1:08d}" for root in (run, straight))
    equal = same(content(url), content(reference))
    whole = all(verify(s.url).ok for root in (run, local) if root is not None for s in ckpt.list_steps(root) if s.committed)
    orphans = sum(collect_garbage(root) for root in (run, local) if root is not None)
    print(f"{kills} kills, {torn} of them in the middle of a save; {steps} steps; {orphans} orphans removed")
    print(f"the last checkpoint is {'the same bit for bit' if equal else 'DIFFERENT'}; {'all' if whole else 'NOT ALL'} bytes are whole")
    return equal and whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="URL of the run; nothing is there yet")
    parser.add_argument("--local", help="directory of the local tier")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of training after which a life is killed at the latest")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        if not story(given.run.rstrip("/"), given.local, given.kills, given.longest, Path(folder)):
            sys.exit(1)


if __name__ == "__main__":
    main()
