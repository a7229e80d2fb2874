"""Reinforcement learning with live weights: a trainer of 4 ranks (FSDP2) publishes, two engines (TP 2 and TP 1) take, come and go.

``python examples/rl_loop.py`` starts all three as jobs of their own; by hand, each in a terminal with the same CKPT_LIVE_SECRET:
``torchrun --nproc-per-node 4 examples/rl_loop.py train /tmp/rl``, ``torchrun --nproc-per-node 2 examples/rl_loop.py engine /tmp/rl a``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt

sys.path.insert(0, str(Path(__file__).parent))
from tiny_engine import EngineConfig, TinyEngine

CONFIG = EngineConfig(vocabulary=64, dim=32, hidden=64, layers=2, heads=4, kv_heads=2)
PROMPTS, LENGTH = 16, 8
STALE = 2
"""Rollouts may be as many versions old as this."""
PATIENCE = 100.0
"""Seconds that a job waits for another one, which may only be starting."""


def reward(tokens: Tensor) -> Tensor:
    """For each row: the part of its new tokens that are even."""
    return (tokens[:, 1:] % 2 == 0).float().mean(dim=1)


def fingerprint(model: TinyEngine) -> int:
    """A number of the weights that does not depend on how they are cut: the sum of all bits, read as integers."""
    total = 0
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if model.ranks.rank == 0 or "norm" not in name:  # norms are whole on each rank of an engine
            total += int(whole.detach().view(torch.int32).sum(dtype=torch.int64))
    if model.ranks.size > 1:
        parts = torch.tensor(total)
        dist.all_reduce(parts, group=model.ranks.group)
        total = int(parts)
    return total


# ------------------------------------------------------------------------------------------------------------- trainer


def train(folder: str, steps: int, wait_for: int = 1, wait_at: int = 0) -> tuple[dict[int, int], list[float]]:
    """Train on what engines write; fingerprints of the weights by step, and mean rewards. ``wait_for``: engines that must have joined at
    step ``wait_at``."""
    torch.manual_seed(0)
    policy = TinyEngine(CONFIG)
    for name, param in policy.named_parameters():
        torch.nn.init.normal_(param, std=1.0 if "norm" in name else 0.1)
        param.requires_grad_(True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-2, weight_decay=0.0)
    state: dict[str, Any] = {"policy": policy, "last": False}
    fingerprints, rewards = {}, []
    # DTensors say how they are cut, so the source needs no layout. Engines find it by what the first rank writes.
    with ckpt.live.Source("tcp://127.0.0.1:0/policy", state) as source:
        if dist.get_rank() == 0:
            _put(Path(folder, "address"), source.address.encode())
        for step in range(steps):
            state["last"] = step == steps - 1
            fingerprints[step] = fingerprint(policy)
            source.publish(step)  # returns at once; optimizer.step() waits for the copy
            tokens = _rollouts(folder, step, wait_for if step == wait_at else 1)
            rewards.append(float(reward(tokens).mean()))
            if dist.get_rank() == 0:
                taken = {sink.sink: sink.step for sink in source.report().sinks}
                print(f"step {step}: reward {rewards[-1]:.3f}, engines have {taken}", flush=True)
            logits = policy(tokens[:, :-1]).log_softmax(-1)
            chosen = logits.gather(2, tokens[:, 1:, None]).squeeze(2).sum(dim=1)
            loss = -((reward(tokens) - reward(tokens).mean()) * chosen).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _farewell(source, steps - 1)
    return fingerprints, rewards


def _rollouts(folder: str, step: int, wait_for: int) -> Tensor:
    """Rows of the newest rollouts, not older than ``STALE`` versions, for all ranks alike, once ``wait_for`` engines have written some."""
    tokens = torch.zeros(PROMPTS, LENGTH + 1, dtype=torch.int64)
    if dist.get_rank() == 0:
        end = time.monotonic() + PATIENCE
        while True:
            written = _written(folder)
            files = sorted(path for at, _, path in written if at >= step - STALE)
            if files and len({name for _, name, _ in written}) >= wait_for:
                break
            if time.monotonic() > end:
                raise TimeoutError(f"no rollouts for step {step}")
            time.sleep(0.02)
        tokens.copy_(torch.from_numpy(np.load(files[-1])))
    dist.broadcast(tokens, 0)
    return tokens


def _written(folder: str) -> list[tuple[int, str, Path]]:
    """Step, engine and file of each rollout."""
    return [(int(path.name.split("-")[1]), path.name.split("-")[2], path) for path in Path(folder).glob("rollout-*.npy")]


def _farewell(source: ckpt.live.Source, step: int) -> None:
    """Give engines that are there the time to take the last version."""
    if dist.get_rank() == 0:
        end = time.monotonic() + PATIENCE
        while any(sink.step != step and sink.state not in ("left", "lost") for sink in source.report().sinks) and time.monotonic() < end:
            time.sleep(0.05)
    dist.barrier()


# -------------------------------------------------------------------------------------------------------------- engine


def layout(tp: int) -> ckpt.Layout:
    """How an engine's parameters are cut: parts of fused ones each for itself."""
    head = CONFIG.dim // CONFIG.heads
    qkv = (CONFIG.heads * head, CONFIG.kv_heads * head, CONFIG.kv_heads * head)
    rules = [
        ("*.qkv_proj", ckpt.Interleaved(0, "tp", groups=qkv)),
        ("*.gate_up_proj", ckpt.Interleaved(0, "tp", groups=2)),
        *((f"*.{name}", ckpt.Shard(1, "tp")) for name in ("o_proj", "down_proj")),
        *((f"*.{name}", ckpt.Shard(0, "tp")) for name in ("embed_tokens", "lm_head")),
        ("*", ckpt.Replicate()),
    ]
    return ckpt.Layout({"tp": tp}, rules)


def engine(folder: str, name: str, leave_after: int | None = None) -> list[tuple[int, int]]:
    """Take versions and write rollouts until the last version, or for so many; step and fingerprint of each."""
    tp = dist.get_world_size() if dist.is_initialized() else 1
    model = TinyEngine(CONFIG, dist.group.WORLD if tp > 1 else None)
    state: dict[str, Any] = {"policy": model, "last": False}
    draw = torch.Generator().manual_seed(len(name))
    taken: list[tuple[int, int]] = []
    with ckpt.live.Sink(_get(Path(folder, "address")).decode(), into=state, layout=layout(tp)) as sink:
        while not state["last"] and (leave_after is None or len(taken) < leave_after):
            version = sink.take(newer_than=sink.version, timeout=PATIENCE)  # whole on all ranks, or not at all
            taken.append((version.step, fingerprint(model)))
            prompts = torch.randint(CONFIG.vocabulary, (PROMPTS, 1), generator=draw)
            tokens = model.generate(prompts, LENGTH, temperature=1.0, generator=draw)
            if model.ranks.rank == 0:
                _put(Path(folder, f"rollout-{version.step:06}-{name}-.npy"), tokens.numpy())
    if model.ranks.rank == 0:
        print(f"engine {name} (TP {tp}) leaves after versions {[step for step, _ in taken]}", flush=True)
    return taken


def _put(path: Path, data: bytes | np.ndarray) -> None:
    part = path.with_name(f".{path.name}")
    part.write_bytes(data) if isinstance(data, bytes) else np.save(part.open("wb"), data)
    part.rename(path)


def _get(path: Path) -> bytes:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} does not appear")
        time.sleep(0.02)
    return path.read_bytes()


def all_at_once(steps: int) -> None:
    """The trainer and an engine; another engine comes a little later, and leaves before the end."""
    os.environ.setdefault("CKPT_LIVE_SECRET", secrets.token_hex(16))

    def launch(ranks: int, *arguments: str) -> subprocess.Popen[bytes]:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, *arguments]
        return subprocess.Popen(run, env=os.environ | {"OMP_NUM_THREADS": "1"})

    with tempfile.TemporaryDirectory() as folder:
        jobs = [launch(4, "train", folder, "--steps", str(steps), "--engines", "2"), launch(2, "engine", folder, "a")]
        # No step is sure to have a rollout: engines skip versions where the trainer is faster. Half way it waits for both.
        while not any(step >= min(2, steps // 2) for step, *_ in _written(folder)) and jobs[0].poll() is None:
            time.sleep(0.1)
        jobs.append(launch(1, "engine", folder, "b", "--leave-after", "3"))
        codes = [job.wait() for job in jobs]
    if any(codes):
        raise SystemExit(f"the jobs ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", nargs="?", choices=("train", "engine"), help="left out: start all jobs")
    parser.add_argument("folder", nargs="?", help="where rollouts go, and the trainer leaves its address")
    parser.add_argument("name", nargs="?", default="a", help="of an engine")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--engines", type=int, default=1, help="the trainer waits half way until so many have joined")
    parser.add_argument("--leave-after", type=int, help="versions after which an engine leaves")
    given = parser.parse_args()
    if given.role is None:
        all_at_once(given.steps)
        return
    dist.init_process_group("gloo")
    try:
        if given.role == "train":
            train(given.folder, given.steps, given.engines, given.steps // 2)
        else:
            engine(given.folder, given.name, given.leave_after)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
